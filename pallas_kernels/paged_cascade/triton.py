"""Cascade attention in Pallas's Triton lowering: one query token per row, over pages shared by all rows and its own.

One launch folds both: some programs take a partition of the shared keys for one kv head and the queries of many rows,
which fill the matrix units; the others a partition of one row's own keys, as in `paged_decode`. A second launch merges
the parts of each row. Its programs are many, where the last to finish of those that share keys would be few.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels import arguments, partition, parts, softmax, walk
from pallas_kernels.device import INTERPRETED, current_device
from pallas_kernels.paged_cascade import config as configs
from pallas_kernels.parts import Run
from pallas_kernels.walk import iota, load

_MERGE_WARPS = 4
_MERGED = 64 * 128  # lanes × dims that these warps merge at once


class Shared(NamedTuple):
    """What all live rows begin with."""

    length: Int32[Array, " 1"]  # tokens
    row: Int32[Array, " 1"]  # a live row, whose table has their pages
    count: Int32[Array, " 1"]  # partitions that they are folded in


def _fold_kernel(
    # Input
    pools_ref,  # walk.Pools
    q_ref,  # [B, N, H]
    lengths_ref,  # [B]
    shared_ref,  # Shared
    slopes_ref,  # [N] or None
    partitions_ref,  # Partitions of the rows' own keys, R of them
    # Output
    shared_out_ref,  # [S, K * width, Hv] float32; width = rows together * group
    shared_lse_ref,  # [S, K * width]
    own_out_ref,  # [R, N, Hv] float32
    own_lse_ref,  # [R, N]
    *,
    form: walk.Form,
    scale: float,
    soft_cap: float | None,
    config: configs.Config,
    ptx: bool,
):
    kv_head, entry = (pl.program_id(axis).astype(jnp.int32) for axis in range(2))
    (rows, num_heads, head_dim), num_shared_parts = q_ref.shape, shared_lse_ref.shape[0]
    group = num_heads // form.num_kv_heads
    num_shared, shared_row, shared_count = (ref[0] for ref in shared_ref)
    dim = iota(pl.next_power_of_2(head_dim))

    def fold(lane_row, lane_head, is_query, query, keys: walk.Keys, stretches):
        at = q_ref.at[lane_row[:, None], lane_head[:, None], dim[None, :]]
        slopes = None if slopes_ref is None else load(slopes_ref.at[lane_head], is_query).astype(jnp.float32)
        return walk.fold(
            load(at, is_query[:, None] & (dim < head_dim)[None, :]),
            query,
            keys,
            stretches,
            tile=config.tile,
            scale=scale,
            soft_cap=soft_cap,
            slopes=slopes,
            window=None,
            ptx=ptx,
        )

    bundle, shared_index = lax.div(entry, np.int32(config.partitions)), lax.rem(entry, np.int32(config.partitions))

    @pl.when((entry < num_shared_parts) & (shared_index < shared_count))
    def fold_shared():
        width = config.together * group
        lane = iota(max(16, pl.next_power_of_2(width)))  # matrix units take at least 16 rows
        row, head = bundle * config.together + lax.div(lane, np.int32(group)), lax.rem(lane, np.int32(group))
        is_query = (lane < width) & (row < rows)
        out, lse = fold(
            row,
            kv_head * group + head,
            is_query,
            load(lengths_ref.at[row], is_query) - 1,
            walk.Keys(pools_ref, form, pools_ref.layer[0], shared_row, kv_head, 0, num_shared),
            walk.share(num_shared, shared_index, shared_count, config.tile),
        )
        parts.store(shared_out_ref, shared_lse_ref, entry, out, lse, kv_head, width)

    row, length, index, count = (ref[jnp.maximum(entry - num_shared_parts, 0)] for ref in partitions_ref)

    @pl.when((entry >= num_shared_parts) & (row < rows))
    def fold_own():
        lane = iota(max(16, pl.next_power_of_2(group)))
        begin = jnp.minimum(num_shared, length)
        out, lse = fold(
            jnp.full_like(lane, row),
            kv_head * group + lane,
            lane < group,
            length - 1,
            walk.Keys(pools_ref, form, pools_ref.layer[0], row, kv_head, begin, length),
            walk.share(length - begin, index, count, config.tile),
        )
        parts.store(own_out_ref, own_lse_ref, entry - num_shared_parts, out, lse, kv_head, group)


def _merge_kernel(
    # Input
    shared_ref,  # Shared
    sinks_ref,  # [N] or None
    partitions_ref,  # Partitions of the rows' own keys, R of them
    shared_out_ref,  # [S, K * width, Hv]
    shared_lse_ref,  # [S, K * width]
    own_out_ref,  # [R, N, Hv]
    own_lse_ref,  # [R, N]
    # Output
    out_ref,  # [B, N, Hv]
    lse_ref,  # [B, N]
    *,
    num_kv_heads: int,
    config: configs.Config,
):
    kv_head, entry = (pl.program_id(axis).astype(jnp.int32) for axis in range(2))
    group = out_ref.shape[1] // num_kv_heads
    row, length, index, count = (ref[entry] for ref in partitions_ref)

    @pl.when((row < out_ref.shape[0]) & (index == 0))
    def merge():
        bundle, place = lax.div(row, np.int32(config.together)), lax.rem(row, np.int32(config.together))
        shared = Run(
            shared_out_ref,
            shared_lse_ref,
            bundle * config.partitions,
            jnp.where(length > 0, shared_ref.count[0], 0),
            (kv_head * config.together + place) * group,
        )
        own = Run(own_out_ref, own_lse_ref, entry, count, kv_head * group)
        out, lse = parts.merge(
            (own, shared), group, lanes=_MERGED // pl.next_power_of_2(out_ref.shape[2]), volatile=False
        )
        if sinks_ref is not None:
            lane = iota(lse.size)
            sink = plgpu.load(sinks_ref.at[kv_head * group + lane], mask=lane < group, other=-jnp.inf)
            out, lse = softmax.with_sink(out, lse, sink.astype(jnp.float32))
        parts.store(out_ref, lse_ref, row, out, lse, kv_head, group)


def paged_cascade(
    q: Float[Array, "B N H"],
    k_pages: Float[Array, "*L P C K H"],
    v_pages: Float[Array, "*L P C K Hv"],
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    num_shared: Int32[Array, ""],
    *,
    layer: int | Int[Array, ""] | None = None,
    layout: str = "NHD",
    k_scales: Float32[Array, "*L P C K"] | None = None,
    v_scales: Float32[Array, "*L P C K"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    config: configs.Config | None = None,
    interpret: bool = False,
    platform: str | None = None,
) -> Any:  # out [B, N, Hv], or (out, lse float32[B, N]); a union would trouble every caller's type checker
    """What `pallas_kernels.paged_decode` computes, for rows that all begin with the same `num_shared` tokens' pages.

    The arguments, the result and the errors are those of `paged_decode`; there is no window.

    Args:
        num_shared: tokens, a multiple of the page size and at most what any live row holds; rows whose length is 0
            share nothing.
        config: how to cut the work; None takes `config.heuristic`.
    """
    pools, form = walk.open_pools(k_pages, v_pages, k_scales, v_scales, block_tables, layer=layer, layout=layout)
    num_kv_heads, v_head_dim, q = form.num_kv_heads, form.v_head_dim, jnp.asarray(q)
    arguments.validate_queries(q, num_kv_heads, form.head_dim)
    rows, num_heads, head_dim = q.shape
    if rows != pools.tables.shape[0]:
        raise ValueError(f"q: expected one token for each of {pools.tables.shape[0]} rows, got {rows}")
    lengths = arguments.validate_integers("lengths", lengths, (rows,))
    num_shared = arguments.validate_integers("num_shared", num_shared, ())
    options = arguments.validate_options(
        q,
        scale=scale,
        soft_cap=soft_cap,
        window=None,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        num_partitions=None,
    )
    if not rows:
        out, lse = jnp.zeros((0, num_heads, v_head_dim), q.dtype), jnp.zeros((0, num_heads), jnp.float32)
        return (out, lse) if return_lse else out
    device = INTERPRETED if interpret else current_device(platform)
    group = num_heads // num_kv_heads
    shape = configs.Shape(rows, num_kv_heads, group, head_dim, v_head_dim, q.dtype.name, form.dtypes[0].name)
    config = config or configs.heuristic(shape, device)

    own_tiles = partition.ceil_div(jnp.maximum(lengths - num_shared, 0), config.tile)
    partitions = partition.by_length(lengths, own_tiles, configs.num_own_partitions(num_kv_heads, device))
    first = jnp.argmax(lengths > 0).astype(jnp.int32)
    shared = Shared(*(x.reshape(1) for x in (num_shared, first, configs.shared_partitions(config, num_shared))))
    bundles = -(-rows // config.together)
    parts_of = [
        (bundles * config.partitions, num_kv_heads * config.together * group),
        (partitions.row.size, num_heads),
    ]
    fold = pl.pallas_call(
        functools.partial(
            _fold_kernel,
            form=form,
            scale=options.scale,
            soft_cap=options.soft_cap,
            config=config,
            ptx=device.ptx,
        ),
        grid=(num_kv_heads, sum(entries for entries, _ in parts_of)),
        out_shape=[
            jax.ShapeDtypeStruct(of, jnp.float32) for entries in parts_of for of in ((*entries, v_head_dim), entries)
        ],
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_cascade",
    )
    merge = pl.pallas_call(
        functools.partial(_merge_kernel, num_kv_heads=num_kv_heads, config=config),
        grid=(num_kv_heads, partitions.row.size),
        out_shape=[
            jax.ShapeDtypeStruct((rows, num_heads, v_head_dim), q.dtype),
            jax.ShapeDtypeStruct((rows, num_heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=_MERGE_WARPS, num_stages=1),
        interpret=interpret,
        name="merge_cascade",
    )

    def run(inputs):
        pools, q, lengths, shared, slopes, sinks, partitions = inputs
        return merge(shared, sinks, partitions, *fold(pools, q, lengths, shared, slopes, partitions))

    inputs = (pools, q, lengths, shared, options.alibi_slopes, options.sinks, partitions)
    out, lse = arguments.forward_only(run, inputs)
    return (out, lse) if return_lse else out
