"""The cache: slots → scatter → pages, in place, and nothing else is touched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from grid import crossed

from paged_jax import BlockTable, PageCopies, PagedCache, layouts, paged_attention

LAYERS, PAGES, PAGE_SIZE, HEADS, DIM, V_DIM = 3, 6, 5, 2, 16, 24
PADDING = PAGES * PAGE_SIZE
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def noise(shape, dtype=jnp.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def filled(dtype=jnp.float32, *, layout="NHD", layers=LAYERS, pages=PAGES, page_size=PAGE_SIZE, seed=0):
    """A cache where every cell differs, so that any stray write shows."""
    shape = (layers, pages, page_size, HEADS)
    k, v = noise((*shape, DIM), seed=seed), noise((*shape, V_DIM), seed=seed + 1)
    if dtype not in pools.QUANTISED:
        return pools.cache_of(k.astype(dtype), v.astype(dtype), layout)
    (k, k_scale), (v, v_scale) = (pools.quantised(np.asarray(pool), np.dtype(dtype)) for pool in (k, v))
    return pools.cache_of(k, v, layout, k_scale, v_scale)


def tokens(count, dtype=jnp.float32, seed=7):
    return noise((count, HEADS, DIM), dtype, seed), noise((count, HEADS, V_DIM), dtype, seed + 1)


def written(cache, layer, k, v, slots):
    """What the pools [L, P, C, K, H] hold after a write: one token at a time, slots out of range dropped."""
    after = []
    for pool, new in zip(pools.contents(cache), (k, v), strict=True):
        pool = np.array(pool)
        for token, slot in zip(np.asarray(new), np.asarray(slots), strict=True):
            if 0 <= slot < pool.shape[1] * pool.shape[2]:
                pool[layer, slot // pool.shape[2], slot % pool.shape[2]] = token.astype(pool.dtype)
        after.append(pool)
    return after


def assert_pools(cache, k, v):
    for pool, expected in zip(pools.contents(cache), (k, v), strict=True):
        np.testing.assert_array_equal(pool, expected)


def assert_in_place(function, cache, *arguments):
    """Compiled with the cache donated, the program keeps the buffers and makes nothing as large as a layer's pool."""
    compiled = jax.jit(function, donate_argnums=0).lower(cache, *arguments).compile()
    assert pools.pool_copies(compiled.as_text(), cache) == []
    before = [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(cache)]
    after = compiled(cache, *arguments)
    assert [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(after)] == before
    assert cache.k.is_deleted()


write = jax.jit(PagedCache.write)
every_layout = pytest.mark.parametrize("layout", pools.LAYOUTS)


# --- create


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v_head_dim", [None, V_DIM])
def test_a_new_cache_is_one_pool_of_all_layers(dtype, v_head_dim):
    cache = PagedCache.create(LAYERS, PAGES, PAGE_SIZE, HEADS, DIM, dtype, v_head_dim=v_head_dim)
    assert cache.k.shape == (LAYERS, PAGES, PAGE_SIZE, HEADS, DIM)
    assert cache.v.shape == (LAYERS, PAGES, PAGE_SIZE, HEADS, v_head_dim or DIM)
    assert cache.k.dtype == cache.v.dtype == dtype
    assert cache.k_scale is None
    assert cache.v_scale is None
    assert (cache.layout, cache.page_size) == ("NHD", PAGE_SIZE)


def test_a_cache_is_bfloat16_unless_told():
    assert PagedCache.create(1, 2, 4, HEADS, DIM).k.dtype == jnp.bfloat16


