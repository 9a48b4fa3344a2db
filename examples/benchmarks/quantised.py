"""What a quantised cache costs in accuracy: SmolLM2 reads a text with each dtype of the cache.

    python -m examples.benchmarks.quantised --out examples/benchmarks/results/quantised-cpu.json

Each token is predicted from K and V that lie in the cache in that dtype. Perplexity is that of the text, and agreement
the share of places where the likeliest next token is the one that a float32 cache gives.
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32
from rich.progress import track

from examples.benchmarks.environment import describe
from paged_jax import BlockTable, PagedCache
from paged_jax.models.loaded import load
from paged_jax.models.weights.fetch import fetch_smollm2

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
TEXT = Path(__file__).parent / "text.txt"  # in the public domain
PAGE_SIZE, CHUNK = 16, 128


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="where the raw results go, as JSON")
    args = parser.parse_args(arguments)
    loaded = load(fetch_smollm2(), dtype="float32")
    tokens = loaded.text.encode(TEXT.read_text(encoding="utf-8"), is_raw=True)
    logits = {dtype: read(loaded.forward, tokens, dtype) for dtype in track(DTYPES, "Reading")}
    results = {
        "benchmark": "quantised",
        "environment": describe("flax"),
        "model": "SmolLM2-135M-Instruct, float32",
        "tokens": len(tokens),
        "dtypes": {dtype: judge(of_dtype, logits["float32"], tokens) for dtype, of_dtype in logits.items()},
    }
    print(json.dumps(results["dtypes"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def read(forward: jax.tree_util.Partial, tokens: list[int], dtype: str) -> np.ndarray:
    """Logits [T, V] after each token, read in chunks through a cache of the dtype."""
    config, blocks = forward.func.config, -(-len(tokens) // PAGE_SIZE)
    attention = config.attention
    sizes = (config.num_layers, blocks, PAGE_SIZE, attention.num_kv_heads, attention.head_dim)
    cache, table = PagedCache.create(*sizes, dtype), BlockTable.create(blocks, PAGE_SIZE, 1, blocks)
    logits = []
    for first in range(0, len(tokens), CHUNK):
        chunk = tokens[first : first + CHUNK]
        padded = jnp.array(chunk + [0] * (CHUNK - len(chunk)), jnp.int32)
        cache, table, of_chunk = _read_chunk(forward, cache, table, padded, jnp.array([len(chunk)], jnp.int32))
        logits.append(np.asarray(of_chunk)[: len(chunk)])
    return np.concatenate(logits)


@functools.partial(jax.jit, donate_argnames=("cache", "table"))
def _read_chunk(
    forward: jax.tree_util.Partial,
    cache: PagedCache,
    table: BlockTable,
    tokens: Int32[Array, " T"],
    num_tokens: Int32[Array, " 1"],
) -> tuple[PagedCache, BlockTable, Float[Array, "T V"]]:
    table, step, _ = table.step(num_tokens, size=tokens.size)
    logits, cache = forward(tokens, step, cache)
    return cache, table, logits


def judge(logits: np.ndarray, exact: np.ndarray, tokens: list[int]) -> dict[str, Any]:
    """Perplexity of each token but the first, and how often the likeliest next token is the exact one."""
    following = np.array(tokens[1:])
    log_probabilities = np.asarray(jax.nn.log_softmax(logits[:-1].astype(np.float64), axis=-1))
    perplexity = np.exp(-log_probabilities[np.arange(following.size), following].mean())
    agreement = (logits.argmax(-1) == exact.argmax(-1)).mean()
    return {"perplexity": round(float(perplexity), 4), "agreement": round(float(agreement), 4)}


if __name__ == "__main__":
    main()
