"""The block table at its boundaries, with what it must refuse, and under every transform it must trace in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from tables import INT_MAX, assert_same, counts, extend, grown, held, leaves, real_copies, release, truncate

from paged_jax import BlockTable

# --- create


@pytest.mark.parametrize(("num_pages", "page_size", "rows", "width"), [(1, 1, 1, 1), (7, 5, 3, 4), (16, 256, 2, 9)])
def test_a_new_table_is_empty_and_every_page_is_free(num_pages, page_size, rows, width):
    table = BlockTable.create(num_pages, page_size, rows, width)
    table.check()
    assert table.page_size == page_size
    assert table.num_free == num_pages
    np.testing.assert_array_equal(table.pages, np.full((rows, width), num_pages))
    np.testing.assert_array_equal(table.lengths, np.zeros(rows))
    np.testing.assert_array_equal(table.ref_counts, np.zeros(num_pages))
    np.testing.assert_array_equal(table.retained, np.zeros(num_pages))
    np.testing.assert_array_equal(np.sort(table.free_pages), np.arange(num_pages))
    assert {leaf.dtype for leaf in leaves(table)} == {np.dtype(np.int32)}


def test_the_page_size_is_static_and_the_arrays_are_leaves():
    table = BlockTable.create(7, 5, 3, 4)
    assert len(jax.tree.leaves(table)) == 6
    assert jax.tree.map(lambda leaf: leaf, table).page_size == 5
    assert jax.jit(lambda table: table)(table).page_size == 5


def test_a_table_may_hold_placeholders():
    """Tree maps and vmap rebuild the dataclass from what are not arrays."""
    table = BlockTable.create(7, 5, 3, 4)
    jax.tree.map(lambda _: None, table)
    batched = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), table)
    grown, ok = jax.jit(jax.vmap(BlockTable.extend))(batched, jnp.asarray([[1, 0, 6], [5, 99, 0]], jnp.int32))
    np.testing.assert_array_equal(ok, [True, False])
    np.testing.assert_array_equal(grown.lengths, [[1, 0, 6], [0, 0, 0]])


# --- extend


@pytest.mark.parametrize("page_size", [1, 4, 5])
@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_a_row_holds_exactly_the_pages_its_tokens_need(page_size, excess):
    length = 3 * page_size + excess
    table = grown(9, page_size, 5, length, 0)
    blocks = -(-length // page_size)
    assert table.num_free == 9 - blocks
    pages = held(table, 0)
    assert len(set(pages)) == blocks
    np.testing.assert_array_equal(np.asarray(table.pages)[0, blocks:], np.full(5 - blocks, 9))
    np.testing.assert_array_equal(np.asarray(table.pages)[1], np.full(5, 9))
    np.testing.assert_array_equal(table.ref_counts, [page in pages for page in range(9)])


def test_growth_keeps_the_pages_that_a_row_has():
    before = grown(9, 4, 5, 5, 4, 0)
    after, ok = extend(before, counts(3, 1, 2))
    assert ok
    after.check()
    np.testing.assert_array_equal(after.lengths, [8, 5, 2])
    for row, new_pages in enumerate((0, 1, 1)):
        old = held(before, row)
        assert held(after, row)[: len(old)] == old
        assert len(held(after, row)) == len(old) + new_pages


def test_one_extension_equals_token_by_token_in_scan():
    at_once = grown(9, 4, 5, 7, 7)

    @jax.jit
    def one_by_one(table):
        return jax.lax.scan(lambda table, _: table.extend(counts(1, 1)), table, length=7)

    scanned, ok = one_by_one(BlockTable.create(9, 4, 2, 5))
    assert ok.all()
    scanned.check()
    np.testing.assert_array_equal(scanned.lengths, at_once.lengths)
    assert scanned.num_free == at_once.num_free


def test_a_while_loop_fills_the_pool_to_the_last_cell():
    @jax.jit
    def fill(table):
        def body(state):
            table, _, steps = state
            table, ok = table.extend(counts(1, 0))
            return table, ok, steps + 1

        return jax.lax.while_loop(lambda state: state[1], body, (table, jnp.asarray(True), 0))

    table, ok, steps = fill(BlockTable.create(3, 4, 2, 9))
    assert not ok
    assert steps == 3 * 4 + 1
    table.check()
    np.testing.assert_array_equal(table.lengths, [12, 0])
    assert table.num_free == 0


REFUSED_EXTENSIONS = {
    "one page too few": (0, 0, 13),
    "one page too few, over several rows": (4, 5, 1),
    "negative": (-1, 0, 0),
    "negative beside positive": (4, -4, 0),
    "the most negative": (-(2**31), 0, 0),
    "the largest": (INT_MAX, 0, 0),
    "the largest, where length + count wraps": (0, INT_MAX, 0),
    "a sum that wraps to zero": (0, 2**30, 2**30),
    "three of the largest": (INT_MAX, INT_MAX, INT_MAX),
    "rounding up to a page wraps": (INT_MAX - 3, 0, 0),
}


@pytest.mark.parametrize("num_tokens", REFUSED_EXTENSIONS.values(), ids=REFUSED_EXTENSIONS)
def test_a_refused_extension_changes_nothing(num_tokens):
    """5 pages of 4, at most 4 blocks a row; rows of 1 and 4 tokens leave 3 pages."""
    before = grown(5, 4, 4, 1, 4, 0)
    after, ok = extend(before, counts(*num_tokens))
    assert ok.dtype == bool
    assert ok.shape == ()
    assert not ok
    assert_same(after, before)


@pytest.mark.parametrize(("num_tokens", "granted"), [((15, 16), True), ((16, 0), False), ((0, 17), False)])
def test_a_row_grows_to_its_last_block_and_no_further(num_tokens, granted):
    """The pool has pages to spare: only the table's width of 4 blocks refuses."""
    before = grown(20, 4, 4, 1, 0)
    after, ok = extend(before, counts(*num_tokens))
    assert ok == granted
    after.check()
    np.testing.assert_array_equal(after.lengths, np.asarray([1, 0]) + num_tokens if granted else before.lengths)


