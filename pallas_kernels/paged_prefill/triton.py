"""Paged attention of several query tokens per row in Pallas's Triton lowering.

One program folds keys that one query tile sees, for one kv head: the tile's tokens and all query heads of the group
share the K and V tiles it loads. A tile of many tokens has one program, and matrix units are its limit. A tile of few,
as in decoding with drafts, is limited by reading: its program has few lanes, and long rows are cut into partitions that
the last to finish merges, in the same launch, as in `paged_decode`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels import arguments, partition, parts, softmax, walk
from pallas_kernels.device import INTERPRETED, current_device
from pallas_kernels.paged_prefill import config as configs
from pallas_kernels.paged_prefill import query_tiles
from pallas_kernels.parts import Part
from pallas_kernels.walk import iota, load


def _kernel(
    # Input
    pools_ref,  # walk.Pools
    window_ref,  # [1] or None
    q_ref,  # [T, N, H]
    lengths_ref,  # [B]
    sinks_ref,  # [N] or None
    slopes_ref,  # [N] or None
    tiles_ref,  # QueryTiles, S of them
    partitions_ref,  # Partitions of the query tiles, R of them
    arrivals_in_ref,  # [S, K] zeros, aliased to arrivals_ref; None: another launch merges
    # Output
    out_ref,  # [T, N, Hv]
    lse_ref,  # [T, N]
    part_out_ref,  # [R, K * width, Hv] float32; width = few * group
    part_lse_ref,  # [R, K * width]
    arrivals_ref=None,  # [S, K] parts of the query tile that are done
    *,
    form: walk.Form,
    scale: float,
    soft_cap: float | None,
    config: configs.Config,
    ptx: bool,
):
    del arrivals_in_ref
    kv_head, entry = (pl.program_id(axis).astype(jnp.int32) for axis in range(2))
    query_tile, num_tokens, index, count = (ref[entry] for ref in partitions_ref)
    head_dim, group = q_ref.shape[2], q_ref.shape[1] // form.num_kv_heads

    def fold(queries: int):
        """The output, its log-sum-exp and where they go, of a tile of up to so many tokens."""
        row, first_token, _, first_position = (ref[query_tile] for ref in tiles_ref)
        # Every array inside has power-of-two sizes: tokens, heads and dims past the end are masked lanes.
        offset, head = _lanes(queries, group, kv_head)
        is_query, dim = offset < num_tokens, iota(pl.next_power_of_2(head_dim))
        is_row = row < lengths_ref.shape[0]  # not padding
        token, query = first_token + offset, first_position + offset
        q = load(q_ref.at[token[:, None], head[:, None], dim[None, :]], is_query[:, None] & (dim < head_dim)[None, :])
        slopes = None if slopes_ref is None else load(slopes_ref.at[head], is_query).astype(jnp.float32)

        # Of the keys that some token of the tile sees, this program folds some tiles.
        window = None if window_ref is None else window_ref[0]
        begin, end = query_tiles.visible(first_position, num_tokens, is_row, window)
        num_tiles = partition.ceil_div(end - begin, config.tile)
        per_partition = lax.div(num_tiles + (count - 1), count)
        first = index * per_partition
        last = jnp.minimum(first + per_partition, num_tiles)

        # Tiles that every token sees whole lie between those where a window begins and those of the tokens' own keys.
        full_first, stretches = first, ()
        if window is not None:
            behind = jnp.maximum(first_position + num_tokens - window - begin, 0)  # which the last token sees no more
            full_first = jnp.clip(partition.ceil_div(behind, config.tile), first, jnp.maximum(first, last))
            stretches = (walk.Stretch(first, full_first, masked=True),)
        num_full = lax.div(jnp.clip(first_position + 1 - begin, 0, end - begin), np.int32(config.tile))
        full_end = jnp.maximum(jnp.minimum(num_full, last), full_first)
        out, lse = walk.fold(
            q,
            query,
            walk.Keys(pools_ref, form, pools_ref.layer[0], row, kv_head, begin, end),
            (
                *stretches,
                walk.Stretch(full_first, full_end, masked=False),
                walk.Stretch(full_end, last, masked=True),
            ),
            tile=config.tile,
            scale=scale,
            soft_cap=soft_cap,
            slopes=slopes,
            window=window,
            ptx=ptx,
        )
        if sinks_ref is not None:  # counted once, in the first partition; padding has none
            sink = plgpu.load(sinks_ref.at[head], mask=is_query, other=-jnp.inf).astype(jnp.float32)
            out, lse = softmax.with_sink(out, lse, jnp.where(is_row & (index == 0), sink, -jnp.inf))
        return out, lse, functools.partial(_store_tokens, out_ref, lse_ref, first_token, num_tokens, kv_head, group)

    @pl.when((num_tokens > 0) & (num_tokens <= config.few))
    def fold_few():
        out, lse, store_tokens = fold(config.few)
        part = Part(part_out_ref, part_lse_ref, entry, index, count, kv_head, config.few * group)
        parts.settle(part, out, lse, arrivals_ref, query_tile, store_tokens, lanes=16)

    if config.queries > config.few:

        @pl.when(num_tokens > config.few)
        def fold_many():
            out, lse, store_tokens = fold(config.queries)
            store_tokens(out, lse)


def _merge_kernel(
    # Input
    tiles_ref,  # QueryTiles, S of them
    partitions_ref,  # Partitions of the query tiles, R of them
    part_out_ref,  # [R, K * width, Hv]
    part_lse_ref,  # [R, K * width]
    out_in_ref,  # aliased to out_ref
    lse_in_ref,  # aliased to lse_ref
    # Output
    out_ref,  # [T, N, Hv]
    lse_ref,  # [T, N]
    *,
    num_kv_heads: int,
):
    """Merges the parts of query tiles in a launch of its own, for hosts where programs cannot wait for each other."""
    del out_in_ref, lse_in_ref
    kv_head, entry = (pl.program_id(axis).astype(jnp.int32) for axis in range(2))
    group, width = out_ref.shape[1] // num_kv_heads, part_lse_ref.shape[1] // num_kv_heads
    query_tile, num_tokens, index, count = (ref[entry] for ref in partitions_ref)

    @pl.when((index == 0) & (count > 1))
    def merge():
        part = Part(part_out_ref, part_lse_ref, entry, index, count, kv_head, width)
        first_token = tiles_ref.first_token[query_tile]
        out, lse = parts.merge((part.run,), width, lanes=16, volatile=False)
        _store_tokens(out_ref, lse_ref, first_token, num_tokens, kv_head, group, out, lse)


def _lanes(queries: int, group: int, kv_head):
    """The token of each lane, counted from the tile's first, and its query head."""
    lane = iota(max(16, pl.next_power_of_2(queries * group)))  # matrix units take at least 16 rows
    return lax.div(lane, np.int32(group)), kv_head * group + lax.rem(lane, np.int32(group))


