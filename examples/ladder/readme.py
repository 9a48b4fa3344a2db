"""Writes the ladder's table in pallas_kernels/README.md from the raw results.

python examples/ladder/readme.py
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "pallas_kernels" / "README.md"
RESULTS = ROOT / "examples" / "benchmarks" / "results" / "ladder-h200.json"

_PLACE = re.compile(r"(<!-- table: ladder -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(text: str, results: Path = RESULTS) -> str:
    """The text, with what stands between the markers of the table made anew."""
    if not _PLACE.search(text):
        raise ValueError("README: expected a place for the table 'ladder', got none")
    return _PLACE.sub(lambda found: found[1] + ladder_table(results) + found[2], text)


def ladder_table(results: Path) -> str:
    """What share of the memory limit each rung reaches in each case: bytes of K and V by time, over the ceiling."""
    if not results.exists():
        return "Not measured yet.\n\n"
    measured = json.loads(results.read_text(encoding="utf-8"))
    environment, ceiling, cases = measured["environment"], measured["ceiling_gb_per_s"], measured["cases"]
    rungs = dict.fromkeys(rung for case in cases.values() for rung in case["microseconds"])
    lines = [("rung", *cases), ("---",) + ("--:",) * len(cases)]
    for rung in rungs:
        times = [case["microseconds"].get(rung) for case in cases.values()]
        shares = [
            f"{case['kv_bytes'] / microseconds / 1e3 / ceiling:.0%} ({microseconds:.1f} us)" if microseconds else ""
            for case, microseconds in zip(cases.values(), times, strict=True)
        ]
        lines.append((rung, *shares))
    where = f"{environment['device']}, jax {environment['versions']['jax']}, {environment['date']}"
    return (
        f"Share of the {ceiling:.0f} GB/s at which memory is read, and the time of one layer; {where}:\n\n"
        + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        + "\n"
    )


if __name__ == "__main__":
    main()
