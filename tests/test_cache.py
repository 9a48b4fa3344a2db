"""The cache: slots → scatter → pages, in place, and nothing else is touched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest

from paged_jax import BlockTable, PageCopies, PagedCache

LAYERS, PAGES, PAGE_SIZE, HEADS, DIM, V_DIM = 3, 6, 5, 2, 16, 24
PADDING = PAGES * PAGE_SIZE
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def noise(shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def filled(dtype=jnp.float32, *, layers=LAYERS, pages=PAGES, page_size=PAGE_SIZE, seed=0):
    """A cache where every cell differs, so that any stray write shows."""
    shape = (layers, pages, page_size, HEADS)
    return PagedCache(
        k=noise((*shape, DIM), dtype, seed),
        v=noise((*shape, V_DIM), dtype, seed + 1),
        k_scale=None,
        v_scale=None,
        layout="NHD",
        page_size=page_size,
    )


def tokens(count, dtype=jnp.float32, seed=7):
    return noise((count, HEADS, DIM), dtype, seed), noise((count, HEADS, V_DIM), dtype, seed + 1)


def written(cache, layer, k, v, slots):
    """What the pools hold after a write: plain numpy, one token at a time, slots out of range dropped."""
    after = []
    for pool, new in ((cache.k, k), (cache.v, v)):
        pool = np.array(pool)
        for token, slot in zip(np.asarray(new), np.asarray(slots), strict=True):
            if 0 <= slot < pool.shape[1] * pool.shape[2]:
                pool[layer, slot // pool.shape[2], slot % pool.shape[2]] = token.astype(pool.dtype)
        after.append(pool)
    return after


def assert_pools(cache, k, v):
    np.testing.assert_array_equal(cache.k, k)
    np.testing.assert_array_equal(cache.v, v)


write = jax.jit(PagedCache.write)


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


def test_layout_and_page_size_are_static_and_pools_are_leaves():
    cache = filled()
    assert len(jax.tree.leaves(cache)) == 2
    assert jax.tree.map(lambda _: None, cache).page_size == PAGE_SIZE
    assert jax.jit(lambda cache: cache)(cache).layout == "NHD"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v_head_dim", [None, V_DIM])
@pytest.mark.parametrize("excess", [-1, 0, 1])
@pytest.mark.parametrize("pages", [1, 2, 1000])
def test_pages_for_is_the_most_that_fit(dtype, v_head_dim, pages, excess):
    sizes = LAYERS, 1, PAGE_SIZE, HEADS, DIM, dtype
    one = jax.eval_shape(lambda: PagedCache.create(*sizes, v_head_dim=v_head_dim))
    one_page = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one))
    fitting = PagedCache.pages_for(
        pages * one_page + excess, LAYERS, PAGE_SIZE, HEADS, DIM, dtype, v_head_dim=v_head_dim
    )
    assert isinstance(fitting, int)
    assert fitting == (pages - 1 if excess < 0 else pages)


def test_pages_for_is_exact_beyond_32_bits():
    cell = 2 * 8 * 128 * 2
    assert PagedCache.pages_for(141 * 2**30, 32, 16, 8, 128) == 141 * 2**30 // (32 * 16 * cell)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: PagedCache.create(1, 2, 0, HEADS, DIM),
        lambda: PagedCache.create(1, 2, 4, HEADS, DIM, layout="nonsense"),
    ],
    ids=["page_size 0", "unknown layout"],
)
def test_a_cache_that_cannot_be_is_refused(mistake):
    with pytest.raises(ValueError, match=r"(?i)page_size|layout"):
        mistake()


# --- write


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("page_size", [1, 4, 5])
def test_a_write_changes_its_cells_and_no_other(layer, page_size):
    cache = filled(page_size=page_size)
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
def test_slots_out_of_range_are_dropped(layer, slots):
    cache = filled()
    k, v = tokens(4)
    assert_pools(write(cache, layer, k, v, jnp.asarray(slots, jnp.int32)), *written(cache, layer, k, v, slots))


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_write_casts_to_the_caches_dtype(dtype, cache_dtype):
    cache = filled(cache_dtype)
    k, v = tokens(4, dtype)
    slots = jnp.asarray([7, 0, PADDING, 29], jnp.int32)
    after = write(cache, 1, k, v, slots)
    assert after.k.dtype == after.v.dtype == cache_dtype
    assert_pools(after, *written(cache, 1, k, v, slots))


def test_a_write_of_no_tokens_changes_nothing():
    cache = filled()
    assert_pools(write(cache, 0, *tokens(0), jnp.zeros(0, jnp.int32)), cache.k, cache.v)


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

    return jax.lax.scan(body, cache, (jnp.arange(cache.k.shape[0]), k, v))[0]


def test_a_scan_over_layers_writes_each_layer():
    cache = filled()
    k, v = noise((LAYERS, 4, HEADS, DIM), seed=3), noise((LAYERS, 4, HEADS, V_DIM), seed=4)
    slots = jnp.asarray([7, 0, -1, 29], jnp.int32)
    expected = cache
    for layer in range(LAYERS):
        new_k, new_v = written(expected, layer, k[layer], v[layer], slots)
        expected = dataclasses.replace(expected, k=jnp.asarray(new_k), v=jnp.asarray(new_v))
    assert_pools(jax.jit(write_every_layer)(cache, k, v, slots), expected.k, expected.v)


# A pool far larger than the tokens makes any copy of it visible.
BIG_PAGES = 64


def write_one_layer(cache, k, v, slots):
    return cache.write(jnp.int32(1), k[1], v[1], slots)


WRITES = {"one layer": write_one_layer, "a scan over layers": write_every_layer}


@pytest.mark.parametrize("dtype", pools.WRITTEN_IN_PLACE)
@pytest.mark.parametrize("writes", WRITES.values(), ids=WRITES)
def test_a_donated_write_keeps_the_buffers_and_copies_no_pool(writes, dtype):
    cache = filled(dtype, pages=BIG_PAGES)
    k, v = noise((LAYERS, 4, HEADS, DIM), dtype), noise((LAYERS, 4, HEADS, V_DIM), dtype)
    slots = jnp.asarray([7, 0, 11, 29], jnp.int32)
    compiled = jax.jit(writes, donate_argnums=0).lower(cache, k, v, slots).compile()
    assert pools.pool_copies(compiled.as_text(), cache) == []

    before = [pool.unsafe_buffer_pointer() for pool in (cache.k, cache.v)]
    after = compiled(cache, k, v, slots)
    assert [pool.unsafe_buffer_pointer() for pool in (after.k, after.v)] == before
    assert cache.k.is_deleted()


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


# --- read


@pytest.mark.parametrize("poison", pools.POISONS, ids=str)
@pytest.mark.parametrize("garbage", pools.GARBAGE)
def test_a_read_gives_the_rows_and_zero_past_their_ends(poison, garbage):
    pool = pools.build(
        [0, 1, 9, 10, 11], page_size=5, v_head_dim=V_DIM, layers=2, layer=1, width=4, poison=poison, garbage=garbage
    )
    k, v = jax.jit(PagedCache.read)(pool.cache, 1, pool.table)
    for dense, rows in ((k, pool.k_rows), (v, pool.v_rows)):
        assert dense.shape == (5, 4 * 5, *rows[0].shape[1:])
        for r, row in enumerate(rows):
            np.testing.assert_array_equal(dense[r, : len(row)], row)
            np.testing.assert_array_equal(dense[r, len(row) :], 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4, 5, 7])
def test_what_is_written_through_slots_is_read_back(dtype, page_size):
    lengths = np.asarray([11, 0, 4])
    table, ok = BlockTable.create(16, page_size, 3, 11).extend(jnp.asarray(lengths, jnp.int32))
    assert ok
    cache = PagedCache.create(2, 16, page_size, HEADS, DIM, dtype, v_head_dim=V_DIM)
    rows = np.repeat(np.arange(3), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    order = np.random.default_rng(0).permutation(len(rows))
    k, v = tokens(len(rows), dtype)
    cache = cache.write(1, k[order], v[order], table.slots(jnp.asarray(positions[order]), jnp.asarray(rows[order])))
    for dense, expected in zip(cache.read(1, table), (k, v), strict=True):
        assert dense.dtype == dtype
        np.testing.assert_array_equal(dense[rows, positions], expected)
        assert np.count_nonzero(dense) == np.count_nonzero(expected)
    assert np.count_nonzero(cache.k[0]) == np.count_nonzero(cache.v[0]) == 0


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
def test_page_copies_copy_whole_pages_of_every_layer(pairs):
    cache = filled()
    k, v = np.array(cache.k), np.array(cache.v)
    for src, dst in pairs:
        if src < PAGES:
            k[:, dst], v[:, dst] = k[:, src], v[:, src]
    assert_pools(copy_pages(cache, page_copies(*pairs)), k, v)


@pytest.mark.parametrize("pairs", [[(PAGES, PAGES)] * 3, [(2, 4), (PAGES, PAGES), (1, 3)]], ids=["none", "two"])
def test_donated_page_copies_keep_the_buffers(pairs):
    cache = filled(pages=PAGES)
    before = [pool.unsafe_buffer_pointer() for pool in (cache.k, cache.v)]
    after = jax.jit(PagedCache.copy_pages, donate_argnums=0)(cache, page_copies(*pairs))
    assert [pool.unsafe_buffer_pointer() for pool in (after.k, after.v)] == before


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
    table, copies, ok = pool.table.truncate(jnp.asarray([10, 6], jnp.int32))
    assert ok
    cache = pool.cache.copy_pages(copies)
    table, step, ok = table.step(jnp.asarray([0, 1], jnp.int32))
    assert ok
    cache = cache.write(0, *tokens(2), step.slots)
    k, v = cache.read(0, table)
    np.testing.assert_array_equal(k[0, :10], pool.k_rows[0])
    np.testing.assert_array_equal(v[0, :10], pool.v_rows[0])
    np.testing.assert_array_equal(k[1, :6], pool.k_rows[1][:6])
    np.testing.assert_array_equal(k[1, 6], tokens(2)[0][1])
    np.testing.assert_array_equal(v[1, 6], tokens(2)[1][1])
