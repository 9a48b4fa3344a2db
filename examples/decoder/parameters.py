"""Load a model's parameters onto a device: names and shapes are checked first, then one tensor is read at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jax
import numpy as np

from decoder.checkpoint import CheckpointError
from decoder.config import ModelConfig
from decoder.names import Stored, is_ignored, stored_tensors
from decoder.shapes import parameter_shapes

Shapes = Mapping[str, tuple[int, ...]]


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
) -> Iterator[tuple[str, jax.Array]]:
    """Each parameter's path and value, shaped as `parameter_shapes` says, in the order of the file's table.

    Args:
        source: an open GGUF file or checkpoint.
        config: of the same model.
        dtype: of the values. The scales of norms are float32 whatever it is: they are few, and Gemma's, stored less
            one, would lose digits.
        device: where to put them, as `jax.device_put` understands it; or for each path a sharding, to which the values
            go in pieces: no device holds, or is sent, more than its share.
        track: wraps the list of tensors to read, to show progress.

    Raises:
        CheckpointError: a tensor is missing, or one too many, or of another shape than the config says.
        GGUFError: or, as the one above, a tensor of a type that cannot be read.
    """
    shapes, stored = parameter_shapes(config), stored_tensors(config, source.layout, source.tensors)
    _check(source, config, stored, shapes)
    return _read(source, stored, shapes, config.attention.head_dim, dtype, device, track)


def _check(source: Source, config: ModelConfig, stored: Mapping[str, Stored], shapes: Shapes) -> None:
    extra = sorted(name for name in source.tensors if name not in stored and not is_ignored(name, config))
    if missing := [name for name in stored if name not in source.tensors]:
        also = f", which has {extra[0]!r}" if extra else ""
        raise CheckpointError(f"{source.path}: expected a tensor {missing[0]!r}, got none{also}")
    if extra:
        raise CheckpointError(f"{source.path}: expected the tensors of a {config.family} model, got {extra[0]!r} too")
    for name, part in stored.items():
        source.check_type(name)
        expected, got = _stored_shape(part, shapes), tuple(source.tensors[name].shape)
        if got != expected:
            raise CheckpointError(f"{source.path}: tensor {name!r}: expected shape {expected}, got {got}")


def _read(
    source: Source,
    stored: Mapping[str, Stored],
    shapes: Shapes,
    head_dim: int,
    dtype: Any,
    device: Any,
    track: Callable[[list[str]], Iterable[str]],
) -> Iterator[tuple[str, jax.Array]]:
    for name in track(list(stored)):
        # A generator of its own, so that nothing of one tensor is left when the next is read.
        yield from _read_one(source, name, stored[name], shapes, head_dim, dtype, device)


def _read_one(
    source: Source, name: str, part: Stored, shapes: Shapes, head_dim: int, dtype: Any, device: Any
) -> Iterator[tuple[str, jax.Array]]:
    is_scale = part.paths[0].endswith(".scale")
    tensor = source.tensor(name, np.float32 if is_scale else dtype)
    for path, value in zip(part.paths, _cut(part, tensor, shapes, head_dim), strict=True):
        # Waited for, because the host's copy may go only when it has arrived.
        target = device[path] if isinstance(device, Mapping) else device
        yield path, jax.block_until_ready(_put(value, target))


def _put(value: np.ndarray, target: Any) -> jax.Array:
    if not isinstance(target, jax.sharding.Sharding):
        return jax.device_put(value, target)
    return jax.make_array_from_callback(value.shape, target, lambda index: value[index])


def _stored_shape(part: Stored, shapes: Shapes) -> tuple[int, ...]:
    first, *_ = parts = [shapes[path] for path in part.paths]
    if part.form == "rows":
        return (sum(shape[0] for shape in parts), *first[1:])
    if part.form == "alternating":
        return (*first[:-1], sum(shape[-1] for shape in parts))
    return first


def _cut(part: Stored, tensor: np.ndarray, shapes: Shapes, head_dim: int) -> list[np.ndarray]:
    """The tensor's parameters, as views of it wherever they can be."""
    if part.form == "rows":
        rows = [shapes[path][0] for path in part.paths]
        return np.split(tensor, np.cumsum(rows)[:-1])
    if part.form == "alternating":
        return [tensor[..., i :: len(part.paths)] for i in range(len(part.paths))]
    if part.form == "less one":
        return [tensor + 1]
    if part.form == "neighbours":
        pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
        return [pairs.swapaxes(1, 2).reshape(tensor.shape)]
    return [tensor]
