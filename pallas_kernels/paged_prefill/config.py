"""How the prefill kernel cuts its work: query tokens and keys per tile, warps and pipeline stages, from shapes."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.quantisation import is_quantised, product_dtype

_LANES = 128  # query tokens × heads of a group in one program: what fills the matrix units
_FEW_LANES = 64  # up to which reading is the limit
_RESIDENT = 4  # programs on a processor at a time: so many hide the latency of memory from each other
_NARROW_LANES = 32  # up to which few query tiles want large tiles of keys, and fewer warps
_FEW = 4  # query tiles × kv heads are few if there are so many times as many processors


class Shape(NamedTuple):
    """What a choice depends on beside the device: of a step, what is known while it is traced."""

    tokens: int
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

    queries: int  # query tokens of one row that share a walk
    few: int  # tiles of up to so many tokens have narrower programs, and partitions; all tiles if it is `queries`
    tile: int  # keys folded at once; a power of two, at least 16
    num_warps: int
    num_stages: int
    programs_per_processor: int = _RESIDENT  # query tiles of few tokens are partitioned until there are so many


def heuristic(shape: Shape, device: Device) -> Config:
    """A sound choice for any shape: as many tokens in a tile as rows have on average, up to full matrix units.

    Where there are too few query tiles for all processors, all of them may be partitioned. Numbers from an H200, of
    tiles, warps and stages at head_dim 128: with 128 lanes 64 x 4 x 3 is within 8 % of the best for prompts and chunks;
    64 x 2 x 3 is within 1 % for 4 and 8 tokens per row, where twice the warps at 8 tokens take 1.4 times as long; and
    64 x 4 x 5 is the best for 16, since registers let only two programs of 64 lanes share a processor, and each must
    have more under way.

    Few query tiles are cut in as many parts as there are processors and no more, since merging takes longer than
    reading: 128 x 4 x 4 for up to 32 lanes and 64 x 8 x 3 for more. Over 4096 tokens of one row 4 new tokens take half
    as long as with four programs on each processor, 16 a third and 32 a fifth.
    """
    group, widest = shape.group, max(shape.head_dim, shape.v_head_dim)
    # Without matrix units, accumulators fill the registers.
    in_float32 = product_dtype(shape.q_dtype, shape.kv_dtype) == "float32"
    lanes = 32 if in_float32 else _LANES
    mean_tokens = max(1, shape.tokens // max(1, shape.rows))
    queries = min(1 << (mean_tokens - 1).bit_length(), lanes // group)
    queries = max(1, queries, 16 // group)  # of 16 lanes, which every program has, none need be idle
    few = min(queries, max(1, 16 // group, min(4, _FEW_LANES // group)))
    num_tiles = shape.tokens // queries + shape.rows
    if num_tiles * shape.num_kv_heads < _RESIDENT * device.processors:
        few = queries
    if in_float32:
        return Config(queries, few, tile=16, num_warps=4, num_stages=2)
    lanes = queries * group
    kv_tiles = shape.rows * -(-mean_tokens // queries) * shape.num_kv_heads
    are_few, are_narrow = kv_tiles * _FEW <= device.processors, lanes <= _NARROW_LANES
    if are_few and are_narrow:
        tile, num_warps, num_stages = (64, 4, 5) if is_quantised(shape.kv_dtype) else (128, 4, 4)
    else:
        tile = 64 if widest <= 128 else 32
        num_warps = 8 if are_few or lanes * widest > _LANES * 128 else 4 if not are_narrow or widest > 128 else 2
        num_stages = 5 if lanes == _FEW_LANES and not are_few else 3
    config = Config(queries, few, tile, num_warps, num_stages, programs_per_processor=1 if are_few else _RESIDENT)
    while config.tile > 16 and _shared_bytes(shape, config) > device.shared_memory:
        config = dataclasses.replace(config, tile=config.tile // 2)
    return config


def _shared_bytes(shape: Shape, config: Config) -> int:
    """What a program holds at most: queries, the weights of a tile, tiles under way; and what the driver keeps."""
    q_bytes, kv_bytes = (jnp.dtype(dtype).itemsize for dtype in (shape.q_dtype, shape.kv_dtype))
    lanes = max(16, 1 << (config.queries * shape.group - 1).bit_length())
    tiles = config.num_stages // 2 * config.tile * (shape.head_dim + shape.v_head_dim) * kv_bytes
    return lanes * (shape.head_dim + config.tile) * q_bytes + tiles + 2048


def num_partitions(config: Config, num_kv_heads: int, device: Device) -> int:
    """Partitions wanted over all query tiles of few tokens, so that there are as many programs as the config says."""
    return max(1, config.programs_per_processor * device.processors // num_kv_heads)
