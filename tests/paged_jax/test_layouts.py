"""Layouts: the same vectors in another order, from any to any."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest

from paged_jax import layouts
from pallas_kernels.layouts import LAYOUTS, pool_index, pool_shape, pool_sizes

L, P, C, K, H, HV = 2, 5, 3, 2, 16, 11
DTYPES = (jnp.float32, jnp.bfloat16)


def numbered(layout, dtype=jnp.float32):
    """A cache where every element differs (in float32)."""
    k, v = (np.arange(L * P * C * K * dim, dtype=np.float32).reshape(L, P, C, K, dim) for dim in (H, HV))
    return pools.cache_of(k.astype(dtype), v.astype(dtype), layout)


def test_the_layouts_are_those_of_the_tests():
    assert set(LAYOUTS) == set(pools.LAYOUTS)


@pytest.mark.parametrize(
    ("source", "target", "dtype"),
    [
        pytest.param(source, target, dtype, marks=() if (i + j + n) % 2 == 0 else pytest.mark.full)
        for (i, source), (j, target), (n, dtype) in itertools.product(*map(enumerate, (LAYOUTS, LAYOUTS, DTYPES)))
    ],
)
def test_a_cache_goes_from_any_layout_to_any(source, target, dtype):
    cache, expected = numbered(source, dtype), numbered(target, dtype)
    for convert in (layouts.convert, jax.jit(layouts.convert, static_argnums=1)):
        converted = convert(cache, target)
        assert (converted.layout, converted.page_size) == (target, C)
        np.testing.assert_array_equal(converted.k, expected.k)
        np.testing.assert_array_equal(converted.v, expected.v)


def test_scales_are_the_same_in_every_layout():
    scales = jnp.ones((L, P, C, K))
    cache = dataclasses.replace(numbered("NHD", jnp.int8), k_scale=scales, v_scale=scales)
    converted = layouts.convert(cache, "vllm")
    assert converted.k_scale is scales
    assert converted.v_scale is scales


def test_a_layout_that_is_unknown_or_cannot_hold_the_vectors_is_refused():
    with pytest.raises(ValueError, match="layout: expected one of 'NHD', 'HND', 'head_major', 'vllm', got 'nonsense'"):
        layouts.convert(numbered("NHD"), "nonsense")
    odd = pools.cache_of(np.zeros((L, P, C, K, 10), np.float32), np.zeros((L, P, C, K, 10), np.float32))
    with pytest.raises(ValueError, match="multiple of 4 for float32, got 10"):
        layouts.convert(odd, "vllm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kernel_finds_each_element_where_the_layout_has_it(layout, dtype):
    """The index of the kernels, element by element and for whole vectors, against arrays laid out by hand."""
    cache = numbered(layout, dtype)
    for axes, pool, expected in zip(LAYOUTS[layout], (cache.k, cache.v), pools.contents(cache), strict=True):
        pool, sizes = np.asarray(pool), dict(zip("LPCKH", expected.shape, strict=True))
        assert pool_sizes(axes, pool.shape) == sizes
        assert pool_shape(axes, sizes, pool.dtype.itemsize) == pool.shape
        layer, page, cell, head, dim = np.ix_(*map(np.arange, expected.shape))
        np.testing.assert_array_equal(
            pool[pool_index(axes, pool.shape, L=layer, P=page, C=cell, K=head, H=dim)], expected
        )
        vector = pool[pool_index(axes, pool.shape, L=1, P=4, C=2, K=1, H=slice(None))]
        np.testing.assert_array_equal(vector.reshape(-1), expected[1, 4, 2, 1])
