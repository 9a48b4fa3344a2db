"""Pairs of one-byte values: what words of them are taken apart into, and queries and outputs split and joined alike."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import paged_decode, pairs

VALUES = [jnp.dtype(name) for name in ("int8", "float8_e4m3fn", "float8_e5m2")]
PRODUCTS = [jnp.dtype(name) for name in ("float16", "bfloat16", "float32")]
COMBINATIONS = [pytest.param(*both, id=f"{both[0]}-{both[1]}") for both in itertools.product(VALUES, PRODUCTS)]


def all_words() -> np.ndarray:
    """Each pair of two bytes once."""
    return np.arange(-(2**15), 2**15, dtype=np.int16)


@pytest.mark.parametrize(("values", "product"), COMBINATIONS)
def test_a_word_is_its_first_and_its_second_value(values, product):
    first, second = jax.jit(functools.partial(pairs.take_apart, values=values, product=product, ptx=False))(all_words())
    expected = all_words().view(values).reshape(-1, 2).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(first, np.float32), expected[:, 0])
    np.testing.assert_array_equal(np.asarray(second, np.float32), expected[:, 1])
    assert first.dtype == second.dtype == product


@pytest.mark.gpu
@pytest.mark.parametrize(("values", "product"), COMBINATIONS)
def test_instructions_for_two_words_give_the_same_numbers(values, product):
    """Less a power of two, and but for NaN and infinity."""
    words = all_words()

    def kernel(words_ref, *number_refs):
        at = pl.program_id(0) * 1024 + jnp.arange(1024)
        of_words = plgpu.load(words_ref.at[at])
        for ref, numbers in zip(number_refs, pairs.take_apart(of_words, values, product, ptx=True), strict=True):
            plgpu.store(ref.at[at], numbers)

    found = pl.pallas_call(
        kernel, grid=(words.size // 1024,), out_shape=[jax.ShapeDtypeStruct(words.shape, product)] * 2
    )(words)
    power = 2.0 ** pairs.shortfall(values, product, ptx=True)
    for numbers, expected in zip(found, words.view(values).reshape(-1, 2).astype(np.float64).T, strict=True):
        is_finite = np.isfinite(expected)
        assert is_finite.sum() > 0.9 * words.size
        np.testing.assert_array_equal(np.asarray(numbers, np.float64)[is_finite] * power, expected[is_finite])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_the_smallest_values_count(dtype):
    """Those with less than a whole exponent are so, too, in the wider float: matrix units must not take them for 0."""
    smallest = jnp.finfo(dtype).smallest_subnormal.astype(np.float32)
    codes = np.random.default_rng(0).integers(-2, 3, (2, 4, 16, 2, 64))
    k, v = (jnp.asarray((smallest * values).astype(dtype)) for values in codes)
    scales = jnp.full(k.shape[:3], 1 / smallest, jnp.float32)
    q = jax.random.normal(jax.random.key(1), (1, 8, 64), jnp.bfloat16)
    attend = functools.partial(
        paged_decode, q, k, v, jnp.arange(4)[None], jnp.array([64]), k_scales=scales, v_scales=scales
    )
    expected = np.asarray(attend(interpret=True), np.float32)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(np.asarray(attend(), np.float32), expected, atol=0.02)


def test_vectors_are_split_and_joined():
    vectors = jax.random.normal(jax.random.key(0), (3, 16))
    even, odd = pairs.split(vectors)
    np.testing.assert_array_equal(even, vectors[:, ::2])
    np.testing.assert_array_equal(odd, vectors[:, 1::2])
    np.testing.assert_array_equal(pairs.join(even, odd), vectors)


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize(("axes", "shape"), [("LPCKH", (2, 3, 4, 1, 24)), ("LPKHCx", (1, 3, 1, 2, 4, 16))])
def test_a_quantised_pool_is_viewed_as_words_along_its_dims(axes, shape, dtype):
    pool = np.random.default_rng(0).integers(-99, 99, shape).astype(np.int8).view(dtype)
    words = pairs.view(axes, jnp.asarray(pool))
    assert words.shape == (*shape[:-1], shape[-1] // 2)
    np.testing.assert_array_equal(words, pool.view(np.int16))


@pytest.mark.parametrize(
    ("axes", "dtype", "last"),
    [("LPKHC", jnp.int8, 32), ("LPCKH", jnp.bfloat16, 32), ("LPCKH", jnp.int8, 33), ("LPCKH", jnp.int8, 16)],
)
def test_other_pools_stay_as_they_are(axes, dtype, last):
    pool = jax.ShapeDtypeStruct((1, 2, 3, 64, last), dtype)
    assert jax.eval_shape(functools.partial(pairs.view, axes), pool) == pool
