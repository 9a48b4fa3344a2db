"""`generate.py --cache-dtype`: what a cache of one byte per element answers, what it takes, and where it is refused."""

import math
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_line import COUNT, Run, expected_text
from forwards import load_forward
from tiny_llama import TinyLlama

from paged_jax.cli import generate, pool
from paged_jax.models.dense import DenseCache, DenseStep, attend_dense
from paged_jax.models.even_keys import even_keys
from paged_jax.models.weights.config_gguf import gguf_config
from paged_jax.models.weights.gguf import open_gguf
from paged_jax.models.weights.shapes import parameter_shapes
from pallas_kernels.quantisation import quantise


def greedy_of_rounded(path: Path, prompt: Sequence[int], dtype: str) -> list[int]:
    """The next tokens where attention sees K and V as a cache of the dtype holds them, without a cache: all anew."""
    file = open_gguf(path)
    model, size = load_forward(file, gguf_config(file), scan_layers=True), len(prompt) + COUNT
    attention = model.func.config.attention

    def attend(q: Any, k: Any, v: Any, cache: DenseCache, step: DenseStep, **options: Any) -> tuple[Any, DenseCache]:
        pairs = (quantise(vectors, jnp.dtype(dtype)) for vectors in (k, v))
        k, v = (values.astype(jnp.float32) * scale[..., None] for values, scale in pairs)
        return attend_dense(q, k, v, cache, step, **options)

    @jax.jit
    def likeliest(model: jax.tree_util.Partial, tokens: Any) -> Any:
        decoder = model.func.decoder(*model.args)
        cells = jnp.zeros((decoder.config.num_layers, 1, size, attention.num_kv_heads, attention.head_dim))
        hidden, _ = decoder(tokens, DenseStep(jnp.arange(size)), DenseCache(cells, cells), attend)
        return decoder.logits(hidden).argmax(-1)

    tokens = np.zeros(size, np.int32)
    tokens[: len(prompt)] = prompt
    for place in range(len(prompt), size):
        tokens[place] = likeliest(model, tokens)[place - 1]
    return tokens[len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("int8", "int8", []),
        pytest.param("fp8", "float8_e4m3fn", ["--scan-layers"], marks=pytest.mark.full),
        pytest.param("float8_e5m2", "float8_e5m2", ["--scan-layers"], marks=pytest.mark.full),
    ],
)
def test_a_quantised_cache_answers_as_its_rounded_keys_and_values_make_it(
    run: Run, tiny: TinyLlama, model: Path, name: str, dtype: str, options: list[str]
) -> None:
    prompt = [5, 200, 31, 7]
    expected = greedy_of_rounded(model, prompt, dtype)
    assert expected != tiny.greedy(prompt, COUNT)
    status, out, err = run("--token-ids", ",".join(map(str, prompt)), "--cache-dtype", name, *options)
    assert (status, out) == (0, ",".join(map(str, expected)) + "\n")
    assert f"cache dtype {dtype}; float32 would take" in err


@pytest.mark.full
@pytest.mark.parametrize(("name", "is_evened"), [("int8", True), ("fp8", False), ("float32", False)])
def test_keys_are_made_even_for_int8_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, is_evened: bool
) -> None:
    calls: list[Any] = []

    def spy(config: Any, weights: Any) -> Any:
        calls.append(config)
        return even_keys(config, weights)

    monkeypatch.setattr(generate, "even_keys", spy)
    assert run("--token-ids", "5,7", "--cache-dtype", name, "--scan-layers", max_tokens=1)[0] == 0
    assert len(calls) == is_evened


def test_a_cache_dtype_that_is_the_models_changes_nothing(run: Run, tiny: TinyLlama) -> None:
    status, out, err = run("zzz", "--dtype", "float32", "--cache-dtype", "float32", "--compare-dense", "--scan-layers")
    assert (status, out) == (0, expected_text(tiny, "zzz") + "\n")
    assert "cache dtype" not in err


@pytest.mark.parametrize(
    ("name", "vector_bytes"),
    [("int8", 16 + 4), *(pytest.param(*case, marks=pytest.mark.full) for case in (("fp8", 20), ("bfloat16", 32)))],
)
def test_the_memory_of_a_cache_counts_scales_and_stands_beside_the_models_dtype(
    run: Run, name: str, vector_bytes: int
) -> None:
    page = 3 * 256 * 2 * 2  # vectors: layers, cells, kv heads, K and V
    status, _, err = run(
        *"abcdefghij", "--raw", "--scan-layers", "--page-size", 256, "--cache-dtype", name, max_tokens=1
    )
    assert status == 0
    memory, plain = (f"{10 * page * size / 1e6:.1f} MB" for size in (vector_bytes, 16 * 4))
    assert re.search(rf"paged +10 of 10 pages used for 10 tokens: {memory},", err), err
    assert re.search(rf"cache dtype \w+; float32 would take {plain} for the same pages", err), err


def test_the_room_of_a_quantised_cache_is_counted_with_its_scales(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = 4 * sum(map(math.prod, parameter_shapes(gguf_config(open_gguf(model))).values()))
    page = 3 * 16 * 2 * 2 * (16 + 4)
    monkeypatch.setattr(pool, "free_bytes", lambda _: weights + 10 * page)
    options = ("x", "--raw", "--scan-layers", "--cache-dtype", "int8")
    assert "of 10 pages used" in run(*options, "--num-pages", 10)[2]
    assert "got 11 pages" in run(*options, "--num-pages", 11)[2]
    assert "of 8 pages used" in run(*options, max_tokens=200)[2]  # of 13 that it might need


@pytest.mark.usefixtures("nothing_computed")
def test_a_cache_dtype_that_the_device_cannot_do_is_refused_with_those_it_can(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = types.SimpleNamespace(device_kind="Imagined", compute_capability="8.0")
    monkeypatch.setattr(jax, "local_devices", lambda: [older])
    status, out, err = run("hello", "--cache-dtype", "fp8")
    assert (status, out) == (2, "")
    assert "a cache on Imagined can have, float32, bfloat16, float16, int8, float8_e5m2, got float8_e4m3fn" in err
