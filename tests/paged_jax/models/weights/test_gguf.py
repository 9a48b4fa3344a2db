"""The GGUF reader: every tensor type against a scalar oracle, every error, and damage at any byte."""

import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf_writer import BLOCKS, TYPE_IDS, gguf_bytes, random_blocks, string, value
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.models.weights.gguf import GGUFError, GGUFFile, open_gguf
from paged_jax.models.weights.gguf_types import GGML_TYPES


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[bytes], GGUFFile]:
    def write_and_open(content: bytes) -> GGUFFile:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return open_gguf(path)

    return write_and_open


# --- Dequantisation ---------------------------------------------------------------------------------------------------


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


def all_types_tensors(values: int = 256 * 6) -> list[tuple[str, tuple[int, ...], str, bytes]]:
    shape = (2, values // 2) if values // 2 % 256 == 0 else (values,)
    return [(f"{kind}.weight", shape, kind, random_blocks(kind, values // BLOCKS[kind][0])) for kind in TYPE_IDS]


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


# --- Header -----------------------------------------------------------------------------------------------------------

EVERY_KIND = {
    "u8": np.uint8(200),
    "i8": np.int8(-100),
    "u16": np.uint16(60000),
    "i16": np.int16(-30000),
    "u32": np.uint32(4_000_000_000),
    "i32": np.int32(-2_000_000_000),
    "f32": np.float32(0.1),
    "bool": np.bool_(True),
    "string": "Ġnaïve ☕",
    "u64": np.uint64(2**63 + 1),
    "i64": np.int64(-(2**62)),
    "f64": np.float64(0.1),
}


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_kind(version: int, opened: Callable[[bytes], GGUFFile]) -> None:
    got = opened(gguf_bytes(EVERY_KIND, version=version)).metadata
    expected = {key: item if isinstance(item, str) else item.item() for key, item in EVERY_KIND.items()}
    assert got == expected
    assert {key: type(item) for key, item in got.items()} == {key: type(item) for key, item in expected.items()}


def test_metadata_arrays(opened: Callable[[bytes], GGUFFile]) -> None:
    numbers, flags = np.array([3, -1, 2], np.int32), np.array([True, False])
    metadata = {"strings": ["a", "", "ü"], "numbers": numbers, "flags": flags, "nested": [["x", "y"], ["z"]], "last": 5}
    got = opened(gguf_bytes(metadata)).metadata
    assert list(got) == list(metadata)
    assert got["strings"] == ["a", "", "ü"]
    assert got["nested"] == [["x", "y"], ["z"]]
    assert got["last"] == 5
    np.testing.assert_array_equal(got["numbers"], numbers, strict=True)
    np.testing.assert_array_equal(got["flags"], flags, strict=True)
    assert got["numbers"].flags.owndata  # no view that would keep the file mapped


@pytest.mark.parametrize("alignment", [32, 64, 8])
def test_tensor_infos(alignment: int, opened: Callable[[bytes], GGUFFile]) -> None:
    metadata = {} if alignment == 32 else {"general.alignment": alignment}
    first, second = np.arange(6, dtype="<f4"), np.arange(24, dtype="<f4")
    tensors = [("a", (6,), "F32", first.tobytes()), ("b", (2, 3, 4), "F32", second.tobytes())]
    content = gguf_bytes(metadata, tensors, alignment=alignment)
    model = opened(content)
    assert list(model.tensors) == ["a", "b"]
    assert model.tensors["b"].shape == (2, 3, 4)
    assert model.tensors["b"].offset == content.index(second.tobytes())
    np.testing.assert_array_equal(model.tensor("a"), first)
    np.testing.assert_array_equal(model.tensor("b"), second.reshape(2, 3, 4))


# --- Errors -----------------------------------------------------------------------------------------------------------

HUGE = 2**63 - 1
HEAD = b"GGUF" + struct.pack("<I", 3)


def one_key(raw_value: bytes) -> bytes:
    return HEAD + struct.pack("<QQ", 0, 1) + string("some.key") + raw_value + bytes(64)


def one_tensor(rank: int, axes: list[int], kind: int, offset: int) -> bytes:
    info = string("w") + struct.pack(f"<I{len(axes)}QIQ", rank, *axes, kind, offset)
    return HEAD + struct.pack("<QQ", 1, 0) + info + bytes(64)


BROKEN = {
    "empty": (b"", "expected a GGUF file, got an empty one"),
    "short magic": (b"GG", "begins with b'GGUF', got b'GG'"),
    "magic": (b"PK\3\4" + bytes(40), "begins with b'GGUF', got b'PK"),
    "magic alone": (b"GGUF", "the version at byte 4 expected at least 4 bytes, got 0"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(40), "expected GGUF version 2 or 3 .* got version 1"),
    "big endian": (b"GGUF" + struct.pack(">I", 3) + bytes(40), "little-endian order, got version 50331648"),
    "no counts": (HEAD, "the tensor count at byte 8 expected at least 8 bytes, got 0"),
    "tensor count": (HEAD + struct.pack("<QQ", HUGE, 0), f"{HUGE} tensor infos at byte 24 expected .* got 0"),
    "key count": (HEAD + struct.pack("<QQ", 0, HUGE), f"{HUGE} keys at byte 24 expected .* got 0"),
    "key length": (
        HEAD + struct.pack("<QQQ", 0, 1, HUGE) + bytes(64),
        f"a key at byte 24 expected at least {HUGE + 8} bytes",
    ),
    "key text": (HEAD + struct.pack("<QQQ", 0, 1, 2) + b"\xff\xfe" + bytes(64), "expected a key to be UTF-8"),
    "key twice": (
        HEAD + struct.pack("<QQ", 0, 2) + 2 * (string("k") + value(1)) + bytes(64),
        "expected every key once, got 'k' again",
    ),
    "value type": (one_key(struct.pack("<I", 13)), "value of 'some.key' to be of a type from 0 to 12, got 13"),
    "string length": (one_key(struct.pack("<IQ", 8, HUGE)), f"'some.key' at byte .* at least {HUGE + 8} bytes"),
    "array type": (one_key(struct.pack("<IIQ", 9, 77, 1)), "to be of a type from 0 to 12, got 77"),
    "numbers": (one_key(struct.pack("<IIQ", 9, 4, HUGE)), f"at least {4 * HUGE} bytes, got 64"),
    "strings": (one_key(struct.pack("<IIQ", 9, 8, HUGE)), f"at least {8 * HUGE} bytes, got 64"),
    "arrays": (one_key(struct.pack("<IIQ", 9, 9, HUGE)), f"at least {12 * HUGE} bytes, got 64"),
    "deep arrays": (one_key(struct.pack("<I", 9) + 5000 * struct.pack("<IQ", 9, 1)), "nest at most 4 arrays, got more"),
    "alignment": (gguf_bytes({"general.alignment": 24}), "general.alignment to be a power of two, got 24"),
    "alignment type": (gguf_bytes({"general.alignment": "32"}), "general.alignment to be a power of two, got '32'"),
    "rank": (one_tensor(5, [1] * 5, 0, 0), "tensor 'w' to have at most 4 axes, got 5"),
    "empty axis": (one_tensor(2, [4, 0], 0, 0), r"tensor 'w' to have no empty axis, got shape \(0, 4\)"),
    "huge shape": (
        one_tensor(4, [HUGE] * 4, 0, 0),
        rf"tensor 'w' of shape .* expected {4 * HUGE**4} bytes .* got a file",
    ),
    "part of a block": (one_tensor(1, [33], 8, 0), "tensor 'w' in whole Q8_0 blocks of 32, got 33"),
    "scalar block": (one_tensor(0, [], 8, 0), "tensor 'w' in whole Q8_0 blocks of 32, got 1"),
    "offset": (one_tensor(1, [1], 0, 2**40), "tensor 'w' .* expected 4 bytes from byte 1099511627.* got a file of"),
    "offset of unknown type": (one_tensor(1, [1], 999, 2**40), "tensor 'w' .* expected 1 bytes from byte"),
    "odd offset": (one_tensor(1, [1], 0, 7), "tensor 'w' at a multiple of 32 bytes, got offset 7"),
    "tensor twice": (
        gguf_bytes({}, [("w", (1,), "F32", bytes(4)), ("w", (1,), "F32", bytes(4))]),
        "expected every tensor once, got 'w' again",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_says_what_is_wrong(name: str, opened: Callable[[bytes], GGUFFile]) -> None:
    content, message = BROKEN[name]
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError, match=message) as caught:
            opened(content)
        assert tracemalloc.get_traced_memory()[1] < 4e6  # no allocation of a size the file only claims
    finally:
        tracemalloc.stop()
    assert "model.gguf" in str(caught.value)


def test_truncated_tensor_data_says_how_much_is_missing(opened: Callable[[bytes], GGUFFile]) -> None:
    content = gguf_bytes({}, [("w", (4, 32), "Q4_1", random_blocks("Q4_1", 4))])
    assert opened(content).tensor("w").shape == (4, 32)
    with pytest.raises(GGUFError, match=rf"tensor 'w' .* expected 80 bytes .* got a file of {len(content) - 1} bytes"):
        opened(content[:-1])


@pytest.mark.parametrize(("type_id", "name"), [(16, "IQ2_XXS"), (9, "Q8_1"), (39, "MXFP4"), (4, "unknown type 4")])
def test_an_unsupported_type_is_named_when_its_tensor_is_read(
    type_id: int, name: str, opened: Callable[[bytes], GGUFFile]
) -> None:
    model = opened(gguf_bytes({}, [("odd.weight", (256,), type_id, bytes(300)), ("w", (1,), "F32", bytes(4))]))
    assert model.tensors["odd.weight"].ggml_type == name
    assert model.tensor("w").shape == (1,)
    with pytest.raises(GGUFError, match=rf"model\.gguf: tensor 'odd\.weight': .*Q6_K, .*got {name}"):
        model.tensor("odd.weight")


def test_an_unknown_tensor_is_named(opened: Callable[[bytes], GGUFFile]) -> None:
    model = opened(gguf_bytes({}, [("w", (1,), "F32", bytes(4))]))
    with pytest.raises(GGUFError, match=r"model\.gguf: expected one of its 1 tensors \(w, ...\), got 'v'"):
        model.tensor("v")


def test_a_missing_file_is_an_ordinary_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_gguf(tmp_path / "nowhere.gguf")


# --- Damage at any byte -----------------------------------------------------------------------------------------------

METADATA: dict[str, Any] = EVERY_KIND | {"general.alignment": 32, "tokens": ["a", "bc", "Ġd"], "nested": [["x"], ["y"]]}
SMALL = gguf_bytes(METADATA, all_types_tensors(256))
HEADER_SIZE = SMALL.index(random_blocks("F32", 256))


def read_or_refuse(content: bytes) -> bool:
    """Whether the file opens; every tensor of one that does must read, or be refused in the reader's own words."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "damaged.gguf")
        path.write_bytes(content)
        try:
            model = open_gguf(path)
        except GGUFError:
            return False
        for name, info in model.tensors.items():
            try:
                assert model.tensor(name).shape == info.shape
            except GGUFError:
                assert "type" in info.ggml_type or info.ggml_type in set(GGML_TYPES.values()) - set(TYPE_IDS)
        return True


def test_the_undamaged_file_reads() -> None:
    assert read_or_refuse(SMALL)


@settings(max_examples=150, deadline=2000)
@given(st.integers(0, len(SMALL) - 1) | st.integers(0, HEADER_SIZE))
def test_any_truncation_is_refused(length: int) -> None:
    assert not read_or_refuse(SMALL[:length])


@settings(max_examples=300, deadline=2000)
@given(st.integers(0, HEADER_SIZE - 1) | st.integers(0, len(SMALL) - 1), st.integers(1, 255))
def test_any_changed_byte_reads_or_is_refused(at: int, change: int) -> None:
    read_or_refuse(SMALL[:at] + bytes([SMALL[at] ^ change]) + SMALL[at + 1 :])


@settings(max_examples=150, deadline=2000)
@given(st.integers(8, HEADER_SIZE), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, HUGE, 2**64 - 1]))
def test_any_count_overwritten_reads_or_is_refused(at: int, count: int) -> None:
    read_or_refuse(SMALL[:at] + struct.pack("<Q", count) + SMALL[at + 8 :])


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


# --- The real model ---------------------------------------------------------------------------------------------------


@pytest.mark.download
def test_the_real_model(smollm2_path: Path) -> None:
    model = open_gguf(smollm2_path)
    expected = {
        "general.architecture": "llama",
        "general.license": "apache-2.0",
        "general.languages": ["en"],
        "llama.block_count": 30,
        "llama.embedding_length": 576,
        "llama.feed_forward_length": 1536,
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
        "llama.rope.freq_base": 100_000.0,
        "llama.context_length": 8192,
    }
    assert {key: model.metadata[key] for key in expected} == expected
    assert len(model.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(model.metadata["tokenizer.ggml.merges"]) == 48900
    assert sum(int(np.prod(info.shape)) for info in model.tensors.values()) == 134_515_008
    embedding = model.tensor("token_embd.weight")
    assert embedding.shape == (49152, 576)
    assert 0.01 < embedding.std() < 1
