"""Draws achieved bandwidth against bytes read, ours and the peers', from the results of `decode.py`.

python -m examples.benchmarks.plot examples/benchmarks/results/decode-h200.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Each contestant is told apart by its marker as well as by its colour.
_STYLES = (("s", "#0072b2"), ("^", "#d55e00"), ("D", "#009e73"), ("v", "#cc79a7"), ("P", "#56b4e9"), ("X", "#e69f00"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=Path, help="JSON file that decode.py wrote")
    parser.add_argument("--out", type=Path, help="picture, .svg or .png; by default the results' path ending in .svg")
    args = parser.parse_args(arguments)
    results = json.loads(args.results.read_text(encoding="utf-8"))
    draw(results, args.out or args.results.with_suffix(".svg"))


def draw(results: dict[str, Any], path: Path) -> None:
    ceiling = results["ceiling_gb_per_s"]
    names = sorted({name for case in results["cases"].values() for name in case["microseconds"]} - {"paged_jax"})
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(ceiling, color="black", linestyle="--", linewidth=1, label=f"reading memory: {ceiling:.0f} GB/s")
    axes.scatter(*_points(results, "paged_jax"), s=60, color="black", zorder=3, label="paged_jax")
    for i, name in enumerate(names):
        marker, colour = _STYLES[i % len(_STYLES)]
        axes.scatter(*_points(results, name), s=36, marker=marker, facecolors="none", edgecolors=colour, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0, ceiling * 1.05)
    axes.set_xlabel("K and V read in one step, MB")
    axes.set_ylabel("bandwidth, GB/s")
    axes.set_title(f"Paged decode attention, one layer, {results['environment']['device']}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "paged_jax"}):  # text as text, no random names
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _points(results: dict[str, Any], name: str) -> tuple[list[float], list[float]]:
    """MB read, and GB/s, of each case that the contestant was measured in."""
    measured = [case for case in results["cases"].values() if name in case["microseconds"]]
    megabytes = [case["kv_bytes"] / 1e6 for case in measured]
    return megabytes, [case["kv_bytes"] / case["microseconds"][name] / 1e3 for case in measured]


if __name__ == "__main__":
    main()
