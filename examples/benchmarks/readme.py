"""Writes the tables of the Markdown files from the raw results.

python -m examples.benchmarks.readme
"""

import functools
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from pallas_kernels.cases import DECODE_CASES, PREFILL_CASES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "examples" / "benchmarks" / "results"


def main() -> None:
    for name in DOCUMENTS:
        document = ROOT / name
        document.write_text(with_tables(name, document.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(name: str, text: str) -> str:
    """The text of a document, with what stands between each pair of table markers made anew."""
    for title, table in DOCUMENTS[name].items():
        pattern = rf"(<!-- table: {title} -->\n).*?(<!-- end -->)"
        if not re.search(pattern, text, re.DOTALL):
            raise ValueError(f"{name}: expected a place for the table {title!r}, got none")
        text = re.sub(pattern, lambda found, table=table: found[1] + table() + found[2], text, flags=re.DOTALL)
    return text


def generation_table() -> str:
    results = json.loads((RESULTS / "generation-cpu.json").read_text(encoding="utf-8"))
    rates = results["tokens_per_second"]
    rows = [
        (name, f"{rate:.1f}", f"{results['compile_seconds'][name]:.1f}" if name in results["compile_seconds"] else "")
        for name, rate in rates.items()
    ]
    readings = [
        (name, *(f"{rate:.0f}" for rate in kinds.values()))
        for name, kinds in results["prefill_tokens_per_second"].items()
    ]
    return (
        f"{results['model']}, {results['new_tokens_per_row']} new tokens per row; {_where(results)}:\n\n"
        + _table(("decoder", "tokens/s", "compile, s"), rows)
        + f"\nBatch 8 is {rates['paged_jax batch 8'] / rates['paged_jax batch 1']:.1f} times batch 1.\n\n"
        + _table(("prompts, rows x tokens", "paged_jax, tokens/s", "one dense forward, tokens/s"), readings)
        + "\n"
    )


def decode_table(*tags: str) -> str:
    """Of the cases that have one of the tags."""
    results = json.loads((RESULTS / "decode-h200.json").read_text(encoding="utf-8"))
    ceiling = results["ceiling_gb_per_s"]
    measured = dict.fromkeys(name for case in results["cases"].values() for name in case["microseconds"])
    peers = [name for name in measured if name != "paged_jax"]
    tagged = {case.name for case in DECODE_CASES if not case.tags.isdisjoint(tags)}
    rows = []
    for name, case in results["cases"].items():
        if name not in tagged:
            continue
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


def shapes_table(file: str, *tags: str) -> str:
    """The kernel alone, on cases that have one of the tags."""
    results = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    ceiling = results["ceiling_gb_per_s"]
    rows = []
    for case in (case for case in DECODE_CASES if not case.tags.isdisjoint(tags)):
        microseconds = results["cases"][case.name]["microseconds"]["paged_jax"]
        rate = case.kv_bytes / microseconds / 1e3
        rows.append(
            (case.name, f"{case.kv_bytes / 1e6:.0f}", f"{microseconds:.1f}", f"{rate:.0f}", f"{rate / ceiling:.0%}")
        )
    head = ("case", "K and V, MB", "us", "GB/s", "of the ceiling")
    return f"{_where(results)}. Reading memory reaches {ceiling:.0f} GB/s there:\n\n" + _table(head, rows) + "\n"


def prefill_table(file: str, *tags: str) -> str:
    """Of the cases that have one of the tags."""
    results = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    rows = []
    for case in (case for case in PREFILL_CASES if case.tag in tags):
        (_, ours), *others = results["cases"][case.name]["microseconds"].items()
        ratios = ", ".join(f"{other.removeprefix('paged_jax, ')} {time / ours:.2f}" for other, time in others)
        rows.append((case.name, f"{ours:.0f}", f"{case.flops / ours / 1e6:.0f}", ratios))
    return (
        f"Several tokens per row, one layer of 32 heads over 8 kv heads x 128, bfloat16; {_where(results)}. The last "
        "column tells how many times as long others take, and our own other ways:\n\n"
        + _table(("rows and tokens", "paged_jax, us", "TFLOP/s", "others"), rows)
        + "\n"
    )


def llama_table() -> str:
    steps, results = (
        json.loads((RESULTS / name).read_text(encoding="utf-8")) for name in ("llama-step-h200.json", "llama-h200.json")
    )
    rows = []
    for name, cases in steps["step"].items():
        for case, step in cases.items():
            milliseconds = (f"{1e3 * step[key]:.2f}" for key in ("seconds_per_step", "seconds_reading"))
            rows.append((f"{name}, {step['layers']} layers, {case}", *milliseconds, f"{step['value']:.2f}"))
    compiled = "; ".join(
        f"{name}: " + ", ".join(f"{sum(measured[kind].values()):.0f} s {kind}" for kind in ("scanned", "unrolled"))
        for name, measured in results["compile"].items()
    )
    text = (
        f"Decoding with random bfloat16 models of Llama 3's shapes, in one compiled loop; {_where(steps)}. Reading "
        f"memory reaches {steps['ceiling_gb_per_s']:.0f} GB/s there, and the last column says how many times as long "
        "as reading its weights, K and V alone a step takes:\n\n"
        + _table(("model, rows x length", "step, ms", "reading alone, ms", "times"), rows)
        + f"\nThe loop is compiled in ({compiled}).\n\n"
    )
    for name, dense in results["dense"].items():
        rates = [
            (kind, str(found["rows"]), f"{found['cache_bytes'] / 2**30:.1f}", f"{found['tokens_per_second']:.0f}")
            for kind, found in dense["contestants"].items()
        ]
        text += (
            f"{name}, rows of {min(dense['lengths'])} to {max(dense['lengths'])} tokens in "
            f"{dense['budget_bytes'] / 2**30:g} GiB; a dense cache has room for {dense['reserved_tokens']} in each:\n\n"
            + _table(("cache", "rows that fit", "GiB", "tokens/s"), rates)
            + "\n"
        )
    return text


def mesh_table() -> str:
    rows = []
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("llama-*-h200-x2.json"))]
    for results in runs:
        how = " with flags" if _flags(results) else ""
        for name, mesh in results["mesh"].items():
            steps = (f"{1e3 * timed['seconds_per_step']:.2f}" for timed in mesh["devices"].values())
            rows.append((f"{name}, {mesh['layers']} layers: step{how}, ms", *steps, f"{mesh['value']:.2f}"))
        for name, attention in results.get("attention", {}).items():
            times = (f"{microseconds:.1f}" for microseconds in attention["microseconds"].values())
            rows.append((f"{name}: attention of a layer, us", *times, f"{attention['value']:.2f}"))
    head = ("64 rows of 4096 tokens", "1 device", f"{runs[0]['devices']} devices", "of one device's")
    return (
        f"The same with kv heads split over devices; {_where(runs[0])}:\n\n"
        + _table(head, rows)
        + "".join(f'\nThese flags: `XLA_FLAGS="{flags}"`.\n\n' for flags in map(_flags, runs) if flags)
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
        f"Writing K and V of one layer, {sizes['kv_heads']} kv heads x {sizes['head_dim']}, of {sizes['layers']} in a "
        f"step; {_where(results)}:\n\n"
        + _table(("cache and tokens", "XLA's scatter, us", "one Pallas launch, us"), rows)
        + "\n"
    )


