"""How the decode kernel cuts its work: tile, warps, pipeline stages and partitions, from shapes and the device."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

_PROGRAMS_PER_PROCESSOR = 4  # resident at a time: so many hide the latency of memory from each other
_ROWS_KEPT_WHOLE = 1.45  # partitions per row, below the 1.5 at which rows of mean length would be cut in two

# By compute capability, from the CUDA programming guide; 64 for others, as an AMD compute unit has.
_SHARED_MEMORY_KIB = {"8.0": 164, "8.6": 100, "8.7": 164, "8.9": 100, "9.0": 228, "10.0": 228, "10.3": 228, "12.0": 100}


class Device(NamedTuple):
    """What a choice depends on."""

    processors: int
    shared_memory: int  # bytes for each processor


INTERPRETED = Device(processors=2, shared_memory=164 << 10)  # every program costs time there


@dataclasses.dataclass(frozen=True)
class Config:
    """One way to run the kernel."""

    tile: int  # tokens folded at once; a power of two, at least 16
    num_warps: int
    num_stages: int  # of the software pipeline: the page ids take two, each tile of K and V in flight two more
    programs_per_processor: int = _PROGRAMS_PER_PROCESSOR  # rows are partitioned until there are so many


def heuristic(
    group: int, head_dim: int, v_head_dim: int, q_dtype: jnp.dtype, kv_dtype: jnp.dtype, device: Device
) -> Config:
    """A sound choice for any shape and GPU.

    The tiles of K and V of all programs that are meant to be resident fit in a processor's shared memory, and wide
    heads and groups spread their accumulator over more warps. float32 products run without matrix units and want small
    tiles.
    """
    in_float32 = jnp.promote_types(q_dtype, kv_dtype) == jnp.float32
    token_bytes = (head_dim + v_head_dim) * jnp.dtype(kv_dtype).itemsize
    tile = 16
    while tile < (16 if in_float32 else 64) and (
        2 * tile * token_bytes <= device.shared_memory // _PROGRAMS_PER_PROCESSOR
    ):
        tile *= 2
    accumulator = max(16, group) * max(head_dim, v_head_dim)
    num_warps = max(1, tile // 32)
    while num_warps < 8 and accumulator > 2048 * num_warps * (1 if not in_float32 else 0.5):
        num_warps *= 2
    return Config(tile, num_warps, num_stages=4)


def num_partitions(config: Config, rows: int, num_kv_heads: int, device: Device) -> int:
    """Partitions wanted over all rows: enough that all processors are busy, and that long rows are cut among many."""
    for_processors = config.programs_per_processor * device.processors // num_kv_heads
    return max(1, for_processors, int(_ROWS_KEPT_WHOLE * rows))


def current_device() -> Device:
    """The GPU at hand; where there is none, as in lowering for one from another host, a middling one."""
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    if not gpus:
        return Device(processors=108, shared_memory=164 << 10)
    capability = str(getattr(gpus[0], "compute_capability", ""))
    return Device(gpus[0].core_count, _SHARED_MEMORY_KIB.get(capability, 64) << 10)
