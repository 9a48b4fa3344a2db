"""How (page, cell, kv head, dim) is indexed: tokens and pages go in and out alike, whatever the order in memory.

The axes are strings in `pallas_kernels.layouts`, and everything follows from them: no code asks for a layout by name.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from paged_jax.cache_check import validate_pools
from pallas_kernels.layouts import SCALE_AXES, Sizes, pool_axes, pool_index, pool_shape, pool_sizes

if TYPE_CHECKING:
    import numpy as np

    from paged_jax.cache import PagedCache

__all__ = [
    "SCALE_AXES",
    "Sizes",
    "convert",
    "pool_axes",
    "pool_shapes",
    "pool_sizes",
    "put_tokens",
    "take_cells",
    "take_pages",
]

_ALL = slice(None)


def pool_shapes(
    layout: str, dtype: np.dtype, *, v_head_dim: int, **sizes: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K pool and of the V pool; `sizes` are L, P, C, K and H, K's head_dim.

    Raises:
        ValueError: the layout is unknown, or packs more bytes together than a vector divides into.
    """
    shapes = []
    for axes, dim in zip(pool_axes(layout), (sizes["H"], v_head_dim), strict=True):
        shape = pool_shape(axes, sizes | {"H": dim}, dtype.itemsize)
        if pool_sizes(axes, shape)["H"] != dim:
            raise ValueError(
                f"head_dim: layout {layout!r} packs 16 bytes together, expected a multiple of {shape[-1]} "
                f"for {dtype.name}, got {dim}"
            )
        shapes.append(shape)
    return shapes[0], shapes[1]


def put_tokens(
    pool: Shaped[Array, "..."],
    axes: str,
    values: Shaped[Array, "T K *H"],
    *,
    layer: Int32[Array, ""],
    page: Int32[Array, " T"],
    cell: Int32[Array, " T"],
) -> Shaped[Array, "..."]:
    """Stores one vector, or in a pool without H one number, per token and kv head; in place where the pool is donated.

    The cells must differ from each other. A page past the end stores nothing.
    """
    index = pool_index(axes, pool.shape, L=layer, P=page, C=cell, K=_ALL, H=_ALL)
    values = _rearrange(
        values.astype(pool.dtype), _present("KH", axes), _remaining(axes, "LPC"), _piece(axes, pool.shape)
    )
    # The indexed axes are apart from each other or in front, so that the tokens are the first axis of what is stored.
    return pool.at[index].set(values, mode="drop", unique_indices=True, wrap_negative_indices=False)


def take_pages(
    pool: Shaped[Array, "..."], axes: str, *, layer: Int32[Array, ""], page: Int32[Array, "..."]
) -> Shaped[Array, "... C K *H"]:
    """Copies whole pages out of one layer; an id outside the pool gives some page that is inside."""
    index = pool_index(axes, pool.shape, L=layer, P=page, C=_ALL, K=_ALL, H=_ALL)
    pages = pool.at[index].get(mode="clip", wrap_negative_indices=False)
    return _rearrange(pages, _remaining(axes, "LP"), _present("CKH", axes))


def take_cells(
    pool: Shaped[Array, "..."],
    axes: str,
    scales: Float32[Array, "L P C K"] | None,
    *,
    layer: Int32[Array, ""],
    page: Int32[Array, "..."],
) -> Float[Array, "... C K H"]:
    """Whole pages as attention means them: as they are, or with scales as float32 values times scales."""
    pages = take_pages(pool, axes, layer=layer, page=page)
    if scales is None:
        return pages
    return pages.astype(jnp.float32) * take_pages(scales, SCALE_AXES, layer=layer, page=page)[..., None]


def convert(cache: PagedCache, layout: str) -> PagedCache:
    """The same cache in another layout; it copies both pools, unless they have that layout already.

    Raises:
        ValueError: the layout is unknown, or packs more bytes together than a head_dim divides into; or the pools are
            not as their own layout says.
    """
    validate_pools(cache)
    sizes = pool_sizes(pool_axes(cache.layout)[0], cache.k.shape)
    shapes = pool_shapes(layout, cache.k.dtype, v_head_dim=cache.v_head_dim, **sizes)
    k, v = (
        _rearrange(pool, axes, to, _piece(to, shape))
        for pool, axes, to, shape in zip(
            (cache.k, cache.v), pool_axes(cache.layout), pool_axes(layout), shapes, strict=True
        )
    )
    return dataclasses.replace(cache, k=k, v=v, layout=layout)


def _remaining(axes: str, indexed: str) -> str:
    return "".join(axis for axis in axes if axis not in indexed)


def _present(wanted: str, axes: str) -> str:
    return "".join(axis for axis in wanted if axis in axes)


def _piece(axes: str, shape: tuple[int, ...]) -> int:
    """The size of the `x` axis, 1 where there is none."""
    return shape[axes.index("x")] if "x" in axes else 1


def _rearrange(array: Shaped[Array, "..."], axes: str, to: str, piece: int = 1) -> Shaped[Array, "..."]:
    """Brings the last axes of an array, named by `axes`, in the order `to`.

    Where only `to` has an `x`, H is split into pieces of `piece`; where only `axes` has one, the pieces are joined.
    """
    first = array.ndim - len(axes)
    if "x" in to and "x" not in axes:
        at = first + axes.index("H")
        array = array.reshape(*array.shape[:at], array.shape[at] // piece, piece, *array.shape[at + 1 :])
        axes = axes.replace("H", "Hx")
    order = to.replace("H", "Hx") if "x" in axes and "x" not in to else to
    array = lax.transpose(array, (*range(first), *(first + axes.index(axis) for axis in order)))
    if order != to:
        at = first + order.index("H")
        array = array.reshape(*array.shape[:at], array.shape[at] * array.shape[at + 1], *array.shape[at + 2 :])
    return array
