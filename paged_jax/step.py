"""One forward pass, described once: where each new token sits, where its K and V go, and which row it belongs to."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from paged_jax.block_table import BlockTable, packed_rows
from paged_jax.integers import require_positive
from pallas_kernels.integers import as_int32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["table", "positions", "rows", "slots", "query_lengths", "last"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class PagedStep:
    """Everything a model's layers need to know about the T tokens of one forward pass; every layer uses the same."""

    table: BlockTable  # as attention must see it: rows without tokens in this step have length 0
    positions: Int32[Array, " T"]  # 0 for padding tokens
    rows: Int32[Array, " T"]  # B for padding tokens
    slots: Int32[Array, " T"]  # the padding slot for padding tokens
    query_lengths: Int32[Array, " B"] | None  # tokens of each row; None in a decode step (one token per row)
    last: Int32[Array, " B"]  # index in T of each row's last token; T for rows without tokens


def plan_step(
    table: BlockTable, num_tokens: Int[Array, " B"], *, size: int | None = None
) -> tuple[BlockTable, PagedStep, Bool[Array, ""]]:
    """Grows the rows by `num_tokens` and lays their new tokens out for one forward pass.

    Args:
        table: the table before the step.
        num_tokens: new tokens of each row.
        size: None for a decode step: `num_tokens` is 0 or 1, T = B, and token t belongs to row t. An int T packs the
            rows' new tokens in row order and pads them to T.

    Returns:
        The grown table, the step, and `ok`. Refused (`ok` False, table unchanged, step all padding): what
        `BlockTable.extend` refuses, more than one token per row in a decode step, more than `size` tokens in all.

    Raises:
        ValueError: `num_tokens` is not an integer array of shape [B], or `size` is not a positive int.
    """
    if size is not None:
        require_positive(size=size)
    num_tokens = as_int32("num_tokens", num_tokens)
    # A sum that wraps around belongs to counts that no pool can hold: extend refuses those.
    fits = jnp.all(num_tokens <= 1) if size is None else jnp.sum(num_tokens, dtype=jnp.int32) <= size
    grown, ok = table.extend(jnp.where(fits, num_tokens, 0))
    ok &= fits
    num_tokens = grown.lengths - table.lengths  # as taken: all zero where refused

    row = jnp.arange(table.max_rows, dtype=jnp.int32)
    is_live = num_tokens > 0
    if size is None:
        rows = jnp.where(is_live, row, table.max_rows)
        positions = jnp.where(is_live, grown.lengths - 1, 0)
        last = jnp.where(is_live, row, table.max_rows)
    else:
        ends = jnp.cumsum(num_tokens, dtype=jnp.int32)
        token = jnp.arange(size, dtype=jnp.int32)
        rows = packed_rows(ends, size)
        from_row_end = ends.at[rows].get(mode="fill", fill_value=0) - token
        positions = grown.lengths.at[rows].get(mode="fill", fill_value=0) - from_row_end
        positions = jnp.where(rows < table.max_rows, positions, 0)
        last = jnp.where(is_live, ends - 1, size)
    step = PagedStep(
        table=dataclasses.replace(grown, lengths=jnp.where(is_live, grown.lengths, 0)),
        positions=positions,
        rows=rows,
        slots=grown.slots(positions, rows),
        query_lengths=None if size is None else num_tokens,
        last=last,
    )
    return grown, step, ok
