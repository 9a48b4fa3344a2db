"""Speed of SmolLM2-135M-Instruct: decoding at batch 1 and 8, beside transformers' `generate` with its cache, and
reading prompts beside one dense forward of the same tokens, which keeps no cache.

    python -m examples.benchmarks.generation --out examples/benchmarks/results/generation-cpu.json

Rounds are interleaved, so that a slow moment of the machine meets every contestant; the medians are what counts.
"""

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32
from rich.progress import track

from examples.benchmarks.environment import describe
from paged_jax import BlockTable, PagedCache
from paged_jax.models.dense import DenseStep
from paged_jax.models.loaded import load
from paged_jax.models.programs import generate, prefill
from paged_jax.models.weights.fetch import fetch_smollm2

PROMPT = "What is gravity? Answer in one sentence."
PAGE_SIZE = 16
PREFILLS = {"1 x 512": (1, 512), "4 x 256": (4, 256), "16 x 64": (16, 64)}  # rows, tokens of each


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=64, help="decoded per row and round (64)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each contestant (7)")
    parser.add_argument("--out", type=Path, help="where the raw results go, as JSON")
    args = parser.parse_args()

    loaded = load(fetch_smollm2(), dtype="float32")
    prompt, model = loaded.text.encode(PROMPT, is_raw=False), loaded.forward
    contestants = {
        f"paged_jax batch {rows}": functools.partial(time_paged, model, prompt, rows, args.tokens) for rows in (1, 8)
    }
    try:
        from examples.benchmarks.hugging_face import time_generate, to_transformers

        contestants["transformers batch 1"] = functools.partial(
            time_generate, to_transformers(model), prompt, args.tokens
        )
    except ImportError as problem:
        print(f"measuring without transformers: {problem}", file=sys.stderr)

    num_new = {name: int(name.split()[-1]) * args.tokens for name in contestants}
    readers = {
        (name, kind): functools.partial(read, model, rows, tokens)
        for name, (rows, tokens) in PREFILLS.items()
        for kind, read in (("paged_jax", time_prefill), ("dense forward", time_forward))
    }

    first, seconds = measure(contestants, args.rounds)
    _, reading = measure(readers, args.rounds)
    results = {
        "benchmark": "generation",
        "environment": describe("flax", "torch", "transformers"),
        "model": "SmolLM2-135M-Instruct, float32",
        "prompt_tokens": len(prompt),
        "new_tokens_per_row": args.tokens,
        "seconds": seconds,
        "compile_seconds": {name: first[name] - seconds[name][0] for name in contestants if "paged" in name},
        "tokens_per_second": {name: num_new[name] / statistics.median(runs) for name, runs in seconds.items()},
        "prefill_seconds": {name: {} for name in PREFILLS},
        "prefill_tokens_per_second": {name: {} for name in PREFILLS},
    }
    for (name, kind), runs in reading.items():
        results["prefill_seconds"][name][kind] = runs
        results["prefill_tokens_per_second"][name][kind] = math.prod(PREFILLS[name]) / statistics.median(runs)
    shown = ("tokens_per_second", "compile_seconds", "prefill_tokens_per_second")
    print(json.dumps({key: results[key] for key in shown}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure(
    contestants: dict[Any, Callable[[], float]], rounds: int
) -> tuple[dict[Any, float], dict[Any, list[float]]]:
    """Seconds of each contestant's first call, which compiles as well, and of those after it, in turns."""
    first = {name: contestant() for name, contestant in contestants.items()}
    seconds = {name: [] for name in contestants}
    for _ in track(range(rounds), "Measuring"):
        for name, contestant in contestants.items():
            seconds[name].append(contestant())
    return first, seconds


def time_paged(model: jax.tree_util.Partial, prompt: list[int], rows: int, num_new: int) -> float:
    """Seconds to decode `num_new` tokens for each of `rows` rows after their prefill."""
    cache, table = empty_cache(model, rows, len(prompt) + num_new)
    tokens, num_tokens = jnp.array(prompt[:-1] * rows, jnp.int32), jnp.full(rows, len(prompt) - 1, jnp.int32)
    cache, table, _ = prefill(model, cache, table, tokens, num_tokens)
    newest, active = jnp.full(rows, prompt[-1], jnp.int32), jnp.ones(rows, bool)
    jax.block_until_ready((cache, table, newest, active))
    start = time.perf_counter()
    result = generate(model, cache, table, newest, active, max_new_tokens=num_new)
    jax.block_until_ready(result)
    seconds = time.perf_counter() - start
    result.check()
    return seconds


def time_prefill(model: jax.tree_util.Partial, rows: int, num_tokens: int) -> float:
    """Seconds to read fresh prompts into pages, as `generate.py` does."""
    cache, table = empty_cache(model, rows, num_tokens)
    tokens = random_tokens(model, rows * num_tokens)
    counts = jnp.full(rows, num_tokens, jnp.int32)
    jax.block_until_ready((cache, table, tokens, counts))
    start = time.perf_counter()
    _, _, ok = jax.block_until_ready(prefill(model, cache, table, tokens, counts, max_context=0))
    seconds = time.perf_counter() - start
    if not ok:
        raise RuntimeError(f"expected room for {rows} x {num_tokens} tokens, got a refusal")
    return seconds


def time_forward(model: jax.tree_util.Partial, rows: int, num_tokens: int) -> float:
    """Seconds of one dense forward of as many tokens."""
    tokens = jax.block_until_ready(random_tokens(model, rows * num_tokens))
    start = time.perf_counter()
    jax.block_until_ready(forward(model, tokens, rows=rows))
    return time.perf_counter() - start


@functools.partial(jax.jit, static_argnames="rows")
def forward(model: jax.tree_util.Partial, tokens: Int32[Array, " T"], *, rows: int) -> Float[Array, "T D"]:
    """The hidden states of prompts of one length, one after the other, with the attention that JAX has."""

    def attend(q, k, v, cache, _, *, scale, **_options):  # this model has neither windows nor sinks
        q, k, v = (x.reshape(rows, -1, *x.shape[1:]) for x in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.reshape(-1, *out.shape[2:]), cache

    positions = jnp.tile(jnp.arange(tokens.size // rows, dtype=jnp.int32), rows)
    return model.func.decoder(*model.args)(tokens, DenseStep(positions), None, attend)[0]


def empty_cache(model: jax.tree_util.Partial, rows: int, num_tokens: int) -> tuple[PagedCache, BlockTable]:
    """A cache and a table with room for so many tokens in each row."""
    blocks = -(-num_tokens // PAGE_SIZE)
    table = BlockTable.create(rows * blocks, PAGE_SIZE, rows, blocks)
    attention = model.func.config.attention
    sizes = (model.func.config.num_layers, table.num_pages, PAGE_SIZE, attention.num_kv_heads, attention.head_dim)
    return PagedCache.create(*sizes, jnp.float32), table


def random_tokens(model: jax.tree_util.Partial, count: int) -> Int32[Array, " T"]:
    return jnp.asarray(np.random.default_rng(0).integers(model.func.config.vocab_size, size=count), jnp.int32)


if __name__ == "__main__":
    main()
