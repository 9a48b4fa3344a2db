"""A model on disk, a Hugging Face folder or a GGUF file: its config and what to generate with, read at once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_jax.models.config import ModelConfig
from paged_jax.models.files import naming
from paged_jax.models.text.special_ids import special_ids
from paged_jax.models.text.text import Text, folder_text, gguf_text, read_settings
from paged_jax.models.weights.checkpoint import Checkpoint, open_checkpoint
from paged_jax.models.weights.config_gguf import gguf_config
from paged_jax.models.weights.config_json import end_tokens, read_config
from paged_jax.models.weights.gguf import GGUFError, GGUFFile, open_gguf
from paged_jax.models.weights.keys_gguf import key_notes
from paged_jax.sampling import Sampler

_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Pretrained:
    source: GGUFFile | Checkpoint
    config: ModelConfig
    end_tokens: frozenset[int]  # generation stops at any of these
    sampler: Sampler | None = None  # how its makers sample; None: greedy, or they do not say
    notes: tuple[str, ...] = ()  # what of the files has no effect here though it has elsewhere: a line for each

    def text(self) -> Text:
        """Its tokenizer; token ids work without one.

        Raises:
            ValueError: there is none, or none that can be read.
        """
        return gguf_text(self.source) if isinstance(self.source, GGUFFile) else folder_text(self.source.path)


def open_pretrained(path: str | os.PathLike[str]) -> Pretrained:
    """The model in a folder or file; the weights stay on disk.

    Raises:
        OSError: it is not there.
        ValueError: `ConfigError`, `CheckpointError` and `GGUFError` among others: the message names file and reason.
    """
    path = Path(path)
    if path.is_dir():
        config, settings = read_config(path), read_settings(path / _GENERATION)
        with naming(path / _GENERATION):
            ends, sampler = end_tokens(settings), _sampler(settings)
        return Pretrained(open_checkpoint(path), config, frozenset(ends + config.end_tokens), sampler)
    file = open_gguf(path)
    config = gguf_config(file)
    with naming(path, GGUFError):
        has_tokens = "tokenizer.ggml.tokens" in file.metadata
        ends = special_ids(file.metadata).end if has_tokens else frozenset(config.end_tokens)
        return Pretrained(file, config, ends, _gguf_sampler(file.metadata), key_notes(file, config.family))


def _gguf_sampler(metadata: Mapping[str, Any]) -> Sampler | None:
    names = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p"}
    given = {name: metadata.get(f"general.sampling.{key}") for name, key in names.items()}
    return _sampler(given | {"do_sample": any(value is not None for value in given.values())})


def _sampler(settings: Mapping[str, Any]) -> Sampler | None:
    """What the file says; what it leaves out is left out."""
    if not settings.get("do_sample") or settings.get("temperature") == 0:
        return None
    given = {name: settings[name] for name in ("temperature", "top_k", "top_p") if settings.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"expected {name} to be a number, got {value!r}")
    if given.get("top_k") == 0:  # transformers' way to keep all
        del given["top_k"]
    return Sampler(**given)
