"""Load a model's parameters onto a device: names and shapes are checked first, then one tensor is read at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jax
import numpy as np

from paged_jax.models.config import ModelConfig
from paged_jax.models.weights.checkpoint import CheckpointError
from paged_jax.models.weights.names import Stored, is_ignored, stored_tensors
from paged_jax.models.weights.shapes import Part, parameter_parts


class Source(Protocol):
    """What a `GGUFFile` and a `Checkpoint` have in common."""

    layout: ClassVar[str]

    @property
    def path(self) -> Path: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...
    def check_type(self, name: str) -> None: ...
    def tensor(self, name: str, dtype: Any = ...) -> np.ndarray: ...


def load_parameters(
    source: Source,
    config: ModelConfig,
    dtype: Any,
    *,
    device: Any = None,
    track: Callable[[list[str]], Iterable[str]] = iter,
) -> Iterator[tuple[str, tuple[int, ...], jax.Array]]:
    """Each part of a parameter: the parameter's path, where in it the part begins, and its value, which has as many
    axes; in the order of the file's table.

    Args:
        source: an open GGUF file or checkpoint.
        config: of the same model.
        dtype: of the values. The scales of norms are float32 whatever it is: they are few, and Gemma's, stored less
            one, would lose digits.
        device: where to put them, as `jax.device_put` understands it; or for each path a sharding, to which the values
            go in pieces: no device holds, or is sent, more than its share. Parts are split like their parameters.
        track: wraps the list of tensors to read, to show progress.

    Raises:
        CheckpointError: a tensor is missing, or one too many, or of another shape than the config says.
        GGUFError: or, as the one above, a tensor of a type that cannot be read.
    """
    parts, stored = parameter_parts(config), stored_tensors(config, source.layout, source.tensors)
    _check(source, config, stored, parts)
    return _read(source, stored, parts, config.attention.head_dim, dtype, device, track)


def _check(source: Source, config: ModelConfig, stored: Mapping[str, Stored], parts: Mapping[str, Part]) -> None:
    extra = sorted(name for name in source.tensors if name not in stored and not is_ignored(name, config))
    if missing := [name for name in stored if name not in source.tensors]:
        also = f", which has {extra[0]!r}" if extra else ""
        raise CheckpointError(f"{source.path}: expected a tensor {missing[0]!r}, got none{also}")
    if extra:
        raise CheckpointError(f"{source.path}: expected the tensors of a {config.family} model, got {extra[0]!r} too")
    for name, tensor in stored.items():
        source.check_type(name)
        expected, got = _stored_shape(tensor, parts), tuple(source.tensors[name].shape)
        if got != expected:
            raise CheckpointError(f"{source.path}: tensor {name!r}: expected shape {expected}, got {got}")


def _read(
    source: Source,
    stored: Mapping[str, Stored],
    parts: Mapping[str, Part],
    head_dim: int,
    dtype: Any,
    device: Any,
    track: Callable[[list[str]], Iterable[str]],
) -> Iterator[tuple[str, tuple[int, ...], jax.Array]]:
    for name in track(list(stored)):
        # A generator of its own, so that nothing of one tensor is left when the next is read.
        yield from _read_one(source, name, stored[name], parts, head_dim, dtype, device)


def _read_one(
    source: Source, name: str, stored: Stored, parts: Mapping[str, Part], head_dim: int, dtype: Any, device: Any
) -> Iterator[tuple[str, tuple[int, ...], jax.Array]]:
    is_scale = stored.parts[0].endswith(".scale")
    tensor = source.tensor(name, np.float32 if is_scale else dtype)
    for part_name, rows in zip(stored.parts, _cut(stored, tensor, parts, head_dim), strict=True):
        part = parts[part_name]
        # Waited for, because the host's copy may go only when it has arrived.
        target = device[part.path] if isinstance(device, Mapping) else device
        yield part.path, part.start, jax.block_until_ready(_put(rows.reshape(part.shape), target))


def _put(value: np.ndarray, target: Any) -> jax.Array:
    if not isinstance(target, jax.sharding.Sharding):
        return jax.device_put(value, target)
    return jax.make_array_from_callback(value.shape, target, lambda index: value[index])


def _stored_shape(stored: Stored, parts: Mapping[str, Part]) -> tuple[int, ...]:
    first, *_ = shapes = [parts[name].stored_shape for name in stored.parts]
    if stored.form == "rows":
        return (sum(shape[0] for shape in shapes), *first[1:])
    if stored.form == "alternating":
        return (*first[:-1], sum(shape[-1] for shape in shapes))
    return first


def _cut(stored: Stored, tensor: np.ndarray, parts: Mapping[str, Part], head_dim: int) -> list[np.ndarray]:
    """The tensor's parts, as views of it wherever they can be."""
    if stored.form == "rows":
        rows = [parts[name].stored_shape[0] for name in stored.parts]
        return np.split(tensor, np.cumsum(rows)[:-1])
    if stored.form == "alternating":
        return [tensor[..., i :: len(stored.parts)] for i in range(len(stored.parts))]
    if stored.form == "less one":
        return [tensor + 1]
    if stored.form == "neighbours":
        pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
        return [pairs.swapaxes(1, 2).reshape(tensor.shape)]
    return [tensor]
