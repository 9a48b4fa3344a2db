"""Decode attention on a GPU: ours beside its peers and the memory ceiling, errors checked in the same run.

    python -m examples.benchmarks.decode --tag headline quantised --peers \
        --out examples/benchmarks/results/decode-h200.json

Each time is that of one layer in a chain of dependent layers inside one `jax.jit`, as deep as a model. The layers take
turns with K and V that exceed the L2 cache together, and the pages of each row are randomly permuted. Contestants take
turns as well, in another order each time, since what one does to the clock the next one feels; the median over the
turns is what counts. A contestant with settings to try first shows which of them is its fastest.
"""

import argparse
import csv
import dataclasses
import functools
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from examples.benchmarks.environment import describe
from examples.benchmarks.peers import PEERS, Contestant
from paged_jax import BlockTable, PagedCache, paged_attention
from pallas_kernels import paged_decode
from pallas_kernels.cases import DECODE_CASES, DecodeCase
from pallas_kernels.layouts import LAYOUTS, SCALE_AXES, pool_shape
from pallas_kernels.paged_decode.config import Config

_BYTES_IN_ROTATION = 400 << 20  # several times the L2 of any GPU
_DEPTH = 32  # layers of the chain, at least: what a step does once is shared by so many
_SECONDS_PER_RUN = 0.02  # long beside the time that starting and waiting take


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case with its data."""

    case: DecodeCase
    q: jax.Array
    cache: PagedCache
    table: BlockTable
    options: dict[str, Any]


class Chain(NamedTuple):
    """Layers that attend one after the other."""

    run: Callable  # compiled: (q, cache, table) -> outputs of the first layer and the last
    depth: int  # layers


class Run(NamedTuple):
    """A contestant ready to be timed."""

    chain: Chain
    operands: tuple
    calls: int  # that take long enough to be timed
    setting: dict[str, Any]
    max_error: float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--tag", nargs="+", help="only cases with one of these tags (headline, model, shape, quantised, scaling)"
    )
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--peers", nargs="*", metavar="PEER", help="measure the peers as well, or those whose name contains a PEER"
    )
    parser.add_argument(
        "--sweep",
        metavar="TILES:WARPS:STAGES:PARTITIONS",
        help='kernel settings to try, as in "32,64:1,2:3,5:0,1,2"; 0 partitions: as many as the kernel chooses',
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results, rewritten after every case")
    parser.add_argument("--csv", type=Path, help="the same as a table, a line for each contestant in each case")
    args = parser.parse_args(arguments)

    results = {
        "benchmark": "decode",
        "environment": describe("flash-attn3-jax", "nvidia-cudnn-cu13"),
        "ceiling_gb_per_s": measure_ceiling(args.rounds),
        "cases": {},
    }
    print(f"reading memory: {results['ceiling_gb_per_s']:.0f} GB/s", flush=True)
    for case in DECODE_CASES:
        if (args.tag and case.tags.isdisjoint(args.tag)) or (args.only and args.only not in case.name):
            continue
        contestants = {"paged_jax": Contestant(attend_paged)} | choose_peers(case, args.peers)
        if args.sweep:
            contestants |= sweep(args.sweep)
        start = time.perf_counter()
        results["cases"][case.name] = measured = measure(make_problem(case), contestants, args.rounds)
        gc.collect()  # the data of a case goes before that of the next comes
        show(case, measured, time.perf_counter() - start)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        if args.csv:
            write_csv(args.csv, results)


def choose_peers(case: DecodeCase, wanted: list[str] | None) -> dict[str, Contestant]:
    """Those that can do the case and contain one of the words wanted, if there are any; None wants no peer."""
    return {
        name: peer
        for name, peer in PEERS.items()
        if wanted is not None and (not wanted or any(word in name for word in wanted)) and peer.fits(case)
    }


def sweep(text: str) -> dict[str, Contestant]:
    """A contestant for each combination of kernel settings."""
    axes = ([int(value) for value in part.split(",")] for part in text.split(":"))
    return {
        f"{tile}x{warps}x{stages} in {partitions or 'automatic'}": Contestant(
            functools.partial(attend_configured, config=Config(tile, warps, stages), num_partitions=partitions or None)
        )
        for tile, warps, stages, partitions in itertools.product(*axes)
    }


def make_problem(case: DecodeCase) -> Problem:
    """Fresh random data; pages permuted over the whole pool."""
    blocks, dtype = np.array(case.num_blocks), jnp.dtype(case.dtype)
    rows, width, held = len(blocks), int(blocks.max()) + case.spare_blocks, int(blocks.sum())
    order = np.random.default_rng(0).permutation(case.num_pages)
    pages = np.full((rows, width), case.num_pages, np.int32)
    pages[np.arange(width) < blocks[:, None]] = order[:held]
    table = BlockTable(
        pages=jnp.asarray(pages),
        lengths=jnp.asarray(case.lengths, jnp.int32),
        ref_counts=jnp.zeros(case.num_pages, jnp.int32).at[order[:held]].set(1),
        retained=jnp.zeros(case.num_pages, jnp.int32),
        free_pages=jnp.asarray(np.roll(order, -held), jnp.int32),
        num_free=jnp.int32(case.spare_pages),
        page_size=case.page_size,
    )
    layers = max(4, -(-_BYTES_IN_ROTATION // case.kv_bytes))
    sizes = {"L": layers, "P": case.num_pages, "C": case.page_size, "K": case.num_kv_heads, "H": case.head_dim}
    keys = jax.random.split(jax.random.key(0), 4)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    kv_dtype = jnp.dtype(case.kv_dtype or case.dtype)
    shapes = [pool_shape(axes, sizes, kv_dtype.itemsize) for axes in LAYOUTS[case.layout]]
    k, v = (draw(key, shape, dtype) for key, shape in zip(keys, shapes, strict=False))
    k_scale = v_scale = None
    if case.kv_dtype is not None:  # of any factors, those of normal values that a byte can tell apart
        k, v = ((30 * pool).astype(kv_dtype) for pool in (k, v))
        k_scale, v_scale = (jnp.full([sizes[axis] for axis in SCALE_AXES], 1 / 30, jnp.float32) for _ in shapes)
    options: dict[str, Any] = {"window": case.window, "soft_cap": case.soft_cap}
    if case.sinks:
        options["sinks"] = draw(keys[3], (case.num_heads,), jnp.float32)
    q = draw(keys[2], (rows, case.num_heads, case.head_dim), dtype)
    return Problem(case, q, PagedCache(k, v, k_scale, v_scale, case.layout, case.page_size), table, options)


def attend_paged(problem: Problem, q, cache, table, layer: int):
    return paged_attention(q, cache, table, layer=layer, **problem.options)


def attend_configured(problem: Problem, q, cache, table, layer: int, *, config: Config, num_partitions: int | None):
    options: dict[str, Any] = problem.options
    return paged_decode(
        q, cache.k, cache.v, table.pages, table.lengths, layer=layer, layout=cache.layout,
        k_scales=cache.k_scale, v_scales=cache.v_scale, num_partitions=num_partitions, config=config, **options,
    )  # fmt: skip


def measure(problem: Problem, contestants: dict[str, Contestant], rounds: int) -> dict[str, Any]:
    """Median microseconds per layer, error and setting of each contestant; the reason for each that fails."""
    case = problem.case
    expected = reference(problem)
    operands: dict[str, tuple] = {}
    runs: dict[str, Run] = {}
    failures = {}  # what does not fit the device is a result, too
    for name, contestant in contestants.items():
        try:
            operands[name] = (problem.q, *contestant.prepare(problem))
        except Exception as obstacle:
            failures[name] = reason(obstacle)
    entries = [(name, setting) for name in operands for setting in contestants[name].settings]
    chains = compile_chains(
        [
            (functools.partial(contestants[name].attend, problem, **setting), operands[name], problem.cache.num_layers)
            for name, setting in entries
        ]
    )
    for name in operands:
        tried = [(chain, setting) for (of, setting), chain in zip(entries, chains, strict=True) if of == name]
        try:
            runs[name] = fastest_setting(tried, operands[name], expected)
        except Exception as obstacle:
            failures[name] = reason(obstacle)
    times = {name: [] for name in runs}
    order = np.random.default_rng(0)
    for _ in range(rounds):
        for name in order.permutation([*runs]).tolist():
            run = runs[name]
            times[name].append(seconds_per_call(run.chain.run, run.operands, run.calls) / run.chain.depth * 1e6)
    return {
        "kv_bytes": case.kv_bytes,
        "layers": problem.cache.num_layers,
        "microseconds": {name: statistics.median(samples) for name, samples in times.items()},
        "max_error": {name: run.max_error for name, run in runs.items()},
        "settings": {name: run.setting for name, run in runs.items() if run.setting},
        "failures": failures,
    }


def fastest_setting(tried: list[tuple[Chain | Exception, dict[str, Any]]], operands: tuple, expected: jax.Array) -> Run:
    """The fastest of a contestant's settings; those that fail are passed over while one works."""
    timed: list[tuple[float, Run]] = []
    obstacles = []
    for chain, setting in tried:
        try:
            run = start(chain, operands, setting, expected)
        except Exception as obstacle:
            obstacles.append(obstacle)
        else:
            timed.append((seconds_per_call(run.chain.run, operands, run.calls), run))
    if not timed:
        raise obstacles[0]
    return min(timed, key=lambda pair: pair[0])[1]


