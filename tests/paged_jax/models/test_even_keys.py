"""Channels of K that stand out are made even for int8: the model says the same, and its cache holds more of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from paged_runs import forward, packed
from tiny_checkpoints import TINY

from paged_jax import BlockTable, PagedCache, sharding
from paged_jax.models import Loaded
from paged_jax.models.even_keys import even_keys
from paged_jax.models.mesh import Split
from paged_jax.models.network import Network
from paged_jax.models.weights.config_json import model_config

PROMPTS = [[5, 90, 31, 7, 63, 90, 91, 12, 80, 81, 66, 4, 17, 55, 38], [7], [10, 10, 20]]
OFFSET = 300.0  # of one channel of each kv head


@functools.cache
def network(name: str, *, scan_layers: bool = True) -> Network:
    model_type, fields = TINY[name]
    return Network(model_config({"model_type": model_type, **fields}), scan_layers)


def random_weights(network: Network) -> dict[str, jax.Array]:
    """Of a model whose K has an offset in the channel that turns most slowly, as in Qwen 2.5."""
    rng, attention, found = np.random.default_rng(0), network.config.attention, {}
    for path, shape in network.shapes(jnp.float32).items():
        values = rng.standard_normal(shape.shape)
        values = 1 + 0.3 * values if path.endswith(".scale") else 0.15 * values
        if path.endswith("qkv.bias"):
            values[..., attention.group, attention.head_dim // 2 - 1] += OFFSET
        found[path] = jnp.asarray(values, jnp.float32)
    return found


def read(model: Network, weights: Any, dtype: Any) -> np.ndarray:
    """The logits after each token, first as prompts, then of one more token for each row, over a cache of `dtype`."""
    attention, rows, blocks = model.config.attention, len(PROMPTS), 5
    sizes = (model.config.num_layers, rows * blocks, 4, attention.num_kv_heads, attention.head_dim)
    pool = PagedCache.create(*sizes, dtype), BlockTable.create(rows * blocks, 4, rows, blocks)
    model_forward = jax.tree_util.Partial(model, weights)
    logits, *pool = packed(model_forward, *pool, PROMPTS, 24)
    last, *_ = forward(model_forward, *pool, jnp.array([3, 4, 5], jnp.int32), jnp.ones(rows, jnp.int32), None)
    return np.concatenate([*logits, np.asarray(last)])


@pytest.mark.parametrize(
    ("name", "scan_layers"), [("qwen2", True), pytest.param("llama with biases", False, marks=pytest.mark.full)]
)
def test_over_floats_it_says_the_same_to_the_last_bit(name: str, scan_layers: bool) -> None:
    model = network(name, scan_layers=scan_layers)
    weights = random_weights(model)
    evened = even_keys(model.config, weights)
    changed = {path for path in weights if not np.array_equal(evened[path], weights[path])}
    assert {path.split("attention.")[-1] for path in changed} == {"qkv.weight", "qkv.bias"}
    np.testing.assert_array_equal(read(model, evened, jnp.float32), read(model, weights, jnp.float32))


@pytest.mark.full
def test_int8_holds_keys_with_offsets() -> None:
    model = network("qwen2")
    weights = random_weights(model)
    exact = read(model, weights, jnp.float32)
    plain, even = (
        np.abs(read(model, kind, jnp.int8) - exact).mean() for kind in (weights, even_keys(model.config, weights))
    )
    assert even < plain / 4


@pytest.mark.parametrize("name", ["llama2", "qwen3", "gemma3"])
def test_models_without_biases_of_k_stay_as_they_are(name: str) -> None:
    model = network(name)
    weights = random_weights(model)
    evened = even_keys(model.config, weights)
    assert all(evened[path] is weights[path] for path in weights)


def test_a_loaded_model_is_made_even_by_a_method() -> None:
    model, nothing_on_disk = network("qwen2"), None
    loaded: Any = Loaded(model.config, random_weights(model), model, nothing_on_disk)
    expected = even_keys(model.config, loaded.weights)
    for path, value in loaded.with_even_keys().weights.items():
        np.testing.assert_array_equal(value, expected[path])


def test_channels_that_are_zero_stay_zero() -> None:
    model = network("qwen2")
    weights = {path: jnp.zeros_like(value) for path, value in random_weights(model).items()}
    for value in even_keys(model.config, weights).values():
        np.testing.assert_array_equal(value, 0)


def test_on_a_mesh_weights_stay_where_they_are() -> None:
    mesh = sharding.make_mesh(heads=1)
    model = Network(network("qwen2").config, True, Split(mesh, heads="heads"))
    specs = model.specs()
    weights = {
        path: jax.device_put(value, NamedSharding(mesh, specs[path])) for path, value in random_weights(model).items()
    }
    for path, value in even_keys(model.config, weights).items():
        assert value.sharding == weights[path].sharding, path
