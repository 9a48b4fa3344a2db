"""Caches of one byte per element: what is written is read back to within half a step, its scales go where it goes."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest

from paged_jax import BlockTable, PageCopies, PagedCache, cache_check, layouts
from pallas_kernels.quantisation import quantise, saturating_cast

LAYERS, PAGES, PAGE_SIZE, HEADS, DIM, V_DIM = 2, 6, 5, 2, 32, 24
PADDING = PAGES * PAGE_SIZE

every_dtype = pytest.mark.parametrize("dtype", pools.QUANTISED, ids=lambda dtype: dtype.__name__)
every_layout = pytest.mark.parametrize("layout", pools.LAYOUTS)

write = jax.jit(PagedCache.write)

# What the nearest value may be away: half a step where steps are largest, as a share of a vector's largest magnitude.
# Two float32 roundings, or a cast by way of float16, may turn a tie.
HALF_STEP = {jnp.int8: 0.5 / 127, jnp.float8_e4m3fn: 16 / 448, jnp.float8_e5m2: 4096 / 57344}
SLACK = 1.002


def empty(dtype, layout="NHD"):
    return PagedCache.create(LAYERS, PAGES, PAGE_SIZE, HEADS, DIM, dtype, v_head_dim=V_DIM, layout=layout)


def tokens(count, seed=0):
    """Vectors of very different sizes, those of V a thousand times those of K."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-6, 6, (count, HEADS, 1))
    return [
        (size * rng.standard_normal((count, HEADS, dim))).astype(np.float32)
        for dim, size in ((DIM, sizes), (V_DIM, 1000 * sizes[::-1]))
    ]


def assert_half_a_step_away(read, vectors, dtype):
    peak = np.abs(vectors).max(-1, keepdims=True)
    assert (np.abs(read - vectors.astype(np.float64)) <= SLACK * HALF_STEP[dtype] * peak).all()


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(jnp.int8, "NHD"), (jnp.int8, "vllm"), (jnp.float8_e4m3fn, "HND"), (jnp.float8_e4m3fn, "vllm"),
     (jnp.float8_e5m2, "head_major")],
)  # fmt: skip
def test_what_is_written_is_read_back_in_float32_to_within_half_a_step(dtype, layout):
    table, _ = jax.jit(BlockTable.extend)(BlockTable.create(PAGES, PAGE_SIZE, 2, 3), jnp.asarray([11, 4], jnp.int32))
    rows, positions = np.repeat([0, 1], [11, 4]), np.r_[:11, :4]
    k, v = tokens(15)
    cache = write(empty(dtype, layout), 1, k, v, jax.jit(BlockTable.slots)(table, positions, rows))
    assert cache.k.dtype == cache.v.dtype == dtype
    assert cache.k_scale.shape == cache.v_scale.shape == (LAYERS, PAGES, PAGE_SIZE, HEADS)
    for dense, vectors in zip(map(np.asarray, jax.jit(PagedCache.read)(cache, 1, table)), (k, v), strict=True):
        assert dense.dtype == jnp.float32
        assert_half_a_step_away(dense[rows, positions], vectors, dtype)
        np.testing.assert_array_equal(dense[1, 4:], 0)
    assert all(np.count_nonzero(pool[0]) == 0 for pool in pools.contents(cache))


@every_dtype
def test_the_largest_of_a_vector_has_the_largest_value_of_the_dtype(dtype):
    k, v = tokens(6)
    cache = write(empty(dtype), 0, k, v, jnp.arange(6, dtype=jnp.int32))
    for pool, scale, vectors in ((cache.k, cache.k_scale, k), (cache.v, cache.v_scale, v)):
        peak = np.abs(np.asarray(pool[0].reshape(PADDING, HEADS, -1)[:6], np.float32)).max(-1)
        np.testing.assert_array_equal(peak, pools.QUANTISED[dtype])
        expected = np.abs(vectors).max(-1) / pools.QUANTISED[dtype]
        np.testing.assert_allclose(scale[0].reshape(PADDING, HEADS)[:6], expected, rtol=1e-6)


