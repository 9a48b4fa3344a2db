"""Query tiles cover every token once, in its row and position, whatever the rows ask for."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_prefill import query_tiles

ROW = st.tuples(st.integers(0, 60), st.one_of(st.just(0), st.just(1), st.integers(0, 40)))  # length, queries
NUM_ROWS, TOKENS = 7, 7 * 40  # one size, so that few programs are compiled

cut = jax.jit(query_tiles.cut, static_argnames=("num_tokens", "queries"))


@given(st.lists(ROW, min_size=NUM_ROWS, max_size=NUM_ROWS), st.sampled_from([1, 2, 8, 16]))
@settings(deadline=None, max_examples=200)
def test_every_token_is_in_one_tile_of_its_row(rows, queries):
    lengths, counts = (np.array(values, np.int32) for values in zip(*rows, strict=True))
    tokens, padding = TOKENS, TOKENS - int(counts.sum())
    tiles = cut(lengths, counts, num_tokens=tokens, queries=queries)
    row_of, position_of = np.full(tokens, -1), np.full(tokens, -(10**6))
    for row, first, count, position in zip(*map(np.asarray, tiles), strict=True):
        assert 0 <= count <= queries
        here = slice(first, first + count)
        assert (row_of[here] == -1).all(), "a token of two tiles"
        row_of[here], position_of[here] = row, position + np.arange(count)
    expected_rows = np.repeat(np.arange(len(rows) + 1), [*counts, padding])
    expected_positions = np.concatenate([np.arange(length - count, length) for length, count in rows])
    assert row_of.tolist() == expected_rows.tolist()
    assert position_of[: counts.sum()].tolist() == expected_positions.tolist()
    assert (position_of[counts.sum() :] < 0).all(), "padding sees nothing"


def test_more_tokens_than_there_are_belong_to_no_row():
    tiles = cut(np.array([9, 9], np.int32), np.array([3, 9], np.int32), num_tokens=5, queries=2)
    first, count = np.asarray(tiles.first_token), np.asarray(tiles.num_tokens)
    assert count.sum() == 5
    assert np.where(count > 0, first + count, 0).max() == 5
