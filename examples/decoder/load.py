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
    """The model in `source`. It is never initialised: its structure is traced, and each value goes to the device.

    Args:
        source: an open GGUF file or checkpoint.
        config: of the same model.
        dtype: of weights and activations; the scales of norms are float32.
        scan_layers: as in `Decoder`; a layer's values go into their place in the stack as they come.
        device, track: as in `load_parameters`.

    Raises:
        CheckpointError, GGUFError: as `load_parameters`.
    """
    parameters = load_parameters(source, config, dtype, device=device, track=track)
    model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, scan_layers=scan_layers, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    for path, value in parameters:
        if scan_layers and path.startswith("layers."):
            _, layer, rest = path.split(".", 2)
            variable = variables[f"layers.{rest}"]
            if layer == "0":
                target = _of_stack(device[path]) if isinstance(device, Mapping) else device
                variable.set_value(jnp.zeros((config.num_layers, *value.shape), value.dtype, device=target))
            value = jax.block_until_ready(_put(variable.get_value(), int(layer), value))
        else:
            variable = variables[path]
        variable.set_value(value)
    return nnx.merge(graph, state)


def _of_stack(sharding: NamedSharding) -> NamedSharding:
    """That of all layers' values, stacked, from one layer's."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


@functools.partial(jax.jit, donate_argnames="stack")
def _put(stack: jax.Array, layer: int, value: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stack, value, layer, 0)
