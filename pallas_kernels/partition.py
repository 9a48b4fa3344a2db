"""Which program folds which keys: rows are cut into partitions by their own lengths, inside jit."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32


class Partitions(NamedTuple):
    """The partitions of all rows, one row after the other; entries past the last have row B."""

    row: Int32[Array, " R"]
    length: Int32[Array, " R"]  # tokens held by the row
    index: Int32[Array, " R"]  # which of the row's partitions it is
    count: Int32[Array, " R"]  # partitions of the row, at least 1


def evenly(lengths: Int32[Array, " B"], count: int) -> Partitions:
    """`count` partitions of every row."""
    entry = jnp.arange(lengths.size * count, dtype=jnp.int32)
    index = lax.rem(entry, jnp.int32(count))
    return Partitions(lax.div(entry, jnp.int32(count)), jnp.repeat(lengths, count), index, jnp.full_like(entry, count))


def by_length(lengths: Int32[Array, " B"], num_tiles: Int32[Array, " B"], wanted: int) -> Partitions:
    """About `wanted` partitions of equal size over all rows, and at least one of each row; R = B + wanted.

    A row gets as many as its tiles are worth, rounded: rows of one length all get the same, and one long row among
    short ones is spread over all processors. Rounding adds less than one partition to each row, so R is enough.

    Source: the idea of balanced partitions is FlashInfer's (Ye et al., 2025), which plans them on the host; here they
    are a few operations on the device, which all layers of a step share.
    """
    size = jnp.maximum(1, ceil_div(jnp.sum(num_tiles, dtype=jnp.int32), wanted))
    count = jnp.maximum(1, lax.div(num_tiles + lax.div(size, jnp.int32(2)), size))
    end = jnp.cumsum(count, dtype=jnp.int32)
    entry = jnp.arange(lengths.size + wanted, dtype=jnp.int32)
    row = jnp.sum(end[None, :] <= entry[:, None], axis=1, dtype=jnp.int32)  # to compare with all rows is one operation

    def of_row(array):
        return array.at[row].get(mode="fill", fill_value=0)

    return Partitions(row, of_row(lengths), entry - of_row(end - count), of_row(count))


def ceil_div(count: Int32[Array, "..."], size: int) -> Int32[Array, "..."]:
    """Counts are not negative, so one truncating division does; `//` compiles to several operations."""
    return lax.div(count + (size - 1), jnp.int32(size))
