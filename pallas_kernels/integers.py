"""Integer arrays from users, brought to int32 without wrapping around."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Int32

_INT32_MAX = 2**31 - 1


def as_int32(name: str, array: ArrayLike) -> Int32[Array, "..."]:
    """The integers as int32; those that do not fit become the nearest that does, and so stay out of range.

    Raises:
        ValueError: `array` is not of an integer dtype.
    """
    if not isinstance(array, jax.Array):  # to numpy first: JAX would let a large integer wrap around
        array = np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name}: expected an integer dtype, got {array.dtype}{list(array.shape)}")
    if jnp.iinfo(array.dtype).max > _INT32_MAX:
        array = array.clip(max(jnp.iinfo(array.dtype).min, -_INT32_MAX - 1), _INT32_MAX)
    return jnp.asarray(array).astype(jnp.int32)
