"""Measures every rung of the ladder on a GPU, beside the memory ceiling, errors checked in the same run.

    python -m examples.ladder.measure --out examples/benchmarks/results/ladder-h200.json

Times are taken as `benchmarks/decode.py` takes them. `benchmarks/readme.py` makes the table from the results.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

from examples.benchmarks.decode import Problem, make_problem, measure, measure_ceiling, show
from examples.benchmarks.environment import describe
from examples.benchmarks.peers import Contestant, by_layer
from examples.ladder import rung1_page_walk, rung2_tiles, rung3_masked_tail, rung4_partitions, rung5_one_launch
from pallas_kernels.cases import DECODE_CASES

RUNGS = {
    "1 page walk": rung1_page_walk.paged_decode,
    "2 tiles": rung2_tiles.paged_decode,
    "3 masked tail apart": rung3_masked_tail.paged_decode,
    "4 partitions by length": rung4_partitions.paged_decode,
    "5 one launch": rung5_one_launch.paged_decode,
}
CASES = ("64 x 4096", "1 x 32768", "16 x 1024", "128 x log-uniform")  # many rows, one, short ones, uneven ones


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results, rewritten after every case")
    args = parser.parse_args(arguments)
    results = {
        "benchmark": "ladder",
        "environment": describe(),
        "ceiling_gb_per_s": measure_ceiling(args.rounds),
        "cases": {},
    }
    contestants = {name: Contestant(_attend_with(decode), by_layer) for name, decode in RUNGS.items()}
    for case in (case for case in DECODE_CASES if case.name in CASES):
        start = time.perf_counter()
        results["cases"][case.name] = measured = measure(make_problem(case), contestants, args.rounds)
        gc.collect()  # the data of a case goes before that of the next comes
        show(case, measured, time.perf_counter() - start)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _attend_with(decode: Callable) -> Callable:
    def attend(problem: Problem, q, cache, table, layer: int):  # noqa: ARG001
        return decode(q, *cache[layer], table.pages, table.lengths)

    return attend


if __name__ == "__main__":
    main()
