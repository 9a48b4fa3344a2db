"""How the decode kernel cuts its work: tile, warps, pipeline stages and partitions, from shapes and the device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

_SHARED_MEMORY = 96 * 1024  # bytes of K and V in flight for one program; what the smallest of recent GPUs has
_PROCESSORS = 128  # assumed where no GPU is present: lowering for one from another host
_PROGRAMS_PER_PROCESSOR = 4  # enough loads in flight to keep the memory busy


@dataclasses.dataclass(frozen=True)
class Config:
    """One way to run the kernel."""

    tile: int  # tokens folded at once; a power of two, at least 16
    num_warps: int
    num_stages: int  # tiles in flight


def heuristic(group: int, head_dim: int, v_head_dim: int, q_dtype: jnp.dtype, kv_dtype: jnp.dtype) -> Config:
    """A sound choice for any shape.

    Narrow tiles with one warp and many stages stream K and V best while the group's accumulator fits one warp's
    registers; wide heads and groups spread over more warps. float32 products run without tensor cores and want small
    tiles. The tiles in flight stay within shared memory.
    """
    in_float32 = jnp.promote_types(q_dtype, kv_dtype) == jnp.float32
    tile = 16 if in_float32 else 32
    token_bytes = (head_dim + v_head_dim) * jnp.dtype(kv_dtype).itemsize
    num_stages = max(1, min(5, _SHARED_MEMORY // (tile * token_bytes)))
    accumulator = max(16, group) * max(head_dim, v_head_dim)
    num_warps = 1
    while num_warps < 8 and accumulator > 2048 * num_warps * (1 if not in_float32 else 0.5):
        num_warps *= 2
    return Config(tile, num_warps, num_stages)


def num_partitions(programs: int) -> int:
    """Partitions per row for `programs` = rows × kv heads: enough that all processors are busy, 1 if they are anyway.

    Depends on shapes and the device only. The kernel shares each row's real length out over them, so a row that is
    short leaves some idle, and none depends on how wide the table is.
    """
    return max(1, _PROGRAMS_PER_PROCESSOR * _processor_count() // programs)


def _processor_count() -> int:
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    return gpus[0].core_count if gpus else _PROCESSORS
