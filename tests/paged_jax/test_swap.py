"""Swapped out and in again, a row holds what it held, bit for bit, wherever it comes to lie."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from tables import extend

from paged_jax import BlockTable, PagedCache, SwappedRows, swap_in, swap_out

LENGTHS = (9, 0, 12, 5)
SIZES = {"page_size": 4, "layers": 2, "layer": 1, "v_head_dim": 24, "head_dim": 32, "width": 5, "poison": pools.NOISE}
MAX_PAGES = 7


def pool(dtype=jnp.float32, layout="NHD", **other):
    return pools.build(LENGTHS, dtype=dtype, layout=layout, **(SIZES | other))


def rows(*numbers):
    return jnp.asarray(numbers, jnp.int32)


def bits(cache, table, row):
    """All that a row holds, in every layer: its cells and their scales."""
    length, pages = int(table.lengths[row]), np.asarray(table.pages[row])
    held = []
    for name in cache.page_axes:
        array = getattr(cache, name)
        array = pools.nhd(array, cache.layout, name) if name in "kv" else np.asarray(array)
        pages_of_row = pages[: -(-length // cache.page_size)]
        cells = array[:, pages_of_row].reshape(array.shape[0], -1, *array.shape[3:])[:, :length]
        held.append(cells.tobytes())
    return held


def overwritten(cache, pages):
    """Other rows have written all over these pages."""
    pools = {}
    for name, axis in cache.page_axes.items():
        pool = np.array(getattr(cache, name))
        pool[(*[slice(None)] * axis, pages)] = 7
        pools[name] = jax.device_put(pool)
    return dataclasses.replace(cache, **pools)


def leaves(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_no_rows_leave_and_come_back():
    held = pool(jnp.float32, "NHD")
    table, swapped, ok = swap_out(held.table, held.cache, rows(), max_pages=MAX_PAGES)
    assert ok
    assert leaves(table) == leaves(held.table)
    expected = leaves(held.cache)
    table, cache, ok = swap_in(table, held.cache, swapped, rows())
    assert ok
    assert leaves((table, cache)) == [*leaves(held.table), *expected]


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (jnp.float32, "NHD"),
        (jnp.bfloat16, "HND"),
        pytest.param(jnp.float16, "head_major", marks=pytest.mark.full),
        (jnp.int8, "vllm"),
        (jnp.float8_e4m3fn, "head_major"),
        pytest.param(jnp.float8_e5m2, "NHD", marks=pytest.mark.full),
    ],
)
def test_rows_come_back_bit_for_bit_and_others_stay(dtype, layout):
    """Row 3 and row 0 leave, others write over their pages, and they come back as rows 1 and 3."""
    held = pool(dtype, layout)
    before = [bits(held.cache, held.table, row) for row in range(4)]
    table, swapped, ok = swap_out(held.table, held.cache, rows(3, 0), max_pages=MAX_PAGES)
    assert ok
    table.check()
    np.testing.assert_array_equal(table.lengths, [0, 0, 12, 0])
    np.testing.assert_array_equal(swapped.lengths, [5, 9])
    assert swapped.pool.num_pages == MAX_PAGES
    cache = overwritten(held.cache, np.asarray(table.ref_counts) == 0)
    table, cache, ok = swap_in(table, cache, swapped, rows(1, 3))
    assert ok
    table.check()
    np.testing.assert_array_equal(table.lengths, [0, 5, 12, 9])
    after = [bits(cache, table, row) for row in range(4)]
    assert after == [before[1], before[3], before[2], before[0]]


def test_what_is_swapped_out_lies_in_host_memory():
    held = pool(jnp.int8)
    _, swapped, _ = swap_out(held.table, held.cache, rows(0), max_pages=3)
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    for leaf in jax.tree.leaves(swapped.pool):
        assert isinstance(leaf, np.ndarray) or leaf.sharding.memory_kind == "pinned_host"
        assert isinstance(leaf, np.ndarray) == ("pinned_host" not in kinds)


def test_a_shared_page_is_copied_and_stays_with_its_other_holders():
    held = pool(shared=(2, 0, 2))
    before = [bits(held.cache, held.table, row) for row in range(4)]
    retained = held.table.retain(held.table.pages[3, :1])  # as a prefix cache does
    table, swapped, ok = swap_out(retained, held.cache, rows(0, 3), max_pages=MAX_PAGES)
    assert ok
    table.check()
    assert bits(held.cache, table, 2) == before[2]
    assert int(table.ref_counts[held.table.pages[3, 0]]) == 1
    table, cache, ok = swap_in(table, held.cache, swapped, rows(0, 3))
    assert ok
    table.check()
    assert [bits(cache, table, row) for row in range(4)] == before
    assert not set(np.asarray(table.pages[0, :3]).tolist()) & set(np.asarray(table.pages[2, :3]).tolist())


@pytest.mark.parametrize(
    ("which", "max_pages"), [((0, 2), 5), ((2, 3, 2), MAX_PAGES), ((0,), 2)], ids=["too many", "twice", "too long"]
)
def test_a_refused_swap_out_changes_nothing(which, max_pages):
    held = pool()
    table, swapped, ok = swap_out(held.table, held.cache, rows(*which), max_pages=max_pages)
    assert not ok
    assert leaves(table) == leaves(held.table)
    np.testing.assert_array_equal(swapped.lengths, 0)


@pytest.mark.parametrize("case", ["no pages", "a live row", "twice", "a narrower table"])
def test_a_refused_swap_in_changes_nothing(case):
    held = pool()
    table, swapped, ok = swap_out(held.table, held.cache, rows(0, 2), max_pages=MAX_PAGES)
    assert ok
    target = {"a live row": rows(0, 3), "twice": rows(1, 1)}.get(case, rows(0, 2))
    if case == "no pages":
        table, ok = extend(table, rows(0, 4 * (int(table.num_free) - 5), 0, 0))
        assert ok
    if case == "a narrower table":
        table = BlockTable.create(table.num_pages, 4, 4, 2)
    before = leaves((table, held.cache))
    after, cache, ok = swap_in(table, held.cache, swapped, target)
    assert not ok
    assert leaves((after, cache)) == before


def test_entries_outside_the_rows_are_passed_over_and_can_come_later():
    held = pool()
    before = bits(held.cache, held.table, 2)
    table, swapped, ok = swap_out(held.table, held.cache, rows(-1, 2, 4, 0), max_pages=MAX_PAGES)
    assert ok
    np.testing.assert_array_equal(swapped.lengths, [0, 12, 0, 9])
    table, cache, ok = swap_in(table, held.cache, swapped, rows(9, 9, 9, 1))
    assert ok
    np.testing.assert_array_equal(table.lengths, [0, 9, 0, 5])
    table, cache, ok = swap_in(table, cache, swapped, rows(9, 2, 9, 9))
    assert ok
    table.check()
    np.testing.assert_array_equal(table.lengths, [0, 9, 12, 5])
    assert bits(cache, table, 2) == before


def test_rows_come_and_go_without_a_new_program():
    """Nor does what uses the cache need one, if that was committed to its device before."""
    programs = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: programs.append(event) if "backend_compile" in event else None
    )
    held = pool(jnp.bfloat16)
    use = jax.jit(lambda cache: cache.write(0, jnp.ones((1, 2, 32)), jnp.ones((1, 2, 24)), rows(2**31 - 1)))
    table, cache = jax.device_put((held.table, held.cache), jax.devices()[0])
    cache, counts = use(cache), []
    for row in map(rows, (0, 2, 3, 0, 1)):
        table, swapped, out = swap_out(table, cache, row, max_pages=4)
        table, cache, back = swap_in(table, use(cache), swapped, row)
        assert out & back
        counts.append(len(programs))
    assert counts[-1] == counts[0]
    np.testing.assert_array_equal(table.lengths, LENGTHS)


def test_a_swap_in_keeps_the_buffers_of_the_cache():
    held = pool(jnp.int8)
    table, swapped, _ = swap_out(held.table, held.cache, rows(2), max_pages=3)
    before = [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(held.cache)]
    _, cache, _ = swap_in(table, held.cache, swapped, rows(2))
    assert [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(cache)] == before
    assert held.cache.k.is_deleted()


OTHER_CACHES = {
    "layers": {"layers": 3},
    "page size": {"page_size": 5},
    "kv heads": {"num_kv_heads": 1},
    "head_dim": {"head_dim": 16},
    "dtype": {"dtype": jnp.int8},
    "layout": {"layout": "HND"},
}


@pytest.mark.parametrize("other", OTHER_CACHES.values(), ids=OTHER_CACHES)
def test_rows_of_another_kind_of_cache_are_refused(other):
    held, elsewhere = pool(), pool(**other)
    swapped = SwappedRows(elsewhere.cache, rows(4))
    with pytest.raises(ValueError, match=r"swapped: expected rows of a cache with 2 layers, pages of 4 .*, got"):
        swap_in(held.table, held.cache, swapped, rows(1))


def test_arguments_that_do_not_fit_say_what_was_expected():
    held = pool()
    for wrong, message in (
        ({"rows": jnp.zeros((2, 1), jnp.int32)}, "rows: expected a 1-D array, got"),
        ({"rows": jnp.zeros(2)}, "rows: expected an integer dtype, got"),
        ({"max_pages": 0}, "max_pages: expected a positive int, got 0"),
        ({"table": BlockTable.create(5, 4, 4, 5)}, "table: expected one for this cache's"),
        ({"cache": PagedCache.create(2, 5, 4, 2, 32)}, "table: expected one for this cache's 5 pages"),
    ):
        arguments = {"table": held.table, "cache": held.cache, "rows": rows(0), "max_pages": 3} | wrong
        with pytest.raises(ValueError, match=message):
            swap_out(**arguments)
    table, swapped, _ = swap_out(held.table, held.cache, rows(0, 2), max_pages=MAX_PAGES)
    with pytest.raises(ValueError, match="rows: expected one for each of 2 entries, got shape"):
        swap_in(table, held.cache, swapped, rows(0))