SPECIAL = {
    "zero": (np.zeros(DIM), 0.0),
    "zero but for one": (np.eye(DIM)[3] * 0.7, None),
    "equal": (np.full(DIM, -3.25), None),
    "too small for a scale": (np.full(DIM, 1e-38), 0.0),
    "the smallest": (np.full(DIM, 1e-30), None),
    "the largest": (np.full(DIM, 3e38), None),
    "one NaN": (np.where(np.arange(DIM) == 5, np.nan, 1.0), np.nan),
    "one infinity": (np.where(np.arange(DIM) == 5, -np.inf, 1.0), np.nan),
}


@every_dtype
def test_vectors_at_the_edge_of_floats(dtype):
    """Each beside a usual one in the other head, which it leaves alone."""
    vectors = np.stack([np.stack([vector, np.linspace(-1, 1, DIM)]) for vector, _ in SPECIAL.values()])
    values, scales = jax.jit(quantise, static_argnums=1)(jnp.asarray(vectors, jnp.float32), dtype)
    read = np.asarray(values, np.float32) * np.asarray(scales)[..., None]
    for (vector, expected), got, scale in zip(SPECIAL.values(), read[:, 0], np.asarray(scales)[:, 0], strict=True):
        if expected is None:
            assert_half_a_step_away(got, vector, dtype)
        else:
            np.testing.assert_array_equal(got, expected)
            np.testing.assert_array_equal(scale, expected)
    assert_half_a_step_away(read[:, 1], vectors[:, 1], dtype)


def test_a_cast_saturates_and_rounds_to_the_nearest():
    numbers = jnp.asarray([464.0, 465.0, -465.0, 1e6, jnp.inf, -jnp.inf, 57344.0, 61440.0, 1.0, 0.0])
    e4m3, e5m2, int8 = (np.asarray(saturating_cast(numbers, dtype), np.float32) for dtype in (
        jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
    ))  # fmt: skip
    np.testing.assert_array_equal(e4m3, [448, 448, -448, 448, 448, -448, 448, 448, 1, 0])
    np.testing.assert_array_equal(e5m2, [448, 448, -448, 57344, 57344, -57344, 57344, 57344, 1, 0])
    np.testing.assert_array_equal(int8, [127, 127, -127, 127, 127, -127, 127, 127, 1, 0])
    halves = jnp.asarray([0.5, 1.5, 2.5, 2.49, -0.5, -2.5, -2.49, 126.5])
    np.testing.assert_array_equal(saturating_cast(halves, jnp.int8), [1, 2, 3, 2, -1, -3, -2, 127])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e5m2])
def test_k_and_v_have_scales_of_their_own(dtype):
    """The bits of V are the same whatever K is, and the other way round."""
    k, v = tokens(4)
    slots = jnp.asarray([7, 0, 29, 12], jnp.int32)
    usual, other_k, other_v = (write(empty(dtype), 0, *kv, slots) for kv in ((k, v), (100 * k, v), (k, 100 * v)))
    np.testing.assert_array_equal(usual.v_scale, other_k.v_scale)
    np.testing.assert_array_equal(usual.v, other_k.v)
    np.testing.assert_array_equal(usual.k_scale, other_v.k_scale)
    np.testing.assert_array_equal(usual.k, other_v.k)
    assert (usual.k_scale != other_k.k_scale).any()


@every_layout
def test_a_write_changes_its_cells_and_their_scales_and_no_other(layout):
    before = filled(jnp.int8, layout)
    k, v = tokens(6)
    k[5] = np.nan  # what a padding token holds
    slots = np.asarray([7, 0, -1, PADDING + 3, 29, PADDING], np.int32)
    after = write(before, 1, k, v, slots)
    live = [7, 0, 29]
    for name in ("k", "v", "k_scale", "v_scale"):
        old, new = (flat(cache, name) for cache in (before, after))
        np.testing.assert_array_equal(new[0], old[0])
        np.testing.assert_array_equal(np.delete(new[1], live, 0), np.delete(old[1], live, 0))
        assert (new[1][live] != old[1][live]).any(axis=tuple(range(1, old[1].ndim))).all()


def filled(dtype, layout="NHD"):
    """Every cell holds other values under another scale."""
    k, v = (
        np.random.default_rng(dim).standard_normal((LAYERS, PAGES, PAGE_SIZE, HEADS, dim)).astype(np.float32)
        for dim in (DIM, V_DIM)
    )
    (k, k_scale), (v, v_scale) = (pools.quantised(pool, np.dtype(dtype)) for pool in (k, v))
    return pools.cache_of(k, v, layout, k_scale, v_scale)


