"""Writes the README's tables from the raw results.

python examples/benchmarks/readme.py
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

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
    ceiling = results["ceiling_gb_per_s"]
    measured = dict.fromkeys(name for case in results["cases"].values() for name in case["microseconds"])
    peers = [name for name in measured if name != "paged_jax"]
    rows = []
    for name, case in results["cases"].items():
        times, ours = case["microseconds"], case["microseconds"]["paged_jax"]
        rate = case["kv_bytes"] / ours / 1e3
        ratios = [f"{times[peer] / ours:.2f}" if peer in times else "" for peer in peers]
        rows.append((name, f"{ours:.1f}", f"{rate:.0f}", f"{rate / ceiling:.0%}", *ratios))
    how = "; the peers' columns tell how many times as long each takes, where it can do the case" if peers else ""
    return (
        f"Decode attention with the GPU kernel, one layer; {_where(results)}. "
        f"Reading memory reaches {ceiling:.0f} GB/s there{how}:\n\n"
        + _table(("rows x length", "paged_jax, us", "GB/s", "of the ceiling", *peers), rows)
        + "\n"
    )


def prefill_table() -> str:
    results = json.loads((RESULTS / "prefill-h200.json").read_text(encoding="utf-8"))
    rows = []
    for name, case in results["cases"].items():
        (_, ours), *others = case["microseconds"].items()
        ratios = ", ".join(f"{other.removeprefix('paged_jax, ')} {time / ours:.2f}" for other, time in others)
        rows.append((name, f"{ours:.0f}", f"{case['flops'] / ours / 1e6:.0f}", ratios))
    return (
        f"Several tokens per row, one layer of 32 heads over 8 kv heads x 128, bfloat16; {_where(results)}. The last "
        "column tells how many times as long others take, and our own other ways:\n\n"
        + _table(("rows and tokens", "paged_jax, us", "TFLOP/s", "others"), rows)
        + "\n"
    )


def write_table() -> str:
    results = json.loads((RESULTS / "write-h200.json").read_text(encoding="utf-8"))
    fewest = min(case["pages"] for case in results["cases"])
    rows = [
        (
            f"{case['dtype']}, {case['tokens']} tokens" + ", pool 4 times as large" * (case["pages"] > fewest),
            *(f"{case['microseconds'][name]:.1f}" for name in ("xla", "triton")),
        )
        for case in results["cases"]
    ]
    sizes = results["sizes"]
    return (
        f"Writing K and V of one layer, {sizes['kv_heads']} kv heads x {sizes['head_dim']}, in a loop over "
        f"{sizes['layers']}; {_where(results)}:\n\n"
        + _table(("cache and tokens", "XLA's scatter, us", "one Pallas launch, us"), rows)
        + "\n"
    )


def quantised_table() -> str:
    results = json.loads((RESULTS / "quantised-cpu.json").read_text(encoding="utf-8"))
    rows = [
        (dtype, f"{judged['perplexity']:.2f}", f"{judged['agreement']:.1%}")
        for dtype, judged in results["dtypes"].items()
    ]
    return (
        f"{results['model']}, reads {results['tokens']} tokens of English prose through a cache of each dtype; "
        f"{_where(results)}:\n\n" + _table(("cache", "perplexity", "same likeliest token"), rows) + "\n"
    )


def block_table_table() -> str:
    results = json.loads((RESULTS / "block-table-h200.json").read_text(encoding="utf-8"))
    sizes, states = results["table"], results["microseconds"]
    rows = [(name, *(f"{states[state][name]:.1f}" for state in states)) for name in next(iter(states.values()))]
    hosts = [(name, f"{milliseconds:.2f}") for name, milliseconds in results["host_milliseconds"].items()]
    return (
        f"Block table of {sizes['rows']} rows x {sizes['blocks_per_row']} blocks over {sizes['pages']} pages, inside "
        f"jit, and the prefix cache on that machine's host; {_where(results)}:\n\n"
        + _table(("operation, us", *(f"pool {state}" for state in states)), rows)
        + "\n"
        + _table(("prefix cache", "ms"), hosts)
        + "\n"
    )


def memory_table() -> str:
    results = json.loads((RESULTS / "memory.json").read_text(encoding="utf-8"))
    rows = []
    for mean, measured in results["mean_lengths"].items():
        paged, reserved = (measured["page_sizes"][size] for size in ("16", "8192"))
        rows.append(
            (
                mean,
                f"{paged['waste']:.1%}",
                f"{reserved['waste']:.1%}",
                f"{paged['rows']:.1f}",
                f"{reserved['rows']:.1f}",
            )
        )
    head = ("mean length", "waste, page size 16", "waste, reserved", "rows at once, page size 16", "rows, reserved")
    return _table(head, rows) + "\n"


def _where(results: dict) -> str:
    environment = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if name != "jaxlib")
    cores = f", {environment['processors']} cores" if environment["platform"] == "cpu" else ""
    return f"{environment['device']}{cores}, {versions}, {environment['date']}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    alignment = ("---",) + ("--:",) * (len(head) - 1)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, alignment, *rows))


TABLES: dict[str, Callable[[], str]] = {
    "generation": generation_table,
    "decode": decode_table,
    "prefill": prefill_table,
    "write": write_table,
    "quantised": quantised_table,
    "block table": block_table_table,
    "memory": memory_table,
}


if __name__ == "__main__":
    main()
