"""The fill kernel overwrites the tokens it is told to, with their values, and lowers for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import crossed
from lowering import lower_for_cuda

from pallas_kernels.token_fill import token_fill

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
CASES = {
    "one token": (1, (2, 24), [0]),
    "none of them": (40, (3, 16), []),
    "all of them": (70, (4, 128), range(70)),
    "some of the last tile": (67, (5, 80), [0, 31, 32, 65, 66]),
}


def check(dtype, num_tokens, sizes, filled, **options):
    vectors = np.random.default_rng(0).standard_normal((num_tokens, *sizes)).astype(dtype)
    fill = np.where(np.arange(num_tokens) % 2, np.nan, 0).astype(np.float32)
    is_filled = np.isin(np.arange(num_tokens), filled)
    out = jax.jit(functools.partial(token_fill, **options))(vectors, is_filled, fill)
    expected = np.where(is_filled[:, None, None], fill[:, None, None], vectors.astype(np.float32))
    assert out.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)


@pytest.mark.parametrize(("dtype", "case"), crossed(DTYPES, [*CASES]))
def test_the_tokens_told_are_filled_and_no_other(dtype, case):
    check(dtype, *CASES[case], interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "sizes", "filled"), CASES.values(), ids=CASES)
def test_the_tokens_told_are_filled_and_no_other_on_a_gpu(dtype, num_tokens, sizes, filled):
    check(dtype, num_tokens, sizes, filled)


def test_it_lowers_for_cuda_and_writes_in_place():
    vectors = jax.ShapeDtypeStruct((100, 8, 96), jnp.bfloat16)
    text = lower_for_cuda(
        token_fill, vectors, jax.ShapeDtypeStruct((100,), bool), jax.ShapeDtypeStruct((100,), jnp.float32)
    )
    assert "output_operand_alias" in text
