"""Hugging Face folders: every tensor is read as it was written, one at a time, and damage is named."""

import json
import tempfile
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from paged_jax.models.weights.checkpoint import CheckpointError, open_checkpoint

INDEX = "model.safetensors.index.json"
SHARDS = {
    "model-00001-of-00002.safetensors": {"a": np.arange(6, dtype=np.float32).reshape(2, 3)},
    "model-00002-of-00002.safetensors": {"b": np.ones(4, np.float16), "c": np.zeros((2, 2), ml_dtypes.bfloat16)},
}


def save_shards(folder: Path, shards: Mapping[str, Mapping[str, np.ndarray]] = SHARDS) -> Path:
    for file, tensors in shards.items():
        save_file(dict(tensors), folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": weight_map}))
    return folder


def change_index(folder: Path, **places: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    changed = index["weight_map"] | places
    index["weight_map"] = {name: file for name, file in changed.items() if file is not None}
    (folder / INDEX).write_text(json.dumps(index))


def same(got: np.ndarray, expected: np.ndarray) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()


# --- Reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0, 4), (4, 0)])
def test_a_tensor_is_read_as_it_was_written(dtype: type, shape: tuple[int, ...], tmp_path: Path) -> None:
    expected = np.asarray(np.random.default_rng(0).standard_normal(shape)).astype(dtype)
    save_file({"before": np.ones(3, np.float32), "w": expected}, tmp_path / "model.safetensors")
    same(open_checkpoint(tmp_path).tensor("w", dtype), expected)


@pytest.mark.parametrize("target", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_tensor_is_rounded_as_a_whole_would_be(source: type, target: type, tmp_path: Path) -> None:
    """5 MB to 10 MB: more than one piece, and the last one not whole."""
    stored = np.random.default_rng(0).standard_normal((2503, 1001)).astype(source)
    save_file({"w": stored}, tmp_path / "model.safetensors")
    same(open_checkpoint(tmp_path).tensor("w", target), stored.astype(target))


def test_a_value_too_large_for_the_dtype_becomes_infinite_without_warnings(tmp_path: Path) -> None:
    save_file({"w": np.array([1e6, -1e6, np.nan], np.float32)}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(open_checkpoint(tmp_path).tensor("w", np.float16), [np.inf, -np.inf, np.nan])


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_shards(tmp_path))
    assert {name: stored.shape for name, stored in checkpoint.tensors.items()} == {"a": (2, 3), "b": (4,), "c": (2, 2)}
    for tensors in SHARDS.values():
        for name, expected in tensors.items():
            same(checkpoint.tensor(name, expected.dtype), expected)


def test_a_single_file_needs_no_index_and_other_files_may_lie_beside_it(tmp_path: Path) -> None:
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    save_file({"other": np.ones(2, np.float32)}, tmp_path / "consolidated.safetensors")
    assert list(open_checkpoint(tmp_path).tensors) == ["w"]


def test_an_index_says_what_belongs_to_a_single_file_beside_it(tmp_path: Path) -> None:
    one, other = {"a": np.ones(2, np.float32)}, {"b": np.ones(3, np.float32)}
    save_shards(tmp_path, {"model.safetensors": one, "more.safetensors": other})
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "b"}
    (tmp_path / "more.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json: expected a file more\.safetensors beside it, got none"):
        open_checkpoint(tmp_path)


def test_only_the_tensor_itself_is_on_the_host_while_it_is_read(tmp_path: Path) -> None:
    stored = np.ones((4096, 1024), np.float32)  # 16 MB, 8 MB as bfloat16
    save_file({"w": stored, "v": stored}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    tracemalloc.start()
    try:
        values = checkpoint.tensor("w", ml_dtypes.bfloat16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert values.nbytes == 8 << 20
    assert peak < values.nbytes + (4 << 20)  # and a piece of it


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere a copy is what is wanted")
@pytest.mark.parametrize("size", [1, 1000, 1_000_003])
def test_jax_on_a_cpu_takes_the_array_over_without_a_copy(size: int, tmp_path: Path) -> None:
    save_file({"w": np.ones(size, np.float32)}, tmp_path / "model.safetensors")
    values = open_checkpoint(tmp_path).tensor("w")
    assert values.ctypes.data % 64 == 0
    if size > 1000:  # a small one may be copied as well as not
        assert jax.device_put(values).unsafe_buffer_pointer() == values.ctypes.data


# --- Damage -----------------------------------------------------------------------------------------------------------


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: expected model.safetensors or .* got no such folder"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"index\.json, got \['pytorch_model.bin'\]"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 30, -1])
def test_a_truncated_file_is_named_with_its_size(keep: int, tmp_path: Path) -> None:
    path = save_shards(tmp_path) / "model-00002-of-00002.safetensors"
    content = path.read_bytes()[:keep]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"00002-of-00002.safetensors: .* got one of {len(content)} bytes: "):
        open_checkpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (save_shards(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json: expected a file model-00002-of-00002\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_shard_that_the_index_does_not_name(tmp_path: Path) -> None:
    save_file({"z": np.ones(1, np.float32)}, save_shards(tmp_path) / "model-00003-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"every shard of its folder, got model-00003-of-00003\.safetensors"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_a_tensor_too_many(tmp_path: Path) -> None:
    change_index(save_shards(tmp_path), z="model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"00001-of-00002.safetensors: expected the tensor 'z' .* got none"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_a_tensor_too_few(tmp_path: Path) -> None:
    change_index(save_shards(tmp_path), c=None)
    with pytest.raises(CheckpointError, match=r"00002-of-00002.safetensors: expected only tensors .* got 'c' as well"):
        open_checkpoint(tmp_path)


def test_an_index_that_swaps_two_shards(tmp_path: Path) -> None:
    change_index(save_shards(tmp_path), a="model-00002-of-00002.safetensors", b="model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"00001-of-00002.safetensors: expected the tensor 'b'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", 3, ".."])
def test_an_index_that_points_out_of_its_folder(place: str, tmp_path: Path) -> None:
    change_index(save_shards(tmp_path), a=place)
    with pytest.raises(CheckpointError, match=r"expected (tensor 'a' in a file of the same folder|a file \.\.)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON, got"),
        ("[]", r"expected a JSON object, got \[\]"),
        ("{}", "expected a weight_map of tensors to files, got None"),
        ('{"weight_map": {}}', "expected a weight_map of tensors to files, got {}"),
        ('{"weight_map": ["a"]}', "expected a weight_map of tensors to files"),
    ],
)
def test_an_index_that_is_none(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=rf"index\.json: {message}"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_is_not_there_or_cannot_be_read(tmp_path: Path) -> None:
    save_file({"w": np.ones(2, np.int8)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected one of its 1 tensors \(w, ...\), got 'v'"):
        checkpoint.tensor("v")
    with pytest.raises(CheckpointError, match=r"tensor 'w': expected one of the types F64, F32, F16, BF16, got I8"):
        checkpoint.tensor("w")


# --- Damage at any byte -----------------------------------------------------------------------------------------------

SMALL = save({"a": np.ones((2, 3), np.float32), "b": np.zeros(4, ml_dtypes.bfloat16)}, {"format": "pt"})
HEADER_SIZE = 8 + int.from_bytes(SMALL[:8], "little")


def read_or_refuse(content: bytes) -> bool:
    """Whether the file opens; every tensor of one that does must read, or be refused in the reader's own words."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.safetensors").write_bytes(content)
        try:
            checkpoint = open_checkpoint(folder)
        except CheckpointError:
            return False
        for name, stored in checkpoint.tensors.items():
            try:
                assert checkpoint.tensor(name).shape == stored.shape
            except CheckpointError:
                assert stored.dtype not in ("F64", "F32", "F16", "BF16")
        return True


def test_the_undamaged_file_reads() -> None:
    assert read_or_refuse(SMALL)


@settings(max_examples=100, deadline=2000)
@given(st.integers(0, len(SMALL) - 1))
def test_any_truncation_is_refused(length: int) -> None:
    assert not read_or_refuse(SMALL[:length])


@settings(max_examples=300, deadline=2000)
@given(st.integers(0, HEADER_SIZE - 1), st.integers(1, 255))
def test_any_changed_byte_reads_or_is_refused(at: int, change: int) -> None:
    read_or_refuse(SMALL[:at] + bytes([SMALL[at] ^ change]) + SMALL[at + 1 :])
