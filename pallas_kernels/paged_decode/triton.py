"""Paged decode attention in Pallas's Triton lowering: one query token per row walks the row's pages.

One program folds one partition of one (row, kv head). All query heads of the group share the K and V tiles it loads.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels import softmax
from pallas_kernels.paged_decode import config as configs


def _kernel(
    # Input
    layer_ref,  # [1]
    window_ref,  # [1] or None
    q_ref,  # [B, N, H]
    k_ref,  # [L, P, C, K, H]
    v_ref,  # [L, P, C, K, Hv]
    tables_ref,  # [B, M]
    lengths_ref,  # [B]
    sinks_ref,  # [N] or None
    slopes_ref,  # [N] or None
    # Output
    out_ref,  # [S, B, N, Hv]
    lse_ref,  # [S, B, N]
    *,
    scale: float,
    soft_cap: float | None,
    tile: int,
    num_partitions: int,
):
    partition, kv_head, row = (pl.program_id(axis).astype(jnp.int32) for axis in range(3))
    page_size, num_kv_heads, head_dim = k_ref.shape[2:]
    v_head_dim = v_ref.shape[4]
    group = q_ref.shape[1] // num_kv_heads

    # Every array inside has power-of-two sizes: heads and dims past the end are masked lanes.
    iota = functools.partial(jnp.arange, dtype=jnp.int32)
    lane = iota(max(16, pl.next_power_of_2(group)))  # matrix units take at least 16 rows
    head = kv_head * group + lane
    is_head = lane < group
    dim, v_dim = iota(pl.next_power_of_2(head_dim)), iota(pl.next_power_of_2(v_head_dim))
    q_dtype = jnp.promote_types(q_ref.dtype, k_ref.dtype)
    v_dtype = jnp.promote_types(q_ref.dtype, v_ref.dtype)
    dot = functools.partial(plgpu.dot, precision=lax.Precision.HIGHEST if q_dtype == jnp.float32 else None)

    q = _load(q_ref.at[row, head[:, None], dim[None, :]], is_head[:, None] & (dim < head_dim)[None, :]).astype(q_dtype)

    layer = layer_ref[0]
    length = lengths_ref[row]
    begin = 0 if window_ref is None else jnp.maximum(length - window_ref[0], 0)  # the first key the query sees

    # A positive scale that is all that happens to a score goes into the softmax's unit instead of every score.
    is_scale_all = soft_cap is None and slopes_ref is None and scale > 0
    unit = scale * softmax.LOG2_E if is_scale_all else softmax.LOG2_E
    slopes = None if slopes_ref is None else _load(slopes_ref.at[head], is_head).astype(jnp.float32)

    def fold_tile(i, state, *, masked: bool):
        position = begin + i * tile + iota(tile)
        is_live = position < length
        page = _load(tables_ref.at[row, position // page_size], is_live if masked else None)
        cell = position % page_size

        def load_tile(ref, dim, true_dim):  # dead cells and lanes past the true dim are zero: 0 · NaN is NaN
            masks = [is_live[:, None]] if masked else []
            masks += [(dim < true_dim)[None, :]] if dim.size != true_dim else []
            mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), (tile, dim.size)) if masks else None
            return _load(ref.at[layer, page[:, None], cell[:, None], kv_head, dim[None, :]], mask)

        k = load_tile(k_ref, dim, head_dim).astype(q_dtype)
        scores = dot(q, k, trans_b=True)
        if not is_scale_all:
            scores = scores * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if slopes is not None:
            scores += slopes[:, None] * (position - (length - 1)).astype(jnp.float32)[None, :]
        if masked:
            scores = jnp.where(is_live[None, :], scores, -jnp.inf)
        v = load_tile(v_ref, v_dim, v_head_dim).astype(v_dtype)
        return softmax.update(state, scores, lambda weights: dot(weights.astype(v_dtype), v), unit=unit, masked=masked)

    # Share the tiles of this row's real length out over the partitions; the one tile that may be partial comes last.
    num_keys = length - begin
    num_tiles = lax.div(num_keys + (tile - 1), np.int32(tile))
    per_partition = lax.div(num_tiles + (num_partitions - 1), np.int32(num_partitions))
    first = partition * per_partition
    end = jnp.minimum(first + per_partition, num_tiles)
    full_end = jnp.maximum(first, jnp.minimum(end, num_keys // tile))
    state = softmax.init(lane.shape, v_dim.size)
    state = lax.fori_loop(first, full_end, functools.partial(fold_tile, masked=False), state)
    state = lax.fori_loop(full_end, end, functools.partial(fold_tile, masked=True), state)
    out, lse = softmax.finish(state, unit=unit)

    if sinks_ref is not None:  # a sink is counted once: by the first partition
        sink = plgpu.load(sinks_ref.at[head], mask=is_head, other=-jnp.inf).astype(jnp.float32)
        out, lse = softmax.with_sink(out, lse, jnp.where(partition == 0, sink, -jnp.inf))

    out_mask = is_head[:, None] & (v_dim < v_head_dim)[None, :]
    out_at = out_ref.at[partition, row, head[:, None], v_dim[None, :]]
    plgpu.store(out_at, out.astype(out_ref.dtype), mask=out_mask)
    plgpu.store(lse_ref.at[partition, row, head], lse, mask=is_head)


def _load(at, mask):
    """What lies there, zero where masked; None loads everything without a mask."""
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0)


def paged_decode(
    q: Float[Array, "B N H"],
    k_pages: Float[Array, "*L P C K H"],
    v_pages: Float[Array, "*L P C K Hv"],
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    *,
    layer: int | Int[Array, ""] | None = None,
    layout: str = "NHD",
    scale: float | None = None,
    window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    num_partitions: int | None = None,
    return_lse: bool = False,
    config: configs.Config | None = None,
    interpret: bool = False,
) -> Any:  # out [B, N, Hv], or (out, lse float32[B, N]); a union would trouble every caller's type checker
    """Attention of each row's last token over the row's pages; with `return_lse` also its natural-log log-sum-exp.

    The arguments are those of `paged_jax.paged_attention`, which validates them, on raw arrays.

    Args:
        k_pages, v_pages: pools stacked over layers, or without `layer` the pools of one, [P, C, K, H].
        layer: which layer of stacked pools, traced or not.
        layout: order of the pools' axes; "NHD".
        scale: `H ** -0.5` if None.
        num_partitions: partitions of each row; None takes `config.num_partitions`.
        config: how to cut the work; None takes `config.heuristic`.
        interpret: run on any host, for tests.
    """
    if layout != "NHD":
        raise NotImplementedError(f"layout: only 'NHD' is implemented, got {layout!r}")
    if k_pages.ndim != (4 if layer is None else 5):
        raise ValueError(f"k_pages: expected 4 axes without a layer and 5 with one, got shape {k_pages.shape}")
    if layer is None:
        k_pages, v_pages, layer = k_pages[None], v_pages[None], 0
    rows, num_heads, head_dim = q.shape
    scale = float(head_dim**-0.5 if scale is None else scale)
    num_kv_heads, v_head_dim = v_pages.shape[3:]
    if config is None:
        config = configs.heuristic(num_heads // num_kv_heads, head_dim, v_head_dim, q.dtype, k_pages.dtype)
    if num_partitions is None:
        num_partitions = configs.num_partitions(rows * num_kv_heads)

    inputs = (
        jnp.asarray(layer, jnp.int32).reshape(1),
        None if window is None else jnp.asarray(window, jnp.int32).reshape(1),
        q,
        k_pages,
        v_pages,
        block_tables,
        lengths,
        sinks,
        alibi_slopes,
    )
    out_dtype = q.dtype if num_partitions == 1 else jnp.float32
    out, lse = pl.pallas_call(
        functools.partial(_kernel, scale=scale, soft_cap=soft_cap, tile=config.tile, num_partitions=num_partitions),
        grid=(num_partitions, num_kv_heads, rows),
        out_shape=(
            jax.ShapeDtypeStruct((num_partitions, rows, num_heads, v_head_dim), out_dtype),
            jax.ShapeDtypeStruct((num_partitions, rows, num_heads), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_decode",
    )(*inputs)
    out, lse = softmax.merge(out, lse) if num_partitions > 1 else (out[0], lse[0])
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out
