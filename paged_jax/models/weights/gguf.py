"""Read a GGUF file: its metadata at once, its tensors one at a time, dequantised.

The file is mapped, not loaded. Its layout, little endian throughout:

    "GGUF"  version  tensor count  key count  keys and values  tensor infos  padding  tensor data

Every size in the header is checked against the bytes that are really there before anything is allocated for it.
"""

import dataclasses
import math
import mmap
import os
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from paged_jax.models.weights.gguf_types import GGML_TYPES, PACKINGS
from paged_jax.models.weights.host_arrays import aligned_empty

_CHUNK = 1 << 18  # weights dequantised at once: temporaries stay in the processor's cache


class GGUFError(ValueError):
    """The file is not one this reader can read; the message names the file and the reason."""


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # in numpy's order, the reverse of GGUF's
    ggml_type: str  # GGML's name, such as "Q4_1"
    offset: int  # of the first byte, from the start of the file
    part: int = 0  # which file of a split one it is in


@dataclass(frozen=True, eq=False)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]  # arrays of numbers are numpy arrays, arrays of strings are lists
    tensors: dict[str, TensorInfo]
    _data: tuple[mmap.mmap, ...] = field(repr=False)  # one, or the parts of a split file
    layout: ClassVar = "gguf"

    def check_type(self, name: str) -> None:
        """Raises GGUFError if the tensor is not there, or is of a type that cannot be read."""
        info = self.tensors.get(name)
        if info is None:
            some = ", ".join(list(self.tensors)[:3])
            raise GGUFError(f"{self.path}: expected one of its {len(self.tensors)} tensors ({some}, ...), got {name!r}")
        if info.ggml_type not in PACKINGS:
            raise GGUFError(
                f"{self.path}: tensor {name!r}: expected one of the types {', '.join(PACKINGS)}, got {info.ggml_type}"
            )

    def tensor(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """The tensor as a new array: dequantised to float32, rounded to `dtype` piece by piece."""
        self.check_type(name)
        info = self.tensors[name]
        packing = PACKINGS[info.ggml_type]
        count = math.prod(info.shape) // packing.values
        data = self._data[info.part]
        blocks = np.frombuffer(data, packing.block, count, info.offset)
        values = aligned_empty((count, packing.values), dtype)
        # A damaged scale may be inf or NaN, and a weight too large for `dtype`: both are read without numpy's warnings.
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, count, _CHUNK // packing.values):
                chunk = slice(start, start + _CHUNK // packing.values)
                values[chunk] = packing.unpack(blocks[chunk]).reshape(-1, packing.values)
        if hasattr(mmap, "MADV_DONTNEED"):  # what was read of the file need not stay in memory beside the weights
            data.madvise(mmap.MADV_DONTNEED)
        return values.reshape(info.shape)


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Map the file and read its header; the tensors' bytes stay on disk until they are asked for.

    Any part of a split file stands for the whole: the others are expected beside it.
    """
    path = Path(path)
    header, metadata, tensors = _read_header(path)
    count = _split_number(header, metadata, "split.count", 1)
    return GGUFFile(path, metadata, tensors, (header.data,)) if count < 2 else _join(path, count)


def _join(path: Path, count: int) -> GGUFFile:
    """The parts' metadata is the first one's: the others hold tensors alone."""
    name = re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.gguf)", path.name)
    if name is None or int(name[3]) != count:
        raise GGUFError(
            f"{path}: expected a part of a split file, of {count} files, to be named like "
            f"model-00001-of-{count:05}.gguf, got another name"
        )
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorInfo] = {}
    data = []
    for part in range(count):
        place = path.with_name(f"{name[1]}{part + 1:05}{name[2]}")
        if not place.is_file():
            raise GGUFError(f"{path}: expected the {count} files of a split one beside each other, got no {place.name}")
        header, keys, infos = _read_header(place)
        got = tuple(_split_number(header, keys, key, None) for key in ("split.no", "split.count"))
        if got != (part, count):
            raise GGUFError(f"{place}: expected split.no and split.count to be {part} and {count}, got {got}")
        if twice := tensors.keys() & infos.keys():
            raise GGUFError(f"{place}: expected every tensor in one file of a split one, got {min(twice)!r} again")
        tensors |= {tensor: dataclasses.replace(info, part=part) for tensor, info in infos.items()}
        metadata, data = metadata or keys, [*data, header.data]
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise GGUFError(f"{path}: expected {total!r} tensors in the files of a split one, got {len(tensors)}")
    return GGUFFile(path, metadata, tensors, tuple(data))


def _split_number(header: "_Header", metadata: dict[str, Any], key: str, default: int | None) -> int:
    number = metadata.get(key, default)
    if not isinstance(number, int) or isinstance(number, bool):
        raise GGUFError(f"{header.path}: expected {key} to be a number, got {number!r:.60}")
    return number


def _read_header(path: Path) -> tuple["_Header", dict[str, Any], dict[str, TensorInfo]]:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
            raise GGUFError(f"{path}: expected a GGUF file, got an empty one")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header = _Header(path, data)
    tensor_count, key_count = _read_preamble(header)
    metadata = _read_metadata(header, key_count)
    return header, metadata, _read_tensor_infos(header, tensor_count, metadata)


def _read_preamble(header: "_Header") -> tuple[int, int]:
    magic = bytes(header.data[:4])
    if magic != b"GGUF":
        raise GGUFError(f"{header.path}: expected a GGUF file, which begins with {b'GGUF'!r}, got {magic!r}")
    header.position = 4
    version = header.u32("the version")
    if version not in (2, 3):
        raise GGUFError(f"{header.path}: expected GGUF version 2 or 3 in little-endian order, got version {version}")
    return header.u64("the tensor count"), header.u64("the key count")


def _read_metadata(header: "_Header", count: int) -> dict[str, Any]:
    header.require(13 * count, f"{count} keys")  # the least a key takes: its length, its value's type, a byte of value
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = header.string("a key")
        if key in metadata:
            raise header.error(f"expected every key once, got {key!r} again")
        metadata[key] = header.value(header.u32(f"the type of {key!r}"), f"the value of {key!r}")
    return metadata


def _read_tensor_infos(header: "_Header", count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise header.error(f"expected general.alignment to be a power of two, got {alignment!r:.60}")
    header.require(24 * count, f"{count} tensor infos")  # the least one takes: name length, rank, type, offset
    entries = [_read_tensor_entry(header) for _ in range(count)]
    data_start = -(-header.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, ggml_type, relative in entries:
        if name in tensors:
            raise header.error(f"expected every tensor once, got {name!r} again")
        if relative % alignment:
            raise header.error(f"expected tensor {name!r} at a multiple of {alignment} bytes, got offset {relative}")
        info = TensorInfo(name, shape, ggml_type, data_start + relative)
        _check_extent(header, info)
        tensors[name] = info
    return tensors


def _read_tensor_entry(header: "_Header") -> tuple[str, tuple[int, ...], str, int]:
    name = header.string("a tensor's name")
    rank = header.u32(f"the rank of tensor {name!r}")
    if rank > 4:
        raise header.error(f"expected tensor {name!r} to have at most 4 axes, got {rank}")
    shape = tuple(header.u64(f"an axis of tensor {name!r}") for _ in range(rank))[::-1]
    if 0 in shape:
        raise header.error(f"expected tensor {name!r} to have no empty axis, got shape {shape}")
    type_id = header.u32(f"the type of tensor {name!r}")
    return name, shape, GGML_TYPES.get(type_id, f"unknown type {type_id}"), header.u64(f"the offset of tensor {name!r}")


def _check_extent(header: "_Header", info: TensorInfo) -> None:
    packing, size = PACKINGS.get(info.ggml_type), 1  # a type we cannot unpack has at least one byte
    if packing is not None:
        row = info.shape[-1] if info.shape else 1
        if row % packing.values:
            raise header.error(
                f"expected rows of tensor {info.name!r} in whole {info.ggml_type} blocks of {packing.values}, got {row}"
            )
        size = math.prod(info.shape) // packing.values * packing.block.itemsize
    if info.offset + size > len(header.data):
        raise GGUFError(
            f"{header.path}: truncated or corrupt: tensor {info.name!r} of shape {info.shape} expected {size} bytes "
            f"from byte {info.offset} on, got a file of {len(header.data)} bytes"
        )


@dataclass
class _Header:
    """A position in the mapped file that never moves past its end."""

    path: Path
    data: mmap.mmap
    position: int = 0

    def error(self, problem: str) -> GGUFError:
        return GGUFError(f"{self.path}: corrupt header near byte {self.position}: {problem}")

    def require(self, size: int, what: str) -> None:
        left = len(self.data) - self.position
        if size > left:
            raise GGUFError(
                f"{self.path}: truncated or corrupt header: {what} at byte {self.position} expected "
                f"at least {size} bytes, got {left}"
            )

    def array(self, dtype: np.dtype, count: int, what: str) -> np.ndarray:
        self.require(count * dtype.itemsize, what)
        values = np.frombuffer(self.data, dtype, count, self.position)
        self.position += values.nbytes
        return values.copy()  # small, and keeps no hold on the file

    def u32(self, what: str) -> int:
        return self.array(_SCALARS[4], 1, what)[0].item()

    def u64(self, what: str) -> int:
        return self.array(_SCALARS[10], 1, what)[0].item()

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        self.require(8 * count, what)
        # One flat loop, for a vocabulary and its merges are hundreds of thousands of strings.
        data, end, position, read_size = self.data, len(self.data), self.position, struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            self.position = position
            if position + 8 > end:
                self.require(8, what)
            start = position + 8
            position = start + read_size(data, position)[0]
            if position > end:
                self.require(position - self.position, what)
            try:
                found.append(data[start:position].decode())
            except UnicodeDecodeError as problem:
                raise self.error(f"expected {what} to be UTF-8, got {problem}") from None
        self.position = position
        return found

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            return self.array(self.scalar(kind, what), 1, what)[0].item()
        if depth == _DEEPEST_ARRAY:
            raise self.error(f"expected {what} to nest at most {_DEEPEST_ARRAY} arrays, got more")
        kind, count = self.u32(f"the element type of {what}"), self.u64(f"the length of {what}")
        if kind == _STRING:
            return self.strings(count, what)
        if kind == _ARRAY:
            self.require(12 * count, what)  # the least an inner array takes: its element type and its length
            return [self.value(_ARRAY, what, depth + 1) for _ in range(count)]
        return self.array(self.scalar(kind, what), count, what)

    def scalar(self, kind: int, what: str) -> np.dtype:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise self.error(f"expected {what} to be of a type from 0 to 12, got {kind}")
        return dtype


_STRING, _ARRAY = 8, 9
_DEEPEST_ARRAY = 4
_SCALARS = {
    kind: np.dtype(code)
    for kind, code in enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8"))
    if code
}
