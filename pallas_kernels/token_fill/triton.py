"""Token fill in Pallas's Triton lowering: overwrites the few tokens that ask for it, and touches no other.

Where XLA selects between an array and a value it reads and writes all of the array: as much as attention itself does
for a short prompt.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.walk import iota, load

_TOKENS = 32  # of a program
_LANES = 256  # elements of a token that are stored at once


def _kernel(
    # Input
    is_filled_ref,  # [T]
    fill_ref,  # [T]
    before_ref,  # the one below, aliased to it
    # Output
    vectors_ref,  # [T, N * H]
):
    del before_ref
    num_tokens, size = vectors_ref.shape
    token = pl.program_id(0).astype(jnp.int32) * _TOKENS + iota(_TOKENS)
    is_token = token < num_tokens
    is_filled = load(is_filled_ref.at[token], is_token)
    fill = load(fill_ref.at[token], is_token)

    @pl.when(jnp.max(is_filled) > 0)
    def store_tokens():
        # Interpret mode knows no masks, but drops what is past the end.
        at = jnp.where(is_filled > 0, token, num_tokens)[:, None]

        @pl.loop(0, pl.cdiv(size, _LANES))
        def store_lanes(chunk):
            lane = chunk * _LANES + iota(_LANES)
            mask = (is_filled > 0)[:, None] & (lane < size)[None, :]
            values = jnp.broadcast_to(fill[:, None], mask.shape)
            plgpu.store(vectors_ref.at[at, lane[None, :]], values, mask=mask)


def token_fill(
    vectors: Float[Array, "T N H"], is_filled: Bool[Array, " T"], fill: Float[Array, " T"], *, interpret: bool = False
) -> Float[Array, "T N H"]:
    """The vectors, with those of the tokens where `is_filled` set to their token's `fill`; in place where they are not
    used again. Costs the reading of [T] flags and the writing of what is filled.

    Args:
        interpret: run on any host, for tests.
    """
    num_tokens, *sizes = vectors.shape
    flat = vectors.reshape(num_tokens, math.prod(sizes))
    filled = pl.pallas_call(
        _kernel,
        grid=(pl.cdiv(num_tokens, _TOKENS),),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        input_output_aliases={2: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="token_fill",
    )(is_filled.astype(jnp.int32), fill.astype(vectors.dtype), flat)
    return filled.reshape(vectors.shape)
