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
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels import softmax, walk
from pallas_kernels.layouts import pool_sizes, stack_pools
from pallas_kernels.paged_prefill import config as configs
from pallas_kernels.paged_prefill import query_tiles
from pallas_kernels.walk import iota, load


def _kernel(
    # Input
    layer_ref,  # [1]
    window_ref,  # [1] or None
    q_ref,  # [T, N, H]
    k_ref,  # pool of K
    v_ref,  # pool of V
    k_scales_ref,  # [L, P, C, K] or None
    v_scales_ref,  # [L, P, C, K] or None
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
    num_kv_heads, head_dim = (pool_sizes(axes[0], k_ref.shape)[axis] for axis in "KH")
    row, first_token, num_tokens, first_position = (ref[query_tile] for ref in tiles_ref)

    # Every array inside has power-of-two sizes: tokens, heads and dims past the end are masked lanes.
    group = q_ref.shape[1] // num_kv_heads
    lane = iota(max(16, pl.next_power_of_2(queries * group)))  # matrix units take at least 16 rows
    offset, head = lax.div(lane, np.int32(group)), kv_head * group + lax.rem(lane, np.int32(group))
    is_query = offset < num_tokens
    dim = iota(pl.next_power_of_2(head_dim))

    @pl.when(num_tokens > 0)
    def fold_query_tile():
        is_row = row < lengths_ref.shape[0]  # not padding
        token, query = first_token + offset, first_position + offset
        last_position = first_position + (num_tokens - 1)
        q = load(q_ref.at[token[:, None], head[:, None], dim[None, :]], is_query[:, None] & (dim < head_dim)[None, :])
        slopes = None if slopes_ref is None else load(slopes_ref.at[head], is_query).astype(jnp.float32)

        # Keys that some token of the tile sees: [begin, end).
        end = jnp.where(is_row, jnp.maximum(last_position + 1, 0), 0)
        window = None if window_ref is None else window_ref[0]
        begin = 0 if window is None else jnp.clip(first_position + 1 - window, 0, end)

        # Tiles that every token sees whole lie between those where a window begins and those of the tokens' own keys.
        num_tiles = lax.div(end - begin + (tile - 1), np.int32(tile))
        full_end = lax.div(jnp.clip(first_position + 1 - begin, 0, end - begin), np.int32(tile))
        full_first, stretches = jnp.int32(0), ()
        if window is not None:
            behind = jnp.maximum(last_position + 1 - window - begin, 0)  # keys that the last token sees no more
            full_first = jnp.minimum(lax.div(behind + (tile - 1), np.int32(tile)), num_tiles)
            full_end = jnp.maximum(full_end, full_first)
            stretches = (walk.Stretch(jnp.int32(0), full_first, masked=True),)
        out, lse = walk.fold(
            q,
            query,
            walk.Keys(
                k_ref, v_ref, k_scales_ref, v_scales_ref, tables_ref, axes, layer_ref[0], row, kv_head, begin, end
            ),
            (
                *stretches,
                walk.Stretch(full_first, full_end, masked=False),
                walk.Stretch(full_end, num_tiles, masked=True),
            ),
            tile=tile,
            scale=scale,
            soft_cap=soft_cap,
            slopes=slopes,
            window=window,
        )
        if sinks_ref is not None:  # padding has none
            sink = plgpu.load(sinks_ref.at[head], mask=is_query, other=-jnp.inf).astype(jnp.float32)
            out, lse = softmax.with_sink(out, lse, jnp.where(is_row, sink, -jnp.inf))

        v_dim = iota(out.shape[1])
        mask = is_query[:, None] & (v_dim < out_ref.shape[2])[None, :]
        plgpu.store(out_ref.at[token[:, None], head[:, None], v_dim[None, :]], out.astype(out_ref.dtype), mask=mask)
        plgpu.store(lse_ref.at[token, head], lse, mask=is_query)


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
    k_scales: Float32[Array, "*L P C K"] | None = None,
    v_scales: Float32[Array, "*L P C K"] | None = None,
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
    k_scales, v_scales = (
        None if scales is None else scales.reshape(-1, *scales.shape[-3:]) for scales in (k_scales, v_scales)
    )
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
        k_scales,
        v_scales,
        block_tables,
        lengths,
        sinks,
        alibi_slopes,
        tiles,
    )
    return (out, lse) if return_lse else out
