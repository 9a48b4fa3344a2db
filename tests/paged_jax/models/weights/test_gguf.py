"""The GGUF reader: headers, files in parts, every error, and damage at any byte."""

import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_writer import TYPE_IDS, all_types_tensors, gguf_bytes, random_blocks, string, value
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.models.weights.gguf import GGUFError, GGUFFile, open_gguf
from paged_jax.models.weights.gguf_types import GGML_TYPES

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


# --- Split files ------------------------------------------------------------------------------------------------------

WHOLE = [(f"t{i}", (2, 32), "Q8_0", random_blocks("Q8_0", 2, i)) for i in range(3)]


def split(folder: Path, **changes: Any) -> list[Path]:
    """Three files of one tensor each, as `llama-gguf-split` names them; changes are to the last one's keys."""
    paths = []
    for i, tensor in enumerate(WHOLE):
        keys: dict[str, Any] = {"some.key": 7} if i == 0 else {}
        keys |= {"split.no": np.uint16(i), "split.count": np.uint16(3), "split.tensors.count": np.int32(3)}
        paths.append(folder / f"model-0000{i + 1}-of-00003.gguf")
        paths[-1].write_bytes(gguf_bytes(keys | (changes if i == 2 else {}), [tensor]))
    return paths


@pytest.mark.parametrize("given", range(3))
def test_any_part_of_a_split_file_is_the_whole(given: int, tmp_path: Path, opened: Callable[[bytes], GGUFFile]) -> None:
    model = open_gguf(split(tmp_path)[given])
    assert model.metadata["some.key"] == 7
    assert list(model.tensors) == ["t0", "t1", "t2"]
    whole = opened(gguf_bytes({}, WHOLE))
    for name in model.tensors:
        np.testing.assert_array_equal(model.tensor(name), whole.tensor(name))


def test_a_split_file_of_one_part_is_a_whole_one(opened: Callable[[bytes], GGUFFile]) -> None:
    assert list(opened(gguf_bytes({"split.no": 0, "split.count": 1}, WHOLE)).tensors) == ["t0", "t1", "t2"]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].unlink()
    with pytest.raises(GGUFError, match=r"00001-of-00003.gguf: expected the 3 files .* got no model-00002-of-00003"):
        open_gguf(paths[0])


def test_a_part_of_another_name_is_refused(tmp_path: Path) -> None:
    renamed = split(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(GGUFError, match=r"model.gguf: expected a part of a split file, of 3 files, .* another name"):
        open_gguf(renamed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split.no": 1}, r"00003-of-00003.gguf: expected split.no and split.count to be 2 and 3, got \(1, 3\)"),
        ({"split.count": 4}, r"expected split.no and split.count to be 2 and 3, got \(2, 4\)"),
        ({"split.no": "x"}, "expected split.no to be a number, got 'x'"),
    ],
)
def test_a_part_of_another_file_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=message):
        open_gguf(split(tmp_path, **changes)[0])


def test_parts_that_overlap_or_lack_tensors_are_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    keys = {"split.no": 2, "split.count": 3}
    paths[2].write_bytes(gguf_bytes(keys, [WHOLE[0]]))
    with pytest.raises(GGUFError, match=r"00003-of-00003.gguf: expected every tensor in one file .* got 't0' again"):
        open_gguf(paths[0])
    paths[2].write_bytes(gguf_bytes(keys))
    with pytest.raises(GGUFError, match=r"expected 3 tensors in the files of a split one, got 2"):
        open_gguf(paths[0])


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
