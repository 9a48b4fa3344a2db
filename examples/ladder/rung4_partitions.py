"""Rung 4, partitions by length: long rows are cut among several programs, and a second launch merges their parts.

Few rows leave most processors idle, and one row that is longer than the rest keeps everyone waiting. So the rows are
cut into parts of about one size, as many of each row as its own length is worth. The lengths are known on the device
only: the cutting is a few operations inside jit, for a fixed number of programs, some of which find nothing to do.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels import softmax
from pallas_kernels.device import INTERPRETED, current_device
from pallas_kernels.paged_decode import config

TILE, WARPS, STAGES = 64, 2, 4
PROGRAMS = 8  # for each processor, that rows are cut into


class Parts(NamedTuple):
    """R parts, one row's after the other's; those left over have row B. The last two are for each row."""

    row: Int32[Array, " R"]
    index: Int32[Array, " R"]  # which of the row's parts it is
    first: Int32[Array, " B"]  # the row's first part
    count: Int32[Array, " B"]  # parts of the row


def paged_decode(
    q: Float[Array, "B N H"],
    k_pages: Float[Array, "P C K H"],
    v_pages: Float[Array, "P C K H"],
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    *,
    interpret: bool = False,
) -> Float[Array, "B N H"]:
    """Attention of each row's last token over the row's pages."""
    (rows, num_heads, head_dim), num_kv_heads = q.shape, k_pages.shape[2]
    device = INTERPRETED if interpret else current_device()
    wanted = config.num_partitions(config.Config(TILE, WARPS, STAGES, PROGRAMS), num_kv_heads, device)
    parts = cut(lengths, wanted)
    num_parts = parts.row.size
    part_out, part_lse = pl.pallas_call(
        _fold_kernel,
        grid=(num_kv_heads, num_parts),
        out_shape=(
            jax.ShapeDtypeStruct((num_parts, num_heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_parts, num_heads), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="fold_parts",
    )(parts, q, k_pages, v_pages, block_tables, lengths)
    return pl.pallas_call(
        functools.partial(_merge_kernel, num_kv_heads=num_kv_heads),
        grid=(num_kv_heads, rows),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="merge_parts",
    )(parts, part_out, part_lse)


def cut(lengths: Int32[Array, " B"], wanted: int) -> Parts:
    """About `wanted` parts over all rows; what rounding adds is less than one for each row."""
    num_tiles = lax.div(lengths + (TILE - 1), TILE)
    size = jnp.maximum(1, lax.div(num_tiles.sum(dtype=jnp.int32) + (wanted - 1), wanted))
    count = jnp.maximum(1, lax.div(num_tiles + lax.div(size, 2), size))
    end = jnp.cumsum(count, dtype=jnp.int32)
    part = jnp.arange(lengths.size + wanted, dtype=jnp.int32)
    row = jnp.sum(end[None, :] <= part[:, None], axis=1, dtype=jnp.int32)
    first = end - count
    return Parts(row, part - first.at[row].get(mode="fill", fill_value=0), first, count)


def _fold_kernel(
    # Input
    parts_ref,  # Parts
    q_ref,  # [B, N, H]
    k_ref,  # [P, C, K, H]
    v_ref,  # [P, C, K, H]
    tables_ref,  # [B, M]
    lengths_ref,  # [B]
    # Output
    part_out_ref,  # [R, N, H]
    part_lse_ref,  # [R, N]
):
    kv_head, part = pl.program_id(0), pl.program_id(1)
    page_size, head_dim, group = k_ref.shape[1], k_ref.shape[3], q_ref.shape[1] // k_ref.shape[2]
    lane, dim = jnp.arange(max(16, pl.next_power_of_2(group))), jnp.arange(head_dim)
    head, is_head = kv_head * group + lane, lane < group
    unit = head_dim**-0.5 * softmax.LOG2_E
    dot = functools.partial(plgpu.dot, precision=lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None)
    row = parts_ref.row[part]

    @pl.when(row < q_ref.shape[0])
    def fold_part():
        q = plgpu.load(q_ref.at[row, head[:, None], dim[None, :]], mask=is_head[:, None], other=0)
        length, index, count = lengths_ref[row], parts_ref.index[part], parts_ref.count[row]

        def fold_tile(i, state, *, masked: bool):
            position = i * TILE + jnp.arange(TILE, dtype=jnp.int32)
            is_live = position < length
            load = functools.partial(plgpu.load, other=0) if masked else lambda at, mask: plgpu.load(at)  # noqa: ARG005
            page = load(tables_ref.at[row, lax.div(position, np.int32(page_size))], mask=is_live)
            cell = lax.rem(position, np.int32(page_size))
            at = (page[:, None], cell[:, None], kv_head, dim[None, :])
            mask = jnp.broadcast_to(is_live[:, None], (TILE, head_dim))
            k = load(k_ref.at[at], mask=mask)
            scores = dot(q, k, trans_b=True)
            if masked:
                scores = jnp.where(is_live[None, :], scores, -jnp.inf)
            v = load(v_ref.at[at], mask=mask)
            return softmax.update(
                state, scores, lambda weights: dot(weights.astype(v.dtype), v), unit=unit, masked=masked
            )

        # The part's share of the row's tiles: only the row's last tile may be partial.
        num_tiles = lax.div(length + (TILE - 1), np.int32(TILE))
        per_part = lax.div(num_tiles + (count - 1), count)
        begin = index * per_part
        end = jnp.minimum(begin + per_part, num_tiles)
        full_end = jnp.maximum(begin, jnp.minimum(end, lax.div(length, np.int32(TILE))))
        state = softmax.init(lane.shape, head_dim)
        state = lax.fori_loop(begin, full_end, functools.partial(fold_tile, masked=False), state)
        state = lax.fori_loop(full_end, end, functools.partial(fold_tile, masked=True), state)
        out, lse = softmax.finish(state, unit=unit)
        plgpu.store(part_out_ref.at[part, head[:, None], dim[None, :]], out, mask=is_head[:, None])
        plgpu.store(part_lse_ref.at[part, head], lse, mask=is_head)


def _merge_kernel(
    # Input
    parts_ref,  # Parts
    part_out_ref,  # [R, N, H]
    part_lse_ref,  # [R, N]
    # Output
    out_ref,  # [B, N, H]
    *,
    num_kv_heads: int,
):
    """An online softmax whose keys are the row's parts, each scored by its log-sum-exp."""
    kv_head, row = pl.program_id(0), pl.program_id(1)
    head_dim, group = out_ref.shape[2], out_ref.shape[1] // num_kv_heads
    lane, dim = jnp.arange(pl.next_power_of_2(group)), jnp.arange(head_dim)
    head, is_head = kv_head * group + lane, lane < group
    first, count = parts_ref.first[row], parts_ref.count[row]

    def fold_part(i, state):
        lse = plgpu.load(part_lse_ref.at[first + i, head], mask=is_head, other=-jnp.inf)
        out = plgpu.load(part_out_ref.at[first + i, head[:, None], dim[None, :]], mask=is_head[:, None], other=0)
        return softmax.update(state, lse[:, None], lambda weights: weights * out, unit=softmax.LOG2_E, masked=True)

    state = lax.fori_loop(0, count, fold_part, softmax.init(lane.shape, head_dim))
    out, _ = softmax.finish(state, unit=softmax.LOG2_E)
    plgpu.store(out_ref.at[row, head[:, None], dim[None, :]], out.astype(out_ref.dtype), mask=is_head[:, None])
