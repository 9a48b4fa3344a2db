"""Slots → scatter → pages in plain JAX: the meaning of a write, on every device."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from paged_jax import layouts
from pallas_kernels import quantisation

Pools = tuple[
    Shaped[Array, "..."], Shaped[Array, "..."], Float32[Array, "L P C K"] | None, Float32[Array, "L P C K"] | None
]


def write(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K Hv"],
    slots: Int32[Array, " T"],
    k_pages: Shaped[Array, "..."],
    v_pages: Shaped[Array, "..."],
    k_scales: Float32[Array, "L P C K"] | None,
    v_scales: Float32[Array, "L P C K"] | None,
    *,
    layer: Int32[Array, ""],
    layout: str,
) -> Pools:
    """The pools and scales after the write; the arguments are `PagedCache.write`'s, validated there. O(T) work."""
    k_axes, v_axes = layouts.pool_axes(layout)
    sizes = layouts.pool_sizes(k_axes, k_pages.shape)
    num_pages, page_size = sizes["P"], jnp.int32(sizes["C"])
    # Slots that write nowhere become distinct pages past the end, so that all indices are unique: XLA then scatters
    # without atomics.
    token = jnp.arange(slots.size, dtype=jnp.int32)
    is_live = (slots >= 0) & (slots < num_pages * sizes["C"])
    page = jnp.where(is_live, lax.div(slots, page_size), num_pages + token)
    cell = jnp.where(is_live, lax.rem(slots, page_size), 0)
    put = functools.partial(layouts.put_tokens, layer=layer, page=page, cell=cell)

    def write_one(pool, axes, scales, vectors):
        if scales is None:
            return put(pool, axes, vectors), None
        values, token_scales = quantisation.quantise(vectors, pool.dtype)
        return put(pool, axes, values), put(scales, layouts.SCALE_AXES, token_scales)

    k_pages, k_scales = write_one(k_pages, k_axes, k_scales, k)
    v_pages, v_scales = write_one(v_pages, v_axes, v_scales, v)
    return k_pages, v_pages, k_scales, v_scales
