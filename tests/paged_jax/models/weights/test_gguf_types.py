"""Every type of a GGUF file's tensors against a scalar oracle, by hand, and against the gguf package."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf_writer import BLOCKS, TYPE_IDS, all_types_tensors, gguf_bytes, random_blocks

from paged_jax.models.weights.gguf import GGUFFile, open_gguf
from paged_jax.models.weights.gguf_types import GGML_TYPES


def half(raw: bytes, at: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", raw, at)[0])


def six_bit_pair(packed: bytes, group: int) -> tuple[int, int]:
    """The scale and the minimum of one of the eight groups of a Q4_K or Q5_K block."""
    if group < 4:
        return packed[group] % 64, packed[group + 4] % 64
    low = packed[group + 4]
    return low % 16 + packed[group - 4] // 64 * 16, low // 16 + packed[group] // 64 * 16


def slow_weight(kind: str, raw: bytes, i: int) -> np.float32:
    """Weight `i` of one block, from the format's definition, in float32 steps."""
    f = np.float32
    if kind == "F32":
        return f(struct.unpack("<f", raw)[0])
    if kind == "F16":
        return half(raw, 0)
    if kind == "BF16":
        return f(struct.unpack("<f", b"\0\0" + raw)[0])
    if kind == "Q8_0":
        return half(raw, 0) * f(struct.unpack_from("<b", raw, 2 + i)[0])
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        at = 4 if kind.endswith("1") else 2
        fifth = 0
        if kind.startswith("Q5"):
            fifth = struct.unpack_from("<I", raw, at)[0] >> i & 1
            at += 4
        low = raw[at + i] % 16 if i < 16 else raw[at + i - 16] // 16
        q = low + 16 * fifth
        if kind.endswith("1"):
            return half(raw, 0) * f(q) + half(raw, 2)
        return half(raw, 0) * f(q - (16 if kind == "Q5_0" else 8))
    if kind in ("Q4_K", "Q5_K"):
        group, within = divmod(i, 32)
        scale, minimum = six_bit_pair(raw[4:16], group)
        fifth = raw[16 + within] >> group & 1 if kind == "Q5_K" else 0
        byte = raw[(48 if kind == "Q5_K" else 16) + group // 2 * 32 + within]
        q = (byte // 16 if group % 2 else byte % 16) + 16 * fifth
        return half(raw, 0) * f(scale) * f(q) - half(raw, 2) * f(minimum)
    if kind in ("IQ4_NL", "IQ4_XS"):
        group, within = divmod(i, 32)
        byte = raw[(2 if kind == "IQ4_NL" else 8) + 16 * group + within % 16]
        q = f(NOT_LINEAR[byte % 16 if within < 16 else byte // 16])
        if kind == "IQ4_NL":
            return half(raw, 0) * q
        low = raw[4 + group // 2] // 16 if group % 2 else raw[4 + group // 2] % 16
        return half(raw, 0) * f(low + 16 * (struct.unpack_from("<H", raw, 2)[0] >> 2 * group & 3) - 32) * q
    if kind == "Q2_K":
        part, j = divmod(i, 128)
        q = raw[16 + 32 * part + j % 32] >> 2 * (j // 32) & 3
        packed = raw[i // 16]
        return half(raw, 80) * f(packed % 16) * f(q) - half(raw, 82) * f(packed // 16)
    if kind == "Q3_K":
        part, j = divmod(i, 128)
        q = (raw[32 + 32 * part + j % 32] >> 2 * (j // 32) & 3) + 4 * (raw[i % 32] >> i // 32 & 1) - 4
        group = i // 16
        low = raw[96 + group % 8] // 16 if group >= 8 else raw[96 + group % 8] % 16
        return half(raw, 108) * f(low + 16 * (raw[104 + group % 4] >> 2 * (group // 4) & 3) - 32) * f(q)
    assert kind == "Q6_K"
    part, j = divmod(i, 128)
    quarter, within = divmod(j, 32)
    byte = raw[64 * part + 32 * (quarter % 2) + within]
    low = byte % 16 if quarter < 2 else byte // 16
    high = raw[128 + 32 * part + within] >> 2 * quarter & 3
    scale = struct.unpack_from("<b", raw, 192 + i // 16)[0]
    return half(raw, 208) * f(scale) * f(low + 16 * high - 32)


NOT_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def slow_dequantise(kind: str, raw: bytes) -> np.ndarray:
    values, size, _ = BLOCKS[kind]
    blocks = [raw[at : at + size] for at in range(0, len(raw), size)]
    return np.array([slow_weight(kind, block, i) for block in blocks for i in range(values)], np.float32)


@pytest.mark.parametrize("kind", TYPE_IDS)
def test_dequantises_as_the_format_defines(kind: str, opened: Callable[[bytes], GGUFFile]) -> None:
    raw = random_blocks(kind, 1536 // BLOCKS[kind][0])
    model = opened(gguf_bytes({}, [("before", (3,), "F32", bytes(12)), ("w", (2, 768), kind, raw)]))
    got = model.tensor("w")
    assert model.tensors["w"].ggml_type == kind
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, slow_dequantise(kind, raw).reshape(2, 768), strict=True)
    assert np.unique(got).size > 30  # the blocks are not trivial


def test_q4_0_by_hand(opened: Callable[[bytes], GGUFFile]) -> None:
    raw = struct.pack("<e", 0.5) + bytes([0x0F, 0xA3]) + bytes([0x88]) * 14
    expected = np.zeros(32, np.float32)
    expected[[0, 1, 16, 17]] = 3.5, -2.5, -4.0, 1.0
    np.testing.assert_array_equal(opened(gguf_bytes({}, [("w", (32,), "Q4_0", raw)])).tensor("w"), expected)


def by_hand(kind: str, raw: bytes, opened: Callable[[bytes], GGUFFile]) -> dict[int, float]:
    """The weights that are not 0, by their places."""
    got = opened(gguf_bytes({}, [("w", (BLOCKS[kind][0],), kind, raw)])).tensor("w")
    return {int(i): float(got[i]) for i in got.nonzero()[0]}


def test_iq4_nl_by_hand(opened: Callable[[bytes], GGUFFile]) -> None:
    """Nibbles name 16 uneven steps: 0 is -127, 8 is 1, 15 is 113; none is 0."""
    got = by_hand("IQ4_NL", struct.pack("<e", 0.5) + bytes([0x80, 0x0F]) + bytes([0x88]) * 14, opened)
    assert got == dict.fromkeys(range(32), 0.5) | {0: -63.5, 16: 0.5, 1: 56.5, 17: -63.5}


def test_iq4_xs_by_hand(opened: Callable[[bytes], GGUFFile]) -> None:
    """Scales are 6 bits less 32: all 32 but that of group 0, 33, and that of group 7, 0b11_0101 = 53."""
    high = 0b11_10_10_10_10_10_10_10
    raw = struct.pack("<eH", 0.5, high) + bytes([0x01, 0, 0, 0x50]) + bytes([0x88]) * 127 + bytes([0xF0])
    got = by_hand("IQ4_XS", raw, opened)
    assert got == dict.fromkeys(range(32), 0.5) | dict.fromkeys(range(224, 256), 10.5) | {
        239: 0.5 * 21 * -127,
        255: 0.5 * 21 * 113,
    }


def test_q2_k_by_hand(opened: Callable[[bytes], GGUFFile]) -> None:
    """Group 2 (weights 32 to 47) has scale 3 and minimum 2, group 15 scale 1; byte 0 holds 2 bits of 0, 32, 64, 96."""
    scales, packed = bytearray(16), bytearray(64)
    scales[2], scales[15], packed[0], packed[63] = 0x23, 0x01, 0b11_00_10_01, 0b11_00_00_00
    got = by_hand("Q2_K", bytes(scales) + bytes(packed) + struct.pack("<2e", 0.5, 0.25), opened)
    assert got == dict.fromkeys(range(32, 48), -0.5) | {32: 0.5 * 3 * 2 - 0.5, 255: 0.5 * 3}


def test_q3_k_by_hand(opened: Callable[[bytes], GGUFFile]) -> None:
    """Weights are 3 bits less 4, the third in `h`; scales 6 bits less 32: that of group 1 is 33, of group 8 0."""
    high, packed, scales = bytearray(b"\xff" * 32), bytearray(64), bytearray(8) + bytearray([0xAA] * 4)
    scales[1], scales[8] = 1, 0b10_00_10_10  # the high bits of groups 0, 4, 8 and 12
    packed[16] = 0b11  # weight 16, whose third bit stands: 7 - 4
    high[17] ^= 1  # weight 17: 0 - 4
    packed[32] = 0b10  # weight 128: 6 - 4
    got = by_hand("Q3_K", bytes(high) + bytes(packed) + bytes(scales) + struct.pack("<e", 0.5), opened)
    assert got == {16: 0.5 * 3, 17: 0.5 * -4, 128: 0.5 * -32 * 2}


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q8_0", "Q5_K"])
@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_damaged_scale_is_read_without_warnings(kind: str, scale: float, opened: Callable[[bytes], GGUFFile]) -> None:
    values, size, _ = BLOCKS[kind]
    raw = struct.pack("<e", scale) + bytes(size - 2)
    assert not np.isfinite(opened(gguf_bytes({}, [("w", (values,), kind, raw)])).tensor("w")).any()


def test_a_tensor_larger_than_one_chunk(opened: Callable[[bytes], GGUFFile]) -> None:
    raw = random_blocks("Q8_0", 9000)  # 288,000 weights, not a multiple of the chunk
    got = opened(gguf_bytes({}, [("w", (9000, 32), "Q8_0", raw)])).tensor("w")
    blocks = np.frombuffer(raw, np.dtype([("d", "<f2"), ("q", "i1", 32)]))
    np.testing.assert_array_equal(got, blocks["d"][:, None].astype(np.float32) * blocks["q"].astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", TYPE_IDS)
def test_a_tensor_is_rounded_to_the_dtype_asked_for(
    kind: str, dtype: type, opened: Callable[[bytes], GGUFFile]
) -> None:
    model = opened(gguf_bytes({}, [("w", (2, 768), kind, random_blocks(kind, 1536 // BLOCKS[kind][0]))]))
    with np.errstate(over="ignore"):
        expected = model.tensor("w").astype(dtype)
    got = model.tensor("w", dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


def test_a_weight_too_large_for_the_dtype_is_infinite_without_warnings(
    opened: Callable[[bytes], GGUFFile],
) -> None:
    raw = struct.pack("<2f", 1e6, -1e6)
    got = opened(gguf_bytes({}, [("w", (2,), "F32", raw)])).tensor("w", np.float16)
    np.testing.assert_array_equal(got, [np.inf, -np.inf])


def test_a_tensor_is_a_copy_of_its_own(opened: Callable[[bytes], GGUFFile]) -> None:
    model = opened(gguf_bytes({}, [("w", (2,), "F32", np.ones(2, "<f4").tobytes())]))
    model.tensor("w")[:] = 7
    np.testing.assert_array_equal(model.tensor("w"), np.ones(2, np.float32))


# --- Against the gguf package -----------------------------------------------------------------------------------------


@pytest.mark.parity
def test_every_type_equals_the_gguf_package(opened: Callable[[bytes], GGUFFile]) -> None:
    oracle = pytest.importorskip("gguf")
    model = opened(gguf_bytes({}, all_types_tensors()))
    reader = oracle.GGUFReader(model.path)
    assert len(reader.tensors) == len(TYPE_IDS)
    for theirs in reader.tensors:
        assert_same_bits(model, theirs, oracle)


@pytest.mark.parity
def test_type_names_equal_the_gguf_package() -> None:
    oracle = pytest.importorskip("gguf")
    theirs = {kind.value: kind.name for kind in oracle.GGMLQuantizationType}
    assert {number: name for number, name in GGML_TYPES.items() if number in theirs} == theirs


@pytest.mark.parity
@pytest.mark.download
def test_the_real_model_equals_the_gguf_package(smollm2_path: Path) -> None:
    oracle = pytest.importorskip("gguf")
    model, reader = open_gguf(smollm2_path), oracle.GGUFReader(smollm2_path)
    assert len(reader.tensors) == len(model.tensors) == 272
    for theirs in reader.tensors:
        assert_same_bits(model, theirs, oracle)


def assert_same_bits(model: GGUFFile, theirs: Any, oracle: Any) -> None:
    info = model.tensors[theirs.name]
    assert (info.ggml_type, info.offset) == (theirs.tensor_type.name, theirs.data_offset)
    got, expected = model.tensor(theirs.name), oracle.dequantize(theirs.data, theirs.tensor_type)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32), err_msg=theirs.name, strict=True)
