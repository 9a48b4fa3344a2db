"""Write small GGUF files, well formed unless told otherwise, for the reader's tests."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TYPE_IDS = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "BF16": 30,
}

# (weights in a block, its bytes, where its half-precision scales begin)
BLOCKS = {
    "F32": (1, 4, ()),
    "F16": (1, 2, (0,)),
    "BF16": (1, 2, ()),
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q2_K": (256, 84, (80, 82)),
    "Q3_K": (256, 110, (108,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
    "IQ4_NL": (32, 18, (0,)),
    "IQ4_XS": (256, 136, (0,)),
}

_KINDS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}

Tensor = tuple[str, tuple[int, ...], int | str, bytes]  # name, numpy shape, type, data


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(item: Any) -> bytes:
    """A value after its type: str, bool, int (uint32), float (float32), numpy scalar or array, or a list of these."""
    kind, body = _encode(item)
    return struct.pack("<I", kind) + body


def _encode(item: Any) -> tuple[int, bytes]:
    if isinstance(item, str):
        return 8, string(item)
    if isinstance(item, list):
        encoded = [_encode(inner) for inner in item]
        return 9, struct.pack("<IQ", encoded[0][0], len(item)) + b"".join(body for _, body in encoded)
    if isinstance(item, int | float) and not isinstance(item, bool | np.generic):
        item = np.float32(item) if isinstance(item, float) else np.uint32(item)
    array = np.asarray(item)
    kind, body = _KINDS[array.dtype.str[1:]], array.astype(array.dtype.newbyteorder("<")).tobytes()
    return (kind, body) if array.ndim == 0 else (9, struct.pack("<IQ", kind, array.size) + body)


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Sequence[Tensor] = (), *, version: int = 3, alignment: int = 32
) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, item in metadata.items():
        header += string(key) + value(item)
    data = b""
    for name, shape, kind, raw in tensors:
        data += bytes(-len(data) % alignment)
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        type_id = TYPE_IDS[kind] if isinstance(kind, str) else kind
        header += string(name) + axes + struct.pack("<IQ", type_id, len(data))
        data += raw
    return header + bytes(-len(header) % alignment) + data


def random_blocks(kind: str, count: int, seed: int = 0) -> bytes:
    """`count` blocks of random bytes, with scales that are ordinary numbers."""
    rng = np.random.default_rng([seed, TYPE_IDS[kind]])
    _, size, scales = BLOCKS[kind]
    if kind == "F32":
        return rng.standard_normal(count).astype("<f4").tobytes()
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    for at in scales:
        blocks[:, at : at + 2] = rng.standard_normal(count).astype("<f2")[:, None].view(np.uint8)
    if kind == "BF16":
        blocks[:, 1] = blocks[:, 1] & 0x80 | 0x3F  # magnitudes around 1
    return blocks.tobytes()


def all_types_tensors(values: int = 256 * 6) -> list[Tensor]:
    """One tensor of each type."""
    shape = (2, values // 2) if values // 2 % 256 == 0 else (values,)
    return [(f"{kind}.weight", shape, kind, random_blocks(kind, values // BLOCKS[kind][0])) for kind in TYPE_IDS]
