"""Keys whose channels are of one size, which an int8 cache needs, made by the weights that they come from.

A vector of int8 has one scale, so that its largest channel sets the steps of all. Where the bias of K is hundreds in
some channels (Qwen 2 and 2.5), the others are left with less than a step. But attention sees products of Q and K alone:
a channel of K may be divided by what the same channel of Q is multiplied with. Formats of 8-bit floats do not gain:
their steps go by each number.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from paged_jax.layers.rope import frequencies
from paged_jax.models.config import ModelConfig

_SPREAD = 3.0  # standard deviations: how far from its bias a channel of K is taken to reach
_LEAST = 2.0**-8  # of the factors: a channel that is always zero needs no other
_WEIGHT, _BIAS, _SCALE = "attention.qkv.weight", "attention.qkv.bias", "attention_norm.scale"


def even_keys(config: ModelConfig, weights: Mapping[str, Array]) -> dict[str, Array]:
    """The weights of the same model, whose keys an int8 cache holds well.

    Factors are powers of two: over a cache of floats it says the same to the last bit. Of a model without biases of K,
    whose channels differ little, or with norms of Q and K the weights stay as they are.

    Args:
        weights: by name, as `Network` says: of layers unrolled or stacked, on one device or a mesh.
    """
    attention, evened = config.attention, dict(weights)
    if not attention.qkv_bias or attention.qk_norm:
        return evened
    pairs = len(frequencies(config.rope, attention.head_dim))
    for layer in [path.removesuffix(_WEIGHT) for path in weights if path.endswith(_WEIGHT)]:
        weight, bias, scale = (weights[layer + name] for name in (_WEIGHT, _BIAS, _SCALE))
        values = _even(weight, bias, scale, group=attention.group, pairs=pairs)
        for name, value in zip((_WEIGHT, _BIAS), values, strict=True):
            evened[layer + name] = jax.device_put(value, weights[layer + name].sharding)
    return evened


@functools.partial(jax.jit, static_argnames=("group", "pairs"))
def _even(
    weight: Float[Array, "*L K G+2 H D"],
    bias: Float[Array, "*L K G+2 H"],
    scale: Float32[Array, "*L D"],
    *,
    group: int,
    pairs: int,
) -> tuple[Float[Array, "*L K G+2 H D"], Float[Array, "*L K G+2 H"]]:
    """`Attention.qkv` with other channels. `scale` is that of the norm before it; `pairs` of channels are turned."""
    key_weight, key_bias = weight[..., group, :, :].astype(jnp.float32), bias[..., group, :].astype(jnp.float32)
    spread = jnp.sqrt(jnp.sum(jnp.square(key_weight * scale[..., None, None, :]), axis=-1))
    size = jnp.abs(key_bias) + _SPREAD * spread
    # A rotation turns what is in one channel of a pair into the other one, so both get one factor.
    first, second, passed = jnp.split(size, [pairs, 2 * pairs], axis=-1)
    turned = jnp.hypot(first, second)
    size = jnp.concatenate([turned, turned, passed], axis=-1)
    usual = jnp.sqrt(jnp.mean(jnp.square(size), axis=-1, keepdims=True))
    exponent = jnp.round(jnp.log2(jnp.maximum(size / jnp.maximum(usual, jnp.finfo(jnp.float32).tiny), _LEAST)))
    factor = jnp.ldexp(jnp.ones_like(size), exponent.astype(jnp.int32))
    factors = jnp.stack([*[factor] * group, 1 / factor, jnp.ones_like(factor)], axis=-2).astype(weight.dtype)
    return weight * factors[..., None], bias * factors
