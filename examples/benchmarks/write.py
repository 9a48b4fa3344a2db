"""Writing K and V of new tokens on a GPU: one Pallas launch beside XLA's scatter, for each dtype of the cache.

    python -m examples.benchmarks.write --out examples/benchmarks/results/write-h200.json

All layers of a chain inside one `jax.jit` write to donated pools, as an unrolled decoder's do: the turns of a loop
would take longer than the writes. Both must leave the same pools behind, and a pool four times as large should take no
longer.
"""

import argparse
import functools
import gc
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from examples.benchmarks.environment import describe
from paged_jax import PagedCache, backends, cache_write_xla

LAYERS, PAGE_SIZE, KV_HEADS, HEAD_DIM = 32, 16, 8, 128
DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
TOKENS, PAGES = (64, 2048), (4096, 16384)
_CALLS = 10  # of the chain, between looks at the clock


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results, rewritten after every case")
    args = parser.parse_args(arguments)
    sizes = {"layers": LAYERS, "page_size": PAGE_SIZE, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    results: dict[str, Any] = {"benchmark": "write", "environment": describe(), "sizes": sizes, "cases": []}
    for dtype, tokens, pages in itertools.product(DTYPES, TOKENS, PAGES):
        case = {"dtype": dtype, "tokens": tokens, "pages": pages}
        case |= measure(dtype, tokens, pages, args.rounds)
        results["cases"].append(case)
        gc.collect()  # the pools of a case go before those of the next come
        print(case, flush=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure(dtype: str, tokens: int, pages: int, rounds: int) -> dict[str, Any]:
    """Median microseconds per layer of each implementation, and whether both leave the same pools behind."""
    key = jax.random.key(0)
    shape = (2 * LAYERS, tokens, KV_HEADS, HEAD_DIM)  # other K and V for each layer, or XLA would quantise them once
    vectors = list(jax.random.normal(key, shape, jnp.bfloat16))
    slots = jax.random.permutation(key, pages * PAGE_SIZE)[:tokens].astype(jnp.int32)
    microseconds, sums = {}, []
    for implementation in ("xla", "triton"):
        cache = PagedCache.create(LAYERS, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype)
        pools = (cache.k, cache.v, cache.k_scale, cache.v_scale)
        chain = functools.partial(write_layers, implementation=implementation)
        pools = jax.block_until_ready(chain(pools, vectors, slots))  # compiles
        sums.append([float(jnp.sum(pool.astype(jnp.float32))) for pool in pools if pool is not None])
        samples = []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(_CALLS):
                pools = chain(pools, vectors, slots)
            jax.block_until_ready(pools)
            samples.append((time.perf_counter() - start) / _CALLS / LAYERS * 1e6)
        microseconds[implementation] = round(statistics.median(samples), 2)
        del cache, pools
    return {"microseconds": microseconds, "same": sums[0] == sums[1]}


@functools.partial(jax.jit, static_argnames="implementation", donate_argnames="pools")
def write_layers(pools, vectors, slots, *, implementation: str):
    names = ("k_pages", "v_pages", "k_scales", "v_scales")
    for layer in range(LAYERS):
        k, v = vectors[2 * layer : 2 * layer + 2]
        arrays = {"k": k, "v": v, "slots": slots, "layer": jnp.int32(layer)} | dict(zip(names, pools, strict=True))
        pools = backends.write(arrays, reference=cache_write_xla.write, layout="NHD", implementation=implementation)
    return pools


if __name__ == "__main__":
    main()
