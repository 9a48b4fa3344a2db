"""A folder's generation_config.json → how its makers sample and where generation stops, and what of it is not here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_jax.models.files import naming, read_settings
from paged_jax.models.keys_json import GENERATION, RANDOM_ONLY, not_harmless, note, unknown
from paged_jax.models.weights.config_json import CONFIG_FILE, end_tokens
from paged_jax.sampling import Sampler

_FILE = "generation_config.json"


@dataclass(frozen=True)
class Generation:
    end_tokens: tuple[int, ...]  # none: the file does not say
    sampler: Sampler | None  # None: greedy, or the file does not say
    notes: tuple[str, ...]


def read_generation(folder: Path, config: Mapping[str, Any]) -> Generation:
    """As the file has it; where there is none its keys may stand in config.json, whose fields are `config`.

    Raises:
        ValueError: the file is no JSON object, or a value cannot be right.
    """
    path, settings = folder / _FILE, config
    if path.is_file():
        settings = read_settings(path)
        strange = list(unknown(GENERATION, settings))
    else:  # config.json has keys of its own
        path, strange = folder / CONFIG_FILE, []
    with naming(path):
        ends, sampler = end_tokens(settings), sampler_of(settings)
    lacking = [key for key, _ in not_harmless(GENERATION, settings) if sampler is not None or key not in RANDOM_ONLY]
    return Generation(ends, sampler, note(path, settings, [*lacking, *strange]))


def sampler_of(settings: Mapping[str, Any]) -> Sampler | None:
    """How the settings say to sample; what they leave out is left out."""
    if not settings.get("do_sample") or settings.get("temperature") == 0:
        return None
    given = {name: settings[name] for name in ("temperature", "top_k", "top_p") if settings.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"expected {name} to be a number, got {value!r}")
    top_k = given.get("top_k")
    if isinstance(top_k, float) and top_k.is_integer():  # as other programs write a whole number
        given["top_k"] = int(top_k)
    if top_k == 0:  # transformers' way to keep all
        del given["top_k"]
    return Sampler(**given)
