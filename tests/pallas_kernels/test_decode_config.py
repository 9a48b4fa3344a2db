"""Which config the kernel runs with: the caller's, one tuned for the device, or the heuristic's; and what is tried."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from grid import DEVICES, DIMS, DTYPES, HEADS, LAYOUTS, crossed, every_device
from lowering import lower_for_cuda

from pallas_kernels import paged_decode
from pallas_kernels.cases import DECODE_CASES
from pallas_kernels.device import INTERPRETED
from pallas_kernels.layouts import LAYOUTS as AXES
from pallas_kernels.layouts import pool_shape
from pallas_kernels.paged_decode import config
from pallas_kernels.paged_decode.config import Config, Device, Shape, choose
from pallas_kernels.quantisation import is_quantised

SHAPES = [
    Shape(num_heads // num_kv_heads, *dims, *dtypes, "NHD", kv_rows)
    for (num_heads, num_kv_heads), dims, dtypes, kv_rows in itertools.product(HEADS, DIMS, DTYPES, (4, 64))
]
LLAMA = Shape(4, 128, 128, "bfloat16", "bfloat16", "NHD", 64)


@every_device
def test_the_resident_programs_tiles_fit_shared_memory(device):
    for shape in SHAPES:
        chosen = config.heuristic(shape, device)
        tile_bytes = chosen.tile * (shape.head_dim + shape.v_head_dim) * jnp.dtype(shape.kv_dtype).itemsize
        assert chosen.tile >= 16, "matrix units take at least 16 rows"
        assert chosen.tile & (chosen.tile - 1) == 0
        resident = min(4, chosen.programs_per_processor)
        assert chosen.tile == 16 or resident * tile_bytes <= device.shared_memory, chosen
        under_way = chosen.num_stages // 2
        assert chosen.tile == 16 or under_way * tile_bytes < device.shared_memory, chosen
        assert tile_bytes <= device.shared_memory, chosen


@every_device
def test_wide_groups_have_fewer_programs_with_larger_tiles(device):
    few, many = (config.heuristic(LLAMA._replace(group=group), device) for group in (16, 64))
    assert many.tile >= few.tile
    assert many.programs_per_processor == 1 < few.programs_per_processor
    # Lanes are what counts: 33 heads take as many as 64.
    assert config.heuristic(LLAMA._replace(group=33), device) == many


@every_device
def test_few_rows_have_one_larger_program_on_each_processor(device):
    few, more = (config.heuristic(LLAMA._replace(kv_rows=kv_rows), device) for kv_rows in (4, 64))
    assert few.programs_per_processor == 1 < more.programs_per_processor
    assert few.num_warps >= 4
    assert few.tile >= more.tile
    assert few.merged_lanes > more.merged_lanes
    in_float32 = LLAMA._replace(q_dtype="float32", kv_dtype="float32")
    few, more = (config.heuristic(in_float32._replace(kv_rows=kv_rows), device) for kv_rows in (4, 64))
    assert few == more, "it computes more than it reads"


@every_device
def test_few_rows_of_wide_heads_have_two_programs_unless_they_are_of_one_byte(device):
    wide = LLAMA._replace(group=2, head_dim=256, v_head_dim=256, kv_rows=4)
    chosen = config.heuristic(wide, device)
    assert chosen.programs_per_processor == 2
    assert chosen.num_warps == (8 if chosen.tile == 64 else 4)
    assert config.heuristic(wide._replace(kv_dtype="int8"), device).programs_per_processor == 1


@every_device
def test_candidates_surround_the_heuristic_and_fit(device):
    for shape in SHAPES:
        first, *others = config.candidates(shape, device)
        assert first == config.heuristic(shape, device)
        assert first not in others
        assert len(set(others)) == len(others) <= 7 * 4 * 6
        for other in others:
            assert other.tile * (shape.head_dim + shape.v_head_dim) * jnp.dtype(shape.kv_dtype).itemsize <= (
                device.shared_memory
            )
    assert len(config.candidates(LLAMA, device)) >= 32


@pytest.mark.parametrize(("tile", "layout"), crossed([32, 64, 128], LAYOUTS))
def test_candidates_lower_for_cuda(tile, layout):
    sizes = {"L": 1, "P": 64, "C": 16, "K": 2, "H": 128}
    k, v = (jax.ShapeDtypeStruct(pool_shape(axes, sizes, 2), jnp.bfloat16) for axes in AXES[layout])
    table, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 9), (3,)))
    q = jax.ShapeDtypeStruct((3, 8, 128), jnp.bfloat16)
    found = {
        (candidate.num_warps, candidate.num_stages): candidate
        for candidate in config.candidates(LLAMA, DEVICES["H200"])
        if candidate.tile == tile
    }
    for candidate in (found[min(found)], found[max(found)]):

        def attend(q, k, v, table, lengths, candidate=candidate):
            return paged_decode(q, k, v, table, lengths, layer=0, layout=layout, config=candidate)

        assert "triton" in lower_for_cuda(attend, q, k, v, table, lengths)


@every_device
def test_many_rows_are_cut_a_little_and_few_until_all_processors_are_busy(device):
    for rows, kv_heads in itertools.product((1, 4, 64, 128, 1000), (1, 2, 8)):
        chosen = config.heuristic(LLAMA._replace(kv_rows=rows * kv_heads), device)
        wanted = config.num_partitions(chosen, kv_heads, device)
        programs = 1 if rows * kv_heads <= device.processors // 8 else 3.9
        assert wanted * kv_heads > programs * device.processors - kv_heads
        assert wanted < 1.5 * rows or chosen.programs_per_processor in (1, 4)
        assert wanted > 1.1 * rows or rows * kv_heads <= 4 * device.processors


# --- tuned entries

NEAR, FAR, PACKED = Config(32, 1, 5, 8), Config(128, 4, 3, 2), Config(16, 1, 3)
ENTRIES = {LLAMA: NEAR, LLAMA._replace(kv_rows=4096): FAR, LLAMA._replace(layout="vllm"): PACKED}
TUNED = Device(132, 228 << 10, "Synthetic GPU-9 (test)")


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """A folder in which one device has entries."""
    monkeypatch.setattr(config, "TUNED", tmp_path)
    config.tuned.cache_clear()
    entries = [
        {"shape": shape._asdict(), "config": vars(chosen), "microseconds": {"a case": 1.0}}
        for shape, chosen in ENTRIES.items()
    ]
    file = tmp_path / "synthetic_gpu_9_test.json"
    file.write_text(json.dumps({"environment": {}, "entries": entries}))
    yield file
    config.tuned.cache_clear()


@pytest.mark.usefixtures("tuned")
def test_the_caller_comes_first_then_what_is_tuned_then_the_heuristic():
    own = Config(16, 1, 2)
    assert choose(own, LLAMA, TUNED) == own
    assert choose(None, LLAMA, TUNED) == NEAR
    for stranger in (TUNED._replace(kind="another"), TUNED._replace(kind=""), INTERPRETED):
        assert choose(None, LLAMA, stranger) == config.heuristic(LLAMA, stranger)


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("kv_rows", "expected"),
    [(0, None), (8, None), (9, NEAR), (64, NEAR), (500, NEAR), (520, FAR), (4096, FAR), (32767, FAR), (32768, None)],
)
def test_the_nearest_number_of_rows_by_ratio_unless_it_is_far(kv_rows, expected):
    shape = LLAMA._replace(kv_rows=kv_rows)
    if expected is None:
        assert choose(None, shape, TUNED) == config.heuristic(shape, TUNED)
        return
    if kv_rows not in (64, 4096):  # how many programs pay is a matter of the rows themselves
        programs = config.heuristic(shape, TUNED).programs_per_processor
        expected = dataclasses.replace(expected, programs_per_processor=programs)
    assert choose(None, shape, TUNED) == expected


@pytest.mark.usefixtures("tuned")
def test_all_else_must_be_equal_but_layouts_that_are_read_alike():
    for other in (
        {"group": 5},
        {"head_dim": 64},
        {"v_head_dim": 64},
        {"q_dtype": "float32"},
        {"kv_dtype": "float16"},
    ):
        shape = LLAMA._replace(**other)
        assert choose(None, shape, TUNED) == config.heuristic(shape, TUNED)
    for layout in ("NHD", "HND", "head_major"):
        assert choose(None, LLAMA._replace(layout=layout), TUNED) == NEAR
    assert choose(None, LLAMA._replace(layout="vllm"), TUNED) == PACKED


def test_a_file_is_read_when_it_is_asked_for_and_once(tuned):
    choose(Config(16, 1, 2), LLAMA, TUNED)
    assert config.tuned.cache_info().currsize == 0
    choose(None, LLAMA, TUNED)
    tuned.unlink()
    assert choose(None, LLAMA, TUNED) == NEAR


def test_names_of_files():
    assert config.file_name("NVIDIA H200") == "nvidia_h200.json"
    assert config.file_name("Radeon RX 7900/XTX") == "radeon_rx_7900_xtx.json"


def test_shipped_entries_were_measured_on_the_device_of_their_file():
    names = {case.name for case in DECODE_CASES}
    for path in config.TUNED.glob("*.json"):
        results = json.loads(path.read_text(encoding="utf-8"))
        assert config.file_name(results["environment"]["device"]) == path.name
        shapes = [Shape(**entry["shape"]) for entry in results["entries"]]
        assert len(set(shapes)) == len(shapes)
        for entry in results["entries"]:
            chosen = Config(**entry["config"])
            assert chosen.tile >= 16
            assert chosen.tile.bit_count() == 1
            assert entry["microseconds"].keys() == entry["heuristic_microseconds"].keys() <= names


def shipped():
    """Each way of running that an entry names, with its shape, once."""
    entries = [
        e for path in config.TUNED.glob("*.json") for e in json.loads(path.read_text(encoding="utf-8"))["entries"]
    ]
    found = {}
    for entry in entries:
        shape, chosen = Shape(**entry["shape"]), Config(**entry["config"])
        key = shape._replace(kv_rows=0), dataclasses.replace(chosen, programs_per_processor=1)
        found.setdefault(key, (shape, chosen))
    return found.values()


WIDE = {
    "heads": LLAMA._replace(group=71, head_dim=64, v_head_dim=64),
    "dims": LLAMA._replace(head_dim=256, v_head_dim=256),
}
ALONE = {
    "Llama": LLAMA,
    "one byte": LLAMA._replace(kv_dtype="int8"),
    "vllm": LLAMA._replace(layout="vllm"),
    **WIDE,
    "few rows of wide heads": WIDE["dims"]._replace(kv_rows=4),
    "few rows of wide heads, vllm": WIDE["dims"]._replace(kv_rows=4, layout="vllm"),
}


@pytest.mark.parametrize(("shape", "device"), crossed([*ALONE], [*DEVICES]))
def test_what_the_heuristic_chooses_for_any_device_lowers_for_cuda(shape, device):
    assert_lowers(ALONE[shape], config.heuristic(ALONE[shape], DEVICES[device]))


@pytest.mark.parametrize(
    ("shape", "chosen"),
    [
        pytest.param(shape, chosen, marks=() if i % 3 == 0 else pytest.mark.full)
        for i, (shape, chosen) in enumerate(shipped())
    ],
    ids=str,
)
def test_shipped_entries_lower_for_cuda(shape, chosen):
    assert_lowers(shape, chosen)


def assert_lowers(shape, chosen):
    sizes = {"L": 1, "P": 64, "C": 16, "K": 2, "H": shape.head_dim}
    dtype = jnp.dtype(shape.kv_dtype)
    k, v = (jax.ShapeDtypeStruct(pool_shape(axes, sizes, dtype.itemsize), dtype) for axes in AXES[shape.layout])
    scales = jax.ShapeDtypeStruct((1, 64, 16, 2), jnp.float32) if is_quantised(dtype) else None
    table, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 9), (3,)))
    q = jax.ShapeDtypeStruct((3, 2 * shape.group, shape.head_dim), shape.q_dtype)

    def attend(q, k, v, scales, table, lengths):
        options = {"k_scales": scales, "v_scales": scales, "layout": shape.layout, "config": chosen}
        return paged_decode(q, k, v, table, lengths, layer=0, **options)

    assert "triton" in lower_for_cuda(attend, q, k, v, scales, table, lengths)


def test_the_kernel_runs_with_what_is_chosen(monkeypatch):
    asked = []

    def answer(given, shape, device):
        asked.append((given, shape, device))
        return Config(16, 1, 2)

    monkeypatch.setattr(config, "choose", answer)
    q, k, v = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((3, 8, 32), "bfloat16"), ((4, 2, 8, 32), "float32"), ((4, 2, 8, 64), "float32"))
    )
    table, lengths = jax.ShapeDtypeStruct((3, 1), "int32"), jax.ShapeDtypeStruct((3,), "int32")
    jax.eval_shape(functools.partial(paged_decode, layout="HND", interpret=True), q, k, v, table, lengths)
    assert asked == [(None, Shape(4, 32, 64, "bfloat16", "float32", "HND", 6), INTERPRETED)]
