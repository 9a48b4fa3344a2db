"""What the public functions demand of their arguments: a ValueError says what was expected and what was given."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float32, Int32, Shaped

from pallas_kernels.integers import as_int32
from pallas_kernels.layouts import SCALE_AXES, pool_axes, pool_sizes
from pallas_kernels.quantisation import LARGEST, is_quantised

FLOATS = ("float32", "bfloat16", "float16")  # of queries, keys and values
DTYPES = (*FLOATS, *LARGEST)  # of pools

Pair = tuple[Any, Any]  # of K and of V


def validate_queries(q: Shaped[Array, "..."], num_kv_heads: int, head_dim: int) -> None:
    """Raises unless q is [T, N, H] of a floating dtype, for pools of so many kv heads of that head_dim."""
    if q.ndim != 3 or q.shape[2] != head_dim or q.shape[1] < 1 or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q: expected shape [tokens, heads, head_dim] with head_dim {head_dim} and heads a multiple of the cache's "
            f"{num_kv_heads} kv heads, got {q.shape}"
        )
    if q.dtype.name not in FLOATS:
        raise ValueError(f"q: expected dtype {', '.join(FLOATS)}, got {q.dtype}")


class Options(NamedTuple):
    """What attention may be asked for, as the kernels take it."""

    scale: float
    soft_cap: float | None
    window: Int32[Array, ""] | None
    sinks: Float[Array, " N"] | None
    alibi_slopes: Float[Array, " N"] | None


def validate_options(
    q: Float[Array, "T N H"],
    *,
    scale: Any,
    soft_cap: Any,
    window: ArrayLike | None,
    sinks: ArrayLike | None,
    alibi_slopes: ArrayLike | None,
    num_partitions: Any,
) -> Options:
    """The options of attention for such queries; the scale is `H ** -0.5` if None."""
    num_heads, head_dim = q.shape[1:]
    is_int = isinstance(num_partitions, (int, np.integer)) and not isinstance(num_partitions, bool)
    if num_partitions is not None and not (is_int and num_partitions >= 1):
        raise ValueError(f"num_partitions: expected None or a positive int, got {num_partitions!r}")
    scale = head_dim**-0.5 if scale is None else _number("scale", scale)
    if soft_cap is not None and (soft_cap := _number("soft_cap", soft_cap)) <= 0:
        raise ValueError(f"soft_cap: expected a positive number, got {soft_cap}")
    per_head = (_per_head(name, of, num_heads) for name, of in (("sinks", sinks), ("alibi_slopes", alibi_slopes)))
    return Options(scale, soft_cap, _window(window), *per_head)


def validate_layer(layer: ArrayLike, num_layers: int) -> Int32[Array, ""]:
    """The layer as an int32 scalar; an int outside [0, num_layers) raises (a traced one cannot be seen)."""
    if isinstance(layer, (int, np.integer)) and not 0 <= layer < num_layers:
        raise ValueError(f"layer: expected an int in [0, {num_layers}), got {layer}")
    layer = jnp.asarray(layer)
    if layer.shape != () or not jnp.issubdtype(layer.dtype, jnp.integer):
        raise ValueError(f"layer: expected an int or an integer scalar, got {layer.dtype}{list(layer.shape)}")
    return layer.astype(jnp.int32)


def validate_pools(
    k: Shaped[Array, "..."],
    v: Shaped[Array, "..."],
    k_scales: Shaped[Array, "..."] | None,
    v_scales: Shaped[Array, "..."] | None,
    *,
    layout: str,
    has_layers: bool = True,
    owner: str = "pools",
    names: tuple[str, str, str, str] = ("k_pages", "v_pages", "k_scales", "v_scales"),
) -> None:
    """Raises unless pools, stacked or of one layer, are alike, as their layout says, and have the scales they need.

    Args:
        owner, names: what messages call them.
    """
    sizes: dict[str, int] = {}
    for name, pool, axes in zip(names[:2], (k, v), pool_axes(layout), strict=True):
        axes = axes if has_layers else axes.replace("L", "")
        got = f"{pool.dtype}{list(pool.shape)}"
        if pool.ndim != len(axes):
            raise ValueError(f"{owner}: expected {name} with axes [{', '.join(axes)}] in layout {layout!r}, got {got}")
        if pool.dtype.name not in DTYPES:
            raise ValueError(f"{owner}: expected {name} of dtype {', '.join(DTYPES)}, got {pool.dtype}")
        if "x" in axes and pool.shape[-1] * pool.dtype.itemsize != 16:
            raise ValueError(f"{owner}: expected {name} with pieces of 16 bytes on its last axis, got {got}")
        of_pool = pool_sizes(axes, pool.shape)
        sizes = sizes or of_pool
        if any(of_pool[axis] != sizes[axis] for axis in SCALE_AXES if axis in axes):
            raise ValueError(
                f"{owner}: expected {name} with as many layers, pages, cells and kv heads as {names[0]} has, "
                f"{list(k.shape)}, got {got}"
            )
    shape = [sizes[axis] for axis in SCALE_AXES if axis in sizes]
    for name, pool, scales_name, scales in zip(names[:2], (k, v), names[2:], (k_scales, v_scales), strict=True):
        expected = f"float32{shape}" if is_quantised(pool.dtype) else None
        got = None if scales is None else f"{scales.dtype}{list(scales.shape)}"
        if got != expected:
            raise ValueError(f"{owner}: expected {scales_name} {expected} beside {name} of {pool.dtype}, got {got}")


def stack_pools(
    k_pages: Shaped[Array, "..."],
    v_pages: Shaped[Array, "..."],
    k_scales: Float32[Array, "*L P C K"] | None,
    v_scales: Float32[Array, "*L P C K"] | None,
    *,
    layer: ArrayLike | None,
    layout: str,
) -> tuple[tuple[str, str], Pair, Pair, Int32[Array, " 1"]]:
    """Axes of K and V, their pools and scales with an L axis, and the layer as kernels take it; without one L is 1.

    Raises:
        ValueError: as `validate_pools` and `validate_layer`.
    """
    validate_pools(k_pages, v_pages, k_scales, v_scales, layout=layout, has_layers=layer is not None)
    axes, pools, scales = pool_axes(layout), (k_pages, v_pages), (k_scales, v_scales)
    if layer is None:  # L is the first axis of all
        layer = 0
        pools, scales = jax.tree.map(lambda array: jnp.expand_dims(array, 0), (pools, scales))
    return axes, pools, scales, validate_layer(layer, pools[0].shape[0]).reshape(1)


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


def _window(window: ArrayLike | None) -> Int32[Array, ""] | None:
    if window is None:
        return None
    if isinstance(window, (int, np.integer)) and not isinstance(window, bool) and window < 1:
        raise ValueError(f"window: expected an int of at least 1, got {window}")
    array = as_int32("window", window)
    if array.shape != ():
        raise ValueError(f"window: expected an int or an integer scalar, got shape {array.shape}")
    return array


def _per_head(name: str, array: ArrayLike | None, num_heads: int) -> Float[Array, " N"] | None:
    if array is None:
        return None
    array = jnp.asarray(array)
    if array.shape != (num_heads,) or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"{name}: expected a floating array with one entry for each of {num_heads} query heads, "
            f"got {array.dtype}{list(array.shape)}"
        )
    return array


def _number(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite Python number (it is static), got {value!r}")
    return float(value)
