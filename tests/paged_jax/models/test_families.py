"""Layers in a scan equal layers unrolled, pages equal a dense cache, and only layers without a window look far back."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_runs import new_pool, one_by_one, packed
from tiny_checkpoints import TINY

from paged_jax.models.dense import generate_dense
from paged_jax.models.network import Network
from paged_jax.models.programs import generate, prefill
from paged_jax.models.weights.config_json import model_config

ROWS = [[5, 90, 31, 7, 63, 90, 91, 12, 80, 81, 66, 4, 17, 55, 38], [7], [10, 10, 20]]


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def random_model(name: str, *, scan_layers: bool) -> jax.tree_util.Partial:
    """Every parameter is random, biases and scales too; the same ones with layers in a scan as without."""
    model_type, fields = TINY[name]
    config, rng = model_config({"model_type": model_type, **fields}), np.random.default_rng(0)
    weights = {}
    for path, shape in Network(config).shapes(jnp.float32).items():
        values = rng.standard_normal(shape.shape)
        is_vector = len(shape.shape) == 1 or path.endswith(".bias")
        values = 1 + 0.3 * values if path.endswith(".scale") else 0.3 * values if is_vector else 0.15 * values
        weights[path] = jnp.asarray(values, jnp.float32)
    if scan_layers:
        layers = [path.removeprefix("layers.0.") for path in weights if path.startswith("layers.0.")]
        stacked = {
            f"layers.{path}": jnp.stack([weights[f"layers.{i}.{path}"] for i in range(config.num_layers)])
            for path in layers
        }
        weights = {path: value for path, value in weights.items() if not path.startswith("layers.")} | stacked
    return jax.tree_util.Partial(Network(config, scan_layers), weights)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama with biases", marks=pytest.mark.full),
        pytest.param("gemma3 linear rope", marks=pytest.mark.full),
        "gpt-oss",
    ],
)
def test_layers_in_a_scan_equal_layers_unrolled(name: str) -> None:
    """Without windows, with windows and rotations of two kinds, and with experts and sinks."""
    models = (random_model(name, scan_layers=scan_layers) for scan_layers in (False, True))
    unrolled, scanned = (packed(model, *new_pool(model, 3, 4), ROWS, 32)[0] for model in models)
    for one, other in zip(unrolled, scanned, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("name", ["gemma2", pytest.param("gpt-oss", marks=pytest.mark.full)])
def test_a_dense_cache_gives_the_same_tokens(name: str) -> None:
    """Windows, soft caps, sinks; rows that end at a stop token, and a prompt of one token."""
    model = random_model(name, scan_layers=True)
    count, read = 20, np.array([len(row) - 1 for row in ROWS], np.int32)
    free = generate_dense(model, ROWS, count, (), jnp.float32)
    stop = free[0][4]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert len({len(row) for row in expected}) > 1
    assert generate_dense(model, ROWS, count, {stop}, jnp.float32) == expected

    tokens = np.pad(np.concatenate([row[:-1] for row in ROWS]), (0, 32 - read.sum())).astype(np.int32)
    cache, table, ok = prefill(model, *new_pool(model, 3, 4), tokens, read)
    assert ok
    newest, active = np.array([row[-1] for row in ROWS], np.int32), np.ones(len(ROWS), bool)
    result = generate(model, cache, table, newest, active, max_new_tokens=count, stop_tokens=(stop,)).check()
    assert [row[row >= 0].tolist() for row in np.asarray(result.tokens)] == expected


def test_only_layers_without_a_window_look_at_pages_before_it() -> None:
    model = random_model("gpt-oss", scan_layers=True)  # every second layer has a window of 8
    row = np.random.default_rng(1).integers(3, 97, 30).tolist()
    _, cache, table = packed(model, *new_pool(model, 1, 4), [row], 32)
    pages = np.asarray(table.pages)[0]
    windowed, full = jnp.array([0, 2]), jnp.array([1, 3])

    def following(cache: Any) -> np.ndarray:
        (logits,), *_ = one_by_one(model, jax.tree.map(jnp.copy, cache), table, [[3]])
        return logits

    def poisoned(layers: Any, pages: np.ndarray) -> np.ndarray:
        at = (layers[:, None], jnp.asarray(pages)[None, :])
        return following(jax.tree.map(lambda pool: pool.at[at].set(jnp.nan), cache))

    outside = pages[: (30 + 1 - 8) // 4]  # the new token at position 30 sees keys from 23 on
    np.testing.assert_array_equal(poisoned(windowed, outside), following(cache))
    assert np.isnan(poisoned(windowed, pages[5:6])).any()
    assert np.isnan(poisoned(full, outside)).any()
