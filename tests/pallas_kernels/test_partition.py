"""Partitions cover every row's tiles once, whatever the lengths, and share them out fairly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import partition

LENGTH = st.one_of(st.just(0), st.integers(1, 40), st.integers(1, 100_000))
TILE = 16


@functools.partial(jax.jit, static_argnames="wanted")
def by_length(lengths, wanted):
    return partition.by_length(lengths, partition.ceil_div(lengths, TILE), wanted)


def partitions_by_length(lengths, wanted):
    return partition.Partitions(*map(np.asarray, by_length(np.asarray(lengths, np.int32), wanted=wanted)))


@given(
    st.sampled_from([1, 3, 40]).flatmap(lambda rows: st.lists(LENGTH, min_size=rows, max_size=rows)),
    st.sampled_from([1, 7, 66, 528]),
)
@settings(deadline=None, max_examples=200)
def test_every_row_has_all_its_partitions_in_order(lengths, wanted):
    parts = partitions_by_length(lengths, wanted)
    used = parts.row < len(lengths)
    assert used.size == len(lengths) + wanted
    assert (parts.row[~used] == len(lengths)).all()
    counts = [parts.count[parts.row == row] for row in range(len(lengths))]
    for row, count in enumerate(counts):
        assert count.size >= 1
        assert (count == count.size).all()
        assert parts.index[parts.row == row].tolist() == list(range(count.size))
        assert (parts.length[parts.row == row] == lengths[row]).all()
    assert (np.diff(parts.row) >= 0).all(), "a row's partitions lie side by side"


def test_rows_of_one_length_get_the_same_and_are_kept_whole_where_rows_are_many():
    assert (partitions_by_length([4096] * 64, 66).count[:64] == 1).all()
    assert (partitions_by_length([4096] * 64, int(1.45 * 64)).count[:64] == 1).all()
    assert (partitions_by_length([4096] * 16, 66).count[:64] == 4).all()


def test_a_long_row_among_short_ones_is_spread_over_the_processors():
    parts = partitions_by_length([100, 65536, 100, 100], 64)
    assert parts.count[parts.row == 1][0] >= 60
    assert (parts.count[np.isin(parts.row, (0, 2, 3))] == 1).all()


@pytest.mark.parametrize("count", [1, 3])
def test_evenly(count):
    parts = partition.evenly(jnp.array([5, 0, 9], jnp.int32), count)
    assert parts.row.tolist() == [row for row in range(3) for _ in range(count)]
    assert parts.length.tolist() == [length for length in (5, 0, 9) for _ in range(count)]
    assert parts.index.tolist() == list(range(count)) * 3
    assert parts.count.tolist() == [count] * 3 * count


def test_lengths_do_not_recompile():
    partitions_by_length([1, 2, 3], 8)
    programs = by_length._cache_size()
    partitions_by_length([4096, 0, 7], 8)
    assert by_length._cache_size() == programs