def flat(cache, name):
    """[L, P·C, K, ..] as bits."""
    pool = getattr(cache, name)
    pool = np.asarray(pool) if name.endswith("scale") else pools.nhd(pool, cache.layout, name)
    return pool.view(f"u{pool.itemsize}").reshape(LAYERS, PADDING, *pool.shape[3:])


@pytest.mark.parametrize(("dtype", "layout"), [*zip(pools.QUANTISED, ("NHD", "vllm", "head_major"), strict=True)])
def test_pages_are_copied_and_zeroed_with_their_scales(dtype, layout):
    before = filled(dtype, layout)
    copies = PageCopies(src=jnp.asarray([2, PAGES, 1], jnp.int32), dst=jnp.asarray([4, PAGES, 0], jnp.int32))
    marks = np.arange(PAGES) == 3
    after = jax.jit(lambda cache: cache.copy_pages(copies).zero_pages(marks))(before)
    for name in ("k", "v", "k_scale", "v_scale"):
        old, new = (flat(cache, name).reshape(LAYERS, PAGES, -1) for cache in (before, after))
        np.testing.assert_array_equal(new[:, [4, 0]], old[:, [2, 1]])
        np.testing.assert_array_equal(new[:, 3], 0)
        np.testing.assert_array_equal(new[:, [1, 2, 5]], old[:, [1, 2, 5]])


@pytest.mark.parametrize(("dtype", "target"), [*zip(pools.QUANTISED, ("vllm", "HND", "head_major"), strict=True)])
def test_a_quantised_cache_goes_from_one_layout_to_another(dtype, target):
    cache = filled(dtype)
    converted = layouts.convert(cache, target)
    assert converted.k_scale is cache.k_scale
    assert converted.v_scale is cache.v_scale
    for name in "kv":
        np.testing.assert_array_equal(flat(converted, name), flat(cache, name))
    if target == "vllm":
        assert converted.k.shape == (LAYERS, PAGES, HEADS, DIM // 16, PAGE_SIZE, 16)


WRONG_SCALES = {
    "none": lambda _: None,
    "of one layer": lambda scale: scale[0],
    "of fewer pages": lambda scale: scale[:, 1:],
    "one per token": lambda scale: scale[..., 0],
    "of another order": lambda scale: jnp.moveaxis(scale, -1, 1),
    "of bfloat16": lambda scale: scale.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("wrong", WRONG_SCALES.values(), ids=WRONG_SCALES)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_that_do_not_fit_are_refused(name, wrong):
    cache = empty(jnp.int8)
    cache = dataclasses.replace(cache, **{name: wrong(getattr(cache, name))})
    message = rf"cache: expected {name} float32\[2, 6, 5, 2\] beside {name[0]} of int8, got (None|float32|bfloat16)"
    with pytest.raises(ValueError, match=message):
        cache.write(0, *tokens(1), jnp.zeros(1, jnp.int32))


def test_only_vectors_of_floats_are_quantised():
    k, v = tokens(1)
    with pytest.raises(ValueError, match="k: expected a floating dtype, got int8"):
        empty(jnp.int8).write(0, k.astype(np.int8), v, jnp.zeros(1, jnp.int32))


def device(capability):
    attributes = {} if capability is None else {"compute_capability": capability}
    return types.SimpleNamespace(device_kind="Imagined", **attributes)


@pytest.mark.parametrize("capability", [None, "8.9", "9.0", "12.0", "gfx942"])
def test_most_devices_can_do_every_dtype(capability):
    assert cache_check.device_dtypes(device(capability)) == cache_check.DTYPES


def test_a_dtype_that_the_device_cannot_do_is_refused_before_anything_is_allocated(monkeypatch):
    """The pool would be of terabytes."""
    monkeypatch.setattr(jax, "local_devices", lambda: [device("8.0")])
    able = "float32, bfloat16, float16, int8, float8_e5m2"
    message = f"dtype: expected one that a cache on Imagined can have, {able}, got float8_e4m3fn"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        PagedCache.create(100, 10**7, 16, 8, 128, jnp.float8_e4m3fn)
    assert PagedCache.create(1, 2, 4, HEADS, DIM, jnp.int8).k.dtype == jnp.int8
