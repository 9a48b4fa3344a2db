"""A GGUF file's metadata → ModelConfig: Llama, Gemma 3, and what is refused."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_writer import Tensor, gguf_bytes

from paged_jax.layers import RopeConfig, attention_factor, frequencies
from paged_jax.models.config import AttentionConfig, MLPConfig, ModelConfig, NormConfig
from paged_jax.models.weights.config_gguf import gguf_config
from paged_jax.models.weights.config_json import model_config
from paged_jax.models.weights.gguf import GGUFError, GGUFFile, open_gguf


def metadata(architecture: str, **changes: Any) -> dict[str, Any]:
    keys = {
        "block_count": 7,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "context_length": 256,
        **changes,
    }
    found = {f"{architecture}.{key}": item for key, item in keys.items() if item is not None}
    return {"general.architecture": architecture, "tokenizer.ggml.eos_token_id": 2, **found}


def zeros(name: str, *shape: int) -> Tensor:
    return name, shape, "F32", bytes(4 * math.prod(shape))


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., GGUFFile]:
    def write_and_open(keys: dict[str, Any], *tensors: Tensor) -> GGUFFile:
        path = tmp_path / "model.gguf"
        path.write_bytes(gguf_bytes(keys, [zeros("token_embd.weight", 97, 64), *tensors]))
        return open_gguf(path)

    return write_and_open


def test_llama_from_gguf(opened: Callable[..., GGUFFile]) -> None:
    config = gguf_config(opened(metadata("llama"), zeros("output.weight", 97, 64)))
    assert config == ModelConfig(
        family="llama",
        vocab_size=97,
        num_layers=7,
        width=64,
        max_length=256,
        attention=AttentionConfig(4, 2, 16, 0.25),
        mlp=MLPConfig(96, "silu"),
        norm=NormConfig(float(np.float32(1e-5))),
        rope=RopeConfig(),
        window_rope=RopeConfig(),
        windows=(None,) * 7,
        end_tokens=(2,),
    )
    assert gguf_config(opened(metadata("llama"))).tied_embeddings


def test_biases_and_scaled_ropes_from_gguf(opened: Callable[..., GGUFFile]) -> None:
    biases = [zeros("blk.0.attn_q.bias", 64), zeros("blk.0.ffn_gate.bias", 96)]
    config = gguf_config(opened(metadata("llama"), *biases))
    assert (config.attention.qkv_bias, config.attention.out_bias, config.mlp.bias) == (True, False, True)
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.freq_base": 5e5}
    assert gguf_config(opened(metadata("llama", **linear))).rope == RopeConfig("linear", 5e5, factor=4.0)


def test_the_divisors_of_llama_3_are_read_from_their_tensor(opened: Callable[..., GGUFFile]) -> None:
    divisors = np.linspace(1, 8, 8, dtype="<f4")
    config = gguf_config(opened(metadata("llama"), ("rope_freqs.weight", (8,), "F32", divisors.tobytes())))
    plain = frequencies(RopeConfig(), 16)
    np.testing.assert_allclose(frequencies(config.rope, 16), plain / divisors, rtol=1e-6)
    assert attention_factor(config.rope) == 1
    with pytest.raises(GGUFError, match=r"'rope_freqs.weight': expected 8 divisors, got \(0.0, 0.0\)"):
        gguf_config(opened(metadata("llama"), zeros("rope_freqs.weight", 2)))


LINEAR = RopeConfig("linear", factor=4.0)
SCALED = {  # what a file says of rotations → what it means, and how many positions may be read
    "a factor alone": ({"factor": 4.0}, LINEAR, 1024),
    "the factor's old name": ({"scale_linear": 4.0}, LINEAR, 1024),
    "the new name goes before": ({"factor": 4.0, "scale_linear": 2.0}, LINEAR, 1024),
    "a type without a factor": ({"type": "linear"}, RopeConfig(), 256),
    "a factor of 0": ({"type": "linear", "factor": 0.0}, RopeConfig(), 256),
    "no scaling": ({"type": "none", "factor": 4.0}, RopeConfig(), 256),
    "a length trained for": (
        {"factor": 4.0, "original_context_length": 64},
        dataclasses.replace(LINEAR, original_max_position_embeddings=64),
        256,
    ),
    "yarn": (
        {"type": "yarn", "factor": 4.0},
        RopeConfig("yarn", factor=4.0, original_max_position_embeddings=256),
        1024,
    ),
    "yarn of a length, and with its ramp": (
        {"type": "yarn", "factor": 8.0, "original_context_length": 64, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
        RopeConfig("yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0),
        512,
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_rotations(name: str, opened: Callable[..., GGUFFile]) -> None:
    said, rope, length = SCALED[name]
    keys = {
        f"rope.scal{'e' if key == 'scale_linear' else 'ing.'}{key.removeprefix('scale')}": said[key] for key in said
    }
    config = gguf_config(opened(metadata("llama", **keys)))
    assert (config.rope, config.window_rope, config.max_length) == (rope, rope, length)


def test_a_factor_and_the_divisors_of_llama_3_both_count(opened: Callable[..., GGUFFile]) -> None:
    divisors = np.linspace(1, 8, 8, dtype="<f4")
    keys = metadata("llama", **{"rope.scaling.factor": 2.0})
    config = gguf_config(opened(keys, ("rope_freqs.weight", (8,), "F32", divisors.tobytes())))
    plain = frequencies(RopeConfig(), 16)
    np.testing.assert_allclose(frequencies(config.rope, 16), plain / divisors / 2, rtol=1e-6)
    assert config.max_length == 256


def test_sizes_given_for_each_layer(opened: Callable[..., GGUFFile]) -> None:
    layers = {"attention.head_count": 4, "attention.head_count_kv": 2, "feed_forward_length": 96}
    keys = {key: np.full(7, size, np.int32) for key, size in layers.items()}
    assert gguf_config(opened(metadata("llama", **keys))) == gguf_config(opened(metadata("llama")))


GEMMA3 = {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 8}


def test_gemma_3_from_gguf_equals_its_config_json(opened: Callable[..., GGUFFile]) -> None:
    config = gguf_config(opened(metadata("gemma3", **GEMMA3)))
    fields = {
        "model_type": "gemma3_text",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": float(np.float32(1e-5)),
        "eos_token_id": 2,
    }
    expected = model_config(fields)
    ropes = {
        name: dataclasses.replace(getattr(expected, name), original_max_position_embeddings=None)
        for name in ("rope", "window_rope")
    }
    assert config == dataclasses.replace(expected, **ropes)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (3, (8, 8, None, 8, 8, None, 8)),
        (1, (None,) * 7),
        (0, (8,) * 7),
        (np.array([True, False, False, False, False, False, True]), (8, None, None, None, None, None, 8)),
        (None, (8, 8, 8, 8, 8, None, 8)),
    ],
)
def test_gemma_3_says_which_layers_have_a_window(
    pattern: Any, expected: tuple[int | None, ...], opened: Callable[..., GGUFFile]
) -> None:
    keys = metadata("gemma3", **GEMMA3, **{"attention.sliding_window_pattern": pattern})
    assert gguf_config(opened(keys)).windows == expected


def test_gemma_3s_length_is_that_of_its_scaled_rotations(opened: Callable[..., GGUFFile]) -> None:
    config = gguf_config(opened(metadata("gemma3", **GEMMA3, **{"rope.scaling.factor": 8.0})))
    assert (config.rope.factor, config.window_rope.factor, config.max_length) == (8.0, None, 256)


def test_gemma_3_of_27b_has_a_scale_of_its_own(opened: Callable[..., GGUFFile]) -> None:
    config = gguf_config(opened(metadata("gemma3", **GEMMA3, block_count=62)))
    assert config.attention.scale == (64 / 4) ** -0.5


END = metadata("llama")
GGUF_REFUSED = {
    "architecture": (metadata("falcon"), "expected an architecture of llama, gemma3, got 'falcon'"),
    "experts": (metadata("llama", expert_count=8), "a model without llama.expert_count, got 8"),
    "softcap": (
        metadata("gemma3", attn_logit_softcapping=50.0),
        "a model without gemma3.attn_logit_softcapping, got 50.0",
    ),
    "rope type": (
        metadata("llama", **{"rope.scaling.type": "longrope"}),
        "to be 'none', 'linear' or 'yarn', got 'longrope'",
    ),
    "missing": (metadata("llama", context_length=None), "positive int32 for llama.context_length, got None"),
    "groups": (metadata("llama", **{"attention.head_count_kv": 3}), "got 4 heads and 3 kv heads"),
    "odd": (metadata("llama", **{"attention.key_length": 15}), "an even head_dim, .* got 15"),
    "partial": (metadata("llama", **{"rope.dimension_count": 8}), r"of one size \(16\)"),
    "base of 0": (metadata("llama", **{"rope.freq_base": 0.0}), "positive float32 for llama.rope.freq_base, got 0.0"),
    "endless base": (metadata("llama", **{"rope.freq_base": math.inf}), "positive float32 for .*freq_base, got inf"),
    "base of 1": (metadata("llama", **{"rope.freq_base": 1.0}), "rope_theta: expected .* got 1.0"),
    "endless base of windows": (
        metadata("gemma3", **GEMMA3, **{"rope.freq_base_swa": math.inf}),
        "positive float32 for gemma3.rope.freq_base_swa, got inf",
    ),
    "endless factor": (
        metadata("llama", **{"rope.scaling.type": "linear", "rope.scaling.factor": math.inf}),
        "positive float32 for llama.rope.scaling.factor, got inf",
    ),
    "endless eps": (
        metadata("llama", **{"attention.layer_norm_rms_epsilon": math.inf}),
        "positive float32 for llama.attention.layer_norm_rms_epsilon, got inf",
    ),
    "eps that is no number": (
        metadata("llama", **{"attention.layer_norm_rms_epsilon": math.nan}),
        "positive float32 for llama.attention.layer_norm_rms_epsilon, got nan",
    ),
    "window of 40 bits": (
        metadata("gemma3", **GEMMA3 | {"attention.sliding_window": np.uint64(2**40)}),
        "positive int32 for gemma3.attention.sliding_window, got 1099511627776",
    ),
    "final softcap": (
        metadata("gemma3", **GEMMA3, final_logit_softcapping="x"),
        "positive float32 for gemma3.final_logit_softcapping, got 'x'",
    ),
    "architectures": (metadata("llama") | {"general.architecture": np.arange(2)}, "an architecture of .* got array"),
    "expert counts": (metadata("llama", expert_count=np.arange(2)), "without llama.expert_count, got array"),
    "rope types": (metadata("llama", **{"rope.scaling.type": np.arange(2)}), "'linear' or 'yarn', got array"),
    "end below 0": (END | {"tokenizer.ggml.eos_token_id": np.int32(-1)}, "eos_token_id to be a token id, got -1"),
    "end of text": (END | {"tokenizer.ggml.eos_token_id": "</s>"}, "eos_token_id to be a token id, got '</s>'"),
    "kv heads": (
        metadata("llama", **{"attention.head_count_kv": np.array([2, 2, 2, 2, 2, 2, 4], np.int32)}),
        r"llama.attention.head_count_kv to be the same in every layer, got \[2, 2, 2, 2, 2, 2, 4\]",
    ),
    "no kv heads": (
        metadata("llama", **{"attention.head_count_kv": np.zeros(7, np.int32)}),
        "positive int32 for llama.attention.head_count_kv, got 0",
    ),
    "pattern": (
        metadata("gemma3", **GEMMA3, **{"attention.sliding_window_pattern": np.array([True, False])}),
        "sliding_window_pattern to be a number or 7 flags, got array",
    ),
    "pattern below 0": (
        metadata("gemma3", **GEMMA3, **{"attention.sliding_window_pattern": np.int32(-1)}),
        "sliding_window_pattern to be a number or 7 flags, got -1",
    ),
    "both ways": (metadata("llama", **{"attention.causal": False}), "without llama.attention.causal, got False"),
    "scaled rotations": (metadata("llama", **{"rope.scaling.attn_factor": 0.5}), "without llama.rope.scaling.attn_"),
    "window": (metadata("gemma3"), "positive int32 for gemma3.attention.sliding_window, got None"),
}


def test_yarn_and_divisors_are_refused_together(opened: Callable[..., GGUFFile]) -> None:
    keys = metadata("llama", **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0})
    with pytest.raises(GGUFError, match=r"type yarn or a tensor 'rope_freqs.weight', got both"):
        gguf_config(opened(keys, ("rope_freqs.weight", (8,), "F32", np.ones(8, "<f4").tobytes())))


@pytest.mark.parametrize("name", GGUF_REFUSED)
def test_gguf_metadata_that_the_decoder_lacks_is_named(name: str, opened: Callable[..., GGUFFile]) -> None:
    keys, message = GGUF_REFUSED[name]
    with pytest.raises(GGUFError, match=message) as caught:
        gguf_config(opened(keys))
    assert "model.gguf" in str(caught.value)


def test_gguf_without_an_embedding(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata("llama"), [zeros("w", 2)]))
    with pytest.raises(GGUFError, match=r"a matrix as tensor 'token_embd\.weight', got none"):
        gguf_config(open_gguf(path))


@pytest.mark.download
def test_smollm2_from_gguf(smollm2_path: Path) -> None:
    config = gguf_config(open_gguf(smollm2_path))
    assert (config.num_layers, config.width, config.vocab_size, config.max_length) == (30, 576, 49_152, 8192)
    assert config.attention == AttentionConfig(9, 3, 64, 0.125)
    assert config.rope == RopeConfig(rope_theta=100_000.0)
    assert config.tied_embeddings
