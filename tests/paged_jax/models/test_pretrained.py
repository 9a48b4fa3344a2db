"""A folder opened: where generation stops, and its notes; its weights are not read."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizer_files import CHATML, save_files, save_tokenizer

from paged_jax.models.pretrained import Pretrained, open_pretrained

CONFIG = {"model_type": "llama", "vocab_size": 264, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
CONFIG |= {"num_attention_heads": 2, "eos_token_id": 2}
ABSENT = "absent"


def folder(path: Path, files: dict[str, Any], tensors: tuple[str, ...] = ("model.norm.weight",)) -> Path:
    save_file({name: np.ones(1, np.float32) for name in tensors}, save_tokenizer(path) / "model.safetensors")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
    return save_files(path, {"config.json": CONFIG, "tokenizer_config.json": settings} | files)


def opened(path: Path, files: dict[str, Any], *tensors: str) -> Pretrained:
    return open_pretrained(folder(path, files, tensors or ("model.norm.weight",)))


def test_generation_stops_at_the_tokenizers_own_end_token_too(tmp_path: Path) -> None:
    found = opened(tmp_path, {"tokenizer_config.json": {"eos_token": "<|im_end|>"}})
    assert found.end_tokens == {2, 4}
    assert found.text().eos == 4
    (tmp_path / "tokenizer.json").unlink()
    assert open_pretrained(tmp_path).end_tokens == {2}


def test_generation_config_goes_before_config_json(tmp_path: Path) -> None:
    given = {"generation_config.json": {"eos_token_id": [3, 4]}}
    assert opened(tmp_path, given).end_tokens == {2, 3, 4}  # 2 is the tokenizer's
    assert opened(tmp_path, given | {"tokenizer_config.json": {}}).end_tokens == {3, 4}
    # Where it does not say, config.json is asked, though transformers then stops at nothing.
    assert opened(tmp_path, {"generation_config.json": {}, "tokenizer_config.json": {}}).end_tokens == {2}


def test_every_file_has_its_note(tmp_path: Path) -> None:
    files = {
        "config.json": CONFIG | {"residual_multiplier": 0.2},
        "generation_config.json": {"repetition_penalty": 1.1},
        "tokenizer_config.json": {"odd": 1},
    }
    images = ("vision_tower.a", "model.vision_tower.b", "multi_modal_projector.c")
    assert opened(tmp_path, files, "model.norm.weight", *images).notes == (
        f"{tmp_path}/config.json: without effect here: residual_multiplier = 0.2",
        f"{tmp_path}/generation_config.json: without effect here: repetition_penalty = 1.1",
        f"{tmp_path}: without effect here: 1 tensors of multi_modal_projector, 2 tensors of vision_tower",
        f"{tmp_path}/tokenizer_config.json: without effect here: odd = 1",
    )


def test_an_ordinary_folder_has_none(tmp_path: Path) -> None:
    settings = {"repetition_penalty": 1.0, "do_sample": True, "top_k": 64, "cache_implementation": "hybrid"}
    assert opened(tmp_path, {"generation_config.json": settings}).notes == ()


@pytest.mark.parity
def test_end_tokens_equal_transformers(tmp_path: Path) -> None:
    """Those of its generate, and the eos of its tokenizer, at which servers stop as well."""
    transformers = pytest.importorskip("transformers")
    ends, names = (ABSENT, None, 3, [3, 4]), (ABSENT, None, "</s>", "<|im_end|>")
    for number, (in_config, in_generation, eos) in enumerate(itertools.product(ends, ends, names)):
        if in_generation is None:
            continue  # as above
        config = {key: value for key, value in CONFIG.items() if key != "eos_token_id"}
        files: dict[str, Any] = {"config.json": config, "tokenizer_config.json": {}}
        for file, key, value in (
            ("config.json", "eos_token_id", in_config),
            ("tokenizer_config.json", "eos_token", eos),
        ):
            files[file] |= {} if value == ABSENT else {key: value}
        if in_generation != ABSENT:
            files["generation_config.json"] = {"eos_token_id": in_generation}
        path = folder(tmp_path / str(number), files)
        if in_generation == ABSENT:
            theirs = transformers.GenerationConfig.from_model_config(transformers.AutoConfig.from_pretrained(path))
        else:
            theirs = transformers.GenerationConfig.from_pretrained(path)
        ids = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
        ids = {*ids, transformers.AutoTokenizer.from_pretrained(path).eos_token_id} - {None}
        assert open_pretrained(path).end_tokens == ids, files
