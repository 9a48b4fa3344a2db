"""What the public functions demand of their arguments: a ValueError says what was expected and what was given."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int32, Shaped

from pallas_kernels.integers import as_int32
from pallas_kernels.layouts import SCALE_AXES, pool_axes, pool_sizes
from pallas_kernels.quantisation import LARGEST, is_quantised

FLOATS = ("float32", "bfloat16", "float16")  # of queries, keys and values
DTYPES = (*FLOATS, *LARGEST)  # of pools


def validate_queries(q: Shaped[Array, "..."], num_kv_heads: int, head_dim: int) -> None:
    """Raises unless q is [T, N, H] of a floating dtype, for pools of so many kv heads of that head_dim."""
    if q.ndim != 3 or q.shape[2] != head_dim or q.shape[1] < 1 or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q: expected shape [tokens, heads, head_dim] with head_dim {head_dim} and heads a multiple of the cache's "
            f"{num_kv_heads} kv heads, got {q.shape}"
        )
    if q.dtype.name not in FLOATS:
        raise ValueError(f"q: expected dtype {', '.join(FLOATS)}, got {q.dtype}")


def validate_options(scale: Any, soft_cap: Any, num_partitions: Any, head_dim: int) -> tuple[float, float | None]:
    """The static options as floats; the scale is `head_dim ** -0.5` if None."""
    is_int = isinstance(num_partitions, (int, np.integer)) and not isinstance(num_partitions, bool)
    if num_partitions is not None and not (is_int and num_partitions >= 1):
        raise ValueError(f"num_partitions: expected None or a positive int, got {num_partitions!r}")
    scale = head_dim**-0.5 if scale is None else _number("scale", scale)
    if soft_cap is not None and (soft_cap := _number("soft_cap", soft_cap)) <= 0:
        raise ValueError(f"soft_cap: expected a positive number, got {soft_cap}")
    return scale, soft_cap


def validate_layer(layer: ArrayLike, num_layers: int) -> Int32[Array, ""]:
    """The layer as an int32 scalar; an int outside [0, num_layers) raises (a traced one cannot be seen)."""
    if isinstance(layer, (int, np.integer)) and not 0 <= layer < num_layers:
        raise ValueError(f"layer: expected an int in [0, {num_layers}), got {layer}")
    layer = jnp.asarray(layer)
    if layer.shape != () or not jnp.issubdtype(layer.dtype, jnp.integer):
        raise ValueError(f"layer: expected an int or an integer scalar, got {layer.dtype}{list(layer.shape)}")
    return layer.astype(jnp.int32)


def validate_window(window: ArrayLike | None) -> Int32[Array, ""] | None:
    """The window as an int32 scalar; None if there is none."""
    if window is None:
        return None
    if isinstance(window, (int, np.integer)) and not isinstance(window, bool) and window < 1:
        raise ValueError(f"window: expected an int of at least 1, got {window}")
    array = as_int32("window", window)
    if array.shape != ():
        raise ValueError(f"window: expected an int or an integer scalar, got shape {array.shape}")
    return array


def validate_per_head(name: str, array: ArrayLike | None, num_heads: int) -> Float[Array, " N"] | None:
    """Sinks or slopes as an array; None if there are none."""
    if array is None:
        return None
    array = jnp.asarray(array)
    if array.shape != (num_heads,) or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"{name}: expected a floating array with one entry for each of {num_heads} query heads, "
            f"got {array.dtype}{list(array.shape)}"
        )
    return array


def validate_pools(
    k_pages: Shaped[Array, "..."],
    v_pages: Shaped[Array, "..."],
    k_scales: Shaped[Array, "..."] | None,
    v_scales: Shaped[Array, "..."] | None,
    *,
    has_layers: bool,
    layout: str,
) -> None:
    """Raises unless raw pools, stacked or of one layer, are alike, as their layout says, with the scales they need."""
    sizes: dict[str, int] = {}
    pools = {"k": (k_pages, k_scales), "v": (v_pages, v_scales)}
    for (name, (pool, scales)), axes in zip(pools.items(), pool_axes(layout), strict=True):
        if pool.ndim != len(axes) - (not has_layers):
            raise ValueError(
                f"{name}_pages: expected {len(axes) - 1} axes without a layer and {len(axes)} with one, "
                f"got shape {pool.shape}"
            )
        if pool.dtype.name not in DTYPES:
            raise ValueError(f"{name}_pages: expected dtype {', '.join(DTYPES)}, got {pool.dtype}")
        if "x" in axes and pool.shape[-1] * pool.dtype.itemsize != 16:
            raise ValueError(
                f"{name}_pages: expected pieces of 16 bytes on the last axis, got {pool.dtype}{list(pool.shape)}"
            )
        of_pool = pool_sizes(axes, pool.shape if has_layers else (1, *pool.shape))
        sizes = sizes or of_pool
        if any(of_pool[axis] != sizes[axis] for axis in SCALE_AXES):
            raise ValueError(
                f"v_pages: expected as many layers, pages, cells and kv heads as k_pages {k_pages.shape} has, "
                f"got {v_pages.shape}"
            )
        shape = tuple(sizes[axis] for axis in SCALE_AXES[not has_layers :])
        expected = f"float32{list(shape)}" if is_quantised(pool.dtype) else None
        got = None if scales is None else f"{scales.dtype}{list(scales.shape)}"
        if got != expected:
            raise ValueError(f"{name}_scales: expected {expected} beside {name}_pages of {pool.dtype}, got {got}")


def validate_integers(name: str, array: ArrayLike, shape: tuple[int | None, ...]) -> Int32[Array, "..."]:
    """The integers as int32, of that shape; None stands for any size."""
    array = as_int32(name, array)
    if array.ndim != len(shape) or any(size not in (None, got) for size, got in zip(shape, array.shape, strict=True)):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{expected}], got {array.shape}")
    return array


def head_dim_obstacle(head_dim: int, v_head_dim: int) -> str | None:
    """Why the attention kernels cannot do these head_dims; None if they can."""
    for name, dim in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        if not (16 <= dim <= 256 and dim % 8 == 0):
            return f"takes a {name} that is a multiple of 8 from 16 to 256, not {dim}"
    return None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward_only(attend, arrays):
    """`attend(arrays)`, which says so when it is differentiated."""
    return attend(arrays)


@forward_only.defjvp
def _refuse_to_differentiate(attend, primals, tangents):
    raise NotImplementedError(
        "paged attention is forward only: it cannot be differentiated. Train with dense attention, or stop the "
        "gradient (jax.lax.stop_gradient) before q, the cache, sinks and slopes."
    )


def _number(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite Python number (it is static), got {value!r}")
    return float(value)
