"""Cascade attention is paged attention, whatever rows share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from attention_cases import BF16, F32, every, meaning
from tolerances import assert_accurate

from paged_jax import cascade_attention, cascade_pays, shared_blocks

pytestmark = pytest.mark.usefixtures("highest_precision")

PAGE = 4
OPTIONS = {"soft_cap": 5.0, "sinks": np.linspace(-1, 1, 6, dtype=np.float32)}
OPTIONS |= {"alibi_slopes": np.linspace(0.1, 0.5, 6, dtype=np.float32), "scale": 0.4}


def pool_of(lengths, num_shared, dtype=F32, seed=0):
    """Rows of which all live ones begin with the pages of the longest; a row's own blocks stay its own."""
    pool = pools.build(lengths, page_size=PAGE, dtype=dtype, seed=seed)
    pages, longest = np.array(pool.table.pages), int(np.argmax(lengths))
    live = np.asarray(lengths) > 0
    pages[live, :num_shared] = pages[longest, :num_shared]
    k, v = (x[0] for x in pools.contents(pool.cache))
    rows = [np.asarray(p)[: -(-n // PAGE)] for p, n in zip(pages, lengths, strict=True)]
    k_rows, v_rows = (
        [x[row].reshape(-1, *x.shape[2:])[:n] for row, n in zip(rows, lengths, strict=True)] for x in (k, v)
    )
    table = dataclasses.replace(pool.table, pages=jnp.asarray(pages))
    return dataclasses.replace(pool, table=table, k_rows=k_rows, v_rows=v_rows)


def cascade(implementation, options):
    static = {name: value for name, value in options.items() if not isinstance(value, np.ndarray)}
    arrays = {name: value for name, value in options.items() if isinstance(value, np.ndarray)}

    @jax.jit
    def attend(q, cache, table, arrays):
        return cascade_attention(q, cache, table, return_lse=True, implementation=implementation, **arrays, **static)

    return lambda q, pool: attend(jnp.asarray(q), pool.cache, pool.table, arrays)


@every
@pytest.mark.parametrize(
    ("lengths", "num_shared", "dtype", "options"),
    [
        ((30, 0, 17, 16, 23), 4, F32, {}),  # one row has nothing else
        ((30, 0, 17, 18, 23), 4, BF16, OPTIONS),
        ((9, 30), 0, F32, OPTIONS),
        ((0, 0), 0, F32, OPTIONS),
        ((0, 13), 3, F32, {}),
        ((3, 3, 2), 0, F32, {}),  # no full block
    ],
)
def test_cascade_is_dense_attention(lengths, num_shared, dtype, options, implementation):
    pool = pool_of(lengths, num_shared, dtype)
    q = np.random.default_rng(3).standard_normal((len(lengths), 6, 16)).astype(dtype)
    q[np.asarray(lengths) == 0] = np.nan
    out, lse = cascade(implementation, options)(q, pool)
    truth, dense = meaning(q, pool, None, options)
    assert_accurate(out, truth[0], dense[0])
    assert_accurate(lse, truth[1], dense[1])


@pytest.mark.parametrize("rows", [1, 33, 70])  # of 6 heads over 2 kv heads: 42 rows share 128 lanes
def test_rows_beyond_what_one_program_takes(rows):
    lengths = (np.arange(rows) % 5 + 8).tolist()
    pool = pool_of(lengths, 2)
    q = np.random.default_rng(3).standard_normal((rows, 6, 16)).astype(F32)
    out, lse = cascade("xla", {})(q, pool)
    truth, dense = meaning(q, pool, None, {})
    assert_accurate(out, truth[0], dense[0])
    assert_accurate(lse, truth[1], dense[1])


@pytest.mark.parametrize(
    ("lengths", "pages", "expected"),
    [
        ((12, 12), ((0, 1, 2), (0, 1, 2)), 3),
        ((12, 11), ((0, 1, 2), (0, 1, 2)), 2),
        ((12, 12), ((0, 1, 2), (0, 3, 2)), 1),  # what comes after a block of one's own is not shared
        ((12, 12), ((0, 1, 2), (3, 1, 2)), 0),
        ((12, 0), ((0, 1, 2), (0, 1, 2)), 0),
        ((0, 0), ((9, 9, 9), (9, 9, 9)), 0),
        ((4, 4), ((0, 9, 9), (0, 9, 9)), 1),  # padding beyond the rows' blocks is no block
    ],
)
def test_blocks_that_all_live_rows_begin_with(lengths, pages, expected):
    table = pools.block_table([[], []], [0, 0], 9, PAGE, width=3)
    table = dataclasses.replace(table, pages=jnp.array(pages, jnp.int32), lengths=jnp.array(lengths, jnp.int32))
    assert int(jax.jit(shared_blocks)(table)) == expected


def test_it_pays_by_the_bytes_that_are_not_read_again():
    pool = pool_of((30, 30, 30), 4)
    assert not cascade_pays(pool.cache, pool.table)
    cache = jax.eval_shape(lambda: dataclasses.replace(pool.cache, k=jnp.zeros((1, 64, 4, 2, 1 << 19)), v=pool.cache.v))
    assert cascade_pays(cache, pool.table)  # 2 rows spared 16 tokens of 2 heads × 2^19 dims × 4 bytes
    assert not cascade_pays(cache, dataclasses.replace(pool.table, lengths=jnp.array([30, 0, 0], jnp.int32)))
