"""What a quantised cache costs in accuracy: a model reads a text with each dtype of the cache.

    python -m examples.benchmarks.quantised --out examples/benchmarks/results/quantised-cpu.json

Each token is predicted from K and V that lie in the cache in that dtype. Perplexity is that of the text, and agreement
the share of places where the likeliest next token is the one that a float32 cache gives.

The models are SmolLM2, and SmolLM2 with biases of K as Qwen 2.5 has them: hundreds, in the channels that turn most
slowly. Those are much the same for all keys of a text, so that the softmax passes over most of them and the model still
reads.
"""

import argparse
import dataclasses
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
from paged_jax.models.even_keys import even_keys
from paged_jax.models.loaded import load
from paged_jax.models.network import Network
from paged_jax.models.weights.fetch import fetch_smollm2

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
TEXT = Path(__file__).parent / "text.txt"  # in the public domain
PAGE_SIZE, CHUNK = 16, 128
BIASES = (300.0, 100.0, 30.0)  # of the slowest channel of each kv head, of the next, ...


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="where the raw results go, as JSON")
    args = parser.parse_args(arguments)
    loaded = load(fetch_smollm2(), dtype="float32", scan_layers=True)
    tokens = loaded.text.encode(TEXT.read_text(encoding="utf-8"), is_raw=True)
    biased = with_key_biases(loaded.forward)
    even = jax.tree_util.Partial(biased.func, even_keys(biased.func.config, *biased.args))
    runs = [  # model, cache, forward, dtype; each model's first is exact
        *(("plain", dtype, loaded.forward, dtype) for dtype in DTYPES),
        *(("biased", dtype, biased, dtype) for dtype in DTYPES),
        ("biased", "int8, even keys", even, "int8"),
    ]
    exact: dict[str, np.ndarray] = {}
    models: dict[str, dict[str, Any]] = {"plain": {}, "biased": {}}
    for model, cache, forward, dtype in track(runs, "Reading"):
        logits = read(forward, tokens, dtype)
        models[model][cache] = judge(logits, exact.setdefault(model, logits), tokens)
    results = {
        "benchmark": "quantised",
        "environment": describe("flax"),
        "model": "SmolLM2-135M-Instruct, float32",
        "biases": BIASES,
        "tokens": len(tokens),
        "models": models,
    }
    print(json.dumps(results["models"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def with_key_biases(forward: jax.tree_util.Partial) -> jax.tree_util.Partial:
    """The model, whose layers are stacked, with BIASES of either sign in K."""
    network, (weights,) = forward.func, forward.args
    attention = dataclasses.replace(network.config.attention, qkv_bias=True)
    network = Network(dataclasses.replace(network.config, attention=attention), network.scan_layers)
    name = "layers.attention.qkv.bias"
    shape = network.shapes(jnp.float32)[name].shape  # [layer, kv head, its query heads + key + value, head_dim]
    bias, rng = np.zeros(shape, np.float32), np.random.default_rng(0)
    slowest = attention.head_dim // 2 - 1
    for place, size in enumerate(BIASES):
        bias[:, :, attention.group, slowest - place] = size * rng.choice([-1, 1], shape[:2])
    return jax.tree_util.Partial(network, {**weights, name: jnp.asarray(bias)})


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
