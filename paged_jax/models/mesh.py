"""The decoder on a mesh: which axis of which parameter is split, and what one device runs on its share.

The whole of a step runs in one `shard_map`, in which each device calls the very decoder on its share. The alternative,
shard_map for attention alone and XLA's own partitioning for the rest, needs no module of this file but leaves it to XLA
where it communicates; here a step holds what is written here and nothing else:

- one sum after each layer's attention and one after its MLP (columns of the first matrices, rows of the last ones),
- one sum after the embeddings, whose rows are split, and
- one gather of the logits, from which all devices then choose the same token, as they compare the same bits.

Nothing crosses the rows' axis.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int32

from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import MLP, Attend, Decoder, Mixture, Step
from paged_jax.models.weights.shapes import parameter_shapes

# A layer's parameters that are split, and which of their axes: the first matrices by what they give out, the last ones
# by what they take in.
_SPLIT_AXES = {
    **{f"attention.qkv.{kind}": 0 for kind in ("weight", "bias")},  # [kv head, ...]
    "attention.sinks": 0,
    "attention.out.weight": 1,
    **{f"mlp.gate_up.{kind}": 1 for kind in ("weight", "bias")},  # [gate + up, out, ...]
    "mlp.down.weight": 1,
    **{f"mlp.experts.{name}": 2 for name in ("gate", "up")},  # [expert, in, out]
    **{f"mlp.experts.{name}_bias": 1 for name in ("gate", "up")},
    "mlp.experts.down": 1,
}
_VOCABULARY = ("embedding.embedding", "head.weight")


@dataclasses.dataclass(frozen=True)
class Split:
    """A mesh, and which of its axes splits kv heads (with all of the model's matrices) and which splits rows.

    Raises:
        ValueError: the mesh has no such axis.
    """

    mesh: Mesh
    heads: str | None = None
    rows: str | None = None

    def __post_init__(self):
        for name in (self.heads, self.rows):
            if name is not None and name not in self.mesh.axis_names:
                raise ValueError(f"mesh: expected an axis {name!r}, got axes {self.mesh.axis_names}")

    @property
    def num_heads_shards(self) -> int:
        return 1 if self.heads is None else self.mesh.shape[self.heads]

    @property
    def num_rows_shards(self) -> int:
        return 1 if self.rows is None else self.mesh.shape[self.rows]


def parameter_specs(config: ModelConfig, split: Split) -> dict[str, PartitionSpec]:
    """The PartitionSpec of every parameter, by its path in `parameter_shapes`; norms are whole on every device.

    Embeddings and logits are whole too where the vocabulary does not divide.

    Raises:
        ValueError: the kv heads, or the MLP's width, do not divide over the devices.
    """
    shards = split.num_heads_shards
    for name, size in (("kv heads", config.attention.num_kv_heads), ("MLP columns", config.mlp.width)):
        if size % shards:
            most = math.gcd(size, shards)
            raise ValueError(
                f"mesh axis {split.heads!r}: expected a divisor of the model's {size} {name}, got {shards} devices; "
                f"{name} are not replicated: split heads over {most} and rows over {shards // most}"
            )

    def spec(path: str) -> PartitionSpec:
        if split.heads is None:
            return PartitionSpec()
        if path in _VOCABULARY:
            return PartitionSpec() if config.vocab_size % shards else PartitionSpec(split.heads)
        axis = _SPLIT_AXES.get(path.split(".", 2)[-1])
        return PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, split.heads)

    return {path: spec(path) for path in parameter_shapes(config)}


# --- What a device runs -----------------------------------------------------------------------------------------------


def split_decoder(decoder: Decoder, split: Split) -> Any:
    """The decoder of one device's share of the weights, to be called inside `shard_map` as the whole one is outside.

    Its modules are changed in place, so it must be of this call alone.
    """
    return decoder if split.num_heads_shards == 1 or split.heads is None else _Shard(decoder, split.heads)


class _Shard(nnx.Module):
    """It sums and gathers where the decoder need not."""

    def __init__(self, model: Decoder, axis: str):
        self.model, self.axis = model, axis
        self.is_vocabulary_split = model.embedding.embedding.shape[0] < model.config.vocab_size
        if self.is_vocabulary_split:
            embedding: Any = _SplitEmbedding(model.embedding, axis)
            model.embedding = embedding
        for layer in [model.layers] if model.scan_layers else model.layers:
            layer.attention.out = _Summed(layer.attention.out, axis)
            layer.mlp = _Summed(layer.mlp, axis)

    def __call__(
        self, tokens: Int32[Array, " T"], step: Step, cache: Any, attend: Attend
    ) -> tuple[Float[Array, "T D"], Any]:
        return self.model(tokens, step, cache, attend)

    def logits(self, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
        logits = self.model.logits(hidden)
        return lax.all_gather(logits, self.axis, axis=1, tiled=True) if self.is_vocabulary_split else logits


class _Summed(nnx.Module):
    """A module whose last matrix is split by what it takes in: its results are parts of a sum."""

    def __init__(self, module: Any, axis: str):
        self.module, self.axis = module, axis
        for holder, name in _last_biases(module):
            bias = getattr(holder, name)
            bias.set_value(jnp.where(lax.axis_index(axis) == 0, bias.get_value(), 0))  # it is added once

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        return lax.psum(self.module(x), self.axis)


def _last_biases(module: Any) -> list[tuple[Any, str]]:
    """The biases that are added to what the last matrix gives."""
    if isinstance(module, Mixture):
        return [(module.experts, "down_bias")]
    last = module.down if isinstance(module, MLP) else module
    return [] if last.bias is None else [(last, "bias")]


class _SplitEmbedding(nnx.Module):
    """The rows of an embedding table that one device has; other tokens come from the other devices."""

    def __init__(self, embed: nnx.Embed, axis: str):
        self.embedding, self.axis = embed.embedding, axis

    def __call__(self, tokens: Int32[Array, " T"]) -> Float[Array, "T D"]:
        matrix = self.embedding[...]
        row = tokens - lax.axis_index(self.axis) * matrix.shape[0]
        mine = matrix.at[row].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return lax.psum(mine, self.axis)
