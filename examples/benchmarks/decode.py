"""Decode attention on a GPU: ours beside its peers and the memory ceiling, errors checked in the same run.

    python examples/benchmarks/decode.py --out examples/benchmarks/results/decode-h200.json

Each time is that of one layer in a chain of dependent layers inside one `jax.jit`. Every layer has K and V of its own,
so that together they exceed the L2 cache, and the pages of each row are randomly permuted. Contestants take turns, and
the median over the turns is what counts.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import describe
from paged_jax import BlockTable, PagedCache, paged_attention
from pallas_kernels import paged_decode
from pallas_kernels.cases import DECODE_CASES, DecodeCase
from pallas_kernels.paged_decode.config import Config

_BYTES_IN_ROTATION = 400 << 20  # several times the L2 of any GPU
_SECONDS_PER_RUN = 0.02  # long beside the time that starting and waiting take


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case with its data."""

    case: DecodeCase
    q: jax.Array
    cache: PagedCache
    table: BlockTable
    options: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tag", help="only cases with this tag (headline, model)")
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", action="store_true", help="measure the peers as well")
    parser.add_argument(
        "--sweep", metavar="TILES:WARPS:STAGES:PARTITIONS", help='kernel settings to try, as in "32,64:1,2:3,5:1,2,4"'
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    results = {
        "benchmark": "decode",
        "environment": describe(),
        "ceiling_gb_per_s": measure_ceiling(args.rounds),
        "cases": {},
    }
    print(f"reading memory: {results['ceiling_gb_per_s']:.0f} GB/s", flush=True)
    for case in DECODE_CASES:
        if (args.tag and args.tag not in case.tags) or (args.only and args.only not in case.name):
            continue
        problem = make_problem(case)
        contestants: dict[str, Callable] = {"paged_jax": attend_paged}
        if args.peers and case.is_plain:  # the peer knows no options
            contestants |= {"xla gather + dense": attend_gathered}
        if args.sweep:
            contestants |= sweep(args.sweep)
        results["cases"][case.name] = measured = measure(problem, contestants, args.rounds)
        measured |= {"kv_bytes": case.kv_bytes}
        show(case, measured)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def sweep(text: str) -> dict[str, Callable]:
    settings = itertools.product(*([int(value) for value in part.split(",")] for part in text.split(":")))
    return {
        f"{tile}x{warps}x{stages} in {partitions}": functools.partial(
            attend_configured, config=Config(tile, warps, stages), num_partitions=partitions
        )
        for tile, warps, stages, partitions in settings
    }


def make_problem(case: DecodeCase) -> Problem:
    """Fresh random data; pages permuted."""
    page, dtype = case.page_size, jnp.dtype(case.dtype)
    rows, longest = len(case.lengths), max(case.lengths)
    blocks = np.array([-(-length // page) for length in case.lengths])
    num_pages, width = int(blocks.sum()), -(-longest // page)
    layer_bytes = num_pages * page * case.num_kv_heads * case.head_dim * 2 * dtype.itemsize
    layers = max(4, -(-_BYTES_IN_ROTATION // layer_bytes))
    rng = np.random.default_rng(0)
    pages = np.full((rows, width), num_pages, np.int32)
    pages[np.arange(width) < blocks[:, None]] = rng.permutation(num_pages)
    table = BlockTable(
        pages=jnp.asarray(pages),
        lengths=jnp.asarray(case.lengths, jnp.int32),
        ref_counts=jnp.ones(num_pages, jnp.int32),
        retained=jnp.zeros(num_pages, jnp.int32),
        free_pages=jnp.zeros(num_pages, jnp.int32),
        num_free=jnp.int32(0),
        page_size=page,
    )
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (layers, num_pages, page, case.num_kv_heads, case.head_dim)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    cache = PagedCache(draw(keys[0], shape, dtype), draw(keys[1], shape, dtype), None, None, "NHD", page)
    options: dict[str, Any] = {"window": case.window, "soft_cap": case.soft_cap}
    if case.sinks:
        options["sinks"] = jax.random.normal(keys[3], (case.num_heads,), jnp.float32)
    return Problem(case, draw(keys[2], (rows, case.num_heads, case.head_dim), dtype), cache, table, options)


def attend_paged(problem: Problem, q, cache, table, layer: int):
    return paged_attention(q, cache, table, layer=layer, **problem.options)


def attend_configured(problem: Problem, q, cache, table, layer: int, *, config: Config, num_partitions: int):
    options: dict[str, Any] = problem.options
    return paged_decode(
        q, cache.k, cache.v, table.pages, table.lengths, layer=layer,
        num_partitions=num_partitions, config=config, **options,
    )  # fmt: skip


def attend_gathered(problem: Problem, q, cache, table, layer: int):  # noqa: ARG001
    """XLA gathers the rows' pages into dense arrays, then attends."""
    k, v = (pool[layer, table.pages].reshape(q.shape[0], -1, *pool.shape[3:]) for pool in (cache.k, cache.v))
    return jax.nn.dot_product_attention(
        q[:, None], k, v, key_value_seq_lengths=table.lengths, query_seq_lengths=jnp.ones_like(table.lengths),
    )[:, 0]  # fmt: skip


def measure(problem: Problem, contestants: dict[str, Callable], rounds: int) -> dict[str, Any]:
    """Median microseconds per layer and error of each contestant; those that fail are named with the reason."""
    layers = problem.cache.num_layers
    expected = reference(problem)
    runs, times, errors, failures = {}, {}, {}, {}
    for name, attend in contestants.items():

        @jax.jit
        def chain(q, cache, table, attend=attend):
            for layer in range(layers):
                q = attend(problem, q, cache, table, layer).astype(q.dtype)
            return q

        one = jax.jit(functools.partial(attend, problem, layer=0))
        try:
            got = one(problem.q, problem.cache, problem.table)
            jax.block_until_ready(chain(problem.q, problem.cache, problem.table))
        except Exception as problem_met:  # a setting that does not fit the device is a result, too
            failures[name] = f"{type(problem_met).__name__}: {str(problem_met).splitlines()[0][:200]}"
            continue
        errors[name] = float(jnp.abs(got.astype(jnp.float32) - expected).max())
        runs[name], times[name] = chain, []
    operands = (problem.q, problem.cache, problem.table)
    calls = {
        name: max(1, round(_SECONDS_PER_RUN / seconds_per_call(chain, operands, 2))) for name, chain in runs.items()
    }
    for _ in range(rounds):
        for name, chain in runs.items():
            times[name].append(seconds_per_call(chain, operands, calls[name]) / layers * 1e6)
    return {
        "layers": layers,
        "microseconds": {name: statistics.median(samples) for name, samples in times.items()},
        "max_error": errors,
        "failures": failures,
    }


def seconds_per_call(function: Callable, operands: tuple, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        out = function(*operands)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def reference(problem: Problem):
    """The plain-JAX implementation on the same values in float32."""
    q = problem.q.astype(jnp.float32)
    return paged_attention(q, problem.cache, problem.table, layer=0, implementation="xla", **problem.options)


def measure_ceiling(rounds: int) -> float:
    """GB/s of reading memory once: the sum of arrays larger than any cache."""
    arrays = [jax.random.normal(jax.random.key(i), (1 << 28,), jnp.float32) for i in range(4)]
    total = jax.jit(lambda arrays: [array.sum() for array in arrays])
    jax.block_until_ready(total(arrays))
    samples = [seconds_per_call(total, (arrays,), 20) for _ in range(rounds)]
    return sum(array.nbytes for array in arrays) / statistics.median(samples) / 1e9


def show(case: DecodeCase, measured: dict[str, Any]) -> None:
    ranked = sorted(measured["microseconds"].items(), key=lambda item: item[1])
    ours = [item for item in ranked if item[0] == "paged_jax"]
    for name, microseconds in ours + [item for item in ranked if item[0] != "paged_jax"][:6]:
        print(
            f"{case.name:24} {name:24} {microseconds:9.1f} us {case.kv_bytes / microseconds / 1e3:7.0f} GB/s  "
            f"error {measured['max_error'][name]:.1e}",
            flush=True,
        )
    for name, reason in measured["failures"].items():
        print(f"{case.name:24} {name:24} failed: {reason}", flush=True)


if __name__ == "__main__":
    main()
