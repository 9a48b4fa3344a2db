"""A decoder as functions of its weights: what one config, one way to compile and one mesh make of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Int32

from paged_jax.cache import PagedCache
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder, attend_paged
from paged_jax.models.dense import DenseStep, attend_causally
from paged_jax.models.mesh import Split, parameter_specs, split_decoder
from paged_jax.step import PagedStep


@dataclasses.dataclass(frozen=True)
class Network:
    """Called with weights, it is the `forward` of `paged_jax.decode`. Hashable: equal networks share compiled programs.

    Weights are a dict of arrays, by their paths in the module, `layers.3.mlp.down.weight` for example: the names and
    shapes of `weights.shapes`. Those of scanned layers are stacked, [layers, ...], and have no number in the name.

    With a split it is called inside `shard_map`, as `sharding.on_mesh` does: it sees one device's weights, rows and kv
    heads, and returns the logits of the whole vocabulary, equal on all shards of heads.
    """

    config: ModelConfig
    scan_layers: bool = False  # one compiled layer in `lax.scan`: compiled in a fraction of the time
    split: Split | None = None  # over a mesh

    def __call__(
        self,
        weights: Mapping[str, Array],
        tokens: Int32[Array, " T"],
        step: PagedStep,
        cache: PagedCache,
        *,
        max_context: int | None = None,
    ) -> tuple[Float[Array, "T V"], PagedCache]:
        """The logits after each token of a step, and the cache with K and V of all. XLA drops logits that nobody uses.

        `max_context` promises how many tokens any row of the step held before it, at most (static): 0 for fresh
        prompts, which then need not read pages.
        """
        decoder = self.decoder(weights)
        if self.split is not None:
            decoder = split_decoder(decoder, self.split)
        hidden, cache = decoder(tokens, step, cache, functools.partial(attend_paged, max_context=max_context))
        return decoder.logits(hidden), cache

    def dense(self, weights: Mapping[str, Array], tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """The logits after each token of rows of one length, without a cache; differentiable. Compile it with jit.

        A layer's scores take 4·B·N·T² bytes.
        """
        num_rows, num_tokens = tokens.shape
        decoder, step = self.decoder(weights), DenseStep(jnp.tile(jnp.arange(num_tokens, dtype=jnp.int32), num_rows))
        attend = functools.partial(attend_causally, num_rows)
        hidden, _ = decoder(jnp.asarray(tokens, jnp.int32).reshape(-1), step, None, attend)
        return decoder.logits(hidden).reshape(num_rows, num_tokens, -1)

    def decoder(self, weights: Mapping[str, Array]) -> Decoder:
        """The Flax module with these weights; its activations have the dtype of the embedding table."""
        graph, shapes = self._structure(weights["embedding.embedding"].dtype)
        return nnx.merge(graph, nnx.from_flat_state({tuple(path): weights[name] for name, (path, _) in shapes.items()}))

    def shapes(self, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every weight. Scales of norms are float32 whatever `dtype` is."""
        return {name: shape for name, (_, shape) in self._structure(jnp.dtype(dtype))[1].items()}

    def specs(self) -> dict[str, PartitionSpec]:
        """The PartitionSpec of every weight; of a network with a split.

        Raises:
            ValueError: the kv heads, or the MLP's width, do not divide over the devices.
        """
        if self.split is None:
            raise ValueError("split: expected a mesh and its axes, got None")
        of_layers = parameter_specs(self.config, self.split)
        if not self.scan_layers:
            return of_layers
        specs = {}
        for path, spec in of_layers.items():
            is_layer = path.startswith("layers.")
            specs[stacked_path(path)[0] if is_layer else path] = PartitionSpec(None, *spec) if is_layer else spec
        return specs

    def _structure(self, dtype: Any) -> Any:
        return _structure(self.config, jnp.dtype(dtype), self.scan_layers)


def stacked_path(path: str) -> tuple[str, int]:
    """`layers.3.mlp.down.weight` → `layers.mlp.down.weight`, 3."""
    layers, number, rest = path.split(".", 2)
    return f"{layers}.{rest}", int(number)


@functools.lru_cache(maxsize=8)  # tracing a deep model's structure takes half a second, and each program needs it
def _structure(config: ModelConfig, dtype: Any, scan_layers: bool) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """The module's graph, and each weight's path in it with its shape, by its name."""
    graph, state = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, dtype=dtype, scan_layers=scan_layers, rngs=nnx.Rngs(0)))
    )
    flat = nnx.to_flat_state(state)
    return graph, {".".join(map(str, path)): (path, variable.get_value()) for path, variable in flat}
