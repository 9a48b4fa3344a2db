"""Attention over parts of the keys merges to attention over all of them, exactly."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from attention_cases import BF16, F16, F32, every, meaning, op
from tolerances import assert_accurate

from paged_jax import merge_attention

pytestmark = pytest.mark.usefixtures("highest_precision")

# --- merging


def cut(pool, first, last, width=8):
    """The same pool through a table that holds only blocks [first, last) of every row."""
    lengths = np.clip(pool.lengths - first * 4, 0, (last - first) * 4)
    blocks = [
        row[first : first + -(-n // 4)].tolist() for row, n in zip(np.asarray(pool.table.pages), lengths, strict=True)
    ]
    table = pools.block_table(blocks, lengths, pool.cache.k.shape[1], 4, width=width)
    return dataclasses.replace(pool, table=table, lengths=lengths)


@pytest.mark.parametrize(
    ("parts", "sink_in", "as_sequence"),
    [
        ([0, 2, 8], None, False),
        ([0, 2, 8], 0, True),
        ([0, 0, 8], 0, False),
        ([0, 7, 8], 1, True),
        ([0, 1, 2, 8], None, True),
        ([0, 3, 3, 4, 8], 1, False),
    ],
    ids=str,
)
@every
def test_parts_over_disjoint_keys_merge_to_the_whole(parts, sink_in, as_sequence, implementation):
    pool = pools.build([0, 3, 8, 9, 30], page_size=4)
    q = np.random.default_rng(1).standard_normal((5, 4, 16)).astype(np.float32)
    sinks = np.asarray([-1.0, 0.0, 1.0, 2.0], np.float32)
    plain, with_sink = _merge_ops(implementation)
    runs = [
        (with_sink if n == sink_in else plain)(q, cut(pool, first, last))
        for n, (first, last) in enumerate(itertools.pairwise(parts))
    ]
    outs, lses = zip(*runs, strict=True)
    out, lse = jax.jit(merge_attention)(*((outs, lses) if as_sequence else (np.stack(outs), np.stack(lses))))
    truth, whole = meaning(q, pool, None, {} if sink_in is None else {"sinks": sinks})
    assert_accurate(out, truth[0], whole[0])
    assert_accurate(lse, truth[1], whole[1])


@functools.cache
def _merge_ops(implementation):
    return op(implementation), op(implementation, {"sinks": np.asarray([-1.0, 0.0, 1.0, 2.0], np.float32)})


def random_part(seed, dtype=F32, empty=False):
    rng = np.random.default_rng(seed)
    out, lse = rng.standard_normal((3, 4, 24)), rng.standard_normal((3, 4))
    return (
        (jnp.zeros((3, 4, 24), dtype), jnp.full((3, 4), -jnp.inf))
        if empty
        else (
            jnp.asarray(out, dtype),
            jnp.asarray(lse, F32),
        )
    )


def merge(*parts):
    return jax.jit(merge_attention)(*map(tuple, zip(*parts, strict=True)))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_nothing_merged_with_nothing_is_nothing(dtype, count):
    out, lse = merge(*[random_part(0, dtype, empty=True)] * count)
    assert out.dtype == dtype
    assert lse.dtype == F32
    np.testing.assert_array_equal(out, np.zeros((3, 4, 24)))
    np.testing.assert_array_equal(lse, np.full((3, 4), -np.inf))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("order", [1, -1])
def test_nothing_is_the_identity_of_merging(dtype, order):
    part, nothing = random_part(1, dtype), random_part(0, dtype, empty=True)
    out, lse = merge(*(part, nothing)[::order])
    np.testing.assert_array_equal(out, part[0])
    np.testing.assert_allclose(lse, part[1], rtol=1e-6)


def test_merging_is_commutative_and_associative():
    a, b, c = (random_part(seed) for seed in range(3))
    at_once = merge(a, b, c)
    for other in (merge(c, a, b), merge(merge(a, b), c), merge(a, merge(b, c))):
        for x, y in zip(at_once, other, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-6)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_parts_merge_by_the_weights_of_their_denominators(dtype):
    parts = [random_part(seed, dtype) for seed in range(3)]
    out, lse = merge(*parts)
    outs, lses = (np.stack([np.asarray(part[n], np.float64) for part in parts]) for n in (0, 1))
    weights = np.exp(lses)
    assert out.dtype == dtype
    tolerance = 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(out, np.float64), (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None], atol=tolerance
    )
    np.testing.assert_allclose(lse, np.log(weights.sum(0)), atol=1e-6)


@pytest.mark.parametrize("offset", [-500_000.0, 500_000.0])
def test_merging_keeps_extreme_logits(offset):
    (a, _), (b, _) = random_part(0), random_part(1)
    level = jnp.full((3, 4), offset)
    out, lse = merge((a, level), (b, level))
    np.testing.assert_allclose(out, (a + b) / 2, atol=1e-6)
    np.testing.assert_allclose(lse, level + np.log(2), rtol=1e-6)
    out, _ = merge((a, level), (b, level - 1000))
    np.testing.assert_array_equal(out, a)


@pytest.mark.parametrize(
    ("outs", "lses"),
    [((2, 3, 4, 24), (2, 3, 5)), ((2, 3, 4, 24), (3, 3, 4)), ((2, 3, 4, 24), (2, 3, 4, 24)), ((2, 3, 4, 24), (3, 4))],
    ids=str,
)
def test_parts_that_do_not_fit_do_not_merge(outs, lses):
    with pytest.raises(ValueError, match=r"(?is)expected.*got"):
        merge_attention(jnp.zeros(outs), jnp.zeros(lses))
