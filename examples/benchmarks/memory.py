"""How many rows fit in a given memory, and how much of it they waste, paged against contiguous reservation.

    python -m examples.benchmarks.memory --out examples/benchmarks/results/memory.json

Requests whose lengths are log-normal (sigma 0.8, means 512, 1024 and 2048, cut at 8192, seed 0) are replayed through a
real block table over 8 GiB of Llama 3 8B's cache. The first half of a request is its prompt. In each turn the rows that
have reached their end are released, the others grow, and waiting requests start in the order in which they came while
their prompts fit. Where the pool runs out, the youngest row is sent back to wait with the tokens it has.

Rows, their tokens and the pages held are read from the table. Waste is the share of the cells held that no token fills.
Contiguous reservation is the same replay with a page size at which the longest row is one page.
"""

import argparse
import collections
import json
import time
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from examples.benchmarks.environment import describe
from paged_jax import BlockTable, PagedCache

POOL_BYTES = 8 << 30
MODEL = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128}  # Llama 3 8B, bfloat16
MAX_LENGTH, MAX_ROWS = 8192, 160  # of rows more than the pool has room for, once some of them are old
MEAN_LENGTHS, SIGMA, SEED = (512, 1024, 2048), 0.8, 0
PAGE_SIZES, CONTIGUOUS = (1, 2, 4, 8, 16, 32, 64, 128, 256), MAX_LENGTH
TURNS, TOKENS_PER_TURN = 160, 32  # the second half of the turns is measured, when rows of all ages live side by side
MOST_WASTE, LEAST_GAIN = 0.04, 2  # targets at page size 16; the gain is rows over rows of contiguous reservation

Waiting = collections.deque[tuple[int, int]]  # of each request, tokens at its start and at its end

