"""One suite for every implementation: what the pages hold changes where the values are, never what attention is."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pools
import pytest
from attention_cases import (
    BF16,
    DECODE,
    DECODE_AT_SIZE,
    DECODE_SAMPLE,
    F16,
    RAGGED,
    RAGGED_AT_SIZE,
    RAGGED_SAMPLE,
    attend_as,
    bits,
    case,
    every,
    meaning,
    op,
    posed,
    queries,
    run_case,
)
from grid import sampled
from tolerances import assert_accurate, dense

from paged_jax import BlockTable, paged_attention

pytestmark = pytest.mark.usefixtures("highest_precision")

BOTH_IN_PARTITIONS = [cases["partitions of everything"] for cases in (DECODE, RAGGED)]


# --- accuracy


@every
@pytest.mark.parametrize("case", sampled(DECODE, DECODE_SAMPLE))
def test_decode_is_dense_attention(case, implementation):
    run_case(case, implementation)


@every
@pytest.mark.parametrize("case", sampled(RAGGED, RAGGED_SAMPLE))
def test_ragged_queries_are_dense_attention(case, implementation):
    run_case(case, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("case", DECODE_AT_SIZE.values(), ids=DECODE_AT_SIZE)
def test_decode_at_size_is_dense_attention(case):
    for implementation in (None, "xla", "triton"):  # one test: to pose the case is most of the work
        run_case(case, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("case", RAGGED_AT_SIZE.values(), ids=RAGGED_AT_SIZE)
def test_ragged_queries_at_size_are_dense_attention(case):
    run_case(case, None)


@pytest.mark.parametrize("case", BOTH_IN_PARTITIONS, ids=["decode", "ragged"])
def test_the_automatic_choice_is_dense_attention(case):
    run_case(case, None)


def test_a_named_kernel_never_gives_way_to_another():
    if jax.default_backend() == "gpu":
        pytest.skip("this platform has the kernel")
    q, pool, options, _, _ = posed(DECODE["plain"])
    with pytest.raises(NotImplementedError, match="'triton' runs on cuda and rocm only"):
        op("triton", options)(q, pool)


@every
@pytest.mark.parametrize(
    ("soft_cap", "num_partitions"),
    [pytest.param(None, 1, marks=pytest.mark.full), (None, 3), pytest.param(50.0, 1, marks=pytest.mark.full)],
)
def test_logits_of_half_a_million_keep_their_softmax(implementation, soft_cap, num_partitions):
    """One key of logit +500000 amid -500000 takes all the weight; equal keys of -500000 share it."""
    pool = pools.build([9, 9, 9, 1], page_size=4, num_kv_heads=1)
    rows = [np.zeros_like(row) for row in pool.k_rows]
    for row, sign in zip(rows, ([-1, 1, -1], [-1, -1, -1], [1, 1, 1], [-1, -1, -1]), strict=True):
        row[:, 0, 0] = np.resize(np.asarray(sign, np.float32), 9)[: len(row)]
    rows[0][4:, 0, 0] = -1
    table = pool.table
    k = np.array(pool.cache.k)
    for pages, row in zip(np.asarray(table.pages), rows, strict=True):
        for j, key in enumerate(row):
            k[0, pages[j // 4], j % 4] = key
    pool = dataclasses.replace(pool, k_rows=rows, cache=dataclasses.replace(pool.cache, k=jnp.asarray(k)))
    q = np.zeros((4, 2, 16), np.float32)
    q[..., 0] = 500_000

    options = {"scale": 1.0, "soft_cap": soft_cap, "num_partitions": num_partitions}
    out, lse = op(implementation, options)(q, pool)
    truth, plain = meaning(q, pool, None, options)
    assert_accurate(out, truth[0], plain[0])
    np.testing.assert_allclose(lse, truth[1], rtol=1e-6)


# --- what no row owns


DEAD = [{"poison": poison} for poison in pools.POISONS] + [{"garbage": garbage} for garbage in pools.GARBAGE]


def assert_same_bits(case, implementation, changes):
    """However the pool is changed, as `pools.build` takes it."""
    attend, q = attend_as(case, implementation), queries(case)
    built = (pools.build(case.lengths, **dict(case.pool), **change) for change in changes)
    first, *others = (bits(*attend(q, pool, case.query_lengths)) for pool in built)
    assert all(other == first for other in others)


@every
@pytest.mark.parametrize("case", sampled(DECODE, DECODE_SAMPLE))
def test_decode_is_bit_identical_whatever_the_dead_cells_hold(case, implementation):
    assert_same_bits(case, implementation, DEAD)


@every
@pytest.mark.parametrize("case", sampled(RAGGED, RAGGED_SAMPLE))
def test_ragged_queries_are_bit_identical_whatever_the_dead_cells_hold(case, implementation):
    assert_same_bits(case, implementation, DEAD)


@every
@pytest.mark.parametrize(
    "case", [DECODE["partitions wholly outside the window"], RAGGED["head major, window 9"]], ids=["decode", "ragged"]
)
def test_poison_behind_the_windows_is_never_read(case, implementation):
    """Keys that no token of a row sees are live cells, yet no query reads them: NaN there stays there."""
    q, pool, options, truth, plain = posed(case)
    k, v = map(np.array, pools.contents(pool.cache))
    page_size, counts = pool.table.page_size, case.query_lengths or [1] * len(case.lengths)
    for pages, length, count in zip(np.asarray(pool.table.pages), case.lengths, counts, strict=True):
        for j in range(max(0, length - count - options["window"] + 1)):
            k[1, pages[j // page_size], j % page_size] = v[1, pages[j // page_size], j % page_size] = np.nan
    poisoned = dataclasses.replace(pool, cache=pools.cache_of(k, v, pool.cache.layout))
    out, lse = attend_as(case, implementation)(q, poisoned, case.query_lengths)
    assert_accurate(out, truth[0], plain[0])
    assert_accurate(lse, truth[1], plain[1])


@every
@pytest.mark.parametrize("case", BOTH_IN_PARTITIONS, ids=["decode", "ragged"])
def test_any_placement_of_pages_gives_the_same(case, implementation):
    assert_same_bits(case, implementation, [{"placement": n} for n in range(4)])


# --- laws


@every
@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.full), "partitions of everything"])
def test_decode_is_ragged_with_one_query_per_row(implementation, name):
    attend, (q, pool, _, truth, plain) = attend_as(DECODE[name], implementation), posed(DECODE[name])
    outs = [attend(q, pool, counts) for counts in (None, np.ones_like(pool.lengths))]
    for out, lse in outs:
        assert_accurate(out, truth[0], plain[0])
        assert_accurate(lse, truth[1], plain[1])
    np.testing.assert_allclose(*(out for out, _ in outs), atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("xla", BF16),
        pytest.param("xla", F16, marks=pytest.mark.full),
        pytest.param("triton_interpret", BF16, marks=pytest.mark.full),
        ("triton_interpret", F16),
        *(pytest.param("triton", dtype, marks=pytest.mark.gpu) for dtype in (BF16, F16)),
    ],
)
def test_partitions_lose_no_accuracy(implementation, dtype):
    """Two parts each rounded to q's dtype before they merge would raise the mean error by a fifth."""
    halved = case((150, 170, 190, 200), (8, 2), page_size=16, head_dim=64, dtype=dtype)
    q, pool, _, truth, _ = posed(halved)
    whole, parts = (
        np.abs(np.asarray(op(implementation, num_partitions=n)(q, pool)[0], np.float64) - truth[0]).mean()
        for n in (1, 2)
    )
    assert parts <= 1.1 * whole


