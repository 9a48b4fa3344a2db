"""A model's files → all that is needed to generate with it: weights, functions of them, tokenizer and settings."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from paged_jax.models.config import ModelConfig
from paged_jax.models.even_keys import even_keys
from paged_jax.models.mesh import Split, parameter_specs
from paged_jax.models.network import Network, stacked_path
from paged_jax.models.pretrained import Pretrained, open_pretrained
from paged_jax.models.text.text import Text
from paged_jax.models.weights.fetch import fetch_smollm2
from paged_jax.models.weights.parameters import Source, load_parameters
from paged_jax.sampling import Sampler


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model in memory."""

    config: ModelConfig
    weights: dict[str, jax.Array]  # by name, as `Network` says
    network: Network
    pretrained: Pretrained  # its files

    @property
    def forward(self) -> jax.tree_util.Partial:
        """`forward(tokens int32[T], step, cache) -> (logits [T, V], cache)`: for `paged_jax.decode` and the engine.

        The weights are its one bound argument, and so arguments of what it is compiled into. It also takes
        `max_context`, as `Network` says. Of a model on a mesh it is called inside `shard_map`.
        """
        return jax.tree_util.Partial(self.network, self.weights)

    def with_even_keys(self) -> Loaded:
        """The same model with keys that an int8 cache holds well, as `even_keys` says; for Qwen 2, 2.5 and gpt-oss."""
        return dataclasses.replace(self, weights=even_keys(self.config, self.weights))

    def dense(self, weights: Mapping[str, Array], tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """The logits after each token of rows of one length, without a cache and differentiable in the weights."""
        return self.network.dense(weights, tokens)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Token ids at any of which generation stops, ascending."""
        return tuple(sorted(self.pretrained.end_tokens))

    @property
    def sampling(self) -> Sampler | None:
        """How the model's makers sample; None: greedily, or they do not say."""
        return self.pretrained.sampler

    @functools.cached_property
    def text(self) -> Text:
        """Tokenizer and chat template.

        Raises:
            ValueError: the files have no tokenizer, or none that can be read.
        """
        return self.pretrained.text()


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    dtype: Any = None,
    device: Any = None,
    mesh: Mesh | None = None,
    heads: str | None = None,
    rows: str | None = None,
    scan_layers: bool = False,
    track: Callable[[list[str]], Iterable[str]] | None = None,
) -> Loaded:
    """A model of nine families (`weights.families`) from a Hugging Face folder or a GGUF file, one tensor at a time.

    Args:
        path: a folder with config.json and safetensors, or a GGUF file. None is SmolLM2-135M-Instruct, 98 MB, fetched
            into a cache folder on first use.
        dtype: of weights and activations; None is float32 on a CPU and bfloat16 elsewhere.
        device: where the weights go, as of `jax.device_put`; None is JAX's default.
        mesh, heads, rows: as of `sharding.create_cache`; kv heads and matrices are then split over `heads`.
        scan_layers: keep the layers' weights stacked and compile one layer for all: sooner ready, on a CPU a tenth
            slower.
        track: wraps the list of tensors to read, to show progress (`rich.progress.track`, `tqdm`).

    Raises:
        OSError: there is no such file or folder, or a file that it needs is missing.
        ValueError: the files are damaged, contradict each other, or are of a model that the decoder lacks: the message
            names file, expected and got; `device` beside `mesh`, axes without a mesh, or a mesh that does not fit.
        FetchError: the default model could not be fetched.

    Warns:
        UserWarning: the files ask for something that has no effect here (`Pretrained.notes`).
    """
    if mesh is None and (heads is not None or rows is not None):
        raise ValueError(f"mesh: expected a mesh with axes {heads!r} and {rows!r}, got None")
    if mesh is not None and device is not None:
        raise ValueError(f"device: expected None beside a mesh, got {device!r}")
    pretrained = open_pretrained(fetch_smollm2() if path is None else path)
    for note in pretrained.notes:
        warnings.warn(note, stacklevel=2)
    split = None if mesh is None else Split(mesh, heads=heads, rows=rows)
    network = Network(pretrained.config, scan_layers, split)
    dtype = default_dtype() if dtype is None else dtype
    weights = load_weights(pretrained.source, network, dtype, device=device, track=track or iter)
    return Loaded(pretrained.config, weights, network, pretrained)


def default_dtype() -> str:
    """Of weights and activations where nobody says: bfloat16 is no faster on a CPU."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def load_weights(
    source: Source,
    network: Network,
    dtype: Any = jnp.float32,
    *,
    device: Any = None,
    track: Callable[[list[str]], Iterable[str]] = iter,
) -> dict[str, jax.Array]:
    """The weights of a network's config from an open file: each value goes to its device, and into its place if it is
    a part of a parameter or a layer of a stack. With a split it goes to the mesh, where no device holds more than its
    share.

    Raises:
        CheckpointError, GGUFError: as `load_parameters`.
        ValueError: the mesh does not fit.
    """
    config, split, targets = network.config, network.split, {}
    if split is not None:  # of each layer's parameter, and of each weight
        targets, device = (
            {path: NamedSharding(split.mesh, spec) for path, spec in specs.items()}
            for specs in (network.specs(), parameter_specs(config, split))
        )
    weights, shapes = {}, network.shapes(dtype)
    for path, start, value in load_parameters(source, config, dtype, device=device, track=track):
        if network.scan_layers and path.startswith("layers."):
            path, layer = stacked_path(path)
            start = (layer, *start)
        shape = shapes[path]
        if value.shape != shape.shape:
            if path not in weights:  # this is the first of its parts
                weights[path] = jnp.zeros(shape.shape, shape.dtype, device=targets.get(path, device))
            value = jax.block_until_ready(_put(weights[path], start, value))
        weights[path] = value
    return weights


@functools.partial(jax.jit, donate_argnames="whole")
def _put(whole: jax.Array, start: tuple[int, ...], part: jax.Array) -> jax.Array:
    """`whole` with the part in place; a stack has one axis more than a part of one of its layers."""
    part = part.reshape((1,) * (whole.ndim - part.ndim) + part.shape)
    return lax.dynamic_update_slice(whole, part, start)
