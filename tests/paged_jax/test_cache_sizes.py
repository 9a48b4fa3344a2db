"""How many pages of a cache fit into so much memory."""

import jax
import jax.numpy as jnp
import pytest

from paged_jax import PagedCache

LAYERS, PAGE_SIZE, HEADS, DIM, V_DIM = 3, 5, 2, 16, 24


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
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