def swap_table() -> str:
    results = json.loads((RESULTS / "swap-h200.json").read_text(encoding="utf-8"))
    rows = [(name, f"{rate:.1f}") for name, rate in results["gb_per_s"].items()]
    return (
        f"Swapping {results['rows']} rows of {results['tokens']} tokens, {results['bytes'] / 1e9:.1f} GB, to pinned "
        f"memory of the host and back, beside copies of one array as large; {_where(results)}:\n\n"
        + _table(("what moves", "GB/s"), rows)
        + "\n"
    )


def quantised_table() -> str:
    results = json.loads((RESULTS / "quantised-cpu.json").read_text(encoding="utf-8"))
    plain, biased = (
        _table(
            ("cache", "perplexity", "same likeliest token"),
            [(cache, f"{judged['perplexity']:.2f}", f"{judged['agreement']:.1%}") for cache, judged in caches.items()],
        )
        for caches in results["models"].values()
    )
    biases = ", ".join(f"{bias:g}" for bias in results["biases"])
    return (
        f"{results['model']}, reads {results['tokens']} tokens of English prose through a cache of each dtype; "
        f"{_where(results)}:\n\n{plain}\nThe same model, to whose keys biases were added as Qwen 2.5 has them: "
        f"{biases}, of either sign, in the channels of each kv head that turn most slowly. `even keys` is "
        f"`loaded.with_even_keys()`, as `paged-jax generate --cache-dtype int8` has it:\n\n{biased}\n"
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


def memory_sentence() -> str:
    """What the whole table of memory comes to."""
    results = json.loads((RESULTS / "memory.json").read_text(encoding="utf-8"))
    pool, measured = results["pool"], results["mean_lengths"]
    paged, reserved = (
        [sizes["page_sizes"][size] for sizes in measured.values()] for size in ("16", str(pool["max_length"]))
    )
    means = [int(mean) for mean in measured]
    wastes = [sorted(case["waste"] for case in cases) for cases in (paged, reserved)]
    sentence = (
        f"In {pool['bytes'] / 2**30:.0f} GiB of cache ({pool['model']}), requests of {min(means)} to {max(means)} "
        f"tokens on average leave {wastes[0][0]:.1%} to {wastes[0][-1]:.1%} of what they hold unused at page size 16, "
        f"and {wastes[1][0]:.0%} to {wastes[1][-1]:.0%} with {pool['max_length']} tokens reserved for each: "
        f"{min(case['rows'] for case in paged):.0f} to {max(case['rows'] for case in paged):.0f} of them fit at once "
        f"instead of {max(case['rows'] for case in reserved):.0f}."
    )
    return textwrap.fill(sentence, 120) + "\n"


def ladder_table() -> str:
    """What share of the memory limit each rung reaches in each case: bytes of K and V by time, over the ceiling."""
    results = json.loads((RESULTS / "ladder-h200.json").read_text(encoding="utf-8"))
    ceiling, cases = results["ceiling_gb_per_s"], results["cases"]
    rungs = dict.fromkeys(rung for case in cases.values() for rung in case["microseconds"])

    def share(case: dict, rung: str) -> str:
        microseconds = case["microseconds"].get(rung)
        return f"{case['kv_bytes'] / microseconds / 1e3 / ceiling:.0%} ({microseconds:.1f} us)" if microseconds else ""

    rows = [(rung, *(share(case, rung) for case in cases.values())) for rung in rungs]
    return (
        f"Share of the {ceiling:.0f} GB/s at which memory is read, and the time of one layer; {_where(results)}:\n\n"
        + _table(("rung", *cases), rows)
        + "\n"
    )


def counters_table() -> str:
    results = json.loads((RESULTS / "counters-h200.json").read_text(encoding="utf-8"))
    columns = {
        "us": lambda case: f"{case['microseconds']:.1f}",
        "MB read": lambda case: f"{case['megabytes_read']:.1f}",
        "memory, of its peak": lambda case: f"{case['memory_percent_of_peak']:.0f}%",
        "issue slots busy": lambda case: f"{case['issue_slots_busy_percent']:.0f}%",
        "busiest processor over mean": lambda case: (
            f"{case['cycles_of_the_busiest_processor'] / case['cycles_of_the_mean_processor']:.2f}"
        ),
        "registers": lambda case: f"{case['registers']:.0f}",
    }
    rows = [(name, *(value(case) for value in columns.values())) for name, case in results["cases"].items()]
    return f"One launch under `ncu`; {_where(results)}:\n\n" + _table(("rows x length", *columns), rows) + "\n"


def _where(results: dict) -> str:
    environment = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if name != "jaxlib")
    cores = f", {environment['processors']} cores" if environment["platform"] == "cpu" else ""
    return f"{environment['device']}{cores}, {versions}, {environment['date']}"


