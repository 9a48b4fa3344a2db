"""Rung 2, tiles: a program gathers 64 tokens at once, however many pages they lie in.

The page and cell of each token come from its position, so that the page size, of any value, does not decide how much
is in flight: a tile of 64 keeps more loads under way, and matrix units busy, than a page of 16.
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
        name="tiles",
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

    def fold_tile(i, state):
        position = i * TILE + jnp.arange(TILE, dtype=jnp.int32)
        is_live = position < length
        page = plgpu.load(tables_ref.at[row, lax.div(position, np.int32(page_size))], mask=is_live, other=0)
        cell = lax.rem(position, np.int32(page_size))
        at = (page[:, None], cell[:, None], kv_head, dim[None, :])
        mask = jnp.broadcast_to(is_live[:, None], (TILE, head_dim))
        k = plgpu.load(k_ref.at[at], mask=mask, other=0)
        scores = jnp.where(is_live[None, :], dot(q, k, trans_b=True), -jnp.inf)
        v = plgpu.load(v_ref.at[at], mask=mask, other=0)
        return softmax.update(state, scores, lambda weights: dot(weights.astype(v.dtype), v), unit=unit, masked=True)

    num_tiles = lax.div(length + (TILE - 1), np.int32(TILE))
    state = lax.fori_loop(0, num_tiles, fold_tile, softmax.init(lane.shape, head_dim))
    out, _ = softmax.finish(state, unit=unit)
    plgpu.store(out_ref.at[row, head[:, None], dim[None, :]], out.astype(out_ref.dtype), mask=is_head[:, None])
