"""A GGUF file's metadata → a `ModelConfig`, for the architectures "llama" and "gemma3"."""

import functools
import math
from typing import Any

import numpy as np

from paged_jax.layers import RopeConfig
from paged_jax.models.config import AttentionConfig, MLPConfig, ModelConfig, NormConfig, is_token_id
from paged_jax.models.files import naming
from paged_jax.models.weights.gguf import GGUFError, GGUFFile
from paged_jax.models.weights.keys_gguf import ARCHITECTURES, refuse_keys

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
    refuse_keys(file, architecture)
    attention, sizes = _attention(file, architecture), _sizes(file, architecture)
    parts = _gemma3(file, attention, sizes) if architecture == "gemma3" else _llama(file, attention, sizes)
    return ModelConfig(attention=attention, **sizes | parts)


def _llama(file: GGUFFile, attention: AttentionConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    rope = _rope(file, "llama", 10_000.0, attention.head_dim)
    return {
        "mlp": _mlp(file, "llama", "silu"),
        "norm": NormConfig(_positive(file, float, "llama.attention.layer_norm_rms_epsilon")),
        "rope": rope,
        "window_rope": rope,
        "windows": (None,) * sizes["num_layers"],
        "max_length": _lengthened(sizes["max_length"], rope),
    }


def _lengthened(length: int, rope: RopeConfig) -> int:
    """The positions to read of a model trained for `length`: scaled rotations make more of them, as in the folders of
    Hugging Face. Gemma 3's length, and that of a model with divisors, is that of the scaled ones already."""
    if rope.rope_type not in ("linear", "yarn") or rope.factor is None:
        return length
    return max(length, int(rope.factor * (rope.original_max_position_embeddings or length)))


def _gemma3(file: GGUFFile, attention: AttentionConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    softcap = "gemma3.final_logit_softcapping"
    return {
        "mlp": _mlp(file, "gemma3", "gelu_pytorch_tanh"),
        "norm": NormConfig(_positive(file, float, "gemma3.attention.layer_norm_rms_epsilon"), after=True),
        "rope": _rope(file, "gemma3", 1_000_000.0, attention.head_dim),
        "window_rope": _checked(file, rope_theta=_positive(file, float, "gemma3.rope.freq_base_swa", 10_000.0)),
        "windows": _windows(file, sizes["num_layers"]),
        "embedding_scale": math.sqrt(sizes["width"]),
        "logit_softcap": None if file.metadata.get(softcap, 0.0) == 0 else _positive(file, float, softcap),
    }


def _windows(file: GGUFFile, num_layers: int) -> tuple[int | None, ...]:
    """A pattern of 3 leaves every third layer without a window; one of 0, none. It may also be a flag for each layer.
    Most files have none: every sixth."""
    window, key = _positive(file, int, "gemma3.attention.sliding_window"), "gemma3.attention.sliding_window_pattern"
    pattern = file.metadata.get(key, 6)
    if isinstance(pattern, np.ndarray) and pattern.shape == (num_layers,):
        return tuple(window if is_windowed else None for is_windowed in pattern.tolist())
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 0:
        raise GGUFError(f"{file.path}: expected {key} to be a number or {num_layers} flags, got {pattern!r:.60}")
    return tuple(None if pattern and (layer + 1) % pattern == 0 else window for layer in range(num_layers))


def _sizes(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """What every architecture says in the same way."""
    size = functools.partial(_positive, file, int)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        got = "none" if embedding is None else f"shape {embedding.shape}"
        raise GGUFError(f"{file.path}: expected a matrix as tensor 'token_embd.weight', got {got}")
    end = file.metadata.get("tokenizer.ggml.eos_token_id")
    if end is not None and (not isinstance(end, int) or isinstance(end, bool) or end < 0):
        raise GGUFError(f"{file.path}: expected tokenizer.ggml.eos_token_id to be a token id, got {end!r:.60}")
    return {
        "family": architecture,
        "vocab_size": embedding.shape[0],
        "num_layers": size(f"{architecture}.block_count"),
        "width": size(f"{architecture}.embedding_length"),
        "max_length": size(f"{architecture}.context_length"),
        "tied_embeddings": "output.weight" not in file.tensors,
        "end_tokens": (end,) if is_token_id(end) else (),
    }


def _attention(file: GGUFFile, architecture: str) -> AttentionConfig:
    def size(key: str, default: int | None = None) -> int:
        return _positive(file, int, f"{architecture}.{key}", default)

    width, num_heads = size("embedding_length"), _of_all_layers(file, f"{architecture}.attention.head_count")
    num_kv_heads = _of_all_layers(file, f"{architecture}.attention.head_count_kv", num_heads)
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
    width = _of_all_layers(file, f"{architecture}.feed_forward_length")
    return MLPConfig(width, activation, bias="blk.0.ffn_gate.bias" in file.tensors)


def _rope(file: GGUFFile, architecture: str, base: float, head_dim: int) -> RopeConfig:
    base = _positive(file, float, f"{architecture}.rope.freq_base", base)
    kind, factor = _scaling(file, architecture)
    divisors = _divisors(file, head_dim)
    if kind == "yarn" and divisors is not None:
        raise GGUFError(f"{file.path}: expected rope.scaling.type yarn or a tensor {_ROPE_FACTORS!r}, got both")
    length = _positive(file, int, f"{architecture}.context_length")
    original = f"{architecture}.rope.scaling.original_context_length"
    if divisors is not None:  # longrope without its two lengths
        divisors = tuple(divisor * factor for divisor in divisors)
        return _checked(
            file,
            "longrope",
            base,
            original_max_position_embeddings=length,
            short_factor=divisors,
            long_factor=divisors,
            attention_factor=1.0,
        )
    if kind == "yarn":
        return _checked(
            file,
            "yarn",
            base,
            factor=factor,
            original_max_position_embeddings=_positive(file, int, original, length),
            beta_fast=_positive(file, float, f"{architecture}.rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=_positive(file, float, f"{architecture}.rope.scaling.yarn_beta_slow", 1.0),
        )
    if factor == 1:
        return _checked(file, rope_theta=base)
    trained = (
        {} if original not in file.metadata else {"original_max_position_embeddings": _positive(file, int, original)}
    )
    return _checked(file, "linear", base, factor=factor, **trained)


def _scaling(file: GGUFFile, architecture: str) -> tuple[str, float]:
    """The type and the factor. As llama.cpp reads them, a factor alone is linear, one of 0 is 1, and the factor's old
    name stands where the new one is missing."""
    key = f"{architecture}.rope.scaling.type"
    kind = file.metadata.get(key, "linear")
    if not isinstance(kind, str) or kind not in ("none", "linear", "yarn"):
        raise GGUFError(f"{file.path}: expected {key} to be 'none', 'linear' or 'yarn', got {kind!r:.60}")
    name = f"{architecture}.rope.scaling.factor"
    if name not in file.metadata:
        name = f"{architecture}.rope.scale_linear"
    if kind == "none" or file.metadata.get(name, 0.0) == 0.0:
        return kind, 1.0
    return kind, _positive(file, float, name)


def _divisors(file: GGUFFile, head_dim: int) -> tuple[float, ...] | None:
    """Llama 3's scaling, already worked out: one divisor a rotation."""
    if _ROPE_FACTORS not in file.tensors:
        return None
    divisors = tuple(file.tensor(_ROPE_FACTORS).ravel().tolist())
    if len(divisors) != head_dim // 2 or not all(0 < divisor < math.inf for divisor in divisors):
        raise GGUFError(f"{file.path}: tensor {_ROPE_FACTORS!r}: expected {head_dim // 2} divisors, got {divisors}")
    return divisors


def _checked(file: GGUFFile, *fields: Any, **named: Any) -> RopeConfig:
    with naming(file.path, GGUFError):
        return RopeConfig(*fields, **named)


def _of_all_layers(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A size that a file gives once, or for each layer, where it is to be the same."""
    sizes = file.metadata.get(key)
    if not isinstance(sizes, np.ndarray):
        return _positive(file, int, key, default)
    if len(set(sizes.tolist())) != 1:
        raise GGUFError(f"{file.path}: expected {key} to be the same in every layer, got {sizes.tolist()!r:.60}")
    return _as_positive(file, int, key, sizes[0].item())


def _positive(file: GGUFFile, kind: type, key: str, default: Any = None) -> Any:
    return _as_positive(file, kind, key, file.metadata.get(key, default))


def _as_positive(file: GGUFFile, kind: type, key: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value <= _LARGEST[kind]:
        raise GGUFError(f"{file.path}: expected a positive {kind.__name__}32 for {key}, got {value!r:.60}")
    return value
