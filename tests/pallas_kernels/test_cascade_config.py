"""How the cascade kernel cuts its work, for any shape and device."""

import itertools

import jax.numpy as jnp
import pytest
from grid import DIMS, DTYPES, HEADS, QUANTISED, every_device

from pallas_kernels.paged_cascade import config
from pallas_kernels.paged_cascade.config import Shape


@every_device
@pytest.mark.parametrize("rows", [1, 32, 1000])
def test_lanes_and_tiles_fit_registers_and_shared_memory(rows, device):
    for (num_heads, num_kv_heads), dims, dtypes in itertools.product(HEADS, DIMS, (*DTYPES, *QUANTISED)):
        shape = Shape(rows, num_kv_heads, num_heads // num_kv_heads, *dims, *dtypes)
        chosen = config.heuristic(shape, device)
        assert 1 <= chosen.together <= rows
        lanes = max(16, 1 << (chosen.together * shape.group - 1).bit_length())
        accumulators = lanes * (1 << (max(dims) - 1).bit_length()) / (32 * chosen.num_warps)
        assert accumulators <= 128, "half of the registers that a thread may have"
        assert chosen.tile in (16, 32, 64)
        tile_bytes = chosen.tile * sum(dims) * jnp.dtype(dtypes[1]).itemsize
        q_bytes = lanes * dims[0] * jnp.dtype(dtypes[0]).itemsize
        # Two tiles are under way, and the weights take less than one more.
        assert chosen.tile == 16 or 3 * tile_bytes + q_bytes < device.shared_memory


@every_device
def test_there_is_a_program_for_each_processor_and_no_part_is_small(device):
    for rows in (2, 32, 300):
        shape = Shape(rows, 8, 4, 128, 128, "bfloat16", "bfloat16")
        chosen = config.heuristic(shape, device)
        programs = -(-rows // chosen.together) * 8 * chosen.partitions
        assert programs <= device.processors or chosen.partitions == 1
        assert programs > device.processors / 2
        parts = [int(config.shared_partitions(chosen, jnp.int32(n))) for n in (0, chosen.tile, 1024, 1 << 20)]
        assert parts[:2] == [1, 1]
        assert parts[3] == chosen.partitions
        assert all(1024 // part >= 4 * chosen.tile for part in parts[2:3] if part > 1)
