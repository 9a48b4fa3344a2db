"""A model's files → a `Decoder` with their weights, one tensor on the host at a time."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from decoder.config import ModelConfig
from decoder.model import Decoder
from decoder.parameters import Source, load_parameters


def load_decoder(
    source: Source,
    config: ModelConfig,
    dtype: Any = jnp.float32,
    *,
    scan_layers: bool = False,
    device: Any = None,
    track: Callable[[list[str]], Iterable[str]] = iter,
) -> Decoder:
    """The model in `source`. It is never initialised: its structure is traced, and each value goes to the device, and
    into its place if it is a part of a parameter or a layer of a stack.

    Args:
        source: an open GGUF file or checkpoint.
        config: of the same model.
        dtype: of weights and activations; the scales of norms are float32.
        scan_layers: as in `Decoder`.
        device, track: as in `load_parameters`.

    Raises:
        CheckpointError, GGUFError: as `load_parameters`.
    """
    parameters = load_parameters(source, config, dtype, device=device, track=track)
    model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, scan_layers=scan_layers, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    for path, start, value in parameters:
        target = device[path] if isinstance(device, Mapping) else device
        if scan_layers and path.startswith("layers."):
            _, layer, rest = path.split(".", 2)
            path, start = f"layers.{rest}", (int(layer), *start)
            target = _of_stack(target) if isinstance(device, Mapping) else target
        variable = variables[path]
        whole = variable.get_value()
        if value.shape != whole.shape:
            if isinstance(whole, jax.ShapeDtypeStruct):  # this is the first of its parts
                whole = jnp.zeros(whole.shape, whole.dtype, device=target)
            value = jax.block_until_ready(_put(whole, start, value))
        variable.set_value(value)
    return nnx.merge(graph, state)


def _of_stack(sharding: NamedSharding) -> NamedSharding:
    """That of all layers' values, stacked, from one layer's."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


@functools.partial(jax.jit, donate_argnames="whole")
def _put(whole: jax.Array, start: tuple[int, ...], part: jax.Array) -> jax.Array:
    """`whole` with the part in place; a stack has one axis more than a part of one of its layers."""
    part = part.reshape((1,) * (whole.ndim - part.ndim) + part.shape)
    return lax.dynamic_update_slice(whole, part, start)