PROMPTS = (13, 9)
CHUNKINGS = {
    "one piece": [((13, 9), 24)],
    "row by row": [((13, 0), 24), ((0, 9), 24)],
    "uneven": [((5, 0), 24), ((7, 4), 24), ((1, 5), 24)],
    "token by token": [((1, int(t < 9)), 24) for t in range(13)],
    "a prompt, then decode steps": [((10, 6), 24)] + [((1, 1), None)] * 3,
    "decode steps": [((1, 1), None)] * 9 + [((1, 0), None)] * 4,
}


@functools.cache
def chunk_step(implementation, **options):
    """A step over the next tokens of two prompts, compiled once for all chunkings of one size."""

    @functools.partial(jax.jit, static_argnames="size")
    def forward(cache, table, counts, q, k, v, size):
        """q, k, v [B, longest, ..] whole prompts; the step says which of their tokens are computed now."""
        table, step, ok = table.step(counts, size=size)
        q, k, v = (
            jnp.where((step.rows < 2)[:, None, None], x[step.rows % 2, step.positions], jnp.nan) for x in (q, k, v)
        )
        cache = cache.write(0, k, v, step.slots)
        out = paged_attention(
            q, cache, step.table, query_lengths=step.query_lengths, implementation=implementation, **options
        )
        return cache, table, step, ok, out

    return forward


INTERPRETED = ("a prompt, then decode steps", "decode steps")
OPTIONS = {"plain": {}, "window and soft cap": {"window": 5, "soft_cap": 3.0}}


@pytest.mark.parametrize(
    ("options", "implementation", "chunks"),
    [
        pytest.param(options, implementation, chunks, id=f"{name}-{implementation}-{chunking}", marks=marks)
        for name, options in OPTIONS.items()
        for implementation, chunkings, marks in (
            ("xla", CHUNKINGS, () if options else pytest.mark.full),
            ("triton_interpret", INTERPRETED, () if options else pytest.mark.full),
            ("triton", CHUNKINGS, pytest.mark.gpu),
        )
        for chunking in chunkings
        for chunks in [CHUNKINGS[chunking]]
    ],
)
def test_any_chunking_of_a_prompt_is_one_piece(implementation, chunks, options):
    rng = np.random.default_rng(5)
    q, k, v = ([rng.standard_normal((n, heads, 16)).astype(np.float32) for n in PROMPTS] for heads in (4, 2, 2))
    nothing = np.full((1, 12, 4, 2, 16), np.nan, np.float32)
    cache = pools.cache_of(nothing, nothing)
    table, forward = BlockTable.create(12, 4, 2, 6), chunk_step(implementation, **options)
    prompts = [np.stack([np.pad(row, ((0, 13 - len(row)), (0, 0), (0, 0))) for row in x]) for x in (q, k, v)]
    outs = np.full((2, 13, 4, 16), np.nan)
    for counts, size in chunks:
        cache, table, step, ok, out = forward(cache, table, jnp.asarray(counts, jnp.int32), *prompts, size=size)
        assert ok
        real = np.asarray(step.rows) < 2
        outs[np.asarray(step.rows)[real], np.asarray(step.positions)[real]] = np.asarray(out)[real]
        np.testing.assert_array_equal(np.asarray(out)[~real], 0)

    packed = np.concatenate([outs[r, :n] for r, n in enumerate(PROMPTS)])
    arguments = np.concatenate(q), k, v, PROMPTS, PROMPTS
    truth, plain = (attend(*arguments, scale=0.25, **options)[0] for attend in (oracle.attention, dense))
    assert_accurate(packed, truth, plain)
