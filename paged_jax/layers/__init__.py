"""Flax NNX layers that put paged attention into a model of one's own. The only part of the package that needs Flax."""

try:
    import flax  # noqa: F401
except ImportError as problem:
    raise ImportError('paged_jax.layers: expected Flax, got none: pip install "paged-jax[flax]"') from problem

from paged_jax.layers.attention import PagedAttention
from paged_jax.layers.rope import RopeConfig, Rotation, attention_factor, frequencies

__all__ = ["PagedAttention", "RopeConfig", "Rotation", "attention_factor", "frequencies"]
