"""GGML's types of tensors: blocks of quantised weights → float32.

A block is some weights with their common scale, read as one numpy record; `unpack` turns n records into n blocks of
weights. The order of float32 operations is GGML's, so that results agree with it bit for bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[..., s] bytes → [..., 2, s]: the low halves, then the high halves."""
    return np.stack((packed & 15, packed >> 4), axis=-2)


def _bits(packed: np.ndarray) -> np.ndarray:
    """[n, 4] bytes → [n, 2, 16]: a fifth bit, in place, for each value of `_nibbles`."""
    return np.unpackbits(packed, axis=1, bitorder="little").reshape(-1, 2, 16) << 4


def _column(blocks: np.ndarray, name: str) -> np.ndarray:
    """A half-precision scale of each block, as [n, 1, 1] float32."""
    return blocks[name].astype(np.float32)[:, None, None]


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _column(blocks, "d") * (_nibbles(blocks["q"]).astype(np.float32) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _column(blocks, "d") * _nibbles(blocks["q"]) + _column(blocks, "m")


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    return _column(blocks, "d") * ((_nibbles(blocks["q"]) | _bits(blocks["h"])).astype(np.float32) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    return _column(blocks, "d") * (_nibbles(blocks["q"]) | _bits(blocks["h"])) + _column(blocks, "m")


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _column(blocks, "d")[..., 0] * blocks["q"]


def _pairs(packed: np.ndarray) -> np.ndarray:
    """[..., s] bytes → [..., 4, s]: their two lowest bits, then the next two, up to the highest."""
    return packed[..., None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    return _column(blocks, "d") * _NOT_LINEAR[_nibbles(blocks["q"])]


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    """Each of a block's eight groups has a 6-bit scale: 4 bits of it in `s`, 2 in `h`."""
    low = (blocks["s"][:, :, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    high = blocks["h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high << 4).astype(np.float32)[..., None] - 32
    return _column(blocks, "d") * scales * _NOT_LINEAR[_nibbles(blocks["q"])].reshape(-1, 8, 32)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    scales, minima = (blocks["s"] & 15)[..., None], (blocks["s"] >> 4)[..., None]
    values = _pairs(blocks["q"]).reshape(-1, 16, 16)
    return _column(blocks, "d") * scales * values - _column(blocks, "m") * minima


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    """Twelve bytes hold sixteen 6-bit scales: the low 4 bits of all in the first eight, the high 2 in the last four."""
    low, high = _nibbles(blocks["s"][:, :8]).reshape(-1, 16), _pairs(blocks["s"][:, 8:]).reshape(-1, 16)
    scales = (low | high << 4).astype(np.float32)[..., None] - 32
    group = np.arange(8, dtype=np.uint8)[:, None]  # bit g of byte i belongs to value i of group g
    third = (blocks["h"][:, None] >> group & 1) << 2
    values = (_pairs(blocks["q"]).reshape(-1, 8, 32) | third).astype(np.float32) - 4
    return _column(blocks, "d") * scales * values.reshape(-1, 16, 16)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the minimum of each of a block's eight groups, as [n, 8, 1] float32.

    Twelve bytes hold sixteen 6-bit numbers: those of the first four groups lie in the low 6 bits of bytes 0-7, whose
    high 2 bits top up the 4-bit halves in bytes 8-11.
    """
    first, last = blocks["s"][:, :8].reshape(-1, 2, 4), _nibbles(blocks["s"][:, 8:])
    scales, minima = np.concatenate((first & 63, last | first >> 6 << 4), axis=2).transpose(1, 0, 2)[..., None]
    return _column(blocks, "d") * scales, _column(blocks, "m") * minima


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    scales, minima = _k_scales(blocks)
    return scales * _nibbles(blocks["q"]).reshape(-1, 8, 32) - minima


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    scales, minima = _k_scales(blocks)
    group = np.arange(8, dtype=np.uint8)[:, None]  # bit g of byte i belongs to value i of group g
    fifth = (blocks["h"][:, None] >> group & 1) << 4
    return scales * (_nibbles(blocks["q"]).reshape(-1, 8, 32) | fifth) - minima


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks["q"]).reshape(-1, 2, 4, 32)
    pair = np.arange(0, 8, 2, dtype=np.uint8)[:, None]  # bits 2g and 2g+1 of byte i belong to value i of group g
    values = (low | (blocks["h"][:, :, None] >> pair & 3) << 4).astype(np.float32) - 32
    return _column(blocks, "d") * blocks["s"][..., None] * values.reshape(-1, 16, 16)


# What the 4-bit values of the IQ4 types stand for.
_NOT_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


class _Packing(NamedTuple):
    values: int  # weights in a block
    block: np.dtype  # one block as it lies in the file
    unpack: Callable[[np.ndarray], np.ndarray]


# In the records: d scale, m minimum, s 6- or 8-bit scales, h high bits, q low bits or whole values.
PACKINGS = {
    "F32": _Packing(1, np.dtype("<f4"), lambda blocks: blocks),
    "F16": _Packing(1, np.dtype("<f2"), lambda blocks: blocks.astype(np.float32)),
    "BF16": _Packing(1, np.dtype("<u2"), _bf16),
    "Q4_0": _Packing(32, np.dtype([("d", "<f2"), ("q", "u1", 16)]), _q4_0),
    "Q4_1": _Packing(32, np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]), _q4_1),
    "Q5_0": _Packing(32, np.dtype([("d", "<f2"), ("h", "u1", 4), ("q", "u1", 16)]), _q5_0),
    "Q5_1": _Packing(32, np.dtype([("d", "<f2"), ("m", "<f2"), ("h", "u1", 4), ("q", "u1", 16)]), _q5_1),
    "Q8_0": _Packing(32, np.dtype([("d", "<f2"), ("q", "i1", 32)]), _q8_0),
    "IQ4_NL": _Packing(32, np.dtype([("d", "<f2"), ("q", "u1", 16)]), _iq4_nl),
    "IQ4_XS": _Packing(256, np.dtype([("d", "<f2"), ("h", "<u2"), ("s", "u1", 4), ("q", "u1", (8, 16))]), _iq4_xs),
    "Q2_K": _Packing(256, np.dtype([("s", "u1", 16), ("q", "u1", (2, 32)), ("d", "<f2"), ("m", "<f2")]), _q2_k),
    "Q3_K": _Packing(256, np.dtype([("h", "u1", 32), ("q", "u1", (2, 32)), ("s", "u1", 12), ("d", "<f2")]), _q3_k),
    "Q4_K": _Packing(256, np.dtype([("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("q", "u1", (4, 32))]), _q4_k),
    "Q5_K": _Packing(
        256, np.dtype([("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("h", "u1", 32), ("q", "u1", (4, 32))]), _q5_k
    ),
    "Q6_K": _Packing(256, np.dtype([("q", "u1", (2, 64)), ("h", "u1", (2, 32)), ("s", "i1", 16), ("d", "<f2")]), _q6_k),
}

GGML_TYPES = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"), 6)),
    **dict(enumerate(("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"), 16)),
    **dict(enumerate(("I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"), 24)),
    **dict(enumerate(("TQ1_0", "TQ2_0"), 34)),
    **dict(enumerate(("MXFP4", "NVFP4", "Q1_0"), 39)),
}
