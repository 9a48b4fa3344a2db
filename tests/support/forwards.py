"""Models for the tests as `forward` functions: from open files, or with weights that a test makes."""

from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.models.config import ModelConfig
from paged_jax.models.loaded import load_weights
from paged_jax.models.network import Network


def load_forward(
    source: Any,
    config: ModelConfig,
    dtype: Any = jnp.float32,
    *,
    split: Any = None,
    scan_layers: bool = False,
    **options: Any,
) -> jax.tree_util.Partial:
    """The model in an open file."""
    network = Network(config, scan_layers, split)
    return jax.tree_util.Partial(network, load_weights(source, network, dtype, **options))
