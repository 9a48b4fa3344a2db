"""Every key of a folder's JSON files is applied, without effect, refused or named: the tables, and notes by hand."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from paged_jax.layers import RopeConfig
from paged_jax.models.config import ConfigError
from paged_jax.models.generation import read_generation
from paged_jax.models.keys_json import CONFIG, GENERATION, RANDOM_ONLY, ROPE, TOKENIZER, Only
from paged_jax.models.weights.config_json import config_notes, model_config
from paged_jax.models.weights.families import DEFAULTS, FAMILIES

LLAMA = {"model_type": "llama", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2}


def generation(folder: Path, settings: dict[str, Any] | None, **config: Any):
    if settings is not None:
        (folder / "generation_config.json").write_text(json.dumps(settings))
    return read_generation(folder, LLAMA | config)


# --- generation_config.json -------------------------------------------------------------------------------------------


def test_sampling_that_is_not_here_is_named(tmp_path: Path) -> None:
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1, "odd": [1], "none": None}
    found = generation(tmp_path, settings)
    assert found.sampler is not None
    assert (found.sampler.temperature, found.sampler.top_k) == (0.7, 20)
    assert found.notes == (
        f"{tmp_path}/generation_config.json: without effect here: repetition_penalty = 1.1, odd = [1]",
    )


@pytest.mark.parametrize("key", [key for key, what in GENERATION.items() if isinstance(what, Only)])
def test_a_value_that_has_no_effect_is_fine_and_any_other_is_named(key: str, tmp_path: Path) -> None:
    for value in (None, *GENERATION[key]):
        assert generation(tmp_path, {"do_sample": True, key: value}).notes == ()
    (said,) = generation(tmp_path, {"do_sample": True, key: 7}).notes
    assert said.endswith(f"generation_config.json: without effect here: {key} = 7")
    assert generation(tmp_path, {key: 7}).notes == (() if key in RANDOM_ONLY else (said,))


@pytest.mark.parametrize(("given", "expected"), [(50.0, 50), (50, 50), (0, None), (0.0, None), (None, None)])
def test_a_whole_number_may_be_written_as_a_float(given: Any, expected: int | None, tmp_path: Path) -> None:
    sampler = generation(tmp_path, {"do_sample": True, "top_k": given}).sampler
    assert sampler is not None
    assert sampler.top_k == expected
    with pytest.raises(ValueError, match=r"generation_config\.json: top_k: expected .* got 2\.5"):
        generation(tmp_path, {"do_sample": True, "top_k": 2.5})


def test_without_the_file_its_keys_may_stand_in_config_json(tmp_path: Path) -> None:
    in_config = {"do_sample": True, "top_p": 0.5, "repetition_penalty": 1.1, "eos_token_id": 5}
    found = generation(tmp_path, None, **in_config)
    assert found.sampler is not None
    assert (found.sampler.top_p, found.end_tokens) == (0.5, (5,))
    assert found.notes == (f"{tmp_path}/config.json: without effect here: repetition_penalty = 1.1",)
    beside = generation(tmp_path, {"eos_token_id": [6]}, **in_config)
    assert (beside.sampler, beside.end_tokens, beside.notes) == (None, (6,), ())


# --- config.json ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [key for key, what in CONFIG.items() if isinstance(what, Only)])
def test_a_feature_that_is_not_here_is_refused_by_name(key: str) -> None:
    for value in (None, *CONFIG[key]):
        assert model_config(LLAMA | {key: value}) == model_config(LLAMA)
    with pytest.raises(ConfigError, match=f"expected a model with {key} = .*, got 7"):
        model_config(LLAMA | {key: 7})


def test_unknown_keys_are_named_in_one_note() -> None:
    scaling = {"type": "linear", "factor": 2.0, "strange": [1]}
    fields = LLAMA | {"rope_scaling": scaling, "residual_multiplier": 0.2, "none": None, "initializer_range": 0.02}
    said = "config.json: without effect here: residual_multiplier = 0.2, rope_scaling.strange = [1]"
    assert config_notes(Path("x"), fields) == (f"x/{said}",)
    text = {"odd": 1, "rope_parameters": {"full_attention": {"strange": 2}, "sliding_attention": {}}}
    (said,) = config_notes(Path("x"), {"model_type": "gemma3", "text_config": text, "vision_config": {"any": 1}})
    assert said.endswith("without effect here: odd = 1, rope_parameters.strange = 2")


def test_the_tables_have_what_the_readers_read() -> None:
    defaults = {key for family in FAMILIES.values() for key in family.defaults} | set(DEFAULTS)
    assert defaults <= CONFIG.keys()
    assert {field.name for field in dataclasses.fields(RopeConfig)} - {"context_length", "interleaved"} <= ROPE.keys()


# --- Against transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("family", [*FAMILIES, "gemma3_text"])
def test_the_table_has_every_field_of_transformers_config_class(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(family)
    assert {*theirs.to_dict(), *theirs.attribute_map} <= CONFIG.keys()


@pytest.mark.parity
def test_the_tables_have_every_field_of_the_other_classes() -> None:
    transformers = pytest.importorskip("transformers")
    assert transformers.GenerationConfig().to_dict().keys() <= GENERATION.keys()
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    assert set(rope.RopeParameters.__annotations__) <= ROPE.keys()
    for name in ("PreTrainedTokenizerFast", "LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer"):
        named = inspect.signature(getattr(transformers, name).__init__).parameters
        taken = {key for key in named if not key.endswith("_token") and key not in ("self", "args", "kwargs")}
        assert taken - {"vocab", "merges"} <= TOKENIZER.keys()


@pytest.mark.parity
def test_neutral_values_are_transformers_defaults() -> None:
    """What transformers itself takes where a file says nothing has no effect, so a file may say it too."""
    transformers = pytest.importorskip("transformers")
    defaults = transformers.GenerationConfig()._get_default_generation_params()
    for key, value in defaults.items():
        what = GENERATION[key]
        assert not isinstance(what, Only) or value is None or value in what, key
