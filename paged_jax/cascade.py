"""Rows that share their first pages attend to those once, as one batch of queries: cascade attention."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from paged_jax import backends, cascade_xla
from paged_jax.attention import operands, validate_rows
from paged_jax.block_table import BlockTable
from paged_jax.cache import PagedCache
from pallas_kernels import arguments

_LEAST_BYTES_SAVED = 48 << 20  # in a layer; about what an H200 reads from its cache while it merges the parts


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
    them together, each row attends to the rest of its pages, and the parts merge by their log-sum-exp. Where little is
    shared this costs more than `paged_attention`: `cascade_pays` tells.

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
    validate_rows(q, cache, table, None)
    backends.validate_implementation(implementation)
    options = arguments.validate_options(
        q,
        scale=scale,
        soft_cap=soft_cap,
        window=None,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        num_partitions=None,
    )
    arrays = operands(q, cache, table, layer, options) | {"num_shared": shared_blocks(table) * table.page_size}
    attend = functools.partial(
        _attend,
        layout=cache.layout,
        scale=options.scale,
        soft_cap=options.soft_cap,
        implementation=implementation,
    )
    if not table.max_rows:
        out, lse = jnp.zeros((0, q.shape[1], cache.v_head_dim), q.dtype), jnp.zeros((0, q.shape[1]), jnp.float32)
        return (out, lse) if return_lse else out
    out, lse = arguments.forward_only(attend, arrays)
    return (out, lse) if return_lse else out


@functools.partial(jax.jit, static_argnames=("layout", "scale", "soft_cap", "implementation"))
def _attend(arrays, **static):  # jitted, so that the layers of an unrolled model share one trace
    return backends.attend_cascade(arrays, reference=cascade_xla.attend, **static)


def shared_blocks(table: BlockTable) -> Int32[Array, ""]:
    """How many full blocks all live rows have in common, from the first on; 0 if fewer than two rows are live.

    Traces under jit; O(B·M).
    """
    if not table.max_rows:
        return jnp.zeros((), jnp.int32)
    is_live = table.lengths > 0
    first = table.pages[jnp.argmax(is_live)]
    is_same = jnp.all((table.pages == first[None, :]) | ~is_live[:, None], axis=0)
    num_same = jnp.sum(jnp.cumprod(is_same.astype(jnp.int32)), dtype=jnp.int32)
    shortest = jnp.min(jnp.where(is_live, table.lengths, jnp.iinfo(jnp.int32).max))
    num_shared = jnp.minimum(num_same, lax.div(shortest, jnp.int32(table.page_size)))
    return jnp.where(jnp.sum(is_live, dtype=jnp.int32) > 1, num_shared, 0)


def cascade_pays(cache: PagedCache, table: BlockTable) -> bool:
    """Whether `cascade_attention` is the faster one for these rows, on the host; costs a transfer of the lengths.

    It saves reading the shared pages for each row but one. Rows that are read at a time find most of those pages in the
    GPU's own cache, so that merging is worth it from 48 MiB in a layer on: on an H200 16 rows with 1024 shared tokens
    of Llama 3 8B gain a seventh, 8 rows lose a quarter. Rows seldom change what they share: ask when requests come and
    go, not at every step.
    """
    rows = int(np.count_nonzero(np.asarray(table.lengths)))
    tokens = int(jax.jit(shared_blocks)(table)) * table.page_size
    token_bytes = (cache.head_dim + cache.v_head_dim) * cache.num_kv_heads * cache.k.dtype.itemsize
    return max(0, rows - 1) * tokens * token_bytes >= _LEAST_BYTES_SAVED
