"""Cache write in Pallas's Triton lowering: one launch stores K and V of all new tokens in their slots, in place.

One program takes some tokens of one kv head. A quantised pool's values and scales are made on the way.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

from pallas_kernels import arguments
from pallas_kernels.layouts import pool_index, pool_sizes, require_addressable
from pallas_kernels.quantisation import quantise
from pallas_kernels.walk import iota, load

_NUM_WARPS = 4
_ELEMENTS = 32 * _NUM_WARPS * 8  # of a program's vectors: 16 bytes of two-byte values for each thread


def _kernel(
    # Input
    layer_ref,  # [1]
    slots_ref,  # [T]
    k_ref,  # [T, K, H]
    v_ref,  # [T, K, Hv]
    before_refs,  # the four below, aliased to them
    # Output
    pool_refs,  # of K and of V
    scales_refs,  # [L, P, C, K] or None, of K and of V
    *,
    axes: tuple[str, str],
    tokens: int,
):
    del before_refs
    kv_head, tile = (pl.program_id(axis).astype(jnp.int32) for axis in range(2))
    sizes, layer = pool_sizes(axes[0], pool_refs[0].shape), layer_ref[0]
    token = tile * tokens + iota(tokens)
    is_token = token < slots_ref.shape[0]
    slot = load(slots_ref.at[token], is_token)
    is_live = is_token & (slot >= 0) & (slot < sizes["P"] * sizes["C"]) & (layer >= 0) & (layer < sizes["L"])
    page, cell = (op(slot, np.int32(sizes["C"])) for op in (lax.div, lax.rem))
    page = jnp.where(
        is_live, page, np.int32(sizes["P"])
    )  # interpret mode knows no masks, but drops what is past the end

    for vectors_ref, pool_ref, scales_ref, pool_axes in zip((k_ref, v_ref), pool_refs, scales_refs, axes, strict=True):
        head_dim = vectors_ref.shape[2]
        dim = iota(pl.next_power_of_2(head_dim))
        mask = is_live[:, None] & (dim < head_dim)[None, :]
        vectors = load(vectors_ref.at[token[:, None], kv_head, dim[None, :]], mask)
        if scales_ref is None:
            values = vectors.astype(pool_ref.dtype)
        else:
            values, scales = quantise(vectors, pool_ref.dtype)
            plgpu.store(scales_ref.at[layer, page, cell, kv_head], scales, mask=is_live)
        at = pool_index(pool_axes, pool_ref.shape, L=layer, P=page[:, None], C=cell[:, None], K=kv_head, H=dim[None, :])
        plgpu.store(pool_ref.at[at], values, mask=mask)


def cache_write(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K Hv"],
    slots: Int32[Array, " T"],
    k_pages: Shaped[Array, "*L P C K H"],
    v_pages: Shaped[Array, "*L P C K Hv"],
    k_scales: Float32[Array, "*L P C K"] | None = None,
    v_scales: Float32[Array, "*L P C K"] | None = None,
    *,
    layer: int | Int[Array, ""] | None = None,
    layout: str = "NHD",
    interpret: bool = False,
) -> tuple[
    Shaped[Array, "*L P C K H"],
    Shaped[Array, "*L P C K Hv"],
    Float32[Array, "*L P C K"] | None,
    Float32[Array, "*L P C K"] | None,
]:
    """The pools and scales with the tokens' K and V in their slots; in place where they are donated.

    The arguments are those of `paged_jax.PagedCache.write` on raw arrays: slots outside [0, P·C) and layers outside
    [0, L) write nowhere.

    Args:
        k_pages, v_pages: pools stacked over layers, or without `layer` the pools of one, in NHD [P, C, K, H].
        k_scales, v_scales: scales of pools of one byte per element, in NHD's order in every layout.
        layer: which layer of stacked pools, traced or not.
        layout: order of the pools' axes, one of `layouts.LAYOUTS`.
        interpret: run on any host, for tests.

    Raises:
        ValueError: an argument does not fit; says what was expected and what was given.
        NotImplementedError: a pool of a size that the kernel cannot address.
    """
    before = (k_pages, v_pages, k_scales, v_scales)
    axes, pools, scales, layer = arguments.stack_pools(*before, layer=layer, layout=layout)
    slots = arguments.validate_integers("slots", slots, (None,))
    for name, vectors, pool_axes, pool in zip("kv", (k, v), axes, pools, strict=True):
        sizes = pool_sizes(pool_axes, pool.shape)
        if vectors.shape != (expected := (slots.size, sizes["K"], sizes["H"])):
            raise ValueError(f"{name}: expected shape {expected}, got {vectors.shape}")
    require_addressable(*pools)
    if not slots.size:
        return before
    tokens = max(1, _ELEMENTS // pl.next_power_of_2(max(k.shape[2], v.shape[2])))
    tokens = min(tokens, pl.next_power_of_2(slots.size))
    operands = (layer, slots, k, v)
    stacked = (pools, scales)
    after = pl.pallas_call(
        functools.partial(_kernel, axes=axes, tokens=tokens),
        grid=(k.shape[1], pl.cdiv(slots.size, tokens)),
        out_shape=jax.tree.map(lambda pool: jax.ShapeDtypeStruct(pool.shape, pool.dtype), stacked),
        input_output_aliases={len(operands) + i: i for i in range(len(jax.tree.leaves(stacked)))},
        compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="cache_write",
    )(*operands, stacked)
    return jax.tree.map(lambda pool, like: pool.reshape(like.shape), (*after[0], *after[1]), before)
