"""The benchmark of quantised caches: it reads through the cache in chunks, and judges what it reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import TINY

from examples.benchmarks import quantised
from paged_jax.models.network import Network
from paged_jax.models.weights.config_json import model_config


@pytest.mark.full
def test_it_reads_in_chunks_and_a_byte_costs_little(monkeypatch):
    monkeypatch.setattr(quantised, "CHUNK", 8)
    model_type, fields = TINY["llama with biases"]
    network, rng = (
        Network(model_config({"model_type": model_type, **fields}), scan_layers=True),
        np.random.default_rng(0),
    )
    shapes = network.shapes(jnp.float32).items()
    weights = {name: jnp.asarray(rng.normal(scale=0.2, size=shape.shape), shape.dtype) for name, shape in shapes}
    model = jax.tree_util.Partial(network, weights)
    tokens = list(range(3, 22))
    exact, byte = (quantised.read(model, tokens, dtype) for dtype in ("float32", "int8"))
    assert exact.shape == byte.shape == (19, network.config.vocab_size)
    assert 0 < np.abs(exact - byte).max() < 0.05 * np.abs(exact).max()
    with jax.default_matmul_precision("highest"):
        monkeypatch.setattr(quantised, "CHUNK", 24)
        np.testing.assert_allclose(quantised.read(model, tokens, "float32"), exact, atol=1e-5)


def test_biases_of_the_slowest_channels_of_k_are_added():
    model_type, fields = TINY["llama2"]
    network = Network(model_config({"model_type": model_type, **fields}), scan_layers=True)
    weights = {name: jnp.zeros(shape.shape) for name, shape in network.shapes(jnp.float32).items()}
    biased = quantised.with_key_biases(jax.tree_util.Partial(network, weights))
    assert biased.args[0].keys() == biased.func.shapes(jnp.float32).keys()
    bias = np.abs(biased.args[0]["layers.attention.qkv.bias"])
    assert bias.shape == (4, 2, 2 + 2, 16)
    np.testing.assert_array_equal(bias[:, :, 2], np.broadcast_to([0] * 5 + [30, 100, 300] + [0] * 8, (4, 2, 16)))
    assert not np.delete(bias, 2, axis=2).any()


def test_what_is_judged():
    tokens = [1, 0, 2, 3]
    uniform = np.zeros((4, 5), np.float32)
    exact = np.eye(5, dtype=np.float32)[[0, 2, 3, 4]]
    assert quantised.judge(uniform, uniform, tokens) == {"perplexity": pytest.approx(5), "agreement": 1.0}
    assert quantised.judge(uniform, exact, tokens)["agreement"] == 0.25  # argmax of equals is the first
    sure = np.asarray(100 * jnp.asarray(exact))
    assert quantised.judge(sure, exact, tokens) == {"perplexity": pytest.approx(1), "agreement": 1.0}
