"""Paged attention of several query tokens per row in Pallas's Triton lowering.

One program folds all keys that one query tile sees, for one kv head: the tile's tokens and all query heads of the group
share the K and V tiles it loads.
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
from pallas_kernels.layouts import pool_index, pool_sizes, stack_pools
from pallas_kernels.paged_prefill import config as configs
from pallas_kernels.paged_prefill import query_tiles

_iota = functools.partial(jnp.arange, dtype=jnp.int32)


def _kernel(
    # Input
    layer_ref,  # [1]
    window_ref,  # [1] or None
    q_ref,  # [T, N, H]
    k_ref,  # pool of K
    v_ref,  # pool of V
    tables_ref,  # [B, M]
    lengths_ref,  # [B]
    sinks_ref,  # [N] or None
    slopes_ref,  # [N] or None
    tiles_ref,  # QueryTiles, S of them
    # Output
    out_ref,  # [T, N, Hv]
    lse_ref,  # [T, N]
    *,
    axes: tuple[str, str],
    scale: float,
    soft_cap: float | None,
    queries: int,
    tile: int,
):
    kv_head, query_tile = (pl.program_id(axis).astype(jnp.int32) for axis in range(2))
    k_sizes, v_sizes = pool_sizes(axes[0], k_ref.shape), pool_sizes(axes[1], v_ref.shape)
    page_size, head_dim, v_head_dim = k_sizes["C"], k_sizes["H"], v_sizes["H"]
    # Products are of one dtype; what differs meets in float32.
    q_dtype, v_dtype = (q_ref.dtype if ref.dtype == q_ref.dtype else jnp.float32 for ref in (k_ref, v_ref))
    dot = functools.partial(plgpu.dot, precision=lax.Precision.HIGHEST if q_dtype == jnp.float32 else None)
    row, first_token, num_tokens, first_position = (ref[query_tile] for ref in tiles_ref)

    # Every array inside has power-of-two sizes: tokens, heads and dims past the end are masked lanes.
    group = q_ref.shape[1] // k_sizes["K"]
    lane = _iota(max(16, pl.next_power_of_2(queries * group)))  # matrix units take at least 16 rows
    offset, head = lax.div(lane, np.int32(group)), kv_head * group + lax.rem(lane, np.int32(group))
    is_query = offset < num_tokens
    dim, v_dim = _iota(pl.next_power_of_2(head_dim)), _iota(pl.next_power_of_2(v_head_dim))

    @pl.when(num_tokens > 0)
    def fold_query_tile():
        is_row = row < lengths_ref.shape[0]  # not padding
        token, query = first_token + offset, first_position + offset
        last_position = first_position + (num_tokens - 1)
        q = _load(q_ref.at[token[:, None], head[:, None], dim[None, :]], is_query[:, None] & (dim < head_dim)[None, :])
        q = q.astype(q_dtype)
        layer = layer_ref[0]

        # Keys that some token of the tile sees: [begin, end).
        end = jnp.where(is_row, jnp.maximum(last_position + 1, 0), 0)
        begin = 0 if window_ref is None else jnp.clip(first_position + 1 - window_ref[0], 0, end)

        is_scale_all = soft_cap is None and slopes_ref is None and scale > 0
        unit = scale * softmax.LOG2_E if is_scale_all else softmax.LOG2_E
        slopes = None if slopes_ref is None else _load(slopes_ref.at[head], is_query).astype(jnp.float32)

        def fold_tile(i, state, *, masked: bool):
            position = begin + i * tile + _iota(tile)
            is_live = position < end
            page = _load(tables_ref.at[row, lax.div(position, np.int32(page_size))], is_live if masked else None)
            cell = lax.rem(position, np.int32(page_size))

            def load_tile(ref, axes, dim, true_dim):  # dead cells and lanes past the true dim are zero: 0 · NaN is NaN
                masks = [is_live[:, None]] if masked else []
                masks += [(dim < true_dim)[None, :]] if dim.size != true_dim else []
                mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), (tile, dim.size)) if masks else None
                at = pool_index(axes, ref.shape, L=layer, P=page[:, None], C=cell[:, None], K=kv_head, H=dim[None, :])
                return _load(ref.at[at], mask)

            k = load_tile(k_ref, axes[0], dim, head_dim).astype(q_dtype)
            scores = dot(q, k, trans_b=True)
            if not is_scale_all:
                scores = scores * scale
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            distance = position[None, :] - query[:, None]
            if slopes is not None:
                scores += slopes[:, None] * distance.astype(jnp.float32)
            if masked:
                is_visible = is_live[None, :] & (distance <= 0)
                if window_ref is not None:
                    is_visible &= distance > -window_ref[0]
                scores = jnp.where(is_visible, scores, -jnp.inf)
            v = load_tile(v_ref, axes[1], v_dim, v_head_dim).astype(v_dtype)
            return softmax.update(
                state, scores, lambda weights: dot(weights.astype(v_dtype), v), unit=unit, masked=masked
            )

        # Tiles that every token sees whole lie between those where a window begins and those of the tokens' own keys.
        num_tiles = lax.div(end - begin + (tile - 1), np.int32(tile))
        full_end = lax.div(jnp.clip(first_position + 1 - begin, 0, end - begin), np.int32(tile))
        state = softmax.init(lane.shape, v_dim.size)
        full_first = jnp.int32(0)
        if window_ref is not None:
            behind = jnp.maximum(last_position + 1 - window_ref[0] - begin, 0)  # keys that the last token sees no more
            full_first = jnp.minimum(lax.div(behind + (tile - 1), np.int32(tile)), num_tiles)
            state = lax.fori_loop(jnp.int32(0), full_first, functools.partial(fold_tile, masked=True), state)
            full_end = jnp.maximum(full_end, full_first)
        state = lax.fori_loop(full_first, full_end, functools.partial(fold_tile, masked=False), state)
        state = lax.fori_loop(full_end, num_tiles, functools.partial(fold_tile, masked=True), state)
        out, lse = softmax.finish(state, unit=unit)
        if sinks_ref is not None:  # padding has none
            sink = plgpu.load(sinks_ref.at[head], mask=is_query, other=-jnp.inf).astype(jnp.float32)
            out, lse = softmax.with_sink(out, lse, jnp.where(is_row, sink, -jnp.inf))

        mask = is_query[:, None] & (v_dim < v_head_dim)[None, :]
        plgpu.store(out_ref.at[token[:, None], head[:, None], v_dim[None, :]], out.astype(out_ref.dtype), mask=mask)
        plgpu.store(lse_ref.at[token, head], lse, mask=is_query)


def _load(at, mask):
    """What lies there, zero where masked; None loads everything without a mask."""
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0)


def paged_prefill(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "*L P C K H"],
    v_pages: Float[Array, "*L P C K Hv"],
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    query_lengths: Int32[Array, " B"],
    *,
    layer: int | Int[Array, ""] | None = None,
    layout: str = "NHD",
    scale: float | None = None,
    window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    config: configs.Config | None = None,
    interpret: bool = False,
) -> Any:  # out [T, N, Hv], or (out, lse float32[T, N]); a union would trouble every caller's type checker
    """Causal attention of packed query tokens over the pages of their rows; with `return_lse` also the log-sum-exp.

    Row r's tokens are its last `query_lengths[r]` positions, packed in row order and padded to T; padding tokens give
    zeros and −inf. The other arguments are those of `pallas_kernels.paged_decode`.

    Args:
        config: how to cut the work; None takes `config.heuristic`.
        interpret: run on any host, for tests.
    """
    axes, k_pages, v_pages, layer = stack_pools(k_pages, v_pages, layer, layout)
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = (pool_sizes(axes[1], v_pages.shape)[axis] for axis in "KH")
    if config is None:
        group = num_heads // num_kv_heads
        config = configs.heuristic(tokens, lengths.size, group, head_dim, v_head_dim, q.dtype, k_pages.dtype)
    tiles = query_tiles.cut(lengths, query_lengths, tokens, config.queries)
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            axes=axes,
            scale=float(head_dim**-0.5 if scale is None else scale),
            soft_cap=soft_cap,
            queries=config.queries,
            tile=config.tile,
        ),
        grid=(num_kv_heads, tiles.row.size),
        out_shape=[
            jax.ShapeDtypeStruct((tokens, num_heads, v_head_dim), q.dtype),
            jax.ShapeDtypeStruct((tokens, num_heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_prefill",
    )(
        layer,
        None if window is None else jnp.asarray(window, jnp.int32).reshape(1),
        q,
        k_pages,
        v_pages,
        block_tables,
        lengths,
        sinks,
        alibi_slopes,
        tiles,
    )
    return (out, lse) if return_lse else out
