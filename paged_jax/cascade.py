"""Rows that share their first pages attend to those once, as one batch of queries: cascade attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from paged_jax.attention import merge_attention, paged_attention
from paged_jax.block_table import BlockTable
from paged_jax.cache import PagedCache

_LANES = 64  # query heads of a group together: more would leave the parts of a row too large to merge quickly
_LEAST_BYTES_SAVED = 320 << 20  # in a layer; about what an H200 reads from its cache while it merges the second part


def cascade_attention(
    q: Float[Array, "B N H"],
    cache: PagedCache,
    table: BlockTable,
    *,
    layer: int | Int[Array, ""] = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:  # out, or (out, lse), as of paged_attention
    """Decode attention, equal to `paged_attention`, that reads the pages shared by all rows once and not for every row.

    The blocks that all rows begin with are found in the table, so any table is right. The queries of all rows attend to
    them in groups of 64 lanes, each row attends to the rest of its pages, and the two parts merge by their
    log-sum-exp. Where little is shared this costs more than `paged_attention`: `cascade_pays` tells.

    Source: cascade inference (Ye et al., "FlashInfer", 2025; Juravsky et al., "Hydragen", 2024).

    Args:
        q: one token per row. All arguments are those of `paged_attention`; a window is not among them, since rows of
            different lengths see different parts of what they share.

    Returns:
        out [B, N, Hv] in q's dtype and, with `return_lse`, the log-sum-exp, float32 [B, N].

    Raises:
        ValueError, NotImplementedError: as `paged_attention`.
    """
    q = jnp.asarray(q)
    options = {"layer": layer, "scale": scale, "soft_cap": soft_cap, "implementation": implementation}
    num_shared = shared_blocks(table)

    # What is left of each row.
    block = jnp.arange(table.max_blocks_per_row, dtype=jnp.int32) + num_shared
    rest = dataclasses.replace(
        table,
        pages=table.pages.at[:, block].get(mode="fill", fill_value=table.num_pages),
        lengths=jnp.maximum(table.lengths - num_shared * table.page_size, 0),
    )
    outs = [paged_attention(q, cache, rest, sinks=sinks, alibi_slopes=alibi_slopes, return_lse=True, **options)]
    outs.append(_attend_shared(q, cache, table, num_shared, alibi_slopes, options))
    out, lse = merge_attention(*zip(*outs, strict=True))
    return (out, lse) if return_lse else out


def shared_blocks(table: BlockTable) -> Int32[Array, ""]:
    """How many full blocks all live rows have in common, from the first on; 0 if fewer than two rows are live.

    Traces under jit; O(B·M).
    """
    is_live = table.lengths > 0
    first = table.pages[jnp.argmax(is_live)]
    is_same = jnp.all((table.pages == first[None, :]) | ~is_live[:, None], axis=0)
    num_same = jnp.sum(jnp.cumprod(is_same.astype(jnp.int32)), dtype=jnp.int32)
    shortest = jnp.min(jnp.where(is_live, table.lengths, jnp.iinfo(jnp.int32).max))
    num_shared = jnp.minimum(num_same, lax.div(shortest, jnp.int32(table.page_size)))
    return jnp.where(jnp.sum(is_live, dtype=jnp.int32) > 1, num_shared, 0)


def cascade_pays(cache: PagedCache, table: BlockTable) -> bool:
    """Whether `cascade_attention` is the faster one for these rows, on the host; costs a transfer of the lengths.

    It saves reading the shared pages once for each row but the first of 64 lanes. Rows that are read at a time find
    most of those pages in the GPU's own cache, so that a second launch and a merge are worth it from 320 MiB in a layer
    on. Rows seldom change what they share: ask when requests come and go, not at every step.
    """
    rows = int(np.count_nonzero(np.asarray(table.lengths)))
    tokens = int(jax.jit(shared_blocks)(table)) * table.page_size
    token_bytes = (cache.head_dim + cache.v_head_dim) * cache.num_kv_heads * cache.k.dtype.itemsize
    return max(0, rows - 1) * tokens * token_bytes >= _LEAST_BYTES_SAVED


def _attend_shared(q, cache: PagedCache, table: BlockTable, num_shared, alibi_slopes, options):
    """Every row's attention to the shared blocks: some rows at a time are one row with as many more query heads."""
    (rows, num_heads), num_kv_heads = q.shape[:2], cache.num_kv_heads
    group = num_heads // num_kv_heads
    together = max(1, min(rows, _LANES // group))
    bundles = -(-rows // together)

    def bundled(heads):  # [B, N, ..] → [bundles, K · together · G, ..]
        heads = jnp.pad(heads, ((0, bundles * together - rows), *((0, 0),) * (heads.ndim - 1)))
        heads = heads.reshape(bundles, together, num_kv_heads, group, *heads.shape[2:])
        return jnp.moveaxis(heads, 1, 2).reshape(bundles, num_kv_heads * together * group, *heads.shape[4:])

    def unbundled(heads):
        heads = heads.reshape(bundles, num_kv_heads, together, group, *heads.shape[2:])
        return jnp.moveaxis(heads, 2, 1).reshape(bundles * together, num_heads, *heads.shape[4:])[:rows]

    first = table.pages[jnp.argmax(table.lengths > 0)]
    length = num_shared * table.page_size
    shared = dataclasses.replace(
        table, pages=jnp.broadcast_to(first, (bundles, first.size)), lengths=jnp.full(bundles, length, jnp.int32)
    )
    slopes = None
    if alibi_slopes is not None:
        slopes = bundled(jnp.broadcast_to(jnp.asarray(alibi_slopes), (together, num_heads)))[0]
    out, lse = paged_attention(bundled(q), cache, shared, alibi_slopes=slopes, return_lse=True, **options)
    out, lse = unbundled(out), unbundled(lse)
    if alibi_slopes is not None:  # distances were counted from the last shared token, and not from the row's own
        distance = (length - table.lengths)[:, None].astype(jnp.float32)
        lse += jnp.asarray(alibi_slopes, jnp.float32)[None, :] * distance
    return out, jnp.where((table.lengths > 0)[:, None], lse, -jnp.inf)