SHAPES = {
    "NHD": ((LAYERS, PAGES, PAGE_SIZE, HEADS, DIM), (LAYERS, PAGES, PAGE_SIZE, HEADS, V_DIM)),
    "HND": ((LAYERS, PAGES, HEADS, PAGE_SIZE, DIM), (LAYERS, PAGES, HEADS, PAGE_SIZE, V_DIM)),
    "head_major": ((LAYERS, HEADS, PAGES, PAGE_SIZE, DIM), (LAYERS, HEADS, PAGES, PAGE_SIZE, V_DIM)),
    "vllm": ((LAYERS, PAGES, HEADS, DIM // 8, PAGE_SIZE, 8), (LAYERS, PAGES, HEADS, V_DIM, PAGE_SIZE)),
}


@pytest.mark.parametrize("layout", SHAPES)
def test_a_layout_orders_the_axes_in_memory_and_nothing_else(layout):
    cache = PagedCache.create(LAYERS, PAGES, PAGE_SIZE, HEADS, DIM, v_head_dim=V_DIM, layout=layout)
    assert (cache.k.shape, cache.v.shape) == SHAPES[layout]
    assert (cache.num_layers, cache.num_pages, cache.page_size) == (LAYERS, PAGES, PAGE_SIZE)
    assert (cache.num_kv_heads, cache.head_dim, cache.v_head_dim) == (HEADS, DIM, V_DIM)
    assert cache.layout == layout


@pytest.mark.parametrize(
    ("dtype", "pieces"), [(jnp.float32, (DIM // 4, PAGE_SIZE, 4)), (jnp.float16, (2, PAGE_SIZE, 8))]
)
def test_vllm_packs_16_bytes_of_k_together(dtype, pieces):
    assert PagedCache.create(1, 2, PAGE_SIZE, HEADS, DIM, dtype, layout="vllm").k.shape[3:] == pieces


def test_layout_and_page_size_are_static_and_pools_are_leaves():
    cache = filled()
    assert len(jax.tree.leaves(cache)) == 2
    assert jax.tree.map(lambda _: None, cache).page_size == PAGE_SIZE
    assert jax.jit(lambda cache: cache)(cache).layout == "NHD"


CANNOT_BE = {
    "page_size 0": lambda: PagedCache.create(1, 2, 0, HEADS, DIM),
    "no pages": lambda: PagedCache.create(1, 0, 4, HEADS, DIM),
    "head_dim True": lambda: PagedCache.create(1, 2, 4, HEADS, True),
    "v_head_dim 0": lambda: PagedCache.create(1, 2, 4, HEADS, DIM, v_head_dim=0),
    "slots beyond int32": lambda: PagedCache.create(1, 2**24, 2**8, HEADS, DIM),
    "an integer dtype": lambda: PagedCache.create(1, 2, 4, HEADS, DIM, jnp.int32),
    "vllm with head_dim 24 in int8": lambda: PagedCache.create(1, 2, 4, HEADS, 24, jnp.int8, layout="vllm"),
    "an unknown layout": lambda: PagedCache.create(1, 2, 4, HEADS, DIM, layout="nonsense"),
    "vllm with head_dim 20": lambda: PagedCache.create(1, 2, 4, HEADS, 20, layout="vllm"),
    "vllm with head_dim 18 in float32": lambda: PagedCache.create(1, 2, 4, HEADS, 18, jnp.float32, layout="vllm"),
    "bytes below 0": lambda: PagedCache.pages_for(-1, 1, 4, HEADS, DIM),
    "pages of 0 cells": lambda: PagedCache.pages_for(10**6, 1, 0, HEADS, DIM),
}


@pytest.mark.parametrize("mistake", CANNOT_BE.values(), ids=CANNOT_BE)
def test_a_cache_that_cannot_be_is_refused(mistake):
    with pytest.raises(ValueError, match=r"(?is)expected.*got"):
        mistake()


def test_only_k_is_packed_so_vllm_takes_any_head_dim_of_v():
    assert PagedCache.create(1, 2, 4, HEADS, DIM, v_head_dim=3, layout="vllm").v.shape == (1, 2, HEADS, 3, 4)


CONTRADICTIONS = {
    "another layout's axes": lambda cache: dataclasses.replace(cache, layout="HND"),
    "another layout's rank": lambda cache: dataclasses.replace(cache, layout="vllm"),
    "an unknown layout": lambda cache: dataclasses.replace(cache, layout="nonsense"),
    "another page size": lambda cache: dataclasses.replace(cache, page_size=PAGE_SIZE - 1),
    "fewer pages of V": lambda cache: dataclasses.replace(cache, v=cache.v[:, 1:]),
    "another number of heads in V": lambda cache: dataclasses.replace(cache, v=cache.v[..., :1, :]),
    "one layer of K": lambda cache: dataclasses.replace(cache, k=cache.k[0]),
    "an unknown dtype": lambda cache: dataclasses.replace(cache, k=cache.k.astype(jnp.int32)),
    "scales without need": lambda cache: dataclasses.replace(cache, k_scale=jnp.ones(cache.k.shape[:4])),
    "pieces of 8 bytes": lambda cache: dataclasses.replace(
        pools.cache_of(*pools.contents(cache), "vllm"), k=jnp.zeros((LAYERS, PAGES, HEADS, DIM // 2, PAGE_SIZE, 2))
    ),
}
USES = {
    "write": lambda cache: cache.write(0, *tokens(4), jnp.zeros(4, jnp.int32)),
    "read": lambda cache: cache.read(0, BlockTable.create(PAGES, PAGE_SIZE, 2, 3)),
    "copy_pages": lambda cache: cache.copy_pages(page_copies((0, 1))),
    "zero_pages": lambda cache: cache.zero_pages(jnp.zeros(PAGES, bool)),
    "convert": lambda cache: layouts.convert(cache, "HND"),
    "attention": lambda cache: paged_attention(
        jnp.zeros((2, 4, DIM)), cache, BlockTable.create(PAGES, PAGE_SIZE, 2, 3)
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("contradict", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_pools_that_contradict_their_layout_are_refused(contradict, use):
    with pytest.raises(ValueError, match=r"(?is)(cache|layout): expected.*got"):
        use(contradict(filled()))


# --- write


@pytest.mark.parametrize(("layer", "page_size", "layout"), crossed(range(LAYERS), [1, 4, 5], [*pools.LAYOUTS]))
def test_a_write_changes_its_cells_and_no_other(layer, page_size, layout):
    cache = filled(page_size=page_size, layout=layout)
    slots = jnp.asarray(np.random.default_rng(layer).permutation(PAGES * page_size)[:4], jnp.int32)
    k, v = tokens(4)
    after = write(cache, layer, k, v, slots)
    assert_pools(after, *written(cache, layer, k, v, slots))


@pytest.mark.parametrize(
    "slots",
    [
        (PADDING, 3, PADDING, PADDING),
        (-1, 3, -PADDING, -PADDING + 1),
        (-PAGE_SIZE, -(2**31), 2**31 - 1, PADDING + 1),
        (PADDING * LAYERS - 1, PADDING * 2, 0, PADDING - 1),
        (-1, -1, PADDING, PADDING),
    ],
    ids=["padding", "negative", "extremes", "inside another layer if layers were flat", "none live"],
)
@pytest.mark.parametrize("layer", [0, 1, LAYERS - 1])
@every_layout
def test_slots_out_of_range_are_dropped(layer, slots, layout):
    cache = filled(layout=layout)
    k, v = tokens(4)
    assert_pools(write(cache, layer, k, v, jnp.asarray(slots, jnp.int32)), *written(cache, layer, k, v, slots))


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [pytest.param("NHD", marks=pytest.mark.full), "vllm"])  # which packs by its dtype
def test_a_write_casts_to_the_caches_dtype(dtype, cache_dtype, layout):
    cache = filled(cache_dtype, layout=layout)
    k, v = tokens(4, dtype)
    slots = jnp.asarray([7, 0, PADDING, 29], jnp.int32)
    after = write(cache, 1, k, v, slots)
    assert after.k.dtype == after.v.dtype == cache_dtype
    assert_pools(after, *written(cache, 1, k, v, slots))


@every_layout
def test_a_write_of_no_tokens_changes_nothing(layout):
    cache = filled(layout=layout)
    assert_pools(write(cache, 0, *tokens(0), jnp.zeros(0, jnp.int32)), *pools.contents(cache))


def test_a_layer_may_be_traced_or_not():
    cache = filled()
    k, v = tokens(4)
    slots = jnp.asarray([7, 0, 12, 29], jnp.int32)
    expected = written(cache, 2, k, v, slots)
    assert_pools(cache.write(2, k, v, slots), *expected)
    assert_pools(cache.write(jnp.int32(2), k, v, slots), *expected)
    assert_pools(jax.jit(lambda cache: cache.write(2, k, v, slots))(cache), *expected)


def write_every_layer(cache, k, v, slots):
    def body(cache, inputs):
        layer, k, v = inputs
        return cache.write(layer, k, v, slots), None

    return jax.lax.scan(body, cache, (jnp.arange(cache.num_layers), k, v))[0]


@every_layout
def test_a_scan_over_layers_writes_each_layer(layout):
    cache = filled(layout=layout)
    k, v = noise((LAYERS, 4, HEADS, DIM), seed=3), noise((LAYERS, 4, HEADS, V_DIM), seed=4)
    slots = jnp.asarray([7, 0, -1, 29], jnp.int32)
    expected = cache
    for layer in range(LAYERS):
        expected = pools.cache_of(*written(expected, layer, k[layer], v[layer], slots))
    assert_pools(jax.jit(write_every_layer)(cache, k, v, slots), expected.k, expected.v)


# A pool far larger than the tokens makes any copy of it visible.
BIG_PAGES = 64


def write_one_layer(cache, k, v, slots):
    return cache.write(jnp.int32(1), k[1], v[1], slots)


WRITES = {"one layer": write_one_layer, "a scan over layers": write_every_layer}


@pytest.mark.parametrize(("dtype", "layout"), pools.WRITTEN_IN_PLACE_IN_LAYOUTS)
@pytest.mark.parametrize("writes", WRITES.values(), ids=WRITES)
def test_a_donated_write_keeps_the_buffers_and_copies_no_pool(writes, dtype, layout):
    k, v = (noise((LAYERS, 4, HEADS, dim), pools.of_tokens(dtype)) for dim in (DIM, V_DIM))
    slots = jnp.asarray([7, 0, 11, 29], jnp.int32)
    assert_in_place(writes, filled(dtype, pages=BIG_PAGES, layout=layout), k, v, slots)


@pytest.mark.xfail(jax.default_backend() == "cpu", reason="XLA widens a float8 array where a CPU updates part of it")
def test_a_donated_write_of_float8_copies_no_pool():
    cache = filled(jnp.float8_e4m3fn, pages=BIG_PAGES)
    assert_in_place(PagedCache.write, cache, 0, *tokens(4), jnp.asarray([7, 0, 11, 29], jnp.int32))


def test_the_search_for_copies_finds_one():
    cache = filled(pages=BIG_PAGES)
    hlo = jax.jit(lambda cache: (cache.k[1] + 1, cache.v)).lower(cache).compile().as_text()
    assert pools.pool_copies(hlo, cache)


def bad_write(cache, *, layer=0, k=(4, HEADS, DIM), v=(4, HEADS, V_DIM), slots=(4,), slot_dtype=jnp.int32):
    return cache.write(layer, jnp.zeros(k), jnp.zeros(v), jnp.zeros(slots, slot_dtype))


@pytest.mark.parametrize(
    "mistake",
    [
        {"k": (4, HEADS, DIM + 1)},
        {"v": (4, HEADS, DIM)},
        {"k": (4, HEADS + 1, DIM)},
        {"v": (4, 1, V_DIM)},
        {"k": (4, DIM)},
        {"k": (1, 4, HEADS, DIM)},
        {"v": (3, HEADS, V_DIM)},
        {"k": (1, HEADS, DIM)},
        {"slots": (5,)},
        {"slots": (1,)},
        {"slots": ()},
        {"slots": (4, 1)},
        {"slot_dtype": jnp.float32},
        {"slot_dtype": bool},
    ],
    ids=str,
)
def test_a_write_that_does_not_fit_says_what_was_expected(mistake):
    with pytest.raises(ValueError, match=r"(?is)expected.*got"):
        jax.eval_shape(lambda cache: bad_write(cache, **mistake), filled())


@pytest.mark.parametrize("layer", [jnp.float32(0), jnp.zeros(1, jnp.int32)], ids=["float", "rank 1"])
def test_a_layer_that_is_no_index_is_refused(layer):
    with pytest.raises(ValueError, match=r"(?i)layer"):
        bad_write(filled(), layer=layer)


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_that_the_cache_lacks_is_refused_or_traced_writes_nowhere(layer):
    cache = filled()
    for use in (
        lambda: bad_write(cache, layer=layer),
        lambda: cache.read(layer, BlockTable.create(PAGES, PAGE_SIZE, 2, 3)),
    ):
        with pytest.raises(ValueError, match=rf"layer: expected an int in \[0, {LAYERS}\), got {layer}"):
            use()
    assert_pools(write(cache, jnp.int32(layer), *tokens(4), jnp.arange(4)), cache.k, cache.v)


# --- read


@pytest.mark.parametrize("poison", pools.POISONS, ids=str)
@pytest.mark.parametrize("garbage", pools.GARBAGE)
@every_layout
def test_a_read_gives_the_rows_and_zero_past_their_ends(poison, garbage, layout):
    where = {"layout": layout, "layers": 2, "layer": 1, "width": 4}
    pool = pools.build([0, 1, 9, 10, 11], page_size=5, v_head_dim=V_DIM, poison=poison, garbage=garbage, **where)
    k, v = jax.jit(PagedCache.read)(pool.cache, 1, pool.table)
    for dense, rows in ((k, pool.k_rows), (v, pool.v_rows)):
        assert dense.shape == (5, 4 * 5, *rows[0].shape[1:])
        for r, row in enumerate(rows):
            np.testing.assert_array_equal(dense[r, : len(row)], row)
            np.testing.assert_array_equal(dense[r, len(row) :], 0)


@jax.jit
def write_and_read(cache, table, k, v, positions, rows):
    cache = cache.write(1, k, v, table.slots(positions, rows))
    return cache, cache.read(1, table)


@pytest.mark.parametrize(("dtype", "page_size", "layout"), crossed(DTYPES, [1, 4, 5, 7], [*pools.LAYOUTS]))
def test_what_is_written_through_slots_is_read_back(dtype, page_size, layout):
    lengths = np.asarray([11, 0, 4])
    table, ok = BlockTable.create(16, page_size, 3, 11).extend(jnp.asarray(lengths, jnp.int32))
    assert ok
    cache = PagedCache.create(2, 16, page_size, HEADS, DIM, dtype, v_head_dim=V_DIM, layout=layout)
    rows = np.repeat(np.arange(3), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    order = np.random.default_rng(0).permutation(len(rows))
    k, v = tokens(len(rows), dtype)
    cache, read = write_and_read(cache, table, k[order], v[order], positions[order], rows[order])
    for dense, expected in zip(map(np.asarray, read), (k, v), strict=True):
        assert dense.dtype == dtype
        np.testing.assert_array_equal(dense[rows, positions], expected)
        assert np.count_nonzero(dense) == np.count_nonzero(expected)
    assert all(np.count_nonzero(pool[0]) == 0 for pool in pools.contents(cache))


# --- copy_pages


copy_pages = jax.jit(PagedCache.copy_pages)


def page_copies(*pairs):
    src, dst = zip(*pairs, strict=True)
    return PageCopies(src=jnp.asarray(src, jnp.int32), dst=jnp.asarray(dst, jnp.int32))


@pytest.mark.parametrize(
    "pairs",
    [
        [(2, 4)],
        [(PAGES, PAGES), (2, 4), (PAGES, PAGES)],
        [(0, 5), (PAGES, PAGES), (5 - 1, 1)],
        [(3, 0), (3, 1), (3, 5)],
        [(PAGES, PAGES), (PAGES, PAGES)],
    ],
    ids=["one", "one amid padding", "first and last", "one page to three", "none"],
)
@every_layout
def test_page_copies_copy_whole_pages_of_every_layer(pairs, layout):
    cache = filled(layout=layout)
    k, v = (np.array(pool) for pool in pools.contents(cache))
    for src, dst in pairs:
        if src < PAGES:
            k[:, dst], v[:, dst] = k[:, src], v[:, src]
    assert_pools(copy_pages(cache, page_copies(*pairs)), k, v)


@pytest.mark.parametrize(("dtype", "layout"), [*((jnp.float32, layout) for layout in pools.LAYOUTS), (jnp.int8, "HND")])
def test_donated_page_copies_keep_the_buffers_and_copy_no_pool(dtype, layout):
    copies = page_copies((2, 4), (BIG_PAGES, BIG_PAGES), (1, 3))
    assert_in_place(PagedCache.copy_pages, filled(dtype, pages=BIG_PAGES, layout=layout), copies)


@pytest.mark.parametrize("pair", [(-1, 2), (2, -1), (PAGES + 1, 2), (2, 2**31 - 1)], ids=str)
def test_copies_of_pages_that_are_none_do_nothing(pair):
    cache = filled()
    assert_pools(copy_pages(cache, page_copies(pair, (0, PAGES))), cache.k, cache.v)


@pytest.mark.parametrize(
    ("src", "dst"), [([5, 6], [1]), ([[1]], [[2]]), ([1.0], [2.0]), (1, 2)], ids=["sizes", "rank 2", "floats", "rank 0"]
)
def test_copies_that_are_no_pairs_are_refused(src, dst):
    with pytest.raises(ValueError, match=r"copies.*expected.*got"):
        filled().copy_pages(PageCopies(jnp.asarray(src), jnp.asarray(dst)))


def test_page_copies_trace_in_scan():
    cache = filled()

    def body(cache, copies):
        return cache.copy_pages(copies), None

    pairs = [(2, 4), (4, 5), (PAGES, PAGES)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(page_copies(pair) for pair in pairs))
    after, _ = jax.jit(lambda cache: jax.lax.scan(body, cache, stacked))(cache)
    for src in (4, 5):
        np.testing.assert_array_equal(after.k[:, src], cache.k[:, 2])
        np.testing.assert_array_equal(after.v[:, src], cache.v[:, 2])


def test_the_copies_of_a_truncation_give_the_row_its_tokens():
    """Two rows share their pages; one is cut inside a page, then writes on: the other still reads what it read."""
    pool = pools.build([10, 10], page_size=4, v_head_dim=V_DIM, width=4, shared=(0, 1, 2))
    table, copies, ok = jax.jit(BlockTable.truncate)(pool.table, jnp.asarray([10, 6], jnp.int32))
    assert ok
    cache = copy_pages(pool.cache, copies)
    table, step, ok = jax.jit(BlockTable.step)(table, jnp.asarray([0, 1], jnp.int32))
    assert ok
    cache = write(cache, 0, *tokens(2), step.slots)
    k, v = map(np.asarray, jax.jit(PagedCache.read)(cache, 0, table))
    np.testing.assert_array_equal(k[0, :10], pool.k_rows[0])
    np.testing.assert_array_equal(v[0, :10], pool.v_rows[0])
    np.testing.assert_array_equal(k[1, :6], pool.k_rows[1][:6])
    np.testing.assert_array_equal(k[1, 6], tokens(2)[0][1])
    np.testing.assert_array_equal(v[1, 6], tokens(2)[1][1])


# --- zero_pages


@pytest.mark.parametrize("marked", [[], [0], [PAGES - 1, 2], range(PAGES)], ids=["none", "first", "two", "all"])
@every_layout
def test_the_marked_pages_become_zero_in_every_layer(marked, layout):
    cache = filled(layout=layout)
    k, v = (np.array(pool) for pool in pools.contents(cache))
    marks = np.zeros(PAGES, bool)
    marks[list(marked)] = True
    k[:, marks], v[:, marks] = 0, 0
    assert_pools(jax.jit(PagedCache.zero_pages)(cache, marks), k, v)


@every_layout
def test_zeroing_donated_pages_keeps_the_buffers_and_copies_no_pool(layout):
    assert_in_place(PagedCache.zero_pages, filled(pages=BIG_PAGES, layout=layout), jnp.arange(BIG_PAGES) % 3 == 1)


@pytest.mark.parametrize(
    "marks", [jnp.zeros(PAGES + 1, bool), jnp.zeros((1, PAGES), bool), jnp.zeros(PAGES, int)], ids=str
)
def test_marks_that_do_not_fit_the_pages_are_refused(marks):
    with pytest.raises(ValueError, match=rf"pages: expected bool\[{PAGES}\], got"):
        filled().zero_pages(marks)
