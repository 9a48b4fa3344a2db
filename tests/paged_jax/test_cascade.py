"""Cascade attention is paged attention, whatever rows share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from attention_cases import BF16, E4M3, E5M2, F32, INT8, every, meaning
from tolerances import assert_accurate

from paged_jax import cascade_attention, cascade_pays, shared_blocks

pytestmark = pytest.mark.usefixtures("highest_precision")

PAGE = 4
OPTIONS = {"soft_cap": 5.0, "sinks": np.linspace(-1, 1, 6, dtype=np.float32)}
OPTIONS |= {"alibi_slopes": np.linspace(0.1, 0.5, 6, dtype=np.float32), "scale": 0.4}


def pool_of(lengths, num_shared, dtype=F32, **sizes):
    """Rows of which all live ones begin with the pages of the longest; a row's own blocks stay its own."""
    pool = pools.build(lengths, page_size=PAGE, dtype=dtype, **sizes)
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


@functools.cache
def cascade(implementation, has_options):
    """The op under jit, compiled once for all calls of one size."""
    options = OPTIONS if has_options else {}

    @jax.jit
    def attend(q, cache, table):
        return cascade_attention(q, cache, table, return_lse=True, implementation=implementation, **options)

    return lambda q, pool: attend(q, pool.cache, pool.table)


def assert_accurate_cascade(pool, implementation, has_options, q_dtype=None):
    lengths, q_dtype = pool.lengths, q_dtype or pool.cache.k.dtype
    q = np.random.default_rng(3).standard_normal((len(lengths), 6, pool.cache.head_dim)).astype(q_dtype)
    q[lengths == 0] = np.nan
    out, lse = cascade(implementation, has_options)(q, pool)
    truth, dense = meaning(q, pool, None, OPTIONS if has_options else {})
    assert_accurate(out, truth[0], dense[0])
    assert_accurate(lse, truth[1], dense[1])


@every
@pytest.mark.parametrize(
    ("lengths", "num_shared", "dtype", "has_options"),
    [
        ((30, 0, 17, 16, 23), 4, F32, False),  # one row has nothing else
        ((30, 0, 17, 18, 23), 4, BF16, True),
        ((9, 30, 0, 5, 12), 0, F32, False),
        ((0, 0, 0, 0, 0), 0, BF16, True),
        ((0, 13, 0, 0, 0), 3, F32, False),
        ((3, 0, 3, 2, 0), 0, F32, False),  # no full block
    ],
)
def test_cascade_is_dense_attention(lengths, num_shared, dtype, has_options, implementation):
    blocks = sum(-(-n // PAGE) for n in lengths)
    pool = pool_of(lengths, num_shared, dtype, width=8, spare_pages=26 - blocks)  # one size: few programs
    assert_accurate_cascade(pool, implementation, has_options)


@pytest.mark.parametrize(
    ("implementation", "rows"),
    [
        pytest.param("xla", 1),
        pytest.param("xla", 23, marks=pytest.mark.full),
        pytest.param("triton_interpret", 1, marks=pytest.mark.full),
        pytest.param("triton_interpret", 23),
        *(pytest.param("triton", rows, marks=pytest.mark.gpu) for rows in (1, 23)),
    ],
)  # of 6 heads over 2 kv heads: 10 rows share a program in float32
def test_rows_beyond_what_one_program_takes(rows, implementation):
    assert_accurate_cascade(pool_of(np.arange(rows) % 5 + 8, 2), implementation, has_options=False)


KINDS = {
    "float32, vllm, values of 32": (F32, {"layout": "vllm", "v_head_dim": 32}),
    "bfloat16, head major, head_dim 24": (BF16, {"layout": "head_major", "head_dim": 24}),
    "int8, vllm": (INT8, {"layout": "vllm"}),
    "float8_e4m3fn, HND": (E4M3, {"layout": "HND"}),
    "float8_e5m2, NHD": (E5M2, {"layout": "NHD"}),
}
BY_DEFAULT = {
    "xla": ("float32, vllm, values of 32", "float8_e5m2, NHD"),
    "triton_interpret": ("bfloat16, head major, head_dim 24", "int8, vllm"),
}


@pytest.mark.parametrize(
    ("implementation", "dtype", "sizes"),
    [
        *(
            pytest.param(name, *kind, id=f"{name}-{what}", marks=() if what in default else pytest.mark.full)
            for name, default in BY_DEFAULT.items()
            for what, kind in KINDS.items()
        ),
        *(pytest.param("triton", *kind, id=f"triton-{what}", marks=pytest.mark.gpu) for what, kind in KINDS.items()),
    ],
)
def test_pools_of_any_kind(dtype, sizes, implementation):
    pool = pool_of((30, 0, 17, 18, 23), 4, dtype, **sizes)
    assert_accurate_cascade(pool, implementation, has_options=True, q_dtype=BF16 if dtype is BF16 else F32)


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
    cache = dataclasses.replace(pool.cache, k=jax.ShapeDtypeStruct((1, 64, 4, 2, 1 << 21), F32))
    assert cascade_pays(cache, pool.table)  # 2 rows spared 16 tokens of 2 heads × 2^21 dims × 4 bytes
    assert not cascade_pays(cache, dataclasses.replace(pool.table, lengths=jnp.array([30, 0, 0], jnp.int32)))
