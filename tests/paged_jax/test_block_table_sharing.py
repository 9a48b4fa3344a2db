"""Pages with several holders: fork, adopt, retain and drop, at their boundaries and with what they must refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from tables import INT_MAX, assert_same, counts, extend, grown, held, real_copies, release, truncate

from paged_jax import BlockTable
from paged_jax.table_check import check_block_tables, check_query_lengths

fork = jax.jit(BlockTable.fork)
adopt = jax.jit(BlockTable.adopt)
retain = jax.jit(BlockTable.retain)
drop = jax.jit(BlockTable.drop)


def two_rows():
    """Rows of 10, 8, 0 and 0 tokens in 12 pages of 4, of which 7 are free."""
    return grown(12, 4, 4, 10, 8, 0, 0)


# --- fork


def test_a_child_shares_full_pages_and_gets_the_last_one_copied():
    before = two_rows()
    after, copies, ok = fork(before, counts(0), counts(2))
    assert ok
    after.check()
    np.testing.assert_array_equal(after.lengths, [10, 8, 10, 0])
    parent, child = held(after, 0), held(after, 2)
    assert parent == held(before, 0)
    assert child[:2] == parent[:2]
    assert real_copies(copies, 12) == [(parent[2], child[2])]
    assert after.ref_counts[jnp.asarray(parent + child[2:])].tolist() == [2, 2, 1, 1]
    assert after.num_free == before.num_free - 1


def test_a_child_of_full_pages_alone_needs_no_page():
    before = two_rows()
    after, copies, ok = fork(before, counts(1), counts(3))
    assert ok
    after.check()
    assert held(after, 3) == held(after, 1)
    assert real_copies(copies, 12) == []
    assert after.num_free == before.num_free


def test_several_children_of_one_parent_each_get_their_own_last_page():
    after, copies, ok = fork(two_rows(), counts(0, 0), counts(3, 2))
    assert ok
    after.check()
    last = [held(after, row)[2] for row in (0, 2, 3)]
    assert len(set(last)) == 3
    assert sorted(real_copies(copies, 12)) == sorted([(last[0], last[1]), (last[0], last[2])])


def test_a_forked_row_is_forked_again():
    table, _, _ = fork(two_rows(), counts(0), counts(2))
    table, copies, ok = fork(table, counts(2), counts(3))
    assert ok
    table.check()
    assert held(table, 3)[:2] == held(table, 0)[:2]
    assert real_copies(copies, 12) == [(held(table, 2)[2], held(table, 3)[2])]
    assert table.ref_counts[held(table, 0)[0]] == 3


def test_a_parent_is_read_as_it_was_before_the_call():
    after, copies, ok = fork(two_rows(), counts(1, 2), counts(2, 3))
    assert ok
    after.check()
    np.testing.assert_array_equal(after.lengths, [10, 8, 8, 0])
    assert real_copies(copies, 12) == []


def test_after_a_fork_rows_grow_apart():
    table, _, _ = fork(two_rows(), counts(0, 1), counts(2, 3))
    table, ok = extend(table, counts(3, 1, 5, 2))
    assert ok
    table.check()
    assert len({*held(table, 0)[2:], *held(table, 2)[2:]}) == 2 + 2
    assert held(table, 1)[2] != held(table, 3)[2]


@pytest.mark.parametrize(
    ("parents", "children"),
    [
        ((-1,), (2,)),
        ((0,), (-1,)),
        ((4,), (2,)),
        ((0,), (4,)),
        ((0, 1), (4, INT_MAX)),
        ((), ()),
        ((2,), (2,)),
        ((9,), (0,)),
    ],
)
def test_entries_outside_the_table_and_empty_parents_start_nothing(parents, children):
    before = two_rows()
    after, copies, ok = fork(before, counts(*parents), counts(*children))
    assert ok
    assert_same(after, before)
    assert copies.src.shape == copies.dst.shape == (len(parents),)
    assert real_copies(copies, 12) == []


REFUSED_FORKS = {
    "onto a live row": ((0,), (1,)),
    "onto itself": ((0,), (0,)),
    "two onto one row": ((0, 1), (2, 2)),
    "one good, one onto a live row": ((1, 1), (2, 0)),
    "one outside, two onto one row": ((9, 0, 1), (0, 2, 2)),
}


@pytest.mark.parametrize(("parents", "children"), REFUSED_FORKS.values(), ids=REFUSED_FORKS)
def test_a_refused_fork_changes_nothing(parents, children):
    before = two_rows()
    after, copies, ok = fork(before, counts(*parents), counts(*children))
    assert not ok
    assert_same(after, before)
    assert real_copies(copies, 12) == []


@pytest.mark.parametrize(("num_pages", "granted"), [(6, False), (7, True)])
def test_a_fork_needs_a_free_page_for_each_copy(num_pages, granted):
    before = grown(num_pages, 4, 4, 10, 8, 0, 0)
    after, copies, ok = fork(before, counts(0, 0), counts(2, 3))
    assert ok == granted
    after.check()
    assert len(real_copies(copies, num_pages)) == (2 if granted else 0)
    if not granted:
        assert_same(after, before)
        assert fork(before, counts(0, 1), counts(2, 3))[2]


def test_a_released_parent_leaves_its_child_whole():
    table, _, _ = fork(two_rows(), counts(0), counts(2))
    child = held(table, 2)
    table = release(table, jnp.asarray([True, False, False, False]))
    table.check()
    assert held(table, 2) == child
    assert table.num_free == 12 - 3 - 2


def test_a_truncated_child_gets_its_own_copy_of_a_shared_page():
    table, _, _ = fork(two_rows(), counts(1), counts(2))
    table, copies, ok = truncate(table, counts(10, 8, 7, 0))
    assert ok
    table.check()
    assert real_copies(copies, 12) == [(held(table, 1)[1], held(table, 2)[1])]


# --- adopt


def test_a_row_starts_on_shared_pages():
    before = two_rows()
    first, second = held(before, 0)[:2]
    after, ok = adopt(before, counts(3), counts(first, second, 12)[None], counts(8))
    assert ok
    after.check()
    assert held(after, 3) == [first, second]
    assert after.lengths[3] == 8
    assert after.num_free == before.num_free
    assert after.ref_counts[first] == 2


def test_rows_adopt_the_same_pages_and_grow_apart():
    before = two_rows()
    pages = jnp.asarray([held(before, 1), held(before, 1)])
    table, ok = adopt(before, counts(2, 3), pages, counts(8, 4))
    assert ok
    table, ok = extend(table, counts(0, 0, 1, 1))
    assert ok
    table.check()
    assert held(table, 2)[:2] == held(before, 1)
    assert held(table, 3)[0] == held(before, 1)[0]
    assert held(table, 2)[2] != held(table, 3)[1]


@pytest.mark.parametrize("behind", [-1, 12, INT_MAX, -(2**31), "free", "twice"])
def test_pages_behind_a_rows_tokens_are_not_read(behind):
    before = two_rows()
    first = held(before, 0)[0]
    behind = {"free": int(before.free_pages[0]), "twice": first}.get(behind, behind)
    after, ok = adopt(before, counts(2), counts(first, behind)[None], counts(4))
    assert ok
    after.check()
    assert held(after, 2) == [first]


def test_more_columns_than_a_row_has_blocks_are_fine_while_unused():
    before = two_rows()
    pages = [*held(before, 1), 12, 12, 12, 12, 12]
    after, ok = adopt(before, counts(2), counts(*pages)[None], counts(8))
    assert ok
    after.check()
    assert held(after, 2) == held(before, 1)


@pytest.mark.parametrize(
    ("rows", "num_tokens"), [((-1,), (8,)), ((4,), (8,)), ((INT_MAX,), (-1,)), ((2,), (0,)), ((9,), (5,))]
)
def test_adopting_outside_the_table_or_nothing_starts_nothing(rows, num_tokens):
    before = two_rows()
    after, ok = adopt(before, counts(*rows), counts(*held(before, 1))[None], counts(*num_tokens))
    assert ok
    assert_same(after, before)


@pytest.mark.parametrize("width", [0, 2])
def test_no_rows_and_no_pages_are_fine(width):
    before = two_rows()
    after, ok = adopt(before, counts(), jnp.zeros((0, width), jnp.int32), counts())
    assert ok
    assert_same(after, before)


def refused_adoptions():
    """name → rows, pages, num_tokens; of `two_rows`, plus one page that no row holds but is retained."""
    table = two_rows()
    a, b, c = held(table, 0)
    free = int(table.free_pages[0])
    return {
        "a live row": ((1,), [[a, b]], (8,)),
        "a row twice": ((2, 2), [[a, b], [a, b]], (8, 4)),
        "a row twice, both with nothing": ((2, 2), [[a, b], [a, b]], (0, 0)),
        "a free page": ((2,), [[a, free]], (8,)),
        "padding": ((2,), [[a, 12]], (8,)),
        "page -1": ((2,), [[a, -1]], (8,)),
        "a huge page": ((2,), [[a, INT_MAX]], (8,)),
        "a page twice in one row": ((2,), [[a, b, a]], (12,)),
        "no multiple of the page size": ((2,), [[a, b]], (7,)),
        "more tokens than the pages hold": ((2,), [[a, b]], (12,)),
        "more blocks than a row may have": ((2,), [[a, b, c, *held(table, 1)]], (20,)),
        "a negative number of tokens": ((2,), [[a, b]], (-4,)),
        "the largest number": ((2,), [[a, b]], (INT_MAX - 3,)),
        "one good row, one free page": ((2, 3), [[a, b], [a, free]], (8, 8)),
    }


REFUSED_ADOPTIONS = list(refused_adoptions())


@pytest.mark.parametrize("name", REFUSED_ADOPTIONS)
def test_a_refused_adoption_changes_nothing(name):
    before = two_rows()
    rows, pages, num_tokens = refused_adoptions()[name]
    after, ok = adopt(before, counts(*rows), jnp.asarray(pages, jnp.int32), counts(*num_tokens))
    assert not ok
    assert_same(after, before)


# --- retain and drop


def test_a_retained_page_outlives_its_rows_and_can_be_adopted():
    before = two_rows()
    pages = held(before, 1)
    table = release(retain(before, counts(*pages)), jnp.ones(4, bool))
    table.check()
    assert table.num_free == 10
    table, ok = adopt(table, counts(0), counts(*pages)[None], counts(8))
    assert ok
    table.check()
    assert held(table, 0) == pages
    table = release(drop(table, counts(*pages)), jnp.ones(4, bool))
    table.check()
    assert table.num_free == 12


def test_every_reference_is_given_back_one_by_one():
    table = two_rows()
    (page, *_) = held(table, 0)
    table = retain(table, counts(page, page, page))
    assert table.retained[page] == 3
    assert table.ref_counts[page] == 4
    table = release(drop(table, counts(page)), jnp.ones(4, bool))
    table.check()
    assert table.num_free == 11
    table = drop(table, counts(page, 12, page))
    table.check()
    assert table.num_free == 12


@pytest.mark.parametrize("times", [1, 2, 5])
def test_dropping_never_takes_a_rows_reference(times):
    before = two_rows()
    page = held(before, 0)[0]
    after = drop(retain(before, counts(page)), counts(*[page] * times))
    assert_same(after, before)
    assert_same(drop(before, counts(*[page] * times)), before)


@pytest.mark.parametrize("pages", [(), (-1,), (12,), (INT_MAX,), (-(2**31),), (-12,), "free"])
def test_free_pages_and_entries_outside_the_pool_are_passed_over(pages):
    before = two_rows()
    pages = np.asarray(before.free_pages)[:3].tolist() if pages == "free" else pages
    assert_same(retain(before, counts(*pages)), before)
    assert_same(drop(before, counts(*pages)), before)


def test_a_page_dropped_twice_in_one_call_is_free_once():
    table = retain(two_rows(), counts(*held(two_rows(), 0)))
    table = release(table, jnp.ones(4, bool))
    table = drop(table, counts(*(held(two_rows(), 0) * 2)))
    table.check()
    assert table.num_free == 12


# --- taken_since


def test_pages_taken_since_are_those_free_before_and_held_now():
    before = two_rows()
    table, ok = extend(before, counts(3, 0, 0, 0))
    table, copies, _ = fork(table, counts(0), counts(2))
    assert ok
    taken = np.flatnonzero(jax.jit(BlockTable.taken_since)(table, before)).tolist()
    assert sorted(taken) == sorted([held(table, 0)[3], *(dst for _, dst in real_copies(copies, 12))])
    assert not table.taken_since(table).any()
    assert not release(table, jnp.ones(4, bool)).taken_since(before).any()


def test_a_table_of_another_pool_is_no_earlier_state():
    with pytest.raises(ValueError, match=r"expected .*12.* got .*11"):
        two_rows().taken_since(grown(11, 4, 4, 1))


# --- everything at once, inside one compiled loop


def test_rows_are_forked_grown_cut_and_released_inside_one_scan():
    """Beam search of one row into two: fork, grow, cut the fork back, end it. The pool never runs dry."""

    @jax.jit
    def run(table):
        def turn(table, _):
            table, _, forked = table.fork(counts(0), counts(2))
            table, ok = table.extend(counts(1, 0, 1, 0))
            table, _, cut = table.truncate(counts(INT_MAX, 8, 3, 0))
            table = table.retain(table.pages[2, :1]).release(jnp.asarray([False, False, True, False]))
            table, adopted = table.adopt(counts(3), table.pages[1:2], counts(8))
            table = table.drop(table.pages[0]).release(jnp.asarray([False, False, False, True]))
            return table, jnp.stack([forked, ok, cut, adopted])

        return jax.lax.scan(turn, table, length=6)

    table, granted = run(two_rows())
    assert granted.all()
    table = drop(table, jnp.arange(12))
    table.check()
    np.testing.assert_array_equal(table.lengths, [16, 8, 0, 0])
    assert table.num_free == 12 - 4 - 2


def test_a_while_loop_forks_until_the_pool_is_empty():
    @jax.jit
    def run(table):
        def body(state):
            table, child, _ = state
            table, _, ok = table.fork(counts(0), child[None])
            return table, child + 1, ok

        return jax.lax.while_loop(lambda state: state[2], body, (table, jnp.int32(1), jnp.asarray(True)))

    table, child, ok = run(grown(5, 4, 2, 6, *[0] * 9))
    assert not ok
    table.check()
    assert child == 1 + 3 + 1
    assert table.num_free == 0


def test_tables_are_batched_by_vmap():
    tables = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), two_rows())
    forked, _, ok = jax.jit(jax.vmap(BlockTable.fork))(tables, np.array([[0], [0]]), np.array([[2], [1]]))
    np.testing.assert_array_equal(ok, [True, False])
    np.testing.assert_array_equal(forked.lengths, [[10, 8, 10, 0], [10, 8, 0, 0]])


# --- mistakes


MISTAKES = {
    "fork: unequal": lambda table: table.fork(counts(0), counts(1, 2)),
    "fork: scalars": lambda table: table.fork(jnp.int32(0), jnp.int32(1)),
    "fork: float": lambda table: table.fork(jnp.zeros(1), counts(1)),
    "adopt: one row of pages, no axis": lambda table: table.adopt(counts(0), counts(1, 2), counts(8)),
    "adopt: unequal": lambda table: table.adopt(counts(0, 1), counts(1, 2)[None], counts(8)),
    "adopt: a scalar of tokens": lambda table: table.adopt(counts(0), counts(1)[None], jnp.int32(4)),
    "adopt: float": lambda table: table.adopt(counts(0), jnp.zeros((1, 2)), counts(4)),
    "retain: rank 2": lambda table: table.retain(counts(1)[None]),
    "retain: bool": lambda table: table.retain(jnp.ones(5, bool)),
    "drop: a scalar": lambda table: table.drop(jnp.int32(1)),
    "drop: float": lambda table: table.drop(jnp.ones(1)),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_of_shape_or_type_raises_at_trace_time(mistake):
    with pytest.raises(ValueError, match=r"expected .* got"):
        jax.eval_shape(mistake, BlockTable.create(5, 4, 2, 3))


# --- host checks


def test_check_says_who_holds_a_page_whose_count_is_wrong():
    table = pools.block_table([[3, 0], [3]], [5, 4], 6, 4, width=3, retained=[0, 0, 0, 1, 0, 0])
    table.check()
    wrong = jax.tree.map(lambda leaf: leaf, table)
    object.__setattr__(wrong, "ref_counts", table.ref_counts.at[3].set(1))
    with pytest.raises(ValueError, match=r"page 3: .* 2 \+ 1, got 1.*row 0, block 0; row 1, block 0; 1 reference"):
        wrong.check()


def test_check_finds_a_page_that_stands_twice_in_one_row():
    table = pools.block_table([[3, 0, 3]], [12], 6, 4)
    with pytest.raises(ValueError, match=r"row 0, block 2: page 3"):
        table.check()


RAW_MISTAKES = {
    "a page past the pool": ([[3, 6], [1, 9]], [8, 4], r"row 0, block 1: .*\[0, 6\), got 6"),
    "page -1": ([[3, 0], [-1, 9]], [8, 4], r"row 1, block 0: .*got -1"),
    "a page twice": ([[3, 3], [1, 9]], [8, 4], r"row 0, block 1: page 3"),
    "a length past the table": ([[3, 0], [1, 9]], [8, 9], r"row 1: .*\[0, 8\], got 9"),
    "a negative length": ([[3, 0], [1, 9]], [-1, 4], r"row 0: .*got -1"),
    "a page past the pool, unsigned": ([[7, 9]], np.array([5], np.uint8), r"row 0, block 0: .*got 7"),
    "lengths that are no integers": ([[3, 0]], [4.0], "expected integer dtypes, got int64 and float64"),
    "pages that are no integers": ([[0.5, 1.0]], [4], "expected integer dtypes, got float64 and int64"),
    "too many lengths": ([[3, 0], [1, 9]], [8, 4, 0], r"\[B, M\], \[B\], got \(2, 2\), \(3,\)"),
}


@pytest.mark.parametrize(("pages", "lengths", "message"), RAW_MISTAKES.values(), ids=RAW_MISTAKES)
def test_a_raw_table_is_checked(pages, lengths, message):
    check_block_tables([[3, 0], [1, 9]], [8, 4], num_pages=6, page_size=4)
    check_block_tables([[3, -1], [1, 9]], np.array([4, 4], np.uint8), num_pages=6, page_size=4)
    with pytest.raises(ValueError, match=message):
        check_block_tables(pages, lengths, num_pages=6, page_size=4)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([2, -1, 0], r"row 1: expected a count of queries in \[0, 3\], got -1"),
        ([2, 4, 0], r"row 1: expected a count of queries in \[0, 3\], got 4"),
        ([3, 3, 1], "expected at most 6 tokens in all, got 7"),
        ([0, 2, 5, 5], r"shape \(3,\), not cumulative ones, got int64\[4\]"),
        ([1.0, 1.0, 0.0], "expected an integer count for each row"),
    ],
)
def test_query_lengths_that_do_not_fit_are_named(counts, message):
    check_query_lengths([2, 3, 0], [4, 3, 9], num_tokens=6)
    with pytest.raises(ValueError, match=message):
        check_query_lengths(counts, [4, 3, 9], num_tokens=6)
