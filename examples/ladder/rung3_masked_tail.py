"""Rung 3, the masked tail apart: full tiles run without masks, and one last tile that may be partial with them.

A mask costs at every token: comparisons, selections, and in the softmax the guard against −inf − (−inf). Only the last
tile of a row can need one, so it gets a loop of its own, of one turn or none.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels import softmax

TILE, WARPS, STAGES = 64, 2, 4


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
    return pl.pallas_call(
        _kernel,
        grid=(k_pages.shape[2], q.shape[0]),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="masked_tail",
    )(q, k_pages, v_pages, block_tables, lengths)


def _kernel(
    q_ref,  # [B, N, H]
    k_ref,  # [P, C, K, H]
    v_ref,  # [P, C, K, H]
    tables_ref,  # [B, M]
    lengths_ref,  # [B]
    out_ref,  # [B, N, H]
):
    kv_head, row = pl.program_id(0), pl.program_id(1)
    page_size, head_dim, group = k_ref.shape[1], k_ref.shape[3], q_ref.shape[1] // k_ref.shape[2]
    lane, dim = jnp.arange(max(16, pl.next_power_of_2(group))), jnp.arange(head_dim)
    head, is_head = kv_head * group + lane, lane < group
    unit = head_dim**-0.5 * softmax.LOG2_E
    dot = functools.partial(plgpu.dot, precision=lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None)

    q = plgpu.load(q_ref.at[row, head[:, None], dim[None, :]], mask=is_head[:, None], other=0)
    length = lengths_ref[row]

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
        return softmax.update(state, scores, lambda weights: dot(weights.astype(v.dtype), v), unit=unit, masked=masked)

    full_end = lax.div(length, np.int32(TILE))
    end = lax.div(length + (TILE - 1), np.int32(TILE))
    state = softmax.init(lane.shape, head_dim)
    state = lax.fori_loop(0, full_end, functools.partial(fold_tile, masked=False), state)
    state = lax.fori_loop(full_end, end, functools.partial(fold_tile, masked=True), state)
    out, _ = softmax.finish(state, unit=unit)
    plgpu.store(out_ref.at[row, head[:, None], dim[None, :]], out.astype(out_ref.dtype), mask=is_head[:, None])
