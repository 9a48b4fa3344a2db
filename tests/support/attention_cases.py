"""The cases of attention, small and large, and how one is run and judged under any implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pools
import pytest
from tolerances import assert_accurate, dense

from paged_jax import paged_attention

GPU = pytest.param("triton", marks=pytest.mark.gpu)
IMPLEMENTATIONS = [pytest.param("xla"), pytest.param("triton_interpret"), GPU]
KERNELS = [pytest.param("triton_interpret"), GPU]

every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
INT8, E4M3, E5M2 = pools.QUANTISED


# --- cases

MIX = (0, 1, 7, 8, 9, 54)  # with pages of 8: nothing, one token, page - 1, page, page + 1, several tiles
SHORT = (0, 1, 9, 17)


@dataclasses.dataclass(frozen=True)
class Case:
    """`pool` goes to `pools.build` and `options` to the op; sinks and alibi_slopes are True for random ones."""

    lengths: tuple
    heads: tuple  # N, K
    q_dtype: object
    pool: tuple
    query_lengths: tuple | None
    padding: int
    options: tuple
    traced_window: bool


def case(
    lengths=MIX,
    heads=(4, 2),
    q_dtype=None,
    query_lengths=None,
    padding=0,
    page_size=8,
    head_dim=16,
    v_head_dim=None,
    dtype=F32,
    layout="NHD",
    width=None,
    num_pages=None,
    shared=None,
    magnitude=1.0,
    traced_window=False,
    **options,
):
    pool = {"page_size": page_size, "head_dim": head_dim, "v_head_dim": v_head_dim, "dtype": dtype, "layout": layout}
    pool |= {"width": width, "num_pages": num_pages, "shared": shared, "magnitude": magnitude}
    pool |= {"num_kv_heads": heads[1]}
    pool |= {"layers": 2, "layer": 1}
    pool = tuple(pool.items())
    options = tuple(options.items())
    q_dtype = q_dtype or (F32 if dtype in pools.QUANTISED else dtype)
    return Case(lengths, heads, q_dtype, pool, query_lengths, padding, options, traced_window)


EVERYTHING = {"window": 9, "soft_cap": 5.0, "sinks": True, "alibi_slopes": True, "scale": 0.5}

DECODE = {
    "plain": case(),
    "every row empty": case(
        (0, 0, 0), page_size=1, num_pages=52, width=20, dtype=BF16, layout="head_major", sinks=True
    ),  # in the program of rows that share pages
    "rows share pages": case((20, 20, 9), shared=(0, 1, 2)),
    "a wide table": case(SHORT, width=40),
    "a table of one block": case((0, 1, 3, 8)),
    # sizes
    "page 1, heads 5 of 1": case((0, 1, 2, 17), (5, 1), page_size=1),
    "page 1, a table of one block": case((1, 0, 1), page_size=1),
    "page 5, head_dim 112, heads 12 of 2": case((0, 4, 5, 6, 54), (12, 2), page_size=5, head_dim=112),
    "page 16, bfloat16": case((15, 16, 17, 54), page_size=16, dtype=BF16),
    "page 24, values of 24, heads 7 of 1, float16": case((0, 23, 25), (7, 1), page_size=24, v_head_dim=24, dtype=F16),
    "page 32, head_dim 80": case((31, 32, 33, 97), page_size=32, head_dim=80),
    "page 64, heads 4 of 4, float16": case((0, 63, 64, 65, 1), (4, 4), page_size=64, dtype=F16),
    "page 128": case((127, 129, 0), page_size=128),
    "page 256, heads 16 of 1, bfloat16": case((1, 257), (16, 1), page_size=256, dtype=BF16),
    "page 32, head_dim 128, heads 8 of 2, float16, soft cap 1, 1 partition": case(
        (31, 32, 0, 33), (8, 2), page_size=32, head_dim=128, dtype=F16, soft_cap=1.0, num_partitions=1, magnitude=2.0
    ),
    "page 64, head_dim 64, heads 64 of 8, float16 over bfloat16, a wide table": case(
        (63, 64, 65), (64, 8), q_dtype=F16, page_size=64, head_dim=64, dtype=BF16, width=9
    ),
    "page 128, head_dim 256, heads 4 of 4, bfloat16 over float32, window 33, soft cap 50": case(
        (127, 1, 129), (4, 4), q_dtype=BF16, page_size=128, head_dim=256, window=33, soft_cap=50.0
    ),
    "page 256, head_dim 192, heads 16 of 1, HND, bfloat16, window 1, more partitions than pages": case(
        (1, 257, 0), (16, 1), page_size=256, head_dim=192, dtype=BF16, layout="HND", window=1, num_partitions=3
    ),
    "head_dim 64, heads 8 of 2, bfloat16": case(SHORT, (8, 2), head_dim=64, dtype=BF16),
    "head_dim 96, heads 14 of 2, float16": case(SHORT, (14, 2), head_dim=96, dtype=F16),
    "head_dim 128, 1 partition": case(SHORT, head_dim=128, num_partitions=1),
    "head_dim 192, values of 128, bfloat16": case(SHORT, head_dim=192, v_head_dim=128, dtype=BF16),
    "head_dim 16, values of 40": case(SHORT, v_head_dim=40),
    "head_dim 256": case(SHORT, head_dim=256),
    "heads 71 of 1": case(SHORT, (71, 1), sinks=True, alibi_slopes=True),
    # dtypes
    "float32 over bfloat16": case(q_dtype=F32, dtype=BF16),
    "float32 over float16": case(q_dtype=F32, dtype=F16),
    "bfloat16 over float32": case(q_dtype=BF16, dtype=F32),
    "float16 over bfloat16": case(q_dtype=F16, dtype=BF16),
    # quantised
    "bfloat16 over int8, page 5, values of 24, heads 5 of 1": case(
        (0, 4, 11, 54),
        (5, 1),
        q_dtype=BF16,
        page_size=5,
        v_head_dim=24,
        dtype=INT8,
        num_partitions=3,
        traced_window=True,
        **EVERYTHING,
    ),
    "float8_e4m3fn, vllm, page 5, heads 7 of 1": case(
        (0, 4, 5, 54), (7, 1), page_size=5, head_dim=80, dtype=E4M3, layout="vllm", width=14
    ),
    "float16 over float8_e5m2, head_dim 112, heads 12 of 2, head major, many keys of little weight": case(
        (0, 150, 200), (12, 2), q_dtype=F16, page_size=32, head_dim=112, dtype=E5M2, layout="head_major", magnitude=0.25
    ),
    # options
    "scale": case(SHORT, scale=1.5),
    "window 1": case(window=1),
    "window 33, bfloat16": case((0, 1, 32, 33, 34, 97), window=33, dtype=BF16),
    "the largest window": case(SHORT, window=2**31 - 1),
    "traced window 11": case(window=11, traced_window=True, page_size=5),
    "soft cap 1": case(soft_cap=1.0, magnitude=2.0),
    "soft cap 50": case(soft_cap=50.0, magnitude=4.0),
    "alibi, bfloat16": case(alibi_slopes=True, dtype=BF16),
    "everything": case((0, 1, 9, 54), (6, 2), **EVERYTHING),
    "everything, odd sizes, bfloat16": case(
        (0, 5, 11, 54), (7, 1), page_size=5, head_dim=80, dtype=BF16, **EVERYTHING, traced_window=True
    ),
    # layouts
    "HND": case((0, 1, 8, 9, 54), layout="HND"),
    "HND, page 5, head_dim 80, heads 7 of 1, bfloat16": case(
        (0, 4, 11, 54), (7, 1), page_size=5, head_dim=80, dtype=BF16, layout="HND", **EVERYTHING
    ),
    "HND, head_dim 192, values of 128, 3 partitions": case(
        (0, 15, 54), page_size=16, head_dim=192, v_head_dim=128, dtype=F16, layout="HND", width=7, num_partitions=3
    ),
    "head major": case((0, 1, 8, 9, 54), layout="head_major"),
    "head major, page 24, values of 24, heads 12 of 4": case(
        (0, 23, 25, 49), (12, 4), page_size=24, v_head_dim=24, layout="head_major", width=6, window=33
    ),
    "head major, page 1, rows share pages, bfloat16": case(
        (20, 20, 9), page_size=1, num_pages=52, shared=(0, 1, 2), dtype=BF16, layout="head_major", sinks=True
    ),
    "vllm": case((0, 1, 8, 9, 54), layout="vllm", width=10),
    "vllm, head_dim 112, values of 40, heads 71 of 1, bfloat16": case(
        (0, 15, 17, 54), (71, 1), page_size=16, head_dim=112, v_head_dim=40, dtype=BF16, layout="vllm", **EVERYTHING
    ),
    "vllm, page 5, head_dim 24, float16": case(
        (0, 4, 5, 54), page_size=5, head_dim=24, dtype=F16, layout="vllm", width=14
    ),
    "vllm, head_dim 256, 2 partitions": case(SHORT, head_dim=256, layout="vllm", num_partitions=2),
    # partitions
    "3 partitions, page 5, bfloat16": case((0, 14, 15, 16, 54), page_size=5, num_partitions=3, dtype=BF16, width=14),
    "more partitions than pages": case(num_partitions=9),
    "more partitions than tokens": case((0, 1, 3), num_partitions=7, page_size=1),
    "partitions wholly outside the window": case(
        (54, 97, 3), (14, 2), head_dim=96, num_partitions=5, window=9, sinks=True
    ),
    "partitions of everything": case((0, 1, 9, 54), width=10, num_partitions=3, **EVERYTHING),
}

FEW_AND_MANY = (97, 200, 54, 17, 9)

RAGGED = {
    "whole prompts": case((0, 1, 7, 8, 9, 17), query_lengths=(0, 1, 7, 8, 9, 17)),
    "last tokens": case((0, 1, 8, 9, 54), query_lengths=(0, 1, 3, 2, 17)),
    "rows without queries": case((9, 17, 0, 54), query_lengths=(0, 3, 0, 1)),
    "no row has queries": case((9, 17), query_lengths=(0, 0), padding=3, sinks=True),
    "one query per row": case((1, 8, 9, 54), query_lengths=(1, 1, 1, 1)),
    "one long row": case((97,), query_lengths=(41,), page_size=16),
    "padding": case((9, 0, 17), query_lengths=(3, 0, 5), padding=5, width=6, sinks=True),
    "more queries than keys": case((0, 2, 9, 1), query_lengths=(3, 5, 9, 1), padding=2),
    "more queries than keys, sinks": case((0, 2, 9, 1), query_lengths=(3, 5, 9, 1), padding=2, sinks=True),
    "rows share pages": case((20, 20, 9), query_lengths=(3, 7, 9), shared=(0, 1, 2)),
    "page 1, a wide table": case((3, 17), query_lengths=(2, 17), page_size=1, width=40),
    "page 5, head_dim 80": case((4, 6, 17), query_lengths=(4, 3, 17), page_size=5, head_dim=80),
    "head_dim 192, values of 128, float32 over bfloat16": case(
        (1, 9, 17), query_lengths=(1, 9, 2), q_dtype=F32, head_dim=192, v_head_dim=128, dtype=BF16
    ),
    "heads 5 of 1, float16": case((9, 17), (5, 1), query_lengths=(9, 2), dtype=F16),
    "heads 71 of 1, alibi": case((9, 17), (71, 1), query_lengths=(9, 2), alibi_slopes=True),
    "float32 over bfloat16": case((1, 9, 54), query_lengths=(1, 9, 17), q_dtype=F32, dtype=BF16),
    "bfloat16 over float32": case((1, 9, 54), query_lengths=(1, 9, 17), q_dtype=BF16, dtype=F32),
    "window 1": case((9, 54), query_lengths=(9, 17), window=1),
    "traced window 11": case((2, 9, 54), query_lengths=(5, 9, 17), window=11, traced_window=True),
    "soft cap": case((9, 54), query_lengths=(9, 17), soft_cap=1.0, magnitude=2.0),
    "3 partitions": case((9, 54), query_lengths=(9, 17), num_partitions=3),
    "HND, page 5": case((0, 9, 54), query_lengths=(0, 9, 17), page_size=5, layout="HND", dtype=BF16),
    "head major, window 9": case((54, 97, 23), query_lengths=(17, 3, 23), layout="head_major", width=16, window=9),
    "vllm, values of 24": case((9, 54), query_lengths=(9, 17), v_head_dim=24, layout="vllm", width=10, dtype=F16),
    "everything": case((0, 2, 9, 54), (6, 2), query_lengths=(2, 5, 9, 17), padding=4, **EVERYTHING),
    # of which the kernel takes tiles of few and tiles of many tokens
    "few tokens and many": case(FEW_AND_MANY, query_lengths=(1, 190, 3, 0, 9), dtype=BF16),
    "few tokens and many, everything": case(
        FEW_AND_MANY, (6, 2), query_lengths=(1, 190, 3, 0, 9), padding=7, dtype=F16, layout="vllm", **EVERYTHING
    ),
    "partitions of everything": case(
        (0, 2, 9, 54), (6, 2), query_lengths=(2, 5, 9, 17), padding=4, width=10, num_partitions=4, **EVERYTHING
    ),
    # quantised
    "bfloat16 over int8, vllm": case(
        (0, 9, 54), query_lengths=(0, 9, 17), q_dtype=BF16, page_size=16, dtype=INT8, layout="vllm", **EVERYTHING
    ),
    "float16 over float8_e5m2, HND, page 5": case(
        (2, 9, 54),
        query_lengths=(5, 9, 17),
        q_dtype=F16,
        page_size=5,
        dtype=E5M2,
        layout="HND",
        padding=3,
        window=9,
        traced_window=True,
    ),
}


# The samples that run by default; test_samples says what they cover. On a GPU all cases run.
DECODE_SAMPLE = (
    "every row empty",
    "page 32, head_dim 128, heads 8 of 2, float16, soft cap 1, 1 partition",
    "page 64, head_dim 64, heads 64 of 8, float16 over bfloat16, a wide table",
    "page 128, head_dim 256, heads 4 of 4, bfloat16 over float32, window 33, soft cap 50",
    "page 256, head_dim 192, heads 16 of 1, HND, bfloat16, window 1, more partitions than pages",
    "head major, page 1, rows share pages, bfloat16",
    "vllm, head_dim 112, values of 40, heads 71 of 1, bfloat16",
    "bfloat16 over int8, page 5, values of 24, heads 5 of 1",
    "float8_e4m3fn, vllm, page 5, heads 7 of 1",
    "float16 over float8_e5m2, head_dim 112, heads 12 of 2, head major, many keys of little weight",
    "partitions wholly outside the window",
    "partitions of everything",
)
RAGGED_SAMPLE = (
    "head_dim 192, values of 128, float32 over bfloat16",
    "head major, window 9",
    "few tokens and many, everything",
    "partitions of everything",
    "bfloat16 over int8, vllm",
    "float16 over float8_e5m2, HND, page 5",
)


LONG = (0, 1, 54, 97, 1328, 2011, 16384)

DECODE_AT_SIZE = {
    "heads 64 of 8": case(LONG, (64, 8), page_size=16, head_dim=128, dtype=BF16),
    "heads 32 of 8, float16": case(LONG, (32, 8), page_size=64, head_dim=128, dtype=F16),
    "heads 71 of 1": case(LONG, (71, 1), page_size=32, head_dim=64, dtype=BF16),
    "heads 16 of 1, head_dim 256": case(LONG, (16, 1), page_size=32, head_dim=256, dtype=BF16),
    "heads 4 of 4, float32": case(LONG, (4, 4), page_size=128, head_dim=64),
    "heads 7 of 1, float32, page 1": case(LONG, (7, 1), page_size=1, head_dim=80),
    "heads 14 of 2, page 5": case(LONG, (14, 2), page_size=5, head_dim=112, dtype=BF16),
    "heads 12 of 2, page 256": case(LONG, (12, 2), page_size=256, head_dim=96, dtype=F16),
    "one row of wide heads": case((4001,), (16, 8), page_size=16, head_dim=256, dtype=BF16),
    "head_dim 192, values 128": case(LONG, (8, 2), page_size=64, head_dim=192, v_head_dim=128, dtype=BF16),
    "window 533": case(LONG, (8, 2), page_size=16, head_dim=128, dtype=BF16, window=533),
    "traced window 64": case(LONG, (8, 2), page_size=16, head_dim=128, dtype=BF16, window=64, traced_window=True),
    "everything": case(LONG, (8, 2), page_size=16, head_dim=64, dtype=BF16, **EVERYTHING),
    "3 partitions": case(LONG, (8, 2), page_size=16, head_dim=64, dtype=BF16, num_partitions=3),
    "1 partition": case(LONG, (8, 2), page_size=8, head_dim=64, num_partitions=1),
    "many partitions": case(LONG, (8, 2), page_size=8, head_dim=64, num_partitions=100),
    "float32 over bfloat16": case(LONG, (8, 2), q_dtype=F32, page_size=16, head_dim=128, dtype=BF16),
    "HND": case(LONG, (8, 2), page_size=16, head_dim=128, dtype=BF16, layout="HND"),
    "head major": case(LONG, (8, 2), page_size=64, head_dim=64, dtype=F16, layout="head_major"),
    "vllm": case(LONG, (64, 8), page_size=16, head_dim=128, dtype=BF16, layout="vllm"),
    "vllm, page 5, float32": case(LONG, (8, 2), page_size=5, head_dim=80, layout="vllm"),
    "float16 over int8, vllm": case(
        (0, 15, 17, 54), q_dtype=F16, page_size=16, head_dim=48, dtype=INT8, layout="vllm", window=33
    ),
    "float16 over float8_e4m3fn, rows share pages": case((20, 20, 9), q_dtype=F16, dtype=E4M3, shared=(0, 1, 2)),
    "large values, float8_e4m3fn, 2 partitions": case(
        (0, 8, 9, 54), dtype=E4M3, layout="HND", magnitude=30.0, scale=1e-3, num_partitions=2
    ),
    "int8": case(LONG, (32, 8), q_dtype=BF16, page_size=16, head_dim=128, dtype=INT8),
    "float8_e4m3fn": case(LONG, (32, 8), q_dtype=BF16, page_size=16, head_dim=128, dtype=E4M3),
    "float8_e5m2, float16, HND": case(LONG, (8, 2), q_dtype=F16, page_size=32, dtype=E5M2, layout="HND"),
    "float8_e4m3fn, vllm": case(LONG, (8, 2), q_dtype=F16, page_size=16, head_dim=128, dtype=E4M3, layout="vllm"),
    "int8, vllm, float32": case(LONG, (7, 1), page_size=32, head_dim=80, dtype=INT8, layout="vllm", window=533),
}

RAGGED_AT_SIZE = {
    "drafts over one long row": case((16384,), (32, 8), query_lengths=(4,), page_size=16, head_dim=128, dtype=BF16),
    "drafts over one long row, int8": case(
        (16384,), (32, 8), query_lengths=(4,), q_dtype=BF16, page_size=16, head_dim=128, dtype=INT8
    ),
    "drafts of wide heads": case((4001,), (16, 8), query_lengths=(4,), page_size=16, head_dim=256, dtype=BF16),
    "a short chunk": case((4001,), (32, 8), query_lengths=(61,), page_size=16, head_dim=128, dtype=BF16),
    "a short chunk of wide heads": case((4001,), (16, 8), query_lengths=(61,), page_size=16, head_dim=256, dtype=F16),
    "a chunk among decoding rows": case(
        (2011, 1328, 97, 4000), (32, 8), query_lengths=(1, 577, 1, 17), page_size=16, head_dim=128, dtype=BF16
    ),
    "heads 64 of 8": case((0, 1, 97, 1328, 2011), (64, 8), query_lengths=(0, 1, 17, 577, 3), head_dim=128, dtype=BF16),
    "float32": case((97, 577, 2011), (8, 2), query_lengths=(97, 577, 2), page_size=32, head_dim=80, padding=9),
    "everything": case((97, 577, 2011), (7, 1), query_lengths=(2, 577, 17), page_size=5, dtype=BF16, **EVERYTHING),
    "int8": case((97, 577, 2011), (8, 2), query_lengths=(2, 577, 17), q_dtype=BF16, head_dim=128, dtype=INT8),
}


# --- running a case


def queries(case):
    """Random queries; padding tokens and the tokens of empty rows hold NaN."""
    head_dim, magnitude = dict(case.pool)["head_dim"], dict(case.pool)["magnitude"]
    counts = case.query_lengths or [1] * len(case.lengths)
    rng = np.random.default_rng(11)
    shape = (sum(counts) + case.padding, case.heads[0], head_dim)
    q = (magnitude * rng.standard_normal(shape)).astype(case.q_dtype)
    if case.query_lengths is None:
        q[np.asarray(case.lengths) == 0] = np.nan
    q[sum(counts) :] = np.nan
    return q


def options_of(case):
    options, heads, rng = dict(case.options), case.heads[0], np.random.default_rng(13)
    if options.get("sinks"):
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    if options.get("alibi_slopes"):
        options["alibi_slopes"] = rng.uniform(0.01, 0.5, heads).astype(np.float32)
    return options


def meaning(q, pool, query_lengths, options):
    """The oracle's out and lse, read through the table, and those of dense attention on the same rows."""
    options = {"scale": q.shape[-1] ** -0.5} | {k: v for k, v in options.items() if k != "num_partitions"}
    k, v = (x[pool.layer] for x in pools.contents(pool.cache))
    truth = oracle.paged(q, k, v, pool.table.pages, pool.lengths, query_lengths, **options)
    return truth, dense(q, pool.k_rows, pool.v_rows, pool.lengths, query_lengths, **options)


