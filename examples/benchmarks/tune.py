"""Finds the fastest kernel settings on the GPU at hand, and writes the file from which the library takes them.

    python -m examples.benchmarks.tune --tag headline model

Cases that the library cannot tell apart while it traces (`config.Shape`) are tuned together: the geometric mean of
their times counts, each over that of the heuristic's settings. All candidates are timed briefly, the best quarter of
them in turns, and the best two of those with other numbers of programs. A shape is written as soon as it is done, and a
later call goes on with what is left.
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from examples.benchmarks.decode import (
    Problem,
    Run,
    attend_configured,
    compile_chains,
    make_problem,
    reference,
    seconds_per_call,
    start,
)
from examples.benchmarks.environment import describe
from pallas_kernels.cases import DECODE_CASES, DecodeCase
from pallas_kernels.device import Device, current_device
from pallas_kernels.paged_decode import config as configs
from pallas_kernels.paged_decode.config import Config, Shape

_FINALISTS = 2  # kernels that are tried with every number of programs
_SECONDS_PER_COMPILATION = 0.7  # about, on 16 cores, to tell how long it will take
_ERROR_ALLOWED = 2  # times that of the heuristic's settings, whose accuracy is tested

Times = dict[Config, list[float]]  # microseconds in each case of a shape


class OutOfTimeError(Exception):
    """The time limit has come before a shape was done."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tag", nargs="+", default=["headline", "model"], help="tune for cases with one of these tags")
    parser.add_argument("--only", help="only for cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=7, help="turns of the candidates that are not out at once (7)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long; what is done is kept")
    parser.add_argument("--out", type=Path, help="JSON file, to go on with if it exists; the library's own by default")
    args = parser.parse_args(arguments)

    deadline = time.monotonic() + args.seconds
    device = current_device()
    out = args.out or Path(str(configs.TUNED), configs.file_name(device.kind))
    results = load(out)
    done = {Shape(**entry["shape"]) for entry in results["entries"]}
    wanted = [
        case
        for case in DECODE_CASES
        if not case.tags.isdisjoint(args.tag) and (not args.only or args.only in case.name)
    ]
    plan = {shape: cases for shape, cases in by_shape(wanted).items() if shape not in done}
    show_plan(plan, len(done), device)
    try:
        for shape, cases in plan.items():
            results["entries"].append(tune(shape, cases, device, args.rounds, deadline))
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            gc.collect()  # the data of a shape goes before that of the next comes
    except OutOfTimeError:
        print(f"out of time; {len(results['entries'])} shapes are done")


def load(path: Path) -> dict[str, Any]:
    """The results to go on with, or none yet. Those of another device or version are not mixed with ours."""
    environment = describe()
    if not path.exists():
        return {"benchmark": "tune", "environment": environment, "entries": []}
    results = json.loads(path.read_text(encoding="utf-8"))
    for key in ("device", "versions"):
        if results["environment"][key] != environment[key]:
            raise SystemExit(f"{path}: expected {key} {environment[key]}, got {results['environment'][key]}")
    return results


def by_shape(cases: Iterable[DecodeCase]) -> dict[Shape, list[DecodeCase]]:
    """The cases of each shape that the library tells apart."""
    shapes: dict[Shape, list[DecodeCase]] = {}
    for case in cases:
        shape = Shape(
            group=case.num_heads // case.num_kv_heads,
            head_dim=case.head_dim,
            v_head_dim=case.head_dim,
            q_dtype=case.dtype,
            kv_dtype=case.kv_dtype or case.dtype,
            layout=case.layout,
            kv_rows=len(case.lengths) * case.num_kv_heads,
        )
        shapes.setdefault(configs.as_tuned(shape), []).append(case)
    return shapes


def show_plan(plan: dict[Shape, list[DecodeCase]], num_done: int, device: Device) -> None:
    compilations = sum(len(kernels(shape, device)) * len(cases) for shape, cases in plan.items())
    minutes = compilations * _SECONDS_PER_COMPILATION / 60
    print(
        f"{len(plan)} shapes of {sum(map(len, plan.values()))} cases to tune, {num_done} done before: "
        f"{compilations} compilations, and some more for the best; about {minutes:.0f} minutes",
        flush=True,
    )


def kernels(shape: Shape, device: Device) -> list[Config]:
    """The candidates with the heuristic's number of programs, its own choice first."""
    first, *others = configs.candidates(shape, device)
    return [first, *(config for config in others if config.programs_per_processor == first.programs_per_processor)]


def tune(shape: Shape, cases: list[DecodeCase], device: Device, rounds: int, deadline: float) -> dict[str, Any]:
    """The entry of a shape; raises OutOfTimeError."""
    print(f"{', '.join(case.name for case in cases)}: {shape}", flush=True)
    start, problems = time.monotonic(), [make_problem(case) for case in cases]
    race = functools.partial(
        race_in_turns, runs={}, problems=problems, expected=list(map(reference, problems)), deadline=deadline
    )
    heuristic, *_ = first = kernels(shape, device)
    times = race(first, rounds=1)
    times = race([heuristic, *ranked(times, heuristic)[: max(_FINALISTS, len(times) // 4)]], rounds=rounds)
    best = ranked(times, heuristic)[:_FINALISTS]
    variants = [
        config
        for config in configs.candidates(shape, device)
        if any(dataclasses.replace(config, programs_per_processor=b.programs_per_processor) == b for b in best)
    ]
    times = race([heuristic, *best, *variants], rounds=rounds)
    chosen = ranked(times, heuristic)[0]
    print(f"  {chosen}: {share_of_heuristic(times, heuristic)[chosen]:.1%} of the heuristic's time", end="")
    print(f", took {time.monotonic() - start:.0f} s", flush=True)

    def by_name(config: Config) -> dict[str, float]:
        return {case.name: round(median, 2) for case, median in zip(cases, times[config], strict=True)}

    return {
        "shape": shape._asdict(),
        "config": dataclasses.asdict(chosen),
        "microseconds": by_name(chosen),
        "heuristic": dataclasses.asdict(heuristic),
        "heuristic_microseconds": by_name(heuristic),
    }


def race_in_turns(
    candidates: list[Config],
    *,
    rounds: int,
    runs: dict[Config, list[Run]],
    problems: list[Problem],
    expected: list[jax.Array],
    deadline: float,
) -> Times:
    """Median times of the candidates that work and are about as accurate as the first, the heuristic's choice.

    `runs` keeps what is compiled from race to race.
    """
    pending = [config for config in dict.fromkeys(candidates) if config not in runs]
    at_a_time = os.cpu_count() or 1
    for first in range(0, len(pending), at_a_time):
        together = pending[first : first + at_a_time]
        if time.monotonic() > deadline:
            raise OutOfTimeError
        runs |= compile_for_each(together, problems, expected)
        print("".join("." if runs[config] else "x" for config in together), end="", flush=True)
    print(flush=True)
    if not runs[candidates[0]]:
        raise RuntimeError(f"the heuristic's choice does not work: {candidates[0]}")
    bars = [_ERROR_ALLOWED * run.max_error for run in runs[candidates[0]]]
    samples: dict[Config, list[list[float]]] = {
        config: [[] for _ in problems]
        for config in candidates
        if runs[config] and all(run.max_error <= bar for run, bar in zip(runs[config], bars, strict=True))
    }
    for _ in range(rounds):
        for config, of_cases in samples.items():
            for run, of_case in zip(runs[config], of_cases, strict=True):
                of_case.append(seconds_per_call(run.chain.run, run.operands, run.calls) / run.chain.depth * 1e6)
    return {config: [statistics.median(of_case) for of_case in of_cases] for config, of_cases in samples.items()}


def compile_for_each(
    candidates: Sequence[Config], problems: list[Problem], expected: list[jax.Array]
) -> dict[Config, list[Run]]:
    """Each config ready to run on each problem; none where it does not fit the device."""
    pairs = list(itertools.product(candidates, problems))
    chains = compile_chains(
        [
            (
                functools.partial(attend_configured, problem, config=config, num_partitions=None),
                (problem.q, problem.cache, problem.table),
                problem.cache.num_layers,
            )
            for config, problem in pairs
        ]
    )
    runs: dict[Config, list[Run]] = {config: [] for config in candidates}
    broken = set()
    for (config, problem), chain, result in zip(pairs, chains, itertools.cycle(expected), strict=False):
        try:
            runs[config].append(start(chain, (problem.q, problem.cache, problem.table), {}, result))
        except Exception:  # Triton and XLA refuse what does not fit, each in its own way
            broken.add(config)
    return {config: [] if config in broken else of_config for config, of_config in runs.items()}


def ranked(times: Times, heuristic: Config) -> list[Config]:
    """Fastest first."""
    shares = share_of_heuristic(times, heuristic)
    return sorted(shares, key=shares.__getitem__)


def share_of_heuristic(times: Times, heuristic: Config) -> dict[Config, float]:
    """Geometric mean over the cases of each candidate's time over the heuristic's."""
    return {
        config: statistics.geometric_mean(us / base for us, base in zip(of_cases, times[heuristic], strict=True))
        for config, of_cases in times.items()
    }


if __name__ == "__main__":
    main()
