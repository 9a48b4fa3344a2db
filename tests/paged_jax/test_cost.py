"""A step costs by what it touches: writing and attending take the same time whatever the pool's size."""

import time

import jax
import jax.numpy as jnp
import pools
import pytest
from tables import grown

from paged_jax import PagedCache, paged_attention

PAGES, PAGE_SIZE, ROWS, KV_HEADS, HEAD_DIM, LAYERS = 512, 16, 4, 2, 64, 4


@pytest.mark.parametrize("dtype", pools.WRITTEN_IN_PLACE)
def test_a_step_takes_the_same_time_in_a_pool_four_times_as_large(dtype):
    assert_time_is_independent_of_the_pool(dtype, "NHD")


@pytest.mark.parametrize(
    "layout", ["head_major", "vllm"]
)  # pages are not outermost; nor are a token's cells in one piece
def test_so_it_does_in_other_layouts(layout):
    assert_time_is_independent_of_the_pool(jnp.float32, layout)


def assert_time_is_independent_of_the_pool(dtype, layout: str):
    small, large = (seconds_per_step(pages, dtype, layout) for pages in (PAGES, 4 * PAGES))
    assert large - small < small / 2 + seconds_per_copy(4 * PAGES, dtype) / 2


def seconds_per_step(num_pages: int, dtype, layout: str) -> float:
    """Of a donated step that writes and attends in every layer."""
    cache = PagedCache.create(LAYERS, num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype, layout=layout)
    table = grown(num_pages, PAGE_SIZE, 8, 1, 50, 17, 90)
    q, k = (jnp.ones((ROWS, heads, HEAD_DIM), pools.of_tokens(dtype)) for heads in (4, KV_HEADS))
    _, step, _ = table.step(jnp.ones(ROWS, jnp.int32))

    def forward(cache):
        def body(layer, carry):
            cache, x = carry
            cache = cache.write(layer, k, k, step.slots)
            return cache, paged_attention(x, cache, step.table, layer=layer)

        return jax.lax.fori_loop(0, LAYERS, body, (cache, q))[0]

    return least_seconds(jax.jit(forward, donate_argnums=0), cache)


def seconds_per_copy(num_pages: int, dtype) -> float:
    """Of reading and writing one pool, the least that a copy costs."""
    pool = jnp.ones((LAYERS, num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM), dtype)
    return least_seconds(jax.jit(lambda pool: pool + 1), pool)


def least_seconds(function, state) -> float:
    """The least of many timings, which other work on the machine disturbs least; each call goes on from the last."""
    state = jax.block_until_ready(function(state))
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        state = jax.block_until_ready(function(state))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
