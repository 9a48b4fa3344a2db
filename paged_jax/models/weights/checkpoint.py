"""Read a Hugging Face folder's safetensors files, one or many: every tensor's shape at once, the data one at a time.

model.safetensors.index.json       {"weight_map": {tensor: file}}, and the files that it names; or, if there is none,
model.safetensors                  all tensors
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors import SafetensorError, safe_open

from paged_jax.models.files import read_object
from paged_jax.models.weights.host_arrays import aligned_empty

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")
_CHUNK = 1 << 20  # bytes made at once


class CheckpointError(ValueError):
    """The weights cannot be read, or are not those of the model; the message names the file and the reason."""


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, such as "BF16"


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    tensors: dict[str, StoredTensor]
    layout: ClassVar = "hugging face"

    def check_type(self, name: str) -> None:
        """Raises CheckpointError if the tensor is not there, or is of a type that cannot be read."""
        stored = self.tensors.get(name)
        if stored is None:
            some = ", ".join(list(self.tensors)[:3])
            raise CheckpointError(
                f"{self.path}: expected one of its {len(self.tensors)} tensors ({some}, ...), got {name!r}"
            )
        if stored.dtype not in _DTYPES:
            raise CheckpointError(
                f"{stored.file}: tensor {name!r}: expected one of the types {', '.join(_DTYPES)}, got {stored.dtype}"
            )

    def tensor(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """The tensor as a new array of `dtype`, rounded to it piece by piece."""
        self.check_type(name)
        stored = self.tensors[name]
        values = aligned_empty(stored.shape, dtype)
        # Opened anew for every tensor: what is mapped of the file then goes with it.
        with _opened(stored.file) as file, np.errstate(over="ignore", invalid="ignore"):
            if not stored.shape:
                values[...] = file.get_tensor(name)
                return values
            rows = file.get_slice(name)
            step = max(1, _CHUNK * len(values) // max(1, values.nbytes))
            for start in range(0, len(values), step):
                stop = min(start + step, len(values))
                values[start:stop] = rows[start:stop]
        return values


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of the folder's files.

    Raises:
        CheckpointError: no such files, or they are damaged, or are not the ones that the index names.
    """
    folder = Path(folder)
    if not (folder / _INDEX).is_file():  # which goes before: a single file beside it may be one of its shards
        if (folder / _SINGLE).is_file():
            return Checkpoint(folder, _stored_tensors(folder / _SINGLE))
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise CheckpointError(f"{folder}: expected {_SINGLE} or {_INDEX}, got {found}")
    weight_map = _read_weight_map(folder / _INDEX)
    _check_files(folder, set(weight_map.values()))
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        stored = _stored_tensors(folder / file)
        _check_shard(folder / file, stored, [name for name, place in weight_map.items() if place == file])
        tensors |= stored
    return Checkpoint(folder, tensors)


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_object(path, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected a weight_map of tensors to files, got {weight_map!r:.60}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path}: expected tensor {name!r} in a file of the same folder, got {file!r}")
    return weight_map


def _check_files(folder: Path, named: Iterable[str]) -> None:
    if missing := sorted(file for file in named if not (folder / file).is_file()):
        raise CheckpointError(f"{folder / _INDEX}: expected a file {missing[0]} beside it, got none")
    if extra := sorted({path.name for path in folder.glob("model-*-of-*.safetensors")} - set(named)):
        raise CheckpointError(f"{folder / _INDEX}: expected to name every shard of its folder, got {extra[0]} as well")


def _check_shard(path: Path, stored: dict[str, StoredTensor], named: list[str]) -> None:
    if missing := [name for name in named if name not in stored]:
        raise CheckpointError(f"{path}: expected the tensor {missing[0]!r} that the index places there, got none")
    if extra := sorted(stored.keys() - set(named)):
        raise CheckpointError(f"{path}: expected only tensors that the index places there, got {extra[0]!r} as well")


def _stored_tensors(path: Path) -> dict[str, StoredTensor]:
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
        return {name: StoredTensor(path, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except SafetensorError as problem:
        raise CheckpointError(
            f"{path}: expected a whole safetensors file, got one of {path.stat().st_size} bytes: {problem}"
        ) from problem
