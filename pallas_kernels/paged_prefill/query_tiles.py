"""Packed query tokens → query tiles: consecutive tokens of one row, which share one walk over its pages."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32


class QueryTiles(NamedTuple):
    """S tiles of up to Q tokens; tiles that are left over have no tokens."""

    row: Int32[Array, " S"]  # B for padding tokens, which see nothing
    first_token: Int32[Array, " S"]  # index in the packed tokens
    num_tokens: Int32[Array, " S"]
    first_position: Int32[Array, " S"]  # of the first token in its row; negative where a row has more queries than keys


def cut(lengths: Int32[Array, " B"], query_lengths: Int32[Array, " B"], num_tokens: int, queries: int) -> QueryTiles:
    """Cuts the tokens of each row, and the padding behind the last row's, into tiles of `queries`.

    Row r's tokens are its last `query_lengths[r]` positions. S = T // Q + B + 1, since the rows and the padding leave
    at most one tile partly filled each. O(S·B) int32 work, shared by the layers of a step.
    """
    counts = jnp.clip(query_lengths, 0, num_tokens)
    first = jnp.cumsum(counts, dtype=jnp.int32) - counts
    counts = jnp.minimum(counts, jnp.maximum(num_tokens - first, 0))  # more tokens than there are belong to no row
    counts = jnp.append(counts, num_tokens - jnp.sum(counts, dtype=jnp.int32))
    lengths = jnp.append(lengths, jnp.int32(0))  # the padding is as a row without keys
    positions = lengths - jnp.append(query_lengths, counts[-1])  # of each row's first token
    first = jnp.cumsum(counts, dtype=jnp.int32) - counts

    num_tiles = lax.div(counts + (queries - 1), jnp.int32(queries))
    end = jnp.cumsum(num_tiles, dtype=jnp.int32)
    tile = jnp.arange(num_tokens // queries + lengths.size, dtype=jnp.int32)
    row = jnp.sum(end[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)

    def of_row(array):
        return array.at[row].get(mode="fill", fill_value=0)

    offset = (tile - of_row(end - num_tiles)) * queries
    return QueryTiles(
        row=row,
        first_token=of_row(first) + offset,
        num_tokens=jnp.clip(of_row(counts) - offset, 0, queries),
        first_position=of_row(positions) + offset,
    )


def visible(
    first_position: Int32[Array, "..."],
    num_tokens: Int32[Array, "..."],
    is_row: Bool[Array, "..."],
    window: Int32[Array, ""] | None,
) -> tuple[int | Int32[Array, "..."], Int32[Array, "..."]]:
    """The keys [begin, end) that some token of a tile sees; none if it is of no row."""
    end = jnp.where(is_row, jnp.maximum(first_position + num_tokens, 0), 0)
    return 0 if window is None else jnp.clip(first_position + 1 - window, 0, end), end