_extend = jax.jit(BlockTable.extend, donate_argnums=0)
_release = jax.jit(BlockTable.release, donate_argnums=0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=TURNS, help="of each replay (default %(default)s)")
    parser.add_argument("--out", type=Path, help="results, .json; the plot is put beside them, as .svg")
    args = parser.parse_args(arguments)

    started = time.perf_counter()
    results: dict[str, Any] = {
        "benchmark": "memory",
        "environment": describe(),
        "pool": {"bytes": POOL_BYTES, "model": "Llama 3 8B, bfloat16", "max_length": MAX_LENGTH},
        "replay": {"sigma": SIGMA, "seed": SEED, "turns": args.turns, "tokens_per_turn": TOKENS_PER_TURN},
        "mean_lengths": {str(mean): {"page_sizes": {}} for mean in MEAN_LENGTHS},
    }
    for page_size in (*PAGE_SIZES, CONTIGUOUS):
        num_pages = PagedCache.pages_for(POOL_BYTES, page_size=page_size, **MODEL)
        for mean in MEAN_LENGTHS:
            table = BlockTable.create(num_pages, page_size, MAX_ROWS, MAX_LENGTH // page_size)
            measured = replay(table, requests(mean), args.turns)
            results["mean_lengths"][str(mean)]["page_sizes"][str(page_size)] = measured
            print(f"page size {page_size:4}, mean length {mean:4}: {_in_words(measured)}", flush=True)
    for mean, found in results["mean_lengths"].items():
        found |= judge(found["page_sizes"])
        print(
            f"page size 16, mean length {mean}: waste {found['waste']:.2%}, {found['gain']:.1f} times the rows of "
            f"contiguous reservation: target {'reached' if found['is_target_reached'] else 'MISSED'}"
        )
    print(f"target: under {MOST_WASTE:.0%} and at least {LEAST_GAIN} times; {time.perf_counter() - started:.0f} s")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        draw(results, args.out.with_suffix(".svg"))


def requests(mean: int) -> Waiting:
    """More requests than a replay serves, the same ones for every page size."""
    lengths = np.random.default_rng(SEED).lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, 10_000)
    lengths = np.clip(lengths.astype(int), 2, MAX_LENGTH)
    return collections.deque(zip((lengths // 2).tolist(), lengths.tolist(), strict=True))


def replay(table: BlockTable, waiting: Waiting, turns: int) -> dict[str, float]:
    """Means over the second half of the turns."""
    ends = np.zeros(table.max_rows, int)  # tokens at which each row ends; 0 for an empty row
    arrivals = np.zeros(table.max_rows, int)  # a row is younger than those of lower numbers
    sent_back = 0
    seen = []
    for turn in range(turns):
        is_done = (ends > 0) & (np.asarray(table.lengths) == ends)
        table, ends[is_done] = _release(table, is_done), 0

        while True:
            lengths = np.asarray(table.lengths)
            table, ok = _extend(table, np.minimum(ends - lengths, TOKENS_PER_TURN))
            if ok:
                break
            youngest = int(np.where(ends > 0, arrivals, -1).argmax())
            waiting.appendleft((int(lengths[youngest]), int(ends[youngest])))
            table, ends[youngest] = _release(table, np.arange(ends.size) == youngest), 0
            sent_back += 1

        table = _start_waiting(table, waiting, ends, arrivals)
        if turn >= turns // 2:
            lengths = np.asarray(table.lengths)
            cells_held = (table.num_pages - int(table.num_free)) * table.page_size
            seen.append(((lengths > 0).sum(), lengths.sum(), cells_held))
    table.check()
    rows, tokens, cells = np.mean(seen, axis=0).tolist()
    return {"rows": rows, "tokens_per_row": tokens / rows, "waste": 1 - tokens / cells, "sent_back": sent_back}


def _start_waiting(table: BlockTable, waiting: Waiting, ends: np.ndarray, arrivals: np.ndarray) -> BlockTable:
    """Starts as many of the first requests as fit, in rows that are empty; marks these rows in the arrays."""
    empty = np.flatnonzero(ends == 0)
    prompts = np.array([start for start, _ in list(waiting)[: empty.size]], int)
    num_started = int((np.cumsum(-(-prompts // table.page_size)) <= int(table.num_free)).sum())
    growth = np.zeros(ends.size, int)
    for row in empty[:num_started]:
        growth[row], ends[row] = waiting.popleft()
        arrivals[row] = arrivals.max() + 1
    table, ok = _extend(table, growth)
    if not ok:
        raise RuntimeError(f"expected room for {num_started} prompts, {growth.sum()} tokens, got a refusal")
    return table


def judge(page_sizes: dict[str, dict[str, float]]) -> dict[str, float | bool]:
    """What page size 16 reaches beside contiguous reservation."""
    waste, gain = page_sizes["16"]["waste"], page_sizes["16"]["rows"] / page_sizes[str(CONTIGUOUS)]["rows"]
    return {"waste": waste, "gain": gain, "is_target_reached": waste < MOST_WASTE and gain >= LEAST_GAIN}


def _in_words(measured: dict[str, float]) -> str:
    return (
        f"{measured['rows']:5.1f} rows of {measured['tokens_per_row']:4.0f} tokens, waste {measured['waste']:6.2%}, "
        f"{measured['sent_back']:3} sent back"
    )


def draw(results: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    waste, rows = figure.subplots(1, 2)
    styles = (("o", "#0072b2"), ("s", "#d55e00"), ("^", "#009e73"))  # told apart by marker as well as by colour
    for (mean, found), (marker, colour) in zip(results["mean_lengths"].items(), styles, strict=True):
        sizes = [int(page_size) for page_size in found["page_sizes"]]
        for axes, name, unit in ((waste, "waste", 0.01), (rows, "rows", 1)):
            values = [measured[name] / unit for measured in found["page_sizes"].values()]
            axes.plot(sizes[:-1], values[:-1], marker=marker, color=colour, label=f"mean length {mean}")
            axes.plot(sizes[-1], values[-1], marker=marker, color=colour, fillstyle="none")
    waste.axhline(100 * MOST_WASTE, color="black", linestyle="--", linewidth=1)
    waste.text(1, 100 * MOST_WASTE, f"under {MOST_WASTE:.0%} at 16", va="bottom", fontsize=8)
    waste.set_yscale("symlog", linthresh=0.1)  # a page of one cell wastes nothing
    waste.set_ylim(0, 100)
    waste.set_ylabel("cells held that no token fills, %")
    rows.set_yscale("log")
    rows.set_yticks((10, 20, 50, 100))
    rows.minorticks_off()
    rows.set_ylabel("rows that fit at once")
    for axes in (waste, rows):
        axes.set_xscale("log", base=2)
        axes.set_xticks((1, 4, 16, 64, 256, CONTIGUOUS), ("1", "4", "16", "64", "256", f"{CONTIGUOUS}:\ncontiguous"))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("page size, tokens")
        axes.grid(alpha=0.3)
    rows.legend(frameon=False)
    pool = results["pool"]
    figure.suptitle(f"{pool['bytes'] / 2**30:g} GiB of cache, {pool['model']}, rows of at most {pool['max_length']}")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "paged_jax"}):  # text as text, no random names
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
