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


def test_gemma_3_of_27b_has_a_scale_of_its_own(opened: Callable[..., GGUFFile]) -> None:
    config = gguf_config(opened(metadata("gemma3", **GEMMA3, block_count=62)))
    assert config.attention.scale == (64 / 4) ** -0.5


END = metadata("llama")
GGUF_REFUSED = {
    "architecture": (metadata("falcon"), "expected an architecture of llama, gemma3, got 'falcon'"),
    "experts": (metadata("llama", expert_count=8), "llama.expert_count = 0, got 8"),
    "softcap": (metadata("gemma3", attn_logit_softcapping=50.0), "gemma3.attn_logit_softcapping = 0.0, got 50.0"),
    "rope type": (
        metadata("llama", **{"rope.scaling.type": "yarn"}),
        "'none' or 'linear', got 'yarn'",
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
    "expert counts": (metadata("llama", expert_count=np.arange(2)), "llama.expert_count = 0, got array"),
    "rope types": (metadata("llama", **{"rope.scaling.type": np.arange(2)}), "'none' or 'linear', got array"),
    "end of 32 bits": (END | {"tokenizer.ggml.eos_token_id": 2**31}, "eos_token_id to be a token id, got 2147483648"),
    "end below 0": (END | {"tokenizer.ggml.eos_token_id": np.int32(-1)}, "eos_token_id to be a token id, got -1"),
    "end of text": (END | {"tokenizer.ggml.eos_token_id": "</s>"}, "eos_token_id to be a token id, got '</s>'"),
    "window": (metadata("gemma3"), "positive int32 for gemma3.attention.sliding_window, got None"),
}


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
