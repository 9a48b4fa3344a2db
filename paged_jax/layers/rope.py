"""Positions → rotations: rotary position embeddings in the variants that published checkpoints use.

The rotary embedding is from Su et al., "RoFormer" (2021). Each pair of a head's elements is turned by position times
the pair's frequency; the variants differ in the frequencies alone, and two of them also scale cosine and sine.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int

TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How one kind of layer turns its heads. Hashable and static; the fields have their names in `config.json`.

    Raises:
        ValueError: a field's value cannot be right. (Fields that are missing show in `frequencies`.)
    """

    rope_type: str = "default"
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0  # the leading part of each head that is turned
    factor: float | None = None  # how many times longer the context is than the one trained for
    original_max_position_embeddings: int | None = None  # the context trained for
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] | None = None  # longrope, one for each pair
    long_factor: tuple[float, ...] | None = None
    attention_factor: float | None = None  # yarn and longrope: scales cosine and sine; None derives it
    context_length: int | None = None  # longrope: the longest row to serve; past the original, `long_factor` holds
    interleaved: bool = False  # pairs are neighbours (2i, 2i + 1), not halves (i, i + R / 2)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _EXPECTED and not (value is None and field.default is None):
                _check(field.name, value)
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and high <= low:
            raise ValueError(f"high_freq_factor: expected a number above low_freq_factor {low}, got {high}")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast: expected a number of at least beta_slow {self.beta_slow}, got {self.beta_fast}"
            )

    @staticmethod
    def from_hf(
        config: Mapping[str, Any], layer_type: str | None = None, *, context_length: int | None = None
    ) -> RopeConfig:
        """Reads a Hugging Face `config.json`, in the style of transformers 5 (`rope_parameters`) or the older one.

        Defaults that a family has without writing them down (Gemma 3's base, for one) are the caller's to fill in.

        Args:
            config: the parsed file; the text part of a multimodal one.
            layer_type: "full_attention" or "sliding_attention" where layers differ in their rotation.
            context_length: the longest row that will be served. Only longrope asks: keys are turned once, when they are
                written, so a row cannot change from short to long factors on its way. None means short.

        Raises:
            ValueError: `layer_type` is not one of the file's, or a field's value cannot be right. (Fields that are
                missing show in `frequencies`.)
            NotImplementedError: the rope type is not one of `TYPES`.
        """
        parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if isinstance(parameters, Mapping) and any(isinstance(value, Mapping) for value in parameters.values()):
            if layer_type not in parameters:
                raise ValueError(f"layer_type: expected one of {', '.join(parameters)}, got {layer_type!r}")
            parameters = parameters[layer_type]
        elif layer_type == "sliding_attention" and "rope_local_base_freq" in config:
            parameters = {"rope_theta": config["rope_local_base_freq"]}  # Gemma 3's local layers are not scaled
            if parameters["rope_theta"] is not None:
                _check("rope_local_base_freq", parameters["rope_theta"])
        if not isinstance(parameters, Mapping):
            raise ValueError(f"rope_parameters: expected an object, got {parameters!r}")

        outside = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
        fields = {name: value for name, value in {**outside, **parameters}.items() if value is not None}
        rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
        rope_type = "longrope" if rope_type == "su" else rope_type  # its first name
        if rope_type not in TYPES:
            raise NotImplementedError(f"rope_type: expected one of {', '.join(TYPES)}, got {rope_type!r}")

        if rope_type in ("llama3", "yarn", "longrope"):
            name, longest = "original_max_position_embeddings", config.get("max_position_embeddings")
            places = (config.get(name), parameters.get(name), longest)  # Phi-3's, beside the parameters, counts
            fields[name] = original = next((length for length in places if length is not None), None)
            if longest is not None and rope_type != "llama3":
                _check("max_position_embeddings", longest)
                _check(name, original)
                fields.setdefault("factor", longest / original)
        for name in ("short_factor", "long_factor"):
            if isinstance(fields.get(name), list):
                fields[name] = tuple(fields[name])
        fields |= {"rope_type": rope_type, "context_length": context_length}
        known = {field.name for field in dataclasses.fields(RopeConfig)} - {"interleaved"}
        return RopeConfig(**{name: fields[name] for name in known if name in fields})


_TINY, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _is_within(value: Any, least: float, most: float = _LARGEST) -> bool:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_number and bool(least <= value <= most)


_POSITIVE = "a positive float32", lambda value: _is_within(value, _TINY)
# With a base of 1 all pairs would turn alike, and the variants divide by the logarithms of base and context.
_ABOVE_1 = "a float32 above 1", lambda value: _is_within(value, math.nextafter(1, 2))
_NOT_NEGATIVE = "a float32 of at least 0", lambda value: _is_within(value, 0)
_FACTORS = (
    "a sequence of positive float32",
    lambda value: isinstance(value, tuple) and len(value) > 0 and all(_is_within(factor, _TINY) for factor in value),
)
_EXPECTED = {  # by the names of fields in `config.json`: in words, and as a predicate
    "rope_theta": _ABOVE_1,
    "rope_local_base_freq": _ABOVE_1,
    "partial_rotary_factor": ("a number in (0, 1]", lambda value: _is_within(value, _TINY, 1)),
    "factor": _POSITIVE,
    "max_position_embeddings": _ABOVE_1,
    "original_max_position_embeddings": _ABOVE_1,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "truncate": ("true or false", lambda value: isinstance(value, bool)),
    "mscale": _NOT_NEGATIVE,  # 0 is as if it were not given
    "mscale_all_dim": _NOT_NEGATIVE,
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
    "attention_factor": _POSITIVE,
}