def _flags(results: dict) -> str:
    """XLA's, as far as a run says; the oldest do not."""
    return results["environment"].get("xla_flags", "")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    alignment = ("---",) + ("--:",) * (len(head) - 1)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, alignment, *rows))


DOCUMENTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "decode": functools.partial(decode_table, "headline"),
        "memory": memory_sentence,
    },
    "examples/benchmarks/README.md": {
        "decode": functools.partial(decode_table, "headline", "quantised"),
        "models": functools.partial(shapes_table, "decode-models-h200.json", "model"),
        "prefill": functools.partial(
            prefill_table, "prefill-h200.json", "fresh", "chunk", "mixed", "drafts", "cascade"
        ),
        "llama": llama_table,
        "mesh": mesh_table,
        "write": write_table,
        "swap": swap_table,
        "block table": block_table_table,
        "memory": memory_table,
        "generation": generation_table,
        "quantised": quantised_table,
    },
    "pallas_kernels/README.md": {
        "shapes": functools.partial(shapes_table, "decode-shapes-h200.json", "shape", "scaling"),
        "single": functools.partial(shapes_table, "decode-single-h200.json", "single"),
        "single prefill": functools.partial(prefill_table, "prefill-single-h200.json", "single"),
        "ladder": ladder_table,
        "counters": counters_table,
    },
}


if __name__ == "__main__":
    main()
