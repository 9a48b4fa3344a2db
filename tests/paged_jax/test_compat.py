"""JAX's deprecated op: the same call gives the same attention."""

import importlib
import inspect
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grid import crossed

from paged_jax import compat

pytestmark = pytest.mark.usefixtures("highest_precision")

ROWS, HEADS, KV_HEADS, HEAD_DIM, PAGES, PAGE_SIZE, WIDTH = 4, 8, 2, 16, 19, 4, 4
LENGTHS = (16, 1, 9, 4)


@pytest.fixture(scope="module")
def jax_op():
    """The deprecated module, which warns when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")


def inputs(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    q = (rng.standard_normal((ROWS, HEADS, HEAD_DIM)) / 4).astype(dtype)
    k, v = (rng.standard_normal((KV_HEADS, PAGES, PAGE_SIZE, HEAD_DIM)).astype(dtype) for _ in "kv")
    return q, k, v, rng.permutation(PAGES)[: ROWS * WIDTH].reshape(ROWS, WIDTH).astype(np.int32)


def dense_rows(pages, tables):
    """The rows' cells [B, M·C, K, H] of pages [K, P, C, H]."""
    return np.moveaxis(pages[:, tables], 0, 3).reshape(ROWS, WIDTH * PAGE_SIZE, KV_HEADS, HEAD_DIM)


def test_the_signature_is_that_of_jax(jax_op):
    ours, theirs = (inspect.signature(op.paged_attention).parameters for op in (compat, jax_op))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


SOME = {("f32", True, None, True), ("bf16", False, 1.5, True), ("f32", False, 1.5, False), ("bf16", True, None, False)}


@pytest.mark.parametrize(
    ("dtype", "has_lengths", "soft_cap", "interpret"),
    [
        pytest.param(*options, marks=() if options in SOME else pytest.mark.full)
        for options in itertools.product(("f32", "bf16"), (True, False), (None, 1.5), (False, True))
    ],
)
def test_it_is_the_reference_of_jax(jax_op, dtype, has_lengths, soft_cap, interpret):
    dtype, tolerance = {"f32": (jnp.float32, 1e-5), "bf16": (jnp.bfloat16, 2e-2)}[dtype]
    lengths = LENGTHS if has_lengths else None
    q, k, v, tables = inputs(dtype)
    lengths = None if lengths is None else np.asarray(lengths, np.int32)
    out = compat.paged_attention(q, k, v, tables, lengths, attn_logits_soft_cap=soft_cap, interpret=interpret)
    expected = jax_op.paged_attention_reference(
        q, dense_rows(k, tables), dense_rows(v, tables), lengths, attn_logits_soft_cap=soft_cap
    )
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=tolerance)


def test_a_row_of_no_keys_gives_zeros_and_dead_pages_are_never_read():
    q, k, v, tables = inputs()
    lengths = np.asarray([0, 5, 0, 4], np.int32)
    expected = compat.paged_attention(q, k, v, tables, lengths)
    np.testing.assert_array_equal(expected[::2], 0)
    is_read = np.arange(WIDTH) * PAGE_SIZE < lengths[:, None]
    out = compat.paged_attention(q, k, v, np.where(is_read, tables, np.int32(-(10**6))), lengths)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("pool_dtype", "scaled"), crossed([jnp.int8, jnp.float8_e4m3fn], ["kv", "k", "v"]))
def test_scales_stand_for_a_factor_per_token_and_head(pool_dtype, scaled):
    q, k, v, tables = inputs()
    pools, exact, scales = {"k": k, "v": v}, {"k": k, "v": v}, {"k": None, "v": None}
    rng = np.random.default_rng(1)
    for name in scaled:
        pools[name] = (30 * pools[name]).astype(pool_dtype)
        scales[name] = rng.uniform(0.01, 0.1, (KV_HEADS, PAGES, PAGE_SIZE)).astype(np.float32)
        exact[name] = pools[name].astype(np.float32) * scales[name][..., None]
    lengths = np.asarray(LENGTHS, np.int32)
    out = compat.paged_attention(q, pools["k"], pools["v"], tables, lengths, scales["k"], scales["v"])
    rows = (dense_rows(exact[name], tables) for name in "kv")
    truth, _ = oracle.attention(q, *rows, LENGTHS, scale=1.0)
    np.testing.assert_allclose(out, truth, atol=1e-4)