@functools.cache
def posed(case):
    """Everything about a case that no implementation changes."""
    q, pool, options = queries(case), pools.build(case.lengths, **dict(case.pool)), options_of(case)
    return q, pool, options, *meaning(q, pool, case.query_lengths, options)


def op(implementation, options=None, **static):
    """paged_attention under jit; arrays among the options are traced. One program for all calls of one size."""
    options = (options or {}) | static
    arrays = {name: value for name, value in options.items() if isinstance(value, np.ndarray | jax.Array)}
    attend = _attend(implementation, tuple((name, value) for name, value in options.items() if name not in arrays))

    def run(q, pool, query_lengths=None):
        query_lengths = None if query_lengths is None else np.asarray(query_lengths, np.int32)
        return attend(q, pool.cache, pool.table, pool.layer, query_lengths, arrays)

    return run


@functools.cache
def _attend(implementation, options):
    @jax.jit
    def attend(q, cache, table, layer, query_lengths, arrays):
        return paged_attention(
            q,
            cache,
            table,
            layer=layer,
            query_lengths=query_lengths,
            return_lse=True,
            implementation=implementation,
            **arrays,
            **dict(options),
        )

    return attend


def attend_as(case, implementation):
    """What a case asks of an implementation, as `op` makes it."""
    options = options_of(case)
    if case.traced_window:
        options["window"] = np.asarray(options["window"], np.int32)
    return op(implementation, options)


def run_case(case, implementation):
    q, pool, _, truth, plain = posed(case)
    out, lse = attend_as(case, implementation)(q, pool, case.query_lengths)
    assert out.dtype == q.dtype
    assert lse.dtype == jnp.float32
    assert_accurate(out, truth[0], plain[0])
    assert_accurate(lse, truth[1], plain[1])


def bits(*arrays):
    return [np.asarray(array).tobytes() for array in arrays]
