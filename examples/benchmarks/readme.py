"""Writes the README's tables from the raw results.

python examples/benchmarks/readme.py
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from pallas_kernels.cases import DECODE_CASES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "examples" / "benchmarks" / "results"


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(text: str) -> str:
    """The text, with what stands between each pair of table markers made anew."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        if not re.search(pattern, text, re.DOTALL):
            raise ValueError(f"README: expected a place for the table {name!r}, got none")
        text = re.sub(pattern, lambda found, table=table: found[1] + table() + found[2], text, flags=re.DOTALL)
    return text


def generation_table() -> str:
    results = json.loads((RESULTS / "generation-cpu.json").read_text(encoding="utf-8"))
    rates = results["tokens_per_second"]
    rows = [
        (name, f"{rate:.1f}", f"{results['compile_seconds'][name]:.1f}" if name in results["compile_seconds"] else "")
        for name, rate in rates.items()
    ]
    return (
        f"{results['model']}, {results['new_tokens_per_row']} new tokens per row; {_where(results)}:\n\n"
        + _table(("decoder", "tokens/s", "compile, s"), rows)
        + f"\nBatch 8 is {rates['paged_jax batch 8'] / rates['paged_jax batch 1']:.1f} times batch 1.\n\n"
    )


def decode_table() -> str:
    results = json.loads((RESULTS / "decode-h200.json").read_text(encoding="utf-8"))
    plain = {case.name: case.is_plain for case in DECODE_CASES}
    rows = []
    for name, case in results["cases"].items():
        ours = case["microseconds"]["paged_jax"]
        rate = case["kv_bytes"] / ours / 1e3
        peer = case["microseconds"].get("xla gather + dense") if plain[name] else None  # the peer knows no options
        rows.append(
            (
                name,
                f"{ours:.1f}",
                f"{rate:.0f}",
                f"{rate / results['ceiling_gb_per_s']:.0%}",
                "" if peer is None else f"{peer:.1f}",
            )
        )
    return (
        f"Decode attention with the GPU kernel, microseconds per layer; {_where(results)}. "
        f"Reading memory reaches {results['ceiling_gb_per_s']:.0f} GB/s there:\n\n"
        + _table(("rows x length", "paged_jax, us", "GB/s", "of the ceiling", "XLA gather + dense, us"), rows)
        + "\n"
    )


def _where(results: dict) -> str:
    environment = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if name != "jaxlib")
    cores = f", {environment['processors']} cores" if environment["platform"] == "cpu" else ""
    return f"{environment['device']}{cores}, {versions}, {environment['date']}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    alignment = ("---",) + ("--:",) * (len(head) - 1)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, alignment, *rows))


TABLES: dict[str, Callable[[], str]] = {"generation": generation_table, "decode": decode_table}


if __name__ == "__main__":
    main()
