"""Vectors as values of one byte with one scale for each: how the writes quantise, and what the walks undo.

Shared by the kernels and by plain JAX, so it uses only what all can lower: element-wise operations and a reduction over
the last axis. All of it is float32.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Shaped

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}  # dtype → its largest magnitude in use

_SMALLEST_PEAK = 1e-30  # of a vector that is not taken for zero: its scale is still a normal float32


def is_quantised(dtype: np.dtype | str) -> bool:
    """Whether vectors of this dtype come with scales."""
    return jnp.dtype(dtype).name in LARGEST


def product_dtype(q_dtype: np.dtype | str, pool_dtype: np.dtype | str) -> np.dtype:
    """Products are of one dtype. Quantised values are exact in any other; what differs else meets in float32."""
    return jnp.dtype(q_dtype if pool_dtype == q_dtype or is_quantised(pool_dtype) else "float32")


def power_of_two(dtype: np.dtype) -> float:
    """The largest power of two of a dtype: times this, scales are about as large as their vectors."""
    return 2.0 ** math.floor(math.log2(LARGEST.get(jnp.dtype(dtype).name, 1.0)))


def quantise(vectors: Float[Array, "... H"], dtype: np.dtype) -> tuple[Shaped[Array, "... H"], Float32[Array, "..."]]:
    """Values of `dtype` and a scale for each vector, so that `values * scale` is nearest to the vector.

    The scale brings the vector's largest magnitude to the dtype's. Vectors of zeros, or with nothing above 1e-30, get
    zeros and scale 0. A vector that holds NaN or an infinity gets zeros and scale NaN: it reads as NaN throughout,
    which shows, and touches no other vector.
    """
    vectors, largest = vectors.astype(jnp.float32), LARGEST[jnp.dtype(dtype).name]
    magnitude = jnp.abs(vectors)
    # A maximum passes over NaN on GPUs: what is not finite is made infinite first.
    is_finite = magnitude <= float(np.finfo(np.float32).max)
    peak = jnp.where(is_finite, magnitude, jnp.inf).max(axis=-1)
    is_held = (peak >= _SMALLEST_PEAK) & (peak < jnp.inf)
    scaled = vectors * (largest / jnp.where(is_held, peak, 1.0))[..., None]
    values = saturating_cast(jnp.where(is_held[..., None], scaled, 0.0), dtype)
    # Multiplied by a constant, not divided: compilers differ in what they make of a division by one.
    scale = jnp.where(is_held, peak * (1 / largest), jnp.where(peak < jnp.inf, 0.0, jnp.nan))
    return values, scale


def saturating_cast(numbers: Float32[Array, "..."], dtype: np.dtype) -> Shaped[Array, "..."]:
    """The nearest values of `dtype`, its largest where numbers lie beyond: a plain cast makes NaN or infinity of them.

    Halves are rounded away from zero for int8, to even for the others.
    """
    largest = LARGEST[jnp.dtype(dtype).name]
    numbers = jnp.clip(numbers, -largest, largest)
    if jnp.issubdtype(dtype, jnp.integer):  # a cast drops the fraction
        numbers = numbers + jnp.where(numbers < 0, -0.5, 0.5)
    return numbers.astype(dtype)
