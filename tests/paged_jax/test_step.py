"""A step describes one forward pass: which token stands where, and where its keys go."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import counts, extend

from paged_jax import BlockTable, PagedStep

PAGES, PAGE_SIZE, WIDTH = 9, 4, 4
PADDING_SLOT = PAGES * PAGE_SIZE


def grown(*lengths):
    table, ok = extend(BlockTable.create(PAGES, PAGE_SIZE, len(lengths), WIDTH), counts(*lengths))
    assert ok
    return table


@functools.partial(jax.jit, static_argnames="size")
def step_of(table, num_tokens, size=None):
    return table.step(num_tokens, size=size)


def cell(table, row, position):
    return int(table.pages[row, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE


def assert_same_table(table, other):
    for field in dataclasses.fields(BlockTable):
        np.testing.assert_array_equal(getattr(table, field.name), getattr(other, field.name), err_msg=field.name)


def assert_describes(step, table, before, num_tokens, size=None):
    """Every field of the step, token by token in plain Python, from the tables before and after."""
    batch = len(num_tokens)
    tokens = [(row, int(before.lengths[row]) + i) for row, n in enumerate(num_tokens) for i in range(n)]
    at = [row for row, _ in tokens] if size is None else list(range(len(tokens)))
    length = batch if size is None else size
    positions, rows, slots = [0] * length, [batch] * length, [PADDING_SLOT] * length
    last = [length] * batch
    for t, (row, position) in zip(at, tokens, strict=True):
        positions[t], rows[t], slots[t], last[row] = position, row, cell(table, row, position), t
    np.testing.assert_array_equal(step.positions, positions)
    np.testing.assert_array_equal(step.rows, rows)
    np.testing.assert_array_equal(step.slots, slots)
    np.testing.assert_array_equal(step.last, last)
    if size is None:
        assert step.query_lengths is None
    else:
        np.testing.assert_array_equal(step.query_lengths, num_tokens)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(step)}
    assert dtypes == {np.dtype(np.int32)}


DECODE = [(1, 1, 1), (1, 0, 1), (0, 0, 0), (0, 1, 0)]
PACKED = [
    ((1, 1, 1), 3),
    ((2, 0, 5), 7),
    ((2, 0, 5), 11),
    ((0, 9, 0), 9),
    ((0, 0, 0), 4),
    ((3, 0, 0), 5),
    ((1, 1, 1), 8),
]


@pytest.mark.parametrize("num_tokens", DECODE)
def test_a_decode_step_gives_token_t_to_row_t(num_tokens):
    before = grown(5, 0, 8)
    table, step, ok = step_of(before, counts(*num_tokens))
    assert ok
    assert isinstance(step, PagedStep)
    table.check()
    np.testing.assert_array_equal(table.lengths, np.asarray([5, 0, 8]) + num_tokens)
    assert_describes(step, table, before, num_tokens)


@pytest.mark.parametrize(("num_tokens", "size"), PACKED)
def test_a_packed_step_holds_the_rows_tokens_in_row_order(num_tokens, size):
    before = grown(5, 0, 8)
    table, step, ok = step_of(before, counts(*num_tokens), size=size)
    assert ok
    table.check()
    np.testing.assert_array_equal(table.lengths, np.asarray([5, 0, 8]) + num_tokens)
    assert_describes(step, table, before, num_tokens, size)


@pytest.mark.parametrize(("num_tokens", "size"), [*((n, None) for n in DECODE), *PACKED])
def test_rows_without_tokens_are_empty_for_attention_and_keep_their_length(num_tokens, size):
    table, step, _ = step_of(grown(5, 0, 8), counts(*num_tokens), size=size)
    active = np.asarray(num_tokens) > 0
    np.testing.assert_array_equal(step.table.lengths, np.where(active, table.lengths, 0))
    np.testing.assert_array_equal(np.asarray(step.table.pages)[active], np.asarray(table.pages)[active])
    assert step.table.page_size == PAGE_SIZE


@pytest.mark.parametrize("size", [None, 3, 6])
def test_a_step_is_an_extension(size):
    before = grown(5, 0, 8)
    table, _, _ = step_of(before, counts(1, 0, 1), size=size)
    assert_same_table(table, before.extend(counts(1, 0, 1))[0])


@pytest.mark.parametrize(
    ("num_tokens", "size"),
    [
        ((2, 0, 0), None),
        ((-1, 1, 0), None),
        ((2, 0, 5), 6),
        ((1, 1, 1), 2),
        ((-1, 2, 0), 8),
        ((12, 0, 0), 64),
        ((2**31 - 1, 0, 0), 8),
        ((2**31 - 1, 2**31 - 1, 4), 8),
        ((8, 16, 8), 64),
    ],
    ids=[
        "two tokens in a decode step",
        "negative in a decode step",
        "one token more than the size",
        "one row more than the size",
        "negative beside positive",
        "more blocks than a row may have",
        "huge",
        "a sum that wraps",
        "more pages than are free",
    ],
)
def test_a_refused_step_changes_nothing_and_is_all_padding(num_tokens, size):
    before = grown(5, 0, 8)
    table, step, ok = step_of(before, counts(*num_tokens), size=size)
    assert ok.dtype == bool
    assert not ok
    assert_same_table(table, before)
    assert_describes(step, table, before, (0, 0, 0), size)
    np.testing.assert_array_equal(step.table.lengths, [0, 0, 0])


def test_one_step_of_a_prompt_equals_decode_steps_in_scan():
    packed_table, packed, _ = step_of(grown(5, 0, 8), counts(0, 6, 0), size=6)

    @jax.jit
    def one_by_one(table):
        def body(table, _):
            table, step, ok = table.step(counts(0, 1, 0))
            return table, (step, ok)

        return jax.lax.scan(body, table, length=6)

    table, (steps, ok) = one_by_one(grown(5, 0, 8))
    assert ok.all()
    table.check()
    np.testing.assert_array_equal(table.lengths, packed_table.lengths)
    np.testing.assert_array_equal(steps.positions[:, 1], packed.positions)
    np.testing.assert_array_equal(steps.slots[:, 1], [cell(table, 1, position) for position in range(6)])
    np.testing.assert_array_equal(steps.table.lengths[:, 1], np.arange(1, 7))
    np.testing.assert_array_equal(steps.slots[:, [0, 2]], PADDING_SLOT)


def test_a_step_traces_in_a_while_loop_until_it_is_refused():
    @jax.jit
    def fill(table):
        def body(state):
            table, _, written = state
            table, step, ok = table.step(counts(1, 1, 0))
            return table, ok, written.at[step.slots].add(1, mode="drop")

        start = table, jnp.asarray(True), jnp.zeros(PADDING_SLOT, jnp.int32)
        return jax.lax.while_loop(lambda state: state[1], body, start)

    table, _, written = fill(grown(0, 0, 0))
    table.check()
    np.testing.assert_array_equal(table.lengths, [16, 16, 0])
    pages = np.asarray(table.pages)[:2].ravel()
    expected = np.zeros((PAGES, PAGE_SIZE))
    expected[pages] = 1
    np.testing.assert_array_equal(written, expected.ravel())