def reason(obstacle: Exception) -> str:
    first_line = (str(obstacle).splitlines() or [""])[0]
    return f"{type(obstacle).__name__}: {first_line[:200]}"


def compile_chains(wanted: Sequence[tuple[Callable, tuple, int]]) -> list[Chain | Exception]:
    """A chain for each (attend, operands, layers), or why there is none; compiled on all CPU cores at a time."""

    def lower(attend: Callable, operands: tuple, layers: int):
        depth = max(_DEPTH, layers)
        # Jitted by itself, it is traced once for all layers, or where each has pools of its own once for each of them.
        attend = jax.jit(attend, static_argnums=(3,) if isinstance(operands[1], tuple) else ())

        @jax.jit
        def chain(q, cache, table):
            outs = []
            for layer in range(depth):
                q, cache = lax.optimization_barrier((q, cache))  # no layer may use what another has gathered
                q = attend(q, cache, table, layer % layers).astype(q.dtype)
                outs.append(q)
            return outs[0], outs[-1]

        return chain.lower(*operands), depth

    def compile_lowered(lowered) -> Chain | Exception:
        if isinstance(lowered, Exception):
            return lowered
        try:
            return Chain(lowered[0].compile(), lowered[1])
        except Exception as obstacle:  # Triton and XLA refuse what does not fit, each in its own way
            return obstacle

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = []
        for attend, operands, layers in wanted:
            try:
                lowered = lower(attend, operands, layers)
            except Exception as obstacle:
                lowered = obstacle
            compiled.append(pool.submit(compile_lowered, lowered))
        return [future.result() for future in compiled]


