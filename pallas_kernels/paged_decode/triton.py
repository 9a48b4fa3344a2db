"""Paged decode attention in Pallas's Triton lowering: one query token per row walks the row's pages.

One program folds one partition of one (row, kv head). All query heads of the group share the K and V tiles it loads.
Where a row has several partitions, the program that finishes the last of them merges them, in the same launch.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels import arguments, partition, parts, softmax, walk
from pallas_kernels.device import INTERPRETED, current_device
from pallas_kernels.paged_decode import config as configs
from pallas_kernels.parts import Part
from pallas_kernels.walk import iota, load


def _fold_kernel(
    # Input
    pools_ref,  # walk.Pools
    window_ref,  # [1] or None
    q_ref,  # [B, N, H]
    sinks_ref,  # [N] or None
    slopes_ref,  # [N] or None
    partitions_ref,  # Partitions, R of them
    arrivals_in_ref,  # [B, K] zeros, aliased to arrivals_ref; None: another launch merges
    # Output
    out_ref,  # [B, N, Hv]
    lse_ref,  # [B, N]
    part_out_ref,  # [R, N, Hv] float32
    part_lse_ref,  # [R, N]
    arrivals_ref=None,  # [B, K] parts of the row that are done
    *,
    form: walk.Form,
    scale: float,
    soft_cap: float | None,
    config: configs.Config,
    ptx: bool,
):
    del arrivals_in_ref
    kv_head, entry = (pl.program_id(axis).astype(jnp.int32) for axis in range(2))
    head_dim, group = q_ref.shape[2], q_ref.shape[1] // form.num_kv_heads

    # Every array inside has power-of-two sizes: heads and dims past the end are masked lanes.
    lane = iota(max(16, pl.next_power_of_2(group)))  # matrix units take at least 16 rows
    head, is_head = kv_head * group + lane, lane < group
    dim = iota(pl.next_power_of_2(head_dim))
    slopes = None if slopes_ref is None else load(slopes_ref.at[head], is_head).astype(jnp.float32)
    row, length, index, count = (ref[entry] for ref in partitions_ref)

    @pl.when(row < q_ref.shape[0])
    def fold_partition():
        q = load(q_ref.at[row, head[:, None], dim[None, :]], is_head[:, None] & (dim < head_dim)[None, :])
        begin = 0 if window_ref is None else jnp.maximum(length - window_ref[0], 0)  # the first key the query sees

        out, lse = walk.fold(
            q,
            length - 1,
            walk.Keys(pools_ref, form, pools_ref.layer[0], row, kv_head, begin, length),
            walk.share(length - begin, index, count, config.tile),
            tile=config.tile,
            scale=scale,
            soft_cap=soft_cap,
            slopes=slopes,
            window=None,  # begin heeds it
            ptx=ptx,
        )
        if sinks_ref is not None:  # a sink is counted once: in the first partition
            sink = plgpu.load(sinks_ref.at[head], mask=is_head, other=-jnp.inf).astype(jnp.float32)
            out, lse = softmax.with_sink(out, lse, jnp.where(index == 0, sink, -jnp.inf))

        part = Part(part_out_ref, part_lse_ref, entry, index, count, kv_head, group)
        store_row = functools.partial(_store_row, out_ref, lse_ref, row, kv_head, group)
        parts.settle(part, out, lse, arrivals_ref, row, store_row, lanes=config.merged_lanes)


def _merge_kernel(
    # Input
    partitions_ref,  # Partitions, R of them
    part_out_ref,  # [R, N, Hv]
    part_lse_ref,  # [R, N]
    out_in_ref,  # aliased to out_ref
    lse_in_ref,  # aliased to lse_ref
    # Output
    out_ref,  # [B, N, Hv]
    lse_ref,  # [B, N]
    *,
    num_kv_heads: int,
):
    """Merges the parts of rows in a launch of its own, for hosts where programs cannot wait for each other."""
    del out_in_ref, lse_in_ref
    kv_head, entry = (pl.program_id(axis).astype(jnp.int32) for axis in range(2))
    group = out_ref.shape[1] // num_kv_heads
    row, _, index, count = (ref[entry] for ref in partitions_ref)

    @pl.when((index == 0) & (count > 1))
    def merge():
        part = Part(part_out_ref, part_lse_ref, entry, index, count, kv_head, group)
        _store_row(out_ref, lse_ref, row, kv_head, group, *parts.merge((part.run,), group, lanes=16, volatile=False))


def _store_row(out_ref, lse_ref, row, kv_head, group: int, out, lse):
    parts.store(out_ref, lse_ref, row, out, lse, kv_head, group)


def paged_decode(
    q: Float[Array, "B N H"],
    k_pages: Float[Array, "*L P C K H"],
    v_pages: Float[Array, "*L P C K Hv"],
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
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
) -> Any:  # out [B, N, Hv], or (out, lse float32[B, N]); a union would trouble every caller's type checker
    """Attention of each row's last token over the row's pages; with `return_lse` also its natural-log log-sum-exp.

    The arguments are those of `paged_jax.paged_attention`, on raw arrays.

    Args:
        k_pages, v_pages: pools stacked over layers, or without `layer` the pools of one, in NHD [P, C, K, H].
        layer: which layer of stacked pools, traced or not.
        layout: order of the pools' axes, one of `layouts.LAYOUTS`.
        k_scales, v_scales: of one-byte pools, what the values of each token and kv head are multiplied with; in NHD's
            order in every layout.
        scale: `H ** -0.5` if None.
        num_partitions: partitions of each row; None shares the rows out by their lengths.
        config: how to cut the work; None takes what `config.choose` finds for the device.
        interpret: run on any host, for tests; merges in a second launch.
        platform: "cuda" or "rocm", which it is lowered for; None is that of the GPU at hand.

    Raises:
        ValueError: an argument does not fit; says what was expected and what was given.
        NotImplementedError: a head_dim or a pool of a size that the kernel cannot do; or the result is differentiated.
    """
    pools, form = walk.open_pools(k_pages, v_pages, k_scales, v_scales, block_tables, layer=layer, layout=layout)
    num_kv_heads, v_head_dim, q = form.num_kv_heads, form.v_head_dim, jnp.asarray(q)
    arguments.validate_queries(q, num_kv_heads, form.head_dim)
    rows, num_heads, head_dim = q.shape
    if rows != pools.tables.shape[0]:
        raise ValueError(f"q: expected one token for each of {pools.tables.shape[0]} rows, got {rows}")
    lengths = arguments.validate_integers("lengths", lengths, (rows,))
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
    if not rows:
        out, lse = jnp.zeros((0, num_heads, v_head_dim), q.dtype), jnp.zeros((0, num_heads), jnp.float32)
        return (out, lse) if return_lse else out
    device = INTERPRETED if interpret else current_device(platform)
    group, kv_rows = num_heads // num_kv_heads, rows * num_kv_heads
    shape = configs.Shape(group, head_dim, v_head_dim, q.dtype.name, form.dtypes[0].name, layout, kv_rows)
    config = configs.choose(config, shape, device)

    num_keys = lengths if window is None else jnp.minimum(lengths, window)
    if num_partitions is None:
        wanted = configs.num_partitions(config, num_kv_heads, device)
        partitions = partition.by_length(lengths, partition.ceil_div(num_keys, config.tile), wanted)
    else:
        partitions = partition.evenly(lengths, num_partitions)
    windows = None if window is None else window.reshape(1)
    out, lse = parts.launch(
        functools.partial(
            _fold_kernel,
            form=form,
            scale=options.scale,
            soft_cap=options.soft_cap,
            config=config,
            ptx=device.ptx,
        ),
        functools.partial(_merge_kernel, num_kv_heads=num_kv_heads),
        (pools, windows, q, options.sinks, options.alibi_slopes, partitions),
        (partitions,),
        out=jax.ShapeDtypeStruct((rows, num_heads, v_head_dim), q.dtype),
        num_kv_heads=num_kv_heads,
        entries=partitions.row.size,
        width=group,
        owners=rows,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="paged_decode",
    )
    return (out, lse) if return_lse else out
