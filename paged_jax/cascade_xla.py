"""Rows that share their first pages, in plain JAX: attention to those and to the rest, merged. What the op means."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from paged_jax import attention_xla, layouts
from pallas_kernels import softmax


def attend(
    q: Float[Array, "B N H"],
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    num_shared: Int32[Array, ""],
    sinks: Float[Array, " N"] | None,
    alibi_slopes: Float[Array, " N"] | None,
    **pools: Any,
) -> tuple[Float[Array, "B N Hv"], Float32[Array, "B N"]]:
    """Attention output in q's dtype and log-sum-exp, of at least one row.

    Args:
        num_shared: tokens that all live rows begin with, a multiple of the page size.
        pools: as `attention_xla.attend` takes them, with the layer, layout, scale and soft cap.
    """
    absent: dict[str, Any] = {"query_lengths": None, "window": None, "num_partitions": None}
    sizes = layouts.pool_sizes(layouts.pool_axes(pools["layout"])[0], pools["k_pages"].shape)
    page_size, num_kv_heads = sizes["C"], sizes["K"]

    # What is left of each row; distances to its keys stay what they are. Nothing past its last block is looked at.
    block = jnp.arange(block_tables.shape[1], dtype=jnp.int32) + lax.div(num_shared, jnp.int32(page_size))
    own_out, own_lse = attention_xla.attend(
        q,
        block_tables=block_tables.at[:, block].get(mode="fill", fill_value=0),
        lengths=jnp.maximum(lengths - num_shared, 0),
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        **pools,
        **absent,
    )

    # What all share: the rows are one row with as many more query heads.
    (rows, num_heads), is_live = q.shape[:2], lengths > 0

    def together(heads):  # [B, N, ..] → [1, K · B · G, ..]
        by_kv_head = jnp.moveaxis(heads.reshape(rows, num_kv_heads, -1, *heads.shape[2:]), 1, 0)
        return by_kv_head.reshape(1, rows * num_heads, *heads.shape[2:])

    def apart(heads):
        by_kv_head = heads.reshape(num_kv_heads, rows, -1, *heads.shape[2:])
        return jnp.moveaxis(by_kv_head, 0, 1).reshape(rows, num_heads, *heads.shape[2:])

    slopes = None if alibi_slopes is None else jnp.broadcast_to(alibi_slopes, (rows, num_heads))
    out, lse = attention_xla.attend(
        together(q),
        block_tables=block_tables[jnp.argmax(is_live)][None],
        lengths=num_shared[None],
        sinks=None,
        alibi_slopes=None if slopes is None else together(slopes)[0],
        **pools,
        **absent,
    )
    out, lse = apart(out), apart(lse)
    if slopes is not None:  # distances were counted from the last shared token, and not from the row's own
        lse += slopes.astype(jnp.float32) * (num_shared - lengths)[:, None].astype(jnp.float32)
    lse = jnp.where(is_live[:, None], lse, -jnp.inf)
    out, lse = softmax.merge(jnp.stack([own_out, out]), jnp.stack([own_lse, lse]))
    return out.astype(q.dtype), lse