def _store_tokens(out_ref, lse_ref, first_token, num_tokens, kv_head, group: int, out, lse):
    lane, v_dim = iota(lse.size), iota(out.shape[1])
    offset, head = lax.div(lane, np.int32(group)), kv_head * group + lax.rem(lane, np.int32(group))
    token, is_query = first_token + offset, offset < num_tokens
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
    num_partitions: int | None = None,
    return_lse: bool = False,
    config: configs.Config | None = None,
    interpret: bool = False,
    platform: str | None = None,
) -> Any:  # out [T, N, Hv], or (out, lse float32[T, N]); a union would trouble every caller's type checker
    """Causal attention of packed query tokens over the pages of their rows; with `return_lse` also the log-sum-exp.

    Row r's tokens are its last `query_lengths[r]` positions, packed in row order and padded to T; padding tokens give
    zeros and −inf. The other arguments are those of `pallas_kernels.paged_decode`.

    Args:
        num_partitions: partitions of each query tile of few tokens; None shares them out by the keys that they see.
        config: how to cut the work; None takes `config.heuristic`.
        interpret: run on any host, for tests.
        platform: as in `pallas_kernels.paged_decode`, whose errors it raises.
    """
    pools, form = walk.open_pools(k_pages, v_pages, k_scales, v_scales, block_tables, layer=layer, layout=layout)
    num_kv_heads, v_head_dim, q = form.num_kv_heads, form.v_head_dim, jnp.asarray(q)
    arguments.validate_queries(q, num_kv_heads, form.head_dim)
    tokens, num_heads, head_dim = q.shape
    lengths, query_lengths = (
        arguments.validate_integers(name, array, pools.tables.shape[:1])
        for name, array in (("lengths", lengths), ("query_lengths", query_lengths))
    )
    options = arguments.validate_options(
        q,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        num_partitions=num_partitions,
    )
    window = options.window
    if not tokens:
        out, lse = jnp.zeros((0, num_heads, v_head_dim), q.dtype), jnp.zeros((0, num_heads), jnp.float32)
        return (out, lse) if return_lse else out
    group = num_heads // num_kv_heads
    device = INTERPRETED if interpret else current_device(platform)
    dtypes = (q.dtype.name, form.dtypes[0].name)
    shape = configs.Shape(tokens, lengths.size, num_kv_heads, group, head_dim, v_head_dim, *dtypes)
    config = config or configs.heuristic(shape, device)
    if num_partitions is not None:
        config = dataclasses.replace(config, few=config.queries)  # tiles of many tokens have partitions, too
    tiles = query_tiles.cut(lengths, query_lengths, tokens, config.queries)
    if num_partitions is None:
        begin, end = query_tiles.visible(tiles.first_position, tiles.num_tokens, tiles.row < lengths.size, window)
        num_tiles = partition.ceil_div(end - begin, config.tile)
        num_tiles = jnp.where(tiles.num_tokens <= config.few, num_tiles, 0)  # the others are kept whole
        wanted = configs.num_partitions(config, num_kv_heads, device)
        partitions = partition.by_length(tiles.num_tokens, num_tiles, wanted)
    else:
        partitions = partition.evenly(tiles.num_tokens, num_partitions)
    windows = None if window is None else window.reshape(1)
    out, lse = parts.launch(
        functools.partial(
            _kernel,
            form=form,
            scale=options.scale,
            soft_cap=options.soft_cap,
            config=config,
            ptx=device.ptx,
        ),
        functools.partial(_merge_kernel, num_kv_heads=num_kv_heads),
        (pools, windows, q, lengths, options.sinks, options.alibi_slopes, tiles, partitions),
        (tiles, partitions),
        out=jax.ShapeDtypeStruct((tokens, num_heads, v_head_dim), q.dtype),
        num_kv_heads=num_kv_heads,
        entries=partitions.row.size,
        width=config.few * group,
        owners=tiles.row.size,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="paged_prefill",
    )
    return (out, lse) if return_lse else out
