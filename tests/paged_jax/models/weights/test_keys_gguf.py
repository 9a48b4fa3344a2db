"""What becomes of every key and tensor of GGUF: what is called applied is read, and the makers' lists are ours."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gguf_writer import gguf_bytes

from paged_jax.models.text.text import gguf_text
from paged_jax.models.weights.config_gguf import gguf_config
from paged_jax.models.weights.gguf import GGUFError, GGUFFile
from paged_jax.models.weights.keys_gguf import APPLIED, ARCHITECTURES, fate, key_notes, refuse_keys
from paged_jax.models.weights.names import NAMES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("key", "neutral", "telling"),
    [
        ("{arch}.expert_count", 0, 8),
        ("{arch}.ssm.conv_kernel", 0, 4),
        ("{arch}.logit_scale", 1.0, 0.5),
        ("{arch}.attention.causal", True, False),
        ("{arch}.attention.scale", 0.0, 0.1),
        ("{arch}.rope.scaling.yarn_ext_factor", -1.0, 0.5),
        ("{arch}.attention.key_length_swa", 0, 64),
        ("{arch}.rope.dimension_sections", np.zeros(4, np.int32), np.array([8, 12, 12, 0], np.int32)),
    ],
)
def test_keys_of_other_models_are_refused(
    key: str, neutral: Any, telling: Any, architecture: str, opened: Callable[[bytes], GGUFFile]
) -> None:
    key = key.format(arch=architecture)
    refuse_keys(opened(gguf_bytes({key: neutral})), architecture)
    with pytest.raises(GGUFError, match=rf"model\.gguf: expected a model without {key}, got "):
        refuse_keys(opened(gguf_bytes({key: telling})), architecture)


def test_keys_without_effect_are_noted_in_one_line(opened: Callable[[bytes], GGUFFile]) -> None:
    keys = {
        "general.name": "any",
        "general.sampling.top_k": 20,
        "general.sampling.min_p": 0.05,
        "general.sampling.mirostat": 0,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.padding_token_id": 7,
        "llama.attention.sliding_window": 4096,
        "llama.of_tomorrow": "x",
    }
    file = opened(gguf_bytes(keys))
    refuse_keys(file, "llama")
    (note,) = key_notes(file, "llama")
    assert note == (
        f"{file.path}: without effect here: general.sampling.min_p = {np.float32(0.05).item()!r}, "
        "tokenizer.ggml.add_eos_token = True, llama.attention.sliding_window = 4096, llama.of_tomorrow = 'x'"
    )
    assert key_notes(opened(gguf_bytes({"general.name": "any"})), "llama") == ()


class Asked(dict[str, Any]):
    """Metadata that remembers which of its keys were read."""

    def __init__(self, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.keys_read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)


def makers_keys(architecture: str) -> Iterator[str]:
    constants = pytest.importorskip("gguf").constants
    groups = [constants.Keys]
    for group in groups:
        for name, value in vars(group).items():
            if isinstance(value, type):
                groups.append(value)
            elif isinstance(value, str) and not name.startswith("_"):
                yield value.replace("{arch}", architecture)


@pytest.mark.parity
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_key_of_the_makers_has_its_fate(architecture: str) -> None:
    assert [key for key in makers_keys(architecture) if fate(key, architecture) is None] == []


@pytest.mark.parity
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_of_the_makers_is_read_or_of_experts(architecture: str) -> None:
    constants = pytest.importorskip("gguf").constants
    kind = constants.MODEL_ARCH[architecture.upper()]
    theirs = {constants.TENSOR_NAMES[tensor].replace("{bid}", "{i}") for tensor in constants.MODEL_TENSORS[kind]}
    ours = {name.removesuffix(".weight") for name in NAMES["gguf"][architecture]}
    others = {"rope_freqs", "blk.{i}.attn_rot_embd"}  # read with the config; skipped by llama.cpp too
    experts = {f"blk.{{i}}.ffn_{name}" for name in ("gate_inp", "gate_exps", "down_exps", "up_exps")}
    assert theirs - ours - others == (experts if architecture == "llama" else set())


def full_metadata(architecture: str, model: str) -> dict[str, Any]:
    sizes = {"block_count": 2, "embedding_length": 8, "feed_forward_length": 16, "context_length": 64}
    heads = {"head_count": 2, "layer_norm_rms_epsilon": 1e-5, "sliding_window": 4}
    keys: dict[str, Any] = {"general.architecture": architecture}
    keys |= {f"{architecture}.{key}": item for key, item in sizes.items()}
    keys |= {f"{architecture}.attention.{key}": item for key, item in heads.items()}
    tokenizer: dict[str, Any] = {"tokens": ["<unk>", "<s>", "</s>", "a"], "model": model}
    tokenizer |= {"scores": np.zeros(4, np.float32)} if model == "llama" else {"pre": "gpt-2", "merges": []}
    return keys | {f"tokenizer.ggml.{key}": item for key, item in tokenizer.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_called_applied_is_what_is_read(architecture: str, opened: Callable[[bytes], GGUFFile]) -> None:
    table = ("token_embd.weight", (4, 8), "F32", bytes(4 * math.prod((4, 8))))
    file = opened(gguf_bytes({}, [table]))
    asked: set[str] = set()
    for model in ("llama", "gpt2"):
        for scaling in ({}, {f"{architecture}.rope.scaling.type": "yarn"}):
            metadata = Asked(full_metadata(architecture, model) | scaling)
            read = GGUFFile(file.path, metadata, file.tensors, file._data)
            gguf_config(read)
            gguf_text(read)
            asked |= metadata.keys_read
    at_opening = ("general.alignment", "general.sampling.", "split.")
    applied = {key.replace("{arch}", architecture) for key in APPLIED.split() if not key.startswith(at_opening)}
    others = {"gemma3": "llama.", "llama": "gemma3."}[architecture]
    assert asked == {key for key in applied if not key.startswith(others)}