def test_a_pool_of_one_byte_is_never_multiplied_out():
    """Nor is a factor read that belongs to no row's cell."""
    q, k, v, tables = inputs()
    k, v = ((30 * pool).astype(np.int8) for pool in (k, v))
    lengths = np.asarray(LENGTHS, np.int32)
    is_held = np.zeros((KV_HEADS, PAGES, PAGE_SIZE), bool)
    for pages, length in zip(tables, LENGTHS, strict=True):
        for j in range(length):
            is_held[:, pages[j // PAGE_SIZE], j % PAGE_SIZE] = True
    factors = (np.where(is_held, np.float32(0.02), np.float32(dead)) for dead in (1.0, np.nan))
    arguments = [(k, v, tables, lengths, scales, scales) for scales in factors]
    outs = [compat.paged_attention(q, *each) for each in arguments]
    np.testing.assert_array_equal(*outs)
    pool, scales = (jax.ShapeDtypeStruct((KV_HEADS, 1000, *shape), dtype) for shape, dtype in (
        ((PAGE_SIZE, HEAD_DIM), jnp.int8), ((PAGE_SIZE,), jnp.float32)
    ))  # fmt: skip
    hlo = compat.paged_attention.lower(q, pool, pool, tables, lengths, scales, scales).compile().as_text()
    assert "s8[1,2,1000,4,16]" in hlo
    assert "f32[1,2,1000,4,16]" not in hlo
    assert "f32[2,1000,4,16]" not in hlo


HINTS = {
    "block_h": 32,
    "pages_per_compute_block": 3,
    "k_splits": 5,
    "num_warps": 4,
    "num_stages": 1,
    "debug": True,
    "mask_value": -1e9,
}


@pytest.mark.parametrize("hint", HINTS)
def test_hints_change_nothing(hint):
    arguments = *inputs(), np.asarray(LENGTHS, np.int32)
    given, without = (
        compat.paged_attention.lower(*arguments, **hints).as_text() for hints in ({hint: HINTS[hint]}, {})
    )
    assert given == without


def test_a_mask_value_with_weight_is_refused():
    with pytest.raises(NotImplementedError, match=r"mask_value: .*expected at most -10000.0, got -1.0"):
        compat.paged_attention(*inputs(), jnp.asarray(LENGTHS), mask_value=-1.0)


MISTAKES = {
    "q of rank 2": {"q": (ROWS, HEAD_DIM)},
    "q of another head_dim": {"q": (ROWS, HEADS, 24)},
    "heads not divisible": {"q": (ROWS, 5, HEAD_DIM)},
    "pools with layers": {"k_pages": (1, KV_HEADS, PAGES, PAGE_SIZE, HEAD_DIM)},
    "pools of other pages": {"v_pages": (KV_HEADS, PAGES + 1, PAGE_SIZE, HEAD_DIM)},
    "tables of another batch": {"block_tables": (ROWS + 1, WIDTH)},
    "tables of rank 1": {"block_tables": (ROWS,)},
    "lengths of another batch": {"lengths": (ROWS - 1,)},
    "scales of another shape": {"k_scales_pages": (KV_HEADS, PAGES)},
}
SHAPES = {
    "q": (ROWS, HEADS, HEAD_DIM),
    "k_pages": (KV_HEADS, PAGES, PAGE_SIZE, HEAD_DIM),
    "v_pages": (KV_HEADS, PAGES, PAGE_SIZE, HEAD_DIM),
    "block_tables": (ROWS, WIDTH),
    "lengths": (ROWS,),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_what_does_not_fit_says_what_was_expected(mistake):
    integers = ("block_tables", "lengths")
    shapes = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32 if name in integers else jnp.float32)
        for name, shape in (SHAPES | mistake).items()
    }
    with pytest.raises(ValueError, match=r"(?is)expected.*got"):
        jax.eval_shape(compat.paged_attention, **shapes)
