"""The decoder on a mesh: which axis of which parameter is split, and prefill and generate run by every device.

The whole of a step runs in one `shard_map`, in which each device calls the very functions of `decoder.model` on its
share. The alternative, shard_map for attention alone and XLA's own partitioning for the rest, needs no module of this
file but leaves it to XLA where it communicates; here a step holds what is written here and nothing else:

- one sum after each layer's attention and one after its MLP (columns of the first matrices, rows of the last ones),
- one sum after the embeddings, whose rows are split, and
- one gather of the logits, from which all devices then choose the same token, as they compare the same bits.

Nothing crosses the rows' axis.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from decoder import model as single
from decoder.config import ModelConfig
from decoder.model import Attend, Decoder, Step, attend_paged
from decoder.shapes import parameter_shapes
from paged_jax import BlockTable, DecodeResult, PagedCache, greedy, sharding

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


def parameter_shardings(config: ModelConfig, split: Split) -> dict[str, NamedSharding]:
    """What `load_decoder` takes as `device`.

    Raises:
        ValueError: as `parameter_specs`.
    """
    return {path: NamedSharding(split.mesh, spec) for path, spec in parameter_specs(config, split).items()}


def model_specs(model: Decoder, split: Split) -> Decoder:
    """The model with a PartitionSpec in place of each array.

    Raises:
        ValueError: as `parameter_specs`.
    """
    specs = parameter_specs(model.config, split)

    def spec(path, _) -> PartitionSpec:
        names = [str(getattr(key, "name", getattr(key, "idx", None))) for key in path[:-1]]  # the last one: the value
        if model.scan_layers and names[0] == "layers":
            return PartitionSpec(None, *specs[".".join(["layers", "0", *names[1:]])])
        return specs[".".join(names)]

    return jax.tree_util.tree_map_with_path(spec, model)


def place_decoder(model: Decoder, split: Split) -> Decoder:
    """A model that is in memory already, on the mesh; `load_decoder` brings one there tensor by tensor.

    Raises:
        ValueError: as `parameter_specs`.
    """
    return sharding.place(split.mesh, model, model_specs(model, split))


def prefill(
    split: Split,
    model: Decoder,
    cache: PagedCache,
    table: BlockTable,
    tokens: Int32[Array | np.ndarray, " T"],
    num_tokens: Int32[Array | np.ndarray, " B"],
    *,
    max_context: int | None = None,
) -> tuple[PagedCache, BlockTable, Bool[Array, "..."]]:
    """`decoder.model.prefill` on a mesh.

    With rows split, the shards' packed tokens lie one after the other, each padded to the same size; table and `ok` are
    stacked.

    Raises:
        ValueError: the table is not one for this split, or as `parameter_specs`.
    """
    tokens, num_tokens = (_place_rows(split, array) for array in (tokens, num_tokens))
    return _prefill(split, model, cache, table, tokens, num_tokens, max_context=max_context)


def lower_prefill(split: Split, *arguments: Any, max_context: int | None = None) -> jax.stages.Lowered:
    """`prefill`'s program for such arguments, to compile ahead of the call; that one is without `split`."""
    return _prefill.lower(split, *arguments, max_context=max_context)


def generate(
    split: Split,
    model: Decoder,
    cache: PagedCache,
    table: BlockTable,
    tokens: Int32[Array | np.ndarray, " B"],
    active: Bool[Array | np.ndarray, " B"],
    *,
    max_new_tokens: int,
    sample: Any = greedy,
    stop_tokens: Sequence[int] = (),
    key: PRNGKeyArray | None = None,
) -> DecodeResult:
    """`decoder.model.generate` on a mesh: each shard of rows goes on until its own rows have ended.

    With rows split, the result's table and `ok` are stacked, and each shard draws with a key of its own.

    Raises:
        ValueError: as `prefill`.
    """
    tokens, active = (_place_rows(split, array) for array in (tokens, active))
    key = None if key is None else jax.device_put(key, NamedSharding(split.mesh, PartitionSpec()))
    options = {"max_new_tokens": max_new_tokens, "sample": sample, "stop_tokens": tuple(stop_tokens)}
    return _generate(split, model, cache, table, tokens, active, key, **options)


def check_placed(split: Split, model: Decoder, cache: PagedCache, table: BlockTable) -> None:
    """Checks on the host that nothing has to move when a step begins.

    Raises:
        ValueError: names the first array that is split otherwise, or does not divide.
    """
    specs = (model_specs(model, split), *_specs(split, cache, table))
    for arrays, spec in zip((model, cache, table), specs, strict=True):
        sharding.check_placed(split.mesh, arrays, spec)


@functools.partial(jax.jit, static_argnames=("split", "max_context"), donate_argnames=("cache", "table"))
def _prefill(split: Split, model: Decoder, cache, table, tokens, num_tokens, *, max_context):
    run = functools.partial(single.prefill, max_context=max_context)
    specs, by_row = _specs(split, cache, table), sharding.rows_spec(split.rows)
    on_mesh = _on_mesh(split, run, model, (*specs, by_row, by_row), (*specs, by_row))
    return on_mesh(model, cache, table, tokens, num_tokens)


@functools.partial(
    jax.jit,
    static_argnames=("split", "max_new_tokens", "sample", "stop_tokens"),
    donate_argnames=("cache", "table"),
)
def _generate(split: Split, model: Decoder, cache, table, tokens, active, key, **options) -> DecodeResult:
    def run(model, cache, table, tokens, active, key):
        if key is not None and split.rows is not None:
            key = jax.random.fold_in(key, lax.axis_index(split.rows))
        return single.generate(model, cache, table, tokens, active, key=key, **options)

    by_row = sharding.rows_spec(split.rows)
    specs = (*_specs(split, cache, table), by_row, by_row, PartitionSpec())
    result = sharding.result_specs(cache, table, heads=split.heads, rows=split.rows)
    return _on_mesh(split, run, model, specs, result)(model, cache, table, tokens, active, key)


def _place_rows(split: Split, array: Any) -> jax.Array:
    """One placement for the first call and those after it, so that none compiles anew."""
    return sharding.place(split.mesh, array, sharding.rows_spec(split.rows))


def _specs(split: Split, cache: PagedCache, table: BlockTable) -> tuple[PagedCache, BlockTable]:
    return sharding.cache_specs(cache, heads=split.heads, rows=split.rows), sharding.table_specs(table, rows=split.rows)


def _on_mesh(split: Split, function: Any, model: Decoder, in_specs: Any, out_specs: Any) -> Any:
    def run(model, *arguments):
        if split.heads is not None and split.num_heads_shards > 1:
            model = _Shard(model, split.heads)
        return function(model, *arguments)

    in_specs = (model_specs(model, split), *in_specs)
    return sharding.on_mesh(run, split.mesh, in_specs=in_specs, out_specs=out_specs, rows=split.rows)


# --- What a device runs -----------------------------------------------------------------------------------------------


class _Shard(nnx.Module):
    """One device's share of a decoder, in place of the whole: it sums and gathers where the decoder need not."""

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
        self, tokens: Int32[Array, " T"], step: Step, cache: Any, attend: Attend = attend_paged
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
    if isinstance(module, single.Mixture):
        return [(module.experts, "down_bias")]
    last = module.down if isinstance(module, single.MLP) else module
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