def _check(name: str, value: Any) -> None:
    expected, is_right = _EXPECTED[name]
    if not is_right(value):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def frequencies(config: RopeConfig, head_dim: int) -> Float32[np.ndarray, "R/2"]:
    """How far one position turns each pair, in radians; R of a head's elements are turned, `head_dim` or fewer.

    Sources: linear, position interpolation of Chen et al. (2023); llama3, Meta's Llama 3.1; yarn, "NTK by parts" of
    Peng et al., "YaRN" (2023); longrope, Ding et al., "LongRoPE" (2024).

    Raises:
        ValueError: a field that the rope type needs is None, the turned part is empty, odd or larger than the head, or
            longrope has not one factor for each pair.
        NotImplementedError: the rope type is unknown.
    """
    if config.rope_type not in TYPES:
        raise NotImplementedError(f"rope_type: expected one of {', '.join(TYPES)}, got {config.rope_type!r}")
    turned = int(head_dim * config.partial_rotary_factor)
    if turned % 2 or not 0 < turned <= head_dim:
        raise ValueError(
            f"rope: expected an even number of elements to turn, at most head_dim {head_dim}, got {turned} "
            f"(partial_rotary_factor {config.partial_rotary_factor})"
        )
    plain = config.rope_theta ** -(np.arange(0, turned, 2) / turned)  # float64, rounded once at the end
    scale = _SCALES.get(config.rope_type)
    return (plain if scale is None else scale(config, plain)).astype(np.float32)


def attention_factor(config: RopeConfig) -> float:
    """What cosine and sine are multiplied by; 1 but for yarn and longrope. Sources: those of `frequencies`.

    Raises:
        ValueError: a field that the rope type needs is None.
    """
    if config.rope_type not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    factor, original = _needed(config, "factor", "original_max_position_embeddings")
    if factor <= 1:
        return 1.0
    if config.rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    if config.mscale and config.mscale_all_dim:
        return (0.1 * config.mscale * math.log(factor) + 1) / (0.1 * config.mscale_all_dim * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1


@functools.partial(jax.tree_util.register_dataclass, data_fields=["cos", "sin"], meta_fields=["interleaved"])
@dataclasses.dataclass(frozen=True)
class Rotation:
    """Cosine and sine of each token's angles, for all layers of one kind to share."""

    cos: Float32[Array, "T R/2"]
    sin: Float32[Array, "T R/2"]
    interleaved: bool = False

    @staticmethod
    def at(positions: Int[Array, " T"], config: RopeConfig, head_dim: int) -> Rotation:
        """The rotation of each position, as `config` has it for heads of `head_dim` elements.

        Raises:
            ValueError, NotImplementedError: as `frequencies`.
        """
        angles = jnp.outer(positions.astype(jnp.float32), jnp.asarray(frequencies(config, head_dim)))
        scale = jnp.float32(attention_factor(config))
        return Rotation(jnp.cos(angles) * scale, jnp.sin(angles) * scale, config.interleaved)

    def rotate(self, heads: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        """Turns the first R elements of each head and passes the others on; in float32, the result in heads' dtype.

        Raises:
            ValueError: the heads are not [T, N, H], with this rotation's T and an H of at least R.
        """
        tokens, pairs = self.cos.shape
        if heads.ndim != 3 or heads.shape[0] != tokens or heads.shape[2] < 2 * pairs:
            raise ValueError(
                f"heads: expected shape ({tokens}, heads, head_dim) with head_dim at least {2 * pairs}, "
                f"got {heads.shape}"
            )
        turned, passed = jnp.split(heads, [2 * pairs], axis=-1)
        sides, axis = ((pairs, 2), -1) if self.interleaved else ((2, pairs), -2)
        both = turned.astype(jnp.float32).reshape(*heads.shape[:2], *sides)
        first, second = (lax.index_in_dim(both, i, axis, keepdims=False) for i in range(2))
        cos, sin = self.cos[:, None], self.sin[:, None]
        both = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis)
        return jnp.concatenate([both.reshape(turned.shape).astype(heads.dtype), passed], axis=-1)


def _needed(config: RopeConfig, *names: str) -> list[Any]:
    if missing := [name for name in names if getattr(config, name) is None]:
        raise ValueError(f"{config.rope_type} rope: expected {', '.join(missing)}, got None")
    return [getattr(config, name) for name in names]


def _linear(config: RopeConfig, plain: np.ndarray) -> np.ndarray:
    (factor,) = _needed(config, "factor")
    return plain / factor


def _llama3(config: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Slow pairs are scaled and fast ones kept, by how often a pair goes round within the context trained for."""
    factor, low, high, original = _needed(
        config, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    )
    rounds = original * plain / (2 * math.pi)
    kept = np.clip((rounds - low) / (high - low), 0, 1)
    return kept * plain + (1 - kept) * plain / factor


def _yarn(config: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """As llama3, but the ramp from kept to scaled is linear in the pair's index, not in its rounds."""
    factor, original = _needed(config, "factor", "original_max_position_embeddings")
    turned = 2 * plain.size

    def index_of(rounds: float) -> float:
        return turned * math.log(original / (rounds * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = index_of(config.beta_fast), index_of(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, turned - 1)
    width = last - first or 0.001  # a ramp of no width is a step
    scaled = np.clip((np.arange(plain.size) - first) / width, 0, 1)
    return scaled * plain / factor + (1 - scaled) * plain


def _longrope(config: RopeConfig, plain: np.ndarray) -> np.ndarray:
    (original,) = _needed(config, "original_max_position_embeddings")
    name = "long_factor" if (config.context_length or 0) > original else "short_factor"
    (factors,) = _needed(config, name)
    if len(factors) != plain.size:
        raise ValueError(f"{name}: expected {plain.size} numbers, one for each pair, got {len(factors)}")
    return plain / np.asarray(factors)


_SCALES = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
