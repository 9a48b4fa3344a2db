"""How the prefill kernel cuts its work: query tokens and keys per tile, warps and pipeline stages, from shapes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

_LANES = 128  # query tokens × heads of a group in one program: what fills the matrix units


@dataclasses.dataclass(frozen=True)
class Config:
    """One way to run the kernel."""

    queries: int  # query tokens of one row that share a walk
    tile: int  # keys folded at once; a power of two, at least 16
    num_warps: int
    num_stages: int


def heuristic(
    tokens: int, rows: int, group: int, head_dim: int, v_head_dim: int, q_dtype: jnp.dtype, kv_dtype: jnp.dtype
) -> Config:
    """A sound choice for any shape: as many tokens in a tile as rows have on average, up to full matrix units."""
    mean_tokens = max(1, tokens // max(1, rows))
    queries = min(1 << (mean_tokens - 1).bit_length(), max(1, _LANES // group))
    lanes = queries * group
    widest = max(head_dim, v_head_dim)
    if q_dtype != kv_dtype or q_dtype == jnp.float32:  # without matrix units, accumulators fill the registers
        return Config(max(1, min(queries, 32 // group)), tile=16, num_warps=4, num_stages=2)
    num_warps = 8 if lanes * widest > 64 * 128 else 4 if lanes > 16 or widest > 128 else 2
    return Config(queries, tile=64 if widest <= 128 else 32, num_warps=num_warps, num_stages=4)
