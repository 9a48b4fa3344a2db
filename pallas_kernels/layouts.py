"""Where (layer, page, cell, kv head, dim) lies in a pool: one string of axes for K and one for V per layout.

Axes: L layers, P pages, C cells per page, K kv heads, H head_dim. Where an `x` follows, the H axis is split in two: the
`x` axis at the very end holds 16 bytes' worth of neighbouring dims, and H counts the pieces.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

LAYOUTS = {
    "NHD": ("LPCKH", "LPCKH"),
    "HND": ("LPKCH", "LPKCH"),
    "head_major": ("LKPCH", "LKPCH"),  # that of JAX's own deprecated op
    "vllm": ("LPKHCx", "LPKHC"),  # that of vLLM's paged attention kernels
}

SCALE_AXES = "LPCK"  # of the scales of quantised pools, in every layout

Sizes = dict[str, int]  # axis → size, H whole


def pool_axes(layout: str) -> tuple[str, str]:
    """The axes of the K pool and of the V pool.

    Raises:
        ValueError: the layout is unknown.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")
    return LAYOUTS[layout]


def pool_shape(axes: str, sizes: Sizes, itemsize: int) -> tuple[int, ...]:
    """The shape of a pool whose elements have `itemsize` bytes; H must divide by the size of an `x` axis."""
    if "x" in axes:
        x = 16 // itemsize
        sizes = sizes | {"H": sizes["H"] // x, "x": x}
    return tuple(sizes[axis] for axis in axes)


def pool_sizes(axes: str, shape: tuple[int, ...]) -> Sizes:
    """The sizes of a pool of this shape, by axis."""
    sizes = dict(zip(axes, shape, strict=True))
    return sizes | {"H": sizes["H"] * sizes.pop("x", 1)}


def pool_index(axes: str, shape: tuple[int, ...], *, L: Any, P: Any, C: Any, K: Any, H: Any) -> tuple[Any, ...]:
    """The index of elements in a pool of this shape, from their index along each axis; they may be arrays.

    An axis may also be `slice(None)`, all of it; an `x` axis then stays apart from its H.
    """
    index = {"L": L, "P": P, "C": C, "K": K, "H": H}
    if "x" in axes:
        x = shape[-1]
        if isinstance(H, slice):
            index |= {"x": H}
        else:  # not `//` and `%`, whose care for negative numbers would hide from compilers which dims are neighbours
            index |= {"H": lax.div(H, jnp.int32(x)), "x": lax.rem(H, jnp.int32(x))}
    return tuple(index[axis] for axis in axes)


def offset_obstacle(pool: Shaped[Array, "..."]) -> str | None:
    """Why Pallas's Triton lowering would read elsewhere in a pool of this size; None if it would not.

    It counts elements in 32 signed bits unless the array is larger than 2^32 bytes.
    """
    if pool.size > 2**31 and pool.size * pool.dtype.itemsize <= 2**32:
        return f"cannot address a pool of {pool.size} elements of one byte (up to 2^31 or beyond 2^32 it can)"
    return None


def require_addressable(k_pages: Shaped[Array, "..."], v_pages: Shaped[Array, "..."]) -> None:
    """NotImplementedError if a pool has a size at which the lowering would read elsewhere."""
    for name, pool in (("k_pages", k_pages), ("v_pages", v_pages)):
        if obstacle := offset_obstacle(pool):
            raise NotImplementedError(f"{name}: the kernel {obstacle}")
