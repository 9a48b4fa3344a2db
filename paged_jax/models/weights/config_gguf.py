"""A GGUF file's metadata → a `ModelConfig`, for the architectures "llama" and "gemma3"."""

import functools
import math
from typing import Any

import numpy as np

from paged_jax.layers import RopeConfig
from paged_jax.models.config import AttentionConfig, MLPConfig, ModelConfig, NormConfig, is_token_id
from paged_jax.models.files import naming
from paged_jax.models.weights.gguf import GGUFError, GGUFFile

ARCHITECTURES = ("llama", "gemma3")
_LARGEST = {int: 2**31 - 1, float: float(np.finfo(np.float32).max)}
_ROPE_FACTORS = "rope_freqs.weight"


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The model in `file`.

    Raises:
        GGUFError: an architecture or feature that the decoder lacks, or metadata that is missing or contradicts itself.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise GGUFError(
            f"{file.path}: expected an architecture of {', '.join(ARCHITECTURES)}, got {architecture!r:.60}"
        )
    for key, value in {"expert_count": 0, "attn_logit_softcapping": 0.0}.items():
        got = file.metadata.get(f"{architecture}.{key}", value)
        if not isinstance(got, int | float) or got != value:
            raise GGUFError(f"{file.path}: expected a model with {architecture}.{key} = {value!r}, got {got!r:.60}")
    attention, sizes = _attention(file, architecture), _sizes(file, architecture)
    parts = _gemma3(file, attention, sizes) if architecture == "gemma3" else _llama(file, attention, sizes)
    return ModelConfig(attention=attention, **sizes, **parts)


def _llama(file: GGUFFile, attention: AttentionConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    rope = _rope(file, "llama", 10_000.0, attention.head_dim)
    return {
        "mlp": _mlp(file, "llama", "silu"),
        "norm": NormConfig(_positive(file, float, "llama.attention.layer_norm_rms_epsilon")),
        "rope": rope,
        "window_rope": rope,
        "windows": (None,) * sizes["num_layers"],
    }


def _gemma3(file: GGUFFile, attention: AttentionConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    window, softcap = _positive(file, int, "gemma3.attention.sliding_window"), "gemma3.final_logit_softcapping"
    return {
        "mlp": _mlp(file, "gemma3", "gelu_pytorch_tanh"),
        "norm": NormConfig(_positive(file, float, "gemma3.attention.layer_norm_rms_epsilon"), after=True),
        "rope": _rope(file, "gemma3", 1_000_000.0, attention.head_dim),
        "window_rope": _checked(file, rope_theta=_positive(file, float, "gemma3.rope.freq_base_swa", 10_000.0)),
        # The file does not say which layers have a window: all but every sixth.
        "windows": tuple(window if (layer + 1) % 6 else None for layer in range(sizes["num_layers"])),
        "embedding_scale": math.sqrt(sizes["width"]),
        "logit_softcap": None if file.metadata.get(softcap, 0.0) == 0 else _positive(file, float, softcap),
    }


def _sizes(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """What every architecture says in the same way."""
    size = functools.partial(_positive, file, int)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        got = "none" if embedding is None else f"shape {embedding.shape}"
        raise GGUFError(f"{file.path}: expected a matrix as tensor 'token_embd.weight', got {got}")
    end = file.metadata.get("tokenizer.ggml.eos_token_id")
    if end is not None and not is_token_id(end):
        raise GGUFError(f"{file.path}: expected tokenizer.ggml.eos_token_id to be a token id, got {end!r:.60}")
    return {
        "family": architecture,
        "vocab_size": embedding.shape[0],
        "num_layers": size(f"{architecture}.block_count"),
        "width": size(f"{architecture}.embedding_length"),
        "max_length": size(f"{architecture}.context_length"),
        "tied_embeddings": "output.weight" not in file.tensors,
        "end_tokens": () if end is None else (end,),
    }


def _attention(file: GGUFFile, architecture: str) -> AttentionConfig:
    def size(key: str, default: int | None = None) -> int:
        return _positive(file, int, f"{architecture}.{key}", default)

    width, num_heads = size("embedding_length"), size("attention.head_count")
    num_kv_heads = size("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise GGUFError(
            f"{file.path}: expected heads in whole groups per kv head, got {num_heads} heads and "
            f"{num_kv_heads} kv heads"
        )
    head_dim = size("attention.key_length", width // num_heads)
    if head_dim % 2:
        raise GGUFError(f"{file.path}: expected an even head_dim, whose pairs are rotated, got {head_dim}")
    if size("attention.value_length", head_dim) != head_dim or size("rope.dimension_count", head_dim) != head_dim:
        raise GGUFError(f"{file.path}: expected K, V and rotary dimensions of one size ({head_dim}), got others")
    # Gemma 3 of 27 B, told by its layers, is scaled by the width's share of a head: what the file leaves unsaid.
    is_27b = architecture == "gemma3" and size("block_count") == 62
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=(width / num_heads if is_27b else head_dim) ** -0.5,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm=architecture == "gemma3",
    )


def _mlp(file: GGUFFile, architecture: str, activation: str) -> MLPConfig:
    width = _positive(file, int, f"{architecture}.feed_forward_length")
    return MLPConfig(width, activation, bias="blk.0.ffn_gate.bias" in file.tensors)


def _rope(file: GGUFFile, architecture: str, base: float, head_dim: int) -> RopeConfig:
    base = _positive(file, float, f"{architecture}.rope.freq_base", base)
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if not isinstance(kind, str) or kind not in ("none", "linear"):
        raise GGUFError(f"{file.path}: expected {architecture}.rope.scaling.type 'none' or 'linear', got {kind!r:.60}")
    if kind == "linear":
        factor = _positive(file, float, f"{architecture}.rope.scaling.factor")
        return _checked(file, "linear", base, factor=factor)
    if _ROPE_FACTORS not in file.tensors:
        return _checked(file, rope_theta=base)
    # Llama 3's scaling, already worked out: one divisor a rotation, which is longrope without its two lengths.
    factors = tuple(file.tensor(_ROPE_FACTORS).ravel().tolist())
    if len(factors) != head_dim // 2 or not all(0 < factor < math.inf for factor in factors):
        raise GGUFError(f"{file.path}: tensor {_ROPE_FACTORS!r}: expected {head_dim // 2} divisors, got {factors}")
    return _checked(
        file,
        "longrope",
        base,
        original_max_position_embeddings=_positive(file, int, f"{architecture}.context_length"),
        short_factor=factors,
        long_factor=factors,
        attention_factor=1.0,
    )


def _checked(file: GGUFFile, *fields: Any, **named: Any) -> RopeConfig:
    with naming(file.path, GGUFError):
        return RopeConfig(*fields, **named)


def _positive(file: GGUFFile, kind: type, key: str, default: Any = None) -> Any:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value <= _LARGEST[kind]:
        raise GGUFError(f"{file.path}: expected a positive {kind.__name__}32 for {key}, got {value!r:.60}")
    return value