@pytest.mark.parametrize("num_tokens", [(0, 0, 12), (4, 4, 4), (15, 0, 0), (0, 12, 0), (3, 0, 0), (0, 0, 0)])
def test_an_extension_that_just_fits_is_granted(num_tokens):
    before = grown(5, 4, 4, 1, 4, 0)
    after, ok = extend(before, counts(*num_tokens))
    assert ok
    after.check()
    np.testing.assert_array_equal(after.lengths, np.asarray([1, 4, 0]) + num_tokens)


def test_extending_by_nothing_changes_nothing():
    before = grown(5, 4, 4, 1, 4, 0)
    after, ok = extend(before, counts(0, 0, 0))
    assert ok
    assert_same(after, before)


def test_a_retained_page_is_not_allocated():
    table = pools.block_table([[2], []], [3, 0], 5, 4, width=4, retained=[1, 0, 1, 0, 0])
    table.check()
    assert not extend(table, counts(0, 13))[1]
    after, ok = extend(table, counts(1, 12))
    assert ok
    after.check()
    assert held(after, 0) == [2]
    assert sorted(held(after, 1)) == [1, 3, 4]


# --- truncate and release


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 9])
def test_truncation_frees_the_pages_behind_the_cut(length):
    before = grown(9, 4, 4, 9, 6)
    after, copies, ok = truncate(before, counts(length, INT_MAX))
    assert ok
    after.check()
    np.testing.assert_array_equal(after.lengths, [length, 6])
    assert held(after, 0) == held(before, 0)[: -(-length // 4)]
    assert held(after, 1) == held(before, 1)
    assert after.num_free == 9 - 2 - -(-length // 4)
    np.testing.assert_array_equal(np.asarray(after.pages)[0, -(-length // 4) :], 9)
    assert copies.src.shape == copies.dst.shape == (2,)
    assert copies.src.dtype == copies.dst.dtype == jnp.int32
    assert real_copies(copies, 9) == []


@pytest.mark.parametrize("lengths", [(9, 6), (10, 7), (INT_MAX, INT_MAX)])
def test_a_length_above_the_rows_truncates_nothing(lengths):
    before = grown(9, 4, 4, 9, 6)
    after, copies, ok = truncate(before, counts(*lengths))
    assert ok
    assert_same(after, before)
    assert real_copies(copies, 9) == []


def test_a_negative_length_is_refused():
    before = grown(9, 4, 4, 9, 6)
    after, copies, ok = truncate(before, counts(2, -1))
    assert not ok
    assert_same(after, before)
    assert real_copies(copies, 9) == []


def shared_rows(free_pages):
    """Rows [3, 0, 4] and [3, 0, 1] share their first two pages of 4 cells, and both hold 10 tokens."""
    return pools.block_table([[3, 0, 4], [3, 0, 1], []], [10, 10, 0], 5 + free_pages, 4, width=4)


@pytest.mark.parametrize(("length", "kept", "copied"), [(9, 3, None), (8, 2, None), (7, 2, 0), (5, 2, 0), (4, 1, None)])
def test_a_row_cut_inside_a_shared_page_gets_its_own_copy(length, kept, copied):
    before = shared_rows(2)
    before.check()
    after, copies, ok = truncate(before, counts(length, INT_MAX, 0))
    assert ok
    after.check()
    assert held(after, 1) == held(before, 1)
    pages = held(after, 0)
    assert len(pages) == kept
    if copied is None:
        assert pages == held(before, 0)[:kept]
        assert real_copies(copies, 7) == []
    else:
        assert pages[:-1] == held(before, 0)[: kept - 1]
        assert pages[-1] not in held(before, 1)
        assert after.ref_counts[pages[-1]] == 1
        assert after.ref_counts[copied] == before.ref_counts[copied] - 1
        assert real_copies(copies, 7) == [(copied, pages[-1])]


def test_rows_cut_inside_the_same_page_part_ways():
    after, copies, ok = truncate(shared_rows(2), counts(6, 7, 0))
    assert ok
    after.check()
    (first, a), (other, b) = held(after, 0), held(after, 1)
    assert first == other == 3
    assert a != b
    sources = {dst: src for src, dst in real_copies(copies, 7)}
    assert {sources.get(a, a), sources.get(b, b)} == {0}


def test_a_row_cut_inside_a_retained_page_gets_its_own_copy():
    before = pools.block_table([[2, 0]], [7], 4, 4, width=3, retained=[1, 0, 1, 0])
    after, copies, ok = truncate(before, counts(6))
    assert ok
    after.check()
    (page,) = set(held(after, 0)) - {2}
    assert real_copies(copies, 4) == [(0, page)]
    np.testing.assert_array_equal(after.retained, before.retained)
    assert after.ref_counts[0] == 1


def test_a_copy_without_a_page_for_it_is_refused():
    before = pools.block_table([[1, 0], [1, 0]], [8, 8], 2, 4, width=3)
    after, copies, ok = truncate(before, counts(7, 8))
    assert not ok
    assert_same(after, before)
    assert real_copies(copies, 2) == []


@pytest.mark.parametrize("ended", [(0,), (1,), (0, 1), (0, 1, 2), ()])
def test_released_rows_are_empty_and_their_last_pages_free(ended):
    before = shared_rows(2)
    after = release(before, jnp.asarray([row in ended for row in range(3)]))
    after.check()
    still = {page for row in range(3) if row not in ended for page in held(before, row)}
    assert after.num_free == 7 - len(still)
    for row in range(3):
        if row in ended:
            assert after.lengths[row] == 0
            np.testing.assert_array_equal(np.asarray(after.pages)[row], 7)
        else:
            assert held(after, row) == held(before, row)


def test_released_pages_are_allocated_again():
    table = grown(3, 4, 3, 12, 0)
    assert not extend(table, counts(0, 1))[1]
    table, ok = extend(release(table, jnp.asarray([True, False])), counts(0, 12))
    assert ok
    table.check()
    assert sorted(held(table, 1)) == [0, 1, 2]


def test_a_retained_page_outlives_its_row():
    table = pools.block_table([[2, 0]], [7], 4, 4, width=3, retained=[0, 0, 1, 0])
    after = release(table, jnp.asarray([True]))
    after.check()
    assert after.num_free == 3
    assert after.ref_counts[2] == 1


# --- slots


@pytest.mark.parametrize("page_size", [1, 4, 5])
def test_a_slot_is_page_times_page_size_plus_offset(page_size):
    table = grown(9, page_size, 4, 2 * page_size + 1, 1)
    length = 2 * page_size + 1
    expected = [held(table, 0)[j // page_size] * page_size + j % page_size for j in range(length)]
    slots = jax.jit(BlockTable.slots)(table, jnp.arange(length), jnp.zeros(length, jnp.int32))
    assert slots.dtype == jnp.int32
    np.testing.assert_array_equal(slots, expected)


@pytest.mark.parametrize(
    ("position", "row"),
    [(-1, 0), (9, 0), (12, 0), (16, 0), (INT_MAX, 0), (-(2**31), 0), (0, 1), (0, -1), (0, 3), (8, -2), (0, INT_MAX)],
)
def test_a_slot_outside_the_rows_is_padding(position, row):
    table = grown(9, 4, 4, 9, 0, 6)
    assert jax.jit(BlockTable.slots)(table, counts(position), counts(row)) == 9 * 4


@pytest.mark.parametrize("garbage", pools.GARBAGE)
def test_slots_never_read_the_table_past_a_rows_last_block(garbage):
    table = pools.block_table([[3, 0], [1]], [5, 4], 5, 4, width=4, garbage=garbage)
    positions = jnp.arange(-2, 20)
    slots = jax.jit(BlockTable.slots)(table, positions[None], counts(0, 1)[:, None])
    assert slots.shape == (2, 22)
    np.testing.assert_array_equal(slots[0], [20, 20, 12, 13, 14, 15, 0, *[20] * 15])
    np.testing.assert_array_equal(slots[1], [20, 20, 4, 5, 6, 7, *[20] * 16])


@pytest.mark.parametrize(("positions", "rows"), [((), ()), ((6,), ()), ((), (3,)), ((2, 1), (3,)), ((0,), (1,))])
def test_positions_and_rows_broadcast(positions, rows):
    slots = jax.jit(BlockTable.slots)(
        BlockTable.create(3, 4, 2, 2), np.zeros(positions, np.int32), np.zeros(rows, np.int32)
    )
    assert slots.shape == np.broadcast_shapes(positions, rows)


# --- mistakes


MISTAKES = {
    "extend: too many rows": lambda table: table.extend(counts(1, 1, 1)),
    "extend: a scalar": lambda table: table.extend(jnp.int32(1)),
    "extend: rank 2": lambda table: table.extend(jnp.ones((2, 1), jnp.int32)),
    "extend: float": lambda table: table.extend(jnp.ones(2)),
    "extend: bool": lambda table: table.extend(jnp.ones(2, bool)),
    "truncate: too few rows": lambda table: table.truncate(counts(1)),
    "truncate: float": lambda table: table.truncate(jnp.ones(2)),
    "release: integers": lambda table: table.release(counts(0, 1)),
    "release: too many rows": lambda table: table.release(jnp.ones(3, bool)),
    "slots: float positions": lambda table: table.slots(jnp.ones(2), counts(0, 1)),
    "slots: float rows": lambda table: table.slots(counts(0, 1), jnp.ones(2)),
    "slots: shapes that do not broadcast": lambda table: table.slots(counts(0, 1), counts(0, 1, 1)),
    "step: too many rows": lambda table: table.step(counts(1, 1, 1)),
    "step: float": lambda table: table.step(jnp.ones(2), size=4),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_of_shape_or_type_raises_at_trace_time(mistake):
    with pytest.raises(ValueError, match=r"(?i)expected|broadcast"):
        jax.eval_shape(mistake, BlockTable.create(5, 4, 2, 3))


# --- check


def broken(table, **changes):
    """The table with single elements changed: field=(index, value)."""
    fields = {name: getattr(table, name).at[index].set(value) for name, (index, value) in changes.items()}
    return dataclasses.replace(table, **fields)


def sound():
    """Rows [3, 0] and [1] of a pool of 6; page 5 is retained; pages 2 and 4 are free."""
    return pools.block_table([[3, 0], [1]], [5, 4], 6, 4, width=3, retained=[0, 0, 0, 0, 0, 1])


def leak(table):
    return dataclasses.replace(table, num_free=table.num_free - 1)


BREAKS = {
    "a page neither free nor held": (leak, "(?i)free"),
    "a page both free and held": (lambda t: broken(t, free_pages=(0, 3)), "(?i)free"),
    "a page free twice": (lambda t: broken(t, free_pages=(0, t.free_pages[1])), "(?i)free"),
    "a free page that does not exist": (lambda t: broken(t, free_pages=(0, 6)), "(?i)free"),
    "a negative number of free pages": (lambda t: dataclasses.replace(t, num_free=jnp.int32(-1)), "(?i)free"),
    "a count too high": (lambda t: broken(t, ref_counts=(3, 2)), "(?i)count|ref"),
    "a count too low on a shared page": (lambda t: broken(t, pages=((1, 0), 3)), "(?i)count|ref|hold|held"),
    "a retained page without its count": (lambda t: broken(t, retained=(3, 1)), "(?i)count|ref|retain"),
    "a negative retained count": (lambda t: broken(t, retained=(5, -1), ref_counts=(5, -1)), "(?i)count|ref|retain"),
    "a row that reads a free page": (lambda t: broken(t, pages=((1, 0), 2)), "(?i)free|hold|held|count"),
    "a row that reads no page": (lambda t: broken(t, pages=((0, 1), 6)), "(?i)page"),
    "a row that reads page -1": (lambda t: broken(t, pages=((0, 1), -1)), "(?i)page"),
    "a row longer than its pages": (lambda t: broken(t, lengths=(1, 5)), "(?i)page|length"),
    "a row longer than the table is wide": (lambda t: broken(t, lengths=(0, 13)), "(?i)page|length|block"),
    "a row of negative length": (lambda t: broken(t, lengths=(0, -1)), "(?i)length"),
}


def test_check_passes_a_sound_table():
    sound().check()
    shared_rows(2).check()


@pytest.mark.parametrize(("change", "name"), BREAKS.values(), ids=BREAKS)
def test_check_names_what_is_broken(change, name):
    with pytest.raises(ValueError, match=name):
        change(sound()).check()
