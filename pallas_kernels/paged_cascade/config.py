"""How the cascade kernel cuts its work: rows that share a program, partitions, keys per tile, warps, from shapes."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels import partition
from pallas_kernels.device import Device
from pallas_kernels.quantisation import product_dtype

_LANES = 128  # rows × heads of a group in one program: what fills the matrix units
_ACCUMULATOR = 128 * 128  # lanes × dims, both powers of two, that four warps hold in registers
_LEAST_TILES = 4  # of a partition: merging more parts takes longer than folding larger ones


class Shape(NamedTuple):
    """What a choice depends on beside the device: of a decode step, what is known while it is traced."""

    rows: int
    num_kv_heads: int
    group: int
    head_dim: int
    v_head_dim: int
    q_dtype: str
    kv_dtype: str


@dataclasses.dataclass(frozen=True)
class Config:
    """One way to run the kernel."""

    together: int  # rows whose queries share a program
    partitions: int  # of the shared keys, at most
    tile: int  # keys folded at once; a power of two, at least 16
    num_warps: int
    num_stages: int


def heuristic(shape: Shape, device: Device) -> Config:
    """A sound choice for any shape: full matrix units, and a program that reads shared keys for each processor.

    Numbers from an H200 at head_dim 128: with 128 lanes 32 x 4 x 5 is the best, 64 x 4 x 3 takes 5 % longer; with 16
    lanes 64 x 2 x 5 is the best. Twice the partitions take a fifth longer, as all parts must be merged.
    """
    in_float32 = product_dtype(shape.q_dtype, shape.kv_dtype) == "float32"
    widest = 1 << (max(shape.head_dim, shape.v_head_dim) - 1).bit_length()
    most_lanes = 32 if in_float32 else min(_LANES, _ACCUMULATOR // widest)
    together = max(1, min(shape.rows, most_lanes // shape.group))
    programs = -(-shape.rows // together) * shape.num_kv_heads
    partitions = max(1, device.processors // programs)
    lanes = max(16, 1 << (together * shape.group - 1).bit_length())
    num_warps = 8 if lanes * widest > _ACCUMULATOR else 4 if in_float32 or lanes > 32 or widest > 128 else 2
    if in_float32:
        return Config(together, partitions, tile=16, num_warps=num_warps, num_stages=2)
    # The queries, two tiles under way and, in less than one more, the weights must fit.
    room = device.shared_memory - lanes * shape.head_dim * jnp.dtype(shape.q_dtype).itemsize
    token_bytes = (shape.head_dim + shape.v_head_dim) * jnp.dtype(shape.kv_dtype).itemsize
    tile = 32 if lanes > 64 or widest > 128 else 64
    while tile > 16 and 3 * tile * token_bytes >= room:
        tile //= 2
    return Config(together, partitions, tile, num_warps, num_stages=5)


def shared_partitions(config: Config, num_shared: Int32[Array, ""]) -> Int32[Array, ""]:
    """In how many partitions to fold so many shared keys."""
    return jnp.clip(partition.ceil_div(num_shared, _LEAST_TILES * config.tile), 1, config.partitions)


def num_own_partitions(num_kv_heads: int, device: Device) -> int:
    """Partitions wanted over all rows' own keys; the programs of shared keys are there as well."""
    return max(1, device.processors // num_kv_heads)
