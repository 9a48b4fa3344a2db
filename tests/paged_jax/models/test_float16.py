"""Float16 ends at 65504. The residual stream does not: a model of float16 says what it says in float32."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_runs import new_pool, packed
from tiny_checkpoints import TINY

from paged_jax.models.dense import DenseStep, attend_causally
from paged_jax.models.network import Network
from paged_jax.models.weights.config_json import model_config

PROMPTS = [[5, 90, 31, 7, 63, 90, 91, 12], [7], [10, 10, 20]]
LIMIT = float(jnp.finfo(jnp.float16).max)
LARGE = 4e4  # what a layer adds; two of them pass the limit
LAST_OF_LAYER = {  # what makes it large, in each family
    "gemma3": ("attention_post_norm.scale", "mlp_post_norm.scale"),
    "llama with biases": ("attention.out.weight", "mlp.down.weight"),
    "gpt-oss": ("attention.out.weight", "mlp.experts.down"),
}


@functools.cache
def network(name: str, *, scan_layers: bool = False) -> Network:
    model_type, fields = TINY[name]
    return Network(model_config({"model_type": model_type, **fields}), scan_layers)


def weights(network: Network, large: Sequence[str]) -> dict[str, jax.Array]:
    """Numbers that float16 holds exactly, so that both models have the same ones."""
    rng, found = np.random.default_rng(0), {}
    for path, shape in network.shapes(jnp.float32).items():
        values = rng.standard_normal(shape.shape)
        values = 1 + 0.3 * values if path.endswith(".scale") else 0.15 * values
        if path.endswith(tuple(large)):
            values *= LARGE / (1.0 if path.endswith(".scale") else 1.5)
        found[path] = jnp.asarray(values if path.endswith(".scale") else values.astype(np.float16), jnp.float32)
    return found


def narrow(weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: value if path.endswith(".scale") else value.astype(jnp.float16) for path, value in weights.items()}


def largest_of_stream(network: Network, weights: Mapping[str, jax.Array]) -> float:
    """The residual stream's largest number after the last layer."""

    @jax.jit
    def stream(weights: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
        decoder: Any = network.decoder(weights)
        decoder.norm = lambda x: x
        return decoder(tokens, DenseStep(jnp.arange(tokens.size)), None, functools.partial(attend_causally, 1))[0]

    return float(jnp.abs(stream(weights, jnp.array(PROMPTS[0], jnp.int32))).max())


@pytest.mark.parametrize(
    ("name", "scan_layers"),
    [
        ("gemma3", True),
        pytest.param("llama with biases", False, marks=pytest.mark.full),
        pytest.param("gpt-oss", True, marks=pytest.mark.full),
    ],
)
def test_a_stream_beyond_float16_gives_the_logits_of_float32(name: str, scan_layers: bool) -> None:
    model, large = network(name, scan_layers=scan_layers), LAST_OF_LAYER[name]
    exact = weights(model, large)
    assert largest_of_stream(model, exact) > LIMIT
    expected, got = (
        packed(forward, *new_pool(forward, len(PROMPTS), 4), PROMPTS, 16)[0]
        for forward in (jax.tree_util.Partial(model, kind) for kind in (exact, narrow(exact)))
    )
    for theirs, ours in zip(expected, got, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, atol=0.02 * np.abs(theirs).max())


def test_logits_beyond_float16_are_numbers() -> None:
    """A tied embedding as large as it can be: t21 of the faults, of which every token was 0."""
    model = network("gemma3", scan_layers=True)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, embedding_scale=1.0))
    exact = weights(model, ())
    table = exact["embedding.embedding"]
    exact["embedding.embedding"] = (table * 6e4 / jnp.abs(table).max()).astype(jnp.float16).astype(jnp.float32)
    for kind in (exact, narrow(exact)):
        forward = jax.tree_util.Partial(model, kind)
        logits = np.concatenate(packed(forward, *new_pool(forward, len(PROMPTS), 4), PROMPTS, 16)[0])
        assert np.abs(logits).max() > LIMIT
        if kind is exact:
            expected = logits
    np.testing.assert_allclose(logits, expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_other_dtypes_stay_as_they_are(dtype: Any) -> None:
    model = network("gemma3", scan_layers=True)
    hidden = jax.eval_shape(
        lambda kind, tokens: model.dense(kind, tokens), model.shapes(dtype), jax.ShapeDtypeStruct((1, 8), jnp.int32)
    )
    assert hidden.dtype == dtype
