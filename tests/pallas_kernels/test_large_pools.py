"""Pools whose elements no longer count in 31 bits: read right, or refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode, paged_prefill

PAGE_SIZE, KV_HEADS, HEAD_DIM, ROWS, HEADS = 16, 8, 128, 4, 32
PAGE_ELEMENTS = PAGE_SIZE * KV_HEADS * HEAD_DIM
LENGTHS = (16, 40, 1, 64)
BLOCKS = 4


def operands(num_pages, dtype):
    """Rows on pages at both ends of a pool that is zero elsewhere, and the same rows in a small pool."""
    ends = np.r_[: ROWS * BLOCKS // 2, num_pages - ROWS * BLOCKS // 2 : num_pages]
    pages = np.random.default_rng(0).permutation(ends).astype(np.int32).reshape(ROWS, BLOCKS)
    small_pages = np.arange(ROWS * BLOCKS, dtype=np.int32).reshape(ROWS, BLOCKS)
    shape = (ROWS * BLOCKS, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    draw = functools.partial(jax.random.randint, minval=-90, maxval=90) if dtype == jnp.int8 else jax.random.normal
    k, v = (draw(jax.random.key(i), shape).astype(dtype) for i in range(2))
    scales = jax.random.uniform(jax.random.key(2), (2, *shape[:3]), minval=0.005, maxval=0.02)

    @functools.partial(jax.jit, static_argnums=0)
    def spread(dtype, held):
        return jnp.zeros((num_pages, *held.shape[1:]), dtype).at[pages.reshape(-1)].set(held)

    large = (spread(dtype, k), spread(dtype, v), jnp.asarray(pages))
    small = (k, v, jnp.asarray(small_pages))
    if dtype != jnp.int8:
        return large, small, {}, {}
    names = ("k_scales", "v_scales")
    large_scales = dict(zip(names, (spread(jnp.float32, held) for held in scales), strict=True))
    return large, small, large_scales, dict(zip(names, scales, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "num_elements"), [("bfloat16", 2**31), ("bfloat16", 3 * 2**30), ("int8", 3 * 2**30), ("int8", 2**32 + 1)]
)
def test_a_large_pool_is_read_right(dtype, num_elements):
    """Of one byte: where pairs of them count in 31 bits, and where they do not."""
    num_pages = -(-num_elements // PAGE_ELEMENTS)
    large, small, large_scales, small_scales = operands(num_pages, jnp.dtype(dtype))
    lengths = jnp.array(LENGTHS, jnp.int32)
    q = jax.random.normal(jax.random.key(5), (ROWS, HEADS, HEAD_DIM), jnp.bfloat16)
    for kernel, counts in ((paged_decode, ()), (paged_prefill, (jnp.ones(ROWS, jnp.int32),))):
        kernel = jax.jit(kernel)  # outside jit, giving the pools an axis for layers copies them
        out, expected = (
            kernel(q, k, v, table, lengths, *counts, **scales)
            for (k, v, table), scales in ((large, large_scales), (small, small_scales))
        )
        assert np.isfinite(np.asarray(expected, np.float32)).all()
        assert np.abs(np.asarray(expected, np.float32)).max() > 0.1
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("num_elements", [2**31 + 1, 3 * 2**30, 2**32])
@pytest.mark.parametrize("kernel", [paged_decode, paged_prefill])
def test_a_pool_of_one_byte_that_would_be_misread_is_refused(kernel, num_elements):
    """Where pages hold V by dim, so that it is not read in pairs."""
    struct = jax.ShapeDtypeStruct
    num_pages = -(-num_elements // PAGE_ELEMENTS)
    k = struct((num_pages, KV_HEADS, HEAD_DIM // 16, PAGE_SIZE, 16), jnp.int8)
    v = struct((num_pages, KV_HEADS, HEAD_DIM, PAGE_SIZE), jnp.int8)
    table, lengths = struct((ROWS, BLOCKS), jnp.int32), struct((ROWS,), jnp.int32)
    q = struct((ROWS, HEADS, HEAD_DIM), jnp.bfloat16)
    counts = (lengths,) if kernel is paged_prefill else ()
    scales = dict.fromkeys(("k_scales", "v_scales"), struct((num_pages, PAGE_SIZE, KV_HEADS), jnp.float32))
    with pytest.raises(NotImplementedError, match=r"v_pages: the kernel cannot address a pool of \d+ elements"):
        jax.eval_shape(functools.partial(kernel, layout="vllm"), q, k, v, table, lengths, *counts, **scales)


@pytest.mark.parametrize("num_elements", [2**31 + 1, 2**32])
def test_a_pool_of_one_byte_whose_pairs_count_in_31_bits_is_taken(num_elements):
    struct = jax.ShapeDtypeStruct
    pool = struct((num_elements // PAGE_ELEMENTS, PAGE_SIZE, KV_HEADS, HEAD_DIM), jnp.int8)
    table, lengths = struct((ROWS, BLOCKS), jnp.int32), struct((ROWS,), jnp.int32)
    q = struct((ROWS, HEADS, HEAD_DIM), jnp.bfloat16)
    scales = dict.fromkeys(("k_scales", "v_scales"), struct(pool.shape[:3], jnp.float32))
    assert jax.eval_shape(paged_decode, q, pool, pool, table, lengths, **scales).shape == q.shape
