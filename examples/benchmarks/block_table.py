"""What the block table's operations cost inside jit, and the prefix cache's on the host.

    python -m examples.benchmarks.block_table --out examples/benchmarks/results/block-table-h200.json

Inside jit: many equal operations in one compiled loop, over their number, so that the host's part in starting the loop
does not count. Each is done on the same table, behind a barrier that keeps the compiler from moving any of its work out
of the loop. On the host: with all that the operation does on the device, until it is done.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from examples.benchmarks.environment import describe
from paged_jax import BlockTable
from paged_jax.prefix_cache import PrefixCache

ROWS, BLOCKS, PAGES, PAGE_SIZE = 256, 512, 100_000, 16
LIVE, FORKED = 192, 64  # rows that hold tokens; how many are forked into the others, or released
BLOCKS_HELD = {"nearly empty": 2, "nearly full": 500}  # by each live row, in a pool for which they are named
PROMPT, INSERTED, CACHED = 16_384, 1_000, 10_000  # tokens; pages; pages

_OPERATIONS_PER_LOOP = {"gpu": 500, "cpu": 10}  # long beside the time that starting and waiting take


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    results: dict[str, Any] = {
        "benchmark": "block table",
        "environment": describe(),
        "table": {"rows": ROWS, "blocks_per_row": BLOCKS, "pages": PAGES, "page_size": PAGE_SIZE},
        "operations_per_loop": _OPERATIONS_PER_LOOP.get(jax.default_backend(), 100),
        "microseconds": {},
    }
    for name, operation in OPERATIONS.items():
        loop = in_loop(operation, results["operations_per_loop"])
        for state, blocks in BLOCKS_HELD.items():
            microseconds = median_seconds(loop, table_with(blocks), args.rounds) / results["operations_per_loop"] * 1e6
            results["microseconds"].setdefault(state, {})[name] = microseconds
            print(f"{name:30} pool {state:12} {microseconds:9.1f} us", flush=True)
    results["host_milliseconds"] = measure_prefix_cache(args.rounds)
    for name, milliseconds in results["host_milliseconds"].items():
        print(f"{name:48} {milliseconds:9.2f} ms", flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def extend(table: BlockTable, turn):
    """Every live row begins a page."""
    return table.extend(jnp.where(jnp.arange(ROWS) < LIVE, 1 + turn % PAGE_SIZE, 0))


def fork(table: BlockTable, turn):
    first = turn % (LIVE - FORKED)
    return table.fork(first + jnp.arange(FORKED), LIVE + jnp.arange(FORKED))


def release(table: BlockTable, turn):
    row = jnp.arange(ROWS) - turn % (LIVE - FORKED)
    return table.release((row >= 0) & (row < FORKED))


def truncate(table: BlockTable, turn):
    """Every live row loses its second half."""
    return table.truncate(table.lengths // 2 + turn % PAGE_SIZE)


def drop(table: BlockTable, turn):
    return table.drop((turn + jnp.arange(INSERTED)) % PAGES)


OPERATIONS: dict[str, Callable] = {
    f"extend {LIVE} rows by a page": extend,
    f"fork {FORKED} rows": fork,
    f"release {FORKED} rows": release,
    f"truncate {LIVE} rows": truncate,
    f"drop {INSERTED} pages": drop,
}


def table_with(blocks: int) -> BlockTable:
    """Live rows with so many full blocks each, in pages that lie in any order; every tenth of these is retained."""
    table = BlockTable.create(PAGES, PAGE_SIZE, ROWS, BLOCKS)
    order = jnp.asarray(np.random.default_rng(0).permutation(PAGES), jnp.int32)
    table = BlockTable(**{**vars(table), "free_pages": order})
    table, ok = jax.jit(BlockTable.extend)(table, jnp.where(jnp.arange(ROWS) < LIVE, blocks * PAGE_SIZE, 0))
    if not ok:
        raise ValueError(f"{LIVE} rows of {blocks} blocks: expected at most {PAGES} pages in all")
    return jax.jit(BlockTable.retain)(table, table.pages[:LIVE, ::10].ravel())


def in_loop(operation: Callable, count: int) -> Callable:
    """`count` such operations on one table, compiled."""

    @jax.jit
    def loop(table: BlockTable):
        def turn(i, _):
            return operation(*lax.optimization_barrier((table, i)))

        return lax.fori_loop(1, count, turn, operation(table, 0))

    return loop


def measure_prefix_cache(rounds: int) -> dict[str, float]:
    """Milliseconds of a prompt that is found, one that is not, and of pages that come and go."""
    rows, tokens = CACHED // INSERTED, INSERTED * PAGE_SIZE
    table = BlockTable.create(PAGES, PAGE_SIZE, rows + 2, max(PROMPT // PAGE_SIZE, INSERTED))
    lengths = jnp.asarray([tokens] * rows + [PROMPT, 0], jnp.int32)
    table, _ = jax.jit(BlockTable.extend)(table, lengths)
    prompts = np.random.default_rng(0).integers(0, 100_000, (rows + 2, max(PROMPT, tokens)))
    release_rows, ended = jax.jit(BlockTable.release), jnp.arange(rows + 2) < rows

    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable, *arguments):
        start = time.perf_counter()
        result = jax.block_until_ready(call(*arguments))
        times.setdefault(name, []).append(time.perf_counter() - start)
        return result

    for _ in range(rounds + 1):
        prefixes, now = PrefixCache(PAGE_SIZE), table
        for row in range(rows):
            name = f"insert {INSERTED} pages" if row == rows - 1 else "insert earlier ones"
            now = timed(name, prefixes.insert, now, row, prompts[row, :tokens])
        now = release_rows(now, ended)
        now, freed = timed(f"evict {INSERTED} of {CACHED} pages", prefixes.evict, now, INSERTED)
        if freed != INSERTED:
            raise RuntimeError(f"evict: expected to free {INSERTED} pages, got {freed}")
        prompt, unknown = prompts[-2:, :PROMPT]
        now = prefixes.insert(now, rows, prompt)
        found = timed(f"match {PROMPT} tokens, all cached", prefixes.match, prompt)
        if found.size != PROMPT // PAGE_SIZE - 1:
            raise RuntimeError(f"match: expected {PROMPT // PAGE_SIZE - 1} pages, got {found.size}")
        timed(f"adopt {PROMPT} tokens, all cached", prefixes.adopt, now, rows + 1, prompt)
        timed(f"adopt {PROMPT} tokens, none cached", prefixes.adopt, now, rows + 1, unknown)
        timed("adopt 1024 tokens, none cached", prefixes.adopt, now, rows + 1, unknown[:1024])
    del times["insert earlier ones"]
    return {name: statistics.median(seconds[1:]) * 1e3 for name, seconds in times.items()}  # the first ones compile


def median_seconds(call: Callable, table: BlockTable, rounds: int) -> float:
    jax.block_until_ready(call(table))  # compiles
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(call(table))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
