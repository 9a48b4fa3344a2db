"""Swapping rows out to host memory and back, beside what the device's host link does with one plain array.

    python -m examples.benchmarks.swap --out examples/benchmarks/results/swap-h200.json

The rows lie on permuted pages of a cache with the layers of Llama 3 8B, and go back to other pages each time.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.benchmarks.environment import describe
from examples.benchmarks.loops import random_arrays
from paged_jax import BlockTable, PagedCache, swap_in, swap_out

LAYERS, PAGE_SIZE, KV_HEADS, HEAD_DIM = 32, 16, 8, 128


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=8, help="that leave together (8)")
    parser.add_argument("--tokens", type=int, default=4096, help="that each of them holds (4096)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args(arguments)
    measured = measure(args.rows, args.tokens, args.rounds)
    results = {"benchmark": "swap", "environment": describe(), "rows": args.rows, "tokens": args.tokens, **measured}
    print(json.dumps(measured, indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure(num_rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Bytes of the rows, and GB/s of each way there and back: medians after a round that warms up."""
    max_pages = num_rows * -(-tokens // PAGE_SIZE)
    sizes = (LAYERS, 2 * max_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    cache = random_arrays(jax.eval_shape(functools.partial(PagedCache.create, *sizes, jnp.bfloat16)))
    cache = jax.device_put(cache, jax.devices()[0])
    table = BlockTable.create(2 * max_pages, PAGE_SIZE, num_rows, 2 * max_pages // num_rows)
    order = jnp.asarray(np.random.default_rng(0).permutation(2 * max_pages), jnp.int32)
    table = dataclasses.replace(table, free_pages=order)
    table, is_begun = jax.jit(BlockTable.extend)(table, jnp.full(num_rows, tokens, jnp.int32))
    rows = jnp.arange(num_rows)
    array = jax.device_put(jnp.ones(2 * max_pages * PAGE_SIZE * LAYERS * KV_HEADS * HEAD_DIM, jnp.bfloat16))
    num_bytes = array.nbytes
    there, back = (array.sharding.with_memory_kind(kind) for kind in (_host_memory(), array.sharding.memory_kind))
    seconds: dict[str, list[float]] = {
        "swap_out": [],
        "swap_in": [],
        "array to the host": [],
        "array from the host": [],
    }
    oks = [is_begun]
    for _ in range(rounds + 1):
        table, swapped, is_out = _timed(seconds["swap_out"], swap_out, table, cache, rows, max_pages=max_pages)
        table, cache, is_in = _timed(seconds["swap_in"], swap_in, table, cache, swapped, rows)
        on_host = _timed(seconds["array to the host"], jax.device_put, array, there)
        _timed(seconds["array from the host"], jax.device_put, on_host, back)
        oks += [is_out, is_in]
    if not all(map(bool, oks)):
        raise RuntimeError(f"expected every call to be carried out, got ok {list(map(bool, oks))}")
    rates = {name: num_bytes / statistics.median(samples[1:]) / 1e9 for name, samples in seconds.items()}
    return {"bytes": num_bytes, "gb_per_s": rates}


def _host_memory() -> str:
    """Pinned, where the device can address it."""
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    return "pinned_host" if "pinned_host" in kinds else jax.devices()[0].default_memory().kind


def _timed(samples: list[float], function: Callable, *arguments: Any, **options: Any) -> Any:
    jax.block_until_ready(arguments)
    start = time.perf_counter()
    result = jax.block_until_ready(function(*arguments, **options))
    samples.append(time.perf_counter() - start)
    return result


if __name__ == "__main__":
    main()
