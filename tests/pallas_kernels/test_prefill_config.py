"""How the prefill kernel cuts its work, for any shape and device."""

import itertools

import jax.numpy as jnp
import pytest
from grid import DIMS, DTYPES, HEADS, QUANTISED, every_device

from pallas_kernels.paged_prefill import config
from pallas_kernels.paged_prefill.config import Shape

LLAMA = Shape(4, 1, 8, 4, 128, 128, "bfloat16", "bfloat16")


@every_device
@pytest.mark.parametrize(("rows", "tokens"), [(0, 1), (1, 1), (1, 4), (1, 16), (1, 2048), (64, 64), (64, 256)])
def test_tiles_fit_shared_memory(rows, tokens, device):
    for (num_heads, num_kv_heads), dims, dtypes in itertools.product(HEADS, DIMS, (*DTYPES, *QUANTISED)):
        shape = Shape(tokens, rows, num_kv_heads, num_heads // num_kv_heads, *dims, *dtypes)
        chosen = config.heuristic(shape, device)
        assert 1 <= chosen.few <= chosen.queries
        assert chosen.tile in (16, 32, 64, 128)
        lanes = max(16, 1 << (chosen.queries * shape.group - 1).bit_length())
        tile_bytes = chosen.tile * sum(dims) * jnp.dtype(dtypes[1]).itemsize
        q_bytes = lanes * (dims[0] + chosen.tile) * jnp.dtype(dtypes[0]).itemsize  # and the weights of a tile
        assert chosen.tile == 16 or chosen.num_stages // 2 * tile_bytes + q_bytes < device.shared_memory - 1024


@every_device
def test_few_query_tiles_are_all_cut_in_as_many_parts_as_there_are_processors(device):
    for tokens in (2, 4, 8, 16, 32):
        shape = LLAMA._replace(tokens=tokens, num_kv_heads=device.processors // 8)
        chosen = config.heuristic(shape, device)
        assert chosen.few == chosen.queries, "none is kept whole"
        assert chosen.programs_per_processor == 1
        assert chosen.num_warps == (4 if chosen.queries * shape.group <= 32 else 8)
        parts = config.num_partitions(chosen, shape.num_kv_heads, device)
        assert parts * shape.num_kv_heads <= device.processors < (parts + 1) * shape.num_kv_heads


@every_device
def test_more_query_tiles_have_more_programs(device):
    for tokens, rows in ((4 * device.processors, device.processors), (64 * device.processors, 1)):
        chosen = config.heuristic(LLAMA._replace(tokens=tokens, rows=rows), device)
        assert chosen.programs_per_processor == 4