def start(chain: Chain | Exception, operands: tuple, setting: dict[str, Any], expected: jax.Array) -> Run:
    """The chain with its error, and as many calls as take long enough to be timed; raises what it is if it is none."""
    if isinstance(chain, Exception):
        raise chain
    first, _ = chain.run(*operands)
    max_error = float(jnp.abs(first.astype(jnp.float32) - expected).max())
    calls = max(1, round(_SECONDS_PER_RUN / seconds_per_call(chain.run, operands, 2)))
    return Run(chain, operands, calls, setting, max_error)


def seconds_per_call(function: Callable, operands: tuple, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        out = function(*operands)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def reference(problem: Problem) -> jax.Array:
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


def show(case: DecodeCase, measured: dict[str, Any], seconds: float) -> None:
    print(f"{case.name}: {case.kv_bytes / 1e6:.0f} MB a layer, {measured['layers']} layers, took {seconds:.0f} s")
    ranked = sorted(measured["microseconds"].items(), key=lambda item: item[1])
    ours = [item for item in ranked if item[0] == "paged_jax"]
    for name, microseconds in ours + [item for item in ranked if item[0] != "paged_jax"][:6]:
        setting = ", ".join(f"{key} {value}" for key, value in measured["settings"].get(name, {}).items())
        print(
            f"  {name:20} {microseconds:9.1f} us {case.kv_bytes / microseconds / 1e3:6.0f} GB/s  "
            f"error {measured['max_error'][name]:.1e}  {setting}"
        )
    for name, reason in measured["failures"].items():
        print(f"  {name:20} failed: {reason}")
    sys.stdout.flush()


def write_csv(path: Path, results: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(("case", "contestant", "setting", "kv_bytes", "us", "gb_per_s", "of_ceiling", "max_error"))
        for case, measured in results["cases"].items():
            for name, microseconds in measured["microseconds"].items():
                rate = measured["kv_bytes"] / microseconds / 1e3
                setting = measured["settings"].get(name, {})
                table.writerow(
                    (
                        case,
                        name,
                        " ".join(f"{key}={value}" for key, value in setting.items()),
                        measured["kv_bytes"],
                        f"{microseconds:.2f}",
                        f"{rate:.0f}",
                        f"{rate / results['ceiling_gb_per_s']:.3f}",
                        f"{measured['max_error'][name]:.2e}",
                    )
                )


if __name__ == "__main__":
    main()
