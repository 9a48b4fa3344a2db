"""Decode speed of SmolLM2-135M-Instruct: ours at batch 1 and 8, beside transformers' `generate` with its cache.

    python examples/benchmarks/generation.py --out examples/benchmarks/results/generation-cpu.json

Rounds are interleaved, so that a slow moment of the machine meets every contestant; the medians are what counts.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from rich.progress import track

from benchmarks.environment import describe
from decoder.config_gguf import gguf_config
from decoder.fetch import fetch_smollm2
from decoder.gguf import open_gguf
from decoder.load import load_decoder
from decoder.model import Decoder, generate, prefill
from decoder.text import gguf_text
from paged_jax import BlockTable, PagedCache

PROMPT = "What is gravity? Answer in one sentence."
PAGE_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=64, help="decoded per row and round (64)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each contestant (7)")
    parser.add_argument("--out", type=Path, help="where the raw results go, as JSON")
    args = parser.parse_args()

    file = open_gguf(fetch_smollm2())
    prompt = gguf_text(file).encode(PROMPT, is_raw=False)
    model = load_decoder(file, gguf_config(file), jnp.float32)
    contestants = {
        f"paged_jax batch {rows}": functools.partial(time_paged, model, prompt, rows, args.tokens) for rows in (1, 8)
    }
    try:
        from benchmarks.hugging_face import time_generate, to_transformers

        contestants["transformers batch 1"] = functools.partial(
            time_generate, to_transformers(model), prompt, args.tokens
        )
    except ImportError as problem:
        print(f"measuring without transformers: {problem}", file=sys.stderr)

    # A first call compiles; what it takes longer than a second one is the time for that.
    first = {name: contestant() for name, contestant in contestants.items()}
    seconds = {name: [contestant()] for name, contestant in contestants.items()}
    for _ in track(range(args.rounds - 1), "Measuring"):
        for name, contestant in contestants.items():
            seconds[name].append(contestant())
    rows = {name: int(name.split()[-1]) for name in contestants}
    results = {
        "benchmark": "generation",
        "environment": describe("flax", "torch", "transformers"),
        "model": "SmolLM2-135M-Instruct, float32",
        "prompt_tokens": len(prompt),
        "new_tokens_per_row": args.tokens,
        "seconds": seconds,
        "compile_seconds": {name: first[name] - seconds[name][0] for name in contestants if "paged" in name},
        "tokens_per_second": {
            name: rows[name] * args.tokens / statistics.median(runs) for name, runs in seconds.items()
        },
    }
    print(json.dumps({key: results[key] for key in ("tokens_per_second", "compile_seconds")}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def time_paged(model: Decoder, prompt: list[int], rows: int, num_new: int) -> float:
    """Seconds to decode `num_new` tokens for each of `rows` rows after their prefill."""
    blocks = -(-(len(prompt) + num_new) // PAGE_SIZE)
    table = BlockTable.create(rows * blocks, PAGE_SIZE, rows, blocks)
    attention = model.config.attention
    sizes = (model.config.num_layers, table.num_pages, PAGE_SIZE, attention.num_kv_heads, attention.head_dim)
    tokens, num_tokens = jnp.array(prompt[:-1] * rows, jnp.int32), jnp.full(rows, len(prompt) - 1, jnp.int32)
    cache, table, _ = prefill(model, PagedCache.create(*sizes, jnp.float32), table, tokens, num_tokens)
    newest, active = jnp.full(rows, prompt[-1], jnp.int32), jnp.ones(rows, bool)
    jax.block_until_ready((cache, table, newest, active))
    start = time.perf_counter()
    result = generate(model, cache, table, newest, active, max_new_tokens=num_new)
    jax.block_until_ready(result)
    seconds = time.perf_counter() - start
    result.check()
    return seconds


if __name__ == "__main__":
    main()
