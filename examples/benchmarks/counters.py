"""Hardware counters of the decode kernel, by NVIDIA's `ncu`: what the time of a case goes by.

    python -m examples.benchmarks.counters --out examples/benchmarks/results/counters-h200.json

Each case runs in a process of its own under `ncu`, which replays its second launch and leaves the clocks as they are.
Reading counters may need a right that only the machine's owner can give.
"""

import argparse
import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from examples.benchmarks.decode import attend_paged, make_problem
from examples.benchmarks.environment import describe
from pallas_kernels.cases import DECODE_CASES

COUNTERS = {  # our name → ncu's
    "microseconds": "gpu__time_duration.sum",
    "megabytes_read": "dram__bytes_read.sum",
    "memory_percent_of_peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_slots_busy_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps_active_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "cycles_waiting_for_memory_per_issue": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "registers": "launch__registers_per_thread",
    "programs_per_processor_by_registers": "launch__occupancy_limit_registers",
    "programs_per_processor_by_shared_memory": "launch__occupancy_limit_shared_mem",
    "cycles_of_the_busiest_processor": "sm__cycles_active.max",
    "cycles_of_the_mean_processor": "sm__cycles_active.avg",
}
_TO_OUR_UNIT = {
    "nsecond": 1e-3,
    "ns": 1e-3,
    "us": 1.0,
    "usecond": 1.0,
    "byte": 1e-6,
    "Kbyte": 1e-3,
    "Mbyte": 1.0,
    "Gbyte": 1e3,
}
_DEFAULT = ("64 x 4096", "128 x log-uniform", "16 x 1024", "1 x 1024", "256 x 512", "64 x 4096, int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--case", nargs="+", default=_DEFAULT, choices=[case.name for case in DECODE_CASES], metavar="CASE"
    )
    parser.add_argument("--run", action="store_true", help="only launch the kernel, twice: what ncu looks at")
    parser.add_argument("--out", type=Path, help="JSON file for the results, rewritten after every case")
    args = parser.parse_args()
    if args.run:
        for name in args.case:
            launch_twice(name)
        return
    results: dict[str, Any] = {"benchmark": "counters", "environment": describe(), "cases": {}}
    for name in args.case:
        results["cases"][name] = measured = count(name)
        print(name, *(f"  {counter}: {value:g}" for counter, value in measured.items()), sep="\n", flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def launch_twice(name: str) -> None:
    (case,) = (case for case in DECODE_CASES if case.name == name)
    problem = make_problem(case)
    attend = jax.jit(lambda q, cache, table: attend_paged(problem, q, cache, table, 1))
    for _ in range(2):
        jax.block_until_ready(attend(problem.q, problem.cache, problem.table))


def count(name: str) -> dict[str, float]:
    """The counters of a case.

    Raises:
        RuntimeError: ncu gave no counters; says what it printed.
    """
    command = ["ncu", "--clock-control", "none", "--kernel-name", "regex:paged_decode", "--launch-skip", "1"]
    command += ["--launch-count", "1", "--csv", "--metrics", ",".join(COUNTERS.values())]
    command += [sys.executable, __file__, "--run", "--case", name]
    # ncu keeps a copy of what the kernel overwrites: it needs some of the memory, too.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    table = run.stdout[run.stdout.find('"ID"') :]
    found = {row["Metric Name"]: row for row in csv.DictReader(io.StringIO(table)) if row.get("Metric Name")}
    if missing := [counter for counter in COUNTERS.values() if counter not in found]:
        raise RuntimeError(f"ncu: expected a value of {missing[0]}, got {(run.stdout + run.stderr)[-500:]!r}")
    return {ours: _number(found[counter]) for ours, counter in COUNTERS.items()}


def _number(row: dict[str, str]) -> float:
    return float(row["Metric Value"].replace(",", "")) * _TO_OUR_UNIT.get(row["Metric Unit"], 1.0)


if __name__ == "__main__":
    main()
