"""The benchmark of Llama 3's shapes on a host without a GPU: its arithmetic, its dense peers, and its command."""

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import cuda_device

from examples.benchmarks import llama, loops
from examples.benchmarks.loops import Case, forward_shapes, new_table, random_arrays
from paged_jax import BlockTable
from paged_jax.models.dense import attend_dense, generate_dense
from paged_jax.models.programs import generate

TESTS = Path(__file__).parents[1]
GIB = 2**30
BUDGET = 2**18  # bytes, for the tiny model
STEPS, CALLS = 16, 3
COMMAND = f"""
from examples.benchmarks import decode, llama
llama.measure_ceiling = lambda _: 10.0
decode._BYTES_IN_ROTATION, decode._SECONDS_PER_RUN, decode._DEPTH = 1, 0.0, 2
llama.main("--shape tiny --devices 2 --steps {STEPS} --calls {CALLS} --budget-gib {BUDGET / GIB}".split()
           + ["--out", "OUT"])
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command writes, in a process that has two devices made of one CPU."""
    out = tmp_path_factory.mktemp("llama") / "out.json"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = {"PYTHONPATH": str(TESTS.parent), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-W", "error", "-c", COMMAND.replace("OUT", str(out))]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text(encoding="utf-8"))


def assert_timed(timed: dict[str, Any]) -> None:
    """The time of a step is made of the raw ones."""
    assert timed["seconds"].keys() == {"steps", "no steps"}
    for samples in (*timed["seconds"].values(), timed["compile_seconds"].values()):
        assert all(seconds > 0 for seconds in samples)
    medians = {kind: statistics.median(samples) for kind, samples in timed["seconds"].items()}
    assert [len(samples) for samples in timed["seconds"].values()] == [CALLS, CALLS]
    assert timed["seconds_per_step"] == pytest.approx((medians["steps"] - medians["no steps"]) / STEPS)


def assert_judged(judged: dict[str, Any], value: float, target: float, *, at_least: bool = False) -> None:
    assert judged["value"] == pytest.approx(value)
    assert judged["target"] == target
    assert judged["is_target_reached"] == (value >= target if at_least else value <= target)


@pytest.mark.full
def test_the_command_says_where_and_that_it_is_right(results):
    assert results["environment"]["versions"].keys() >= {"jax", "flax"}
    assert (results["devices"], results["num_steps"], results["ceiling_gb_per_s"]) == (2, STEPS, 10.0)
    assert results["check"]["different"] == {"1": 0, "2": 0}
    assert results["check"]["distinct"] > 8  # a model that says one thing would show nothing


@pytest.mark.full
def test_compiling_is_timed_scanned_and_unrolled(results):
    measured = results["compile"]["tiny"]
    for kind in ("scanned", "unrolled"):
        assert min(measured[kind].values()) > 0
    assert_judged(measured, sum(measured["scanned"].values()), 20)


@pytest.mark.full
@pytest.mark.parametrize(("name", "rows", "target"), [("4 x 24", 4, 1.2), ("1 x 24", 1, 1.15)])
def test_a_step_is_held_against_the_bytes_that_it_reads(results, name, rows, target):
    step = results["step"]["tiny"][name]
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 64)  # of both layers
    norms = 4 * 64 * 5  # float32
    assert step["weight_bytes_read"] == 2 * (matrices + 64 * 64) + norms
    assert step["parameter_bytes"] == step["weight_bytes_read"] + 2 * 64 * 64
    held = [24 + i + 1 for i in range(STEPS)]
    assert step["kv_bytes_read"] == rows * np.mean(held) * 2 * 2 * 2 * 16 * 2
    assert_timed(step)
    reading = (step["weight_bytes_read"] + step["kv_bytes_read"]) / 10e9
    assert step["seconds_reading"] == pytest.approx(reading)
    assert_judged(step, step["seconds_per_step"] / reading, target)


@pytest.mark.full
def test_rows_fit_in_the_budget_as_one_counts_by_hand(results):
    dense = results["dense"]["tiny"]
    token_bytes = 2 * 2 * 2 * 16 * 2  # K and V, layers, kv heads, head_dim, bfloat16
    assert (dense["token_bytes"], dense["budget_bytes"], dense["reserved_tokens"]) == (token_bytes, BUDGET, 64)
    assert all(8 <= length <= 64 - STEPS for length in dense["lengths"])
    paged, reserved = (dense["contestants"][name] for name in ("paged", "dense"))
    assert reserved["rows"] == BUDGET // (64 * token_bytes) == 16
    assert reserved["cells"] == 16 * 64
    assert paged["rows"] == len(dense["lengths"]) > 16
    assert paged["cells"] == sum(-(-(length + STEPS) // 16) * 16 for length in dense["lengths"])
    assert BUDGET - 64 * token_bytes < paged["cache_bytes"] == paged["cells"] * token_bytes <= BUDGET
    for measured in (paged, reserved):
        assert_timed(measured)
        assert measured["tokens_per_second"] == pytest.approx(measured["rows"] / measured["seconds_per_step"])
    assert dense["gains"].keys() == {"dense"}
    gain = paged["tokens_per_second"] / reserved["tokens_per_second"]
    assert_judged(dense["gains"]["dense"], gain, 1.3, at_least=True)
    assert dense["failures"] == {"dense, cuDNN": "RuntimeError: cuDNN is not detected."}


@pytest.mark.full
def test_a_mesh_is_held_against_one_device(results):
    mesh, attention = results["mesh"]["tiny"], results["attention"]["tiny"]
    assert mesh["devices"].keys() == attention["microseconds"].keys() == {"1", "2"}
    one, two = mesh["devices"].values()
    assert one["seconds"] == results["step"]["tiny"]["4 x 24"]["seconds"]  # measured once
    assert_timed(two)
    assert_judged(mesh, two["seconds_per_step"] / one["seconds_per_step"], 0.6)
    assert max(attention["max_error"].values()) < 0.02
    assert_judged(attention, attention["microseconds"]["2"] / attention["microseconds"]["1"], 0.52)


# --- Full size, without values


def full_case(name: str, layers: int, num_rows: int = 1) -> Case:
    config = llama.SHAPES[name].config(layers)
    return Case(config, (4096,) * num_rows, 32, scan_layers=True)


@pytest.mark.parametrize(("name", "layers", "parameters"), [("8b", 32, 8_030_261_248), ("70b", 80, 70_553_706_496)])
def test_the_shapes_are_those_of_llama_3(name, layers, parameters):
    case = full_case(name, layers)
    norms = case.config.width * (2 * layers + 1)
    weights = loops.weight_bytes(case)
    assert weights["all"] == 2 * (parameters - norms) + 4 * norms
    assert weights["all"] - weights["read"] == 2 * 128256 * case.config.width


def test_8b_s_rows_in_32_gib():
    args = llama.parse_arguments([])
    shape = llama.SHAPES["8b"]
    paged, reserved = llama.cases_in_budget(shape, shape.config(None), args, 32 * GIB)
    assert len(reserved.lengths) == reserved.num_pages == 32  # each has 1 GiB
    assert reserved.token_bytes * reserved.page_size == GIB
    assert len(paged.lengths) % 8 == 0
    assert paged.lengths[:32] == reserved.lengths
    assert 32 * GIB - GIB < paged.num_pages * 16 * paged.token_bytes <= 32 * GIB
    assert np.mean([length for length in paged.lengths if length]) == pytest.approx((1024 + 8192) / 2, rel=0.1)


def lower(case: Case, run: Callable, cache: Any) -> str:
    table = jax.eval_shape(functools.partial(BlockTable.create, *case.table_sizes))
    rest = [jax.ShapeDtypeStruct((len(case.lengths),), dtype) for dtype in (jnp.int32, jnp.bool_)]
    trace = jax.jit(functools.partial(run, max_new_tokens=case.num_steps)).trace(
        forward_shapes(case), cache, table, *rest
    )
    return trace.lower(lowering_platforms=("cuda",)).as_text()


def test_the_loop_lowers_for_cuda_at_full_size():
    case = full_case("8b", 32, num_rows=64)
    with cuda_device():
        assert "triton" in lower(case, generate, loops.paged_cache_shapes(case))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_cudnn_s_dense_cache_lowers_for_cuda(scan_layers, monkeypatch):
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    case = dataclasses.replace(full_case("8b", 2, num_rows=32), scan_layers=scan_layers, page_size=8192)
    run = functools.partial(llama.generate_reserved, llama.attend_cudnn)
    text = lower(case, run, llama.dense_cache_shapes(case))
    assert text.count("stablehlo.custom_call @__cudnn$fmhaSoftmax") == (1 if scan_layers else 2)


# --- Values


@pytest.mark.full
@pytest.mark.parametrize(("peer", "scan_layers"), [("dense", True), ("cudnn", False)])
def test_dense_peers_generate_the_dense_decoder_s_tokens(peer, scan_layers, monkeypatch, highest_precision):  # noqa: ARG001
    attend_any = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *args, **options: attend_any(*args, **options | {"implementation": "xla"}),
    )
    attend = {"dense": attend_dense, "cudnn": llama.attend_cudnn}[peer]
    case = Case(llama.SHAPES["tiny"].config(None), (1, 1, 1), 12, scan_layers, page_size=16, dtype="float32")
    model, first = random_arrays(forward_shapes(case)), [3, 41, 7]
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), llama.dense_cache_shapes(case))
    table, active = BlockTable.create(*case.table_sizes), jnp.ones(3, bool)
    result = llama.generate_reserved(attend, model, cache, table, jnp.array(first), active, max_new_tokens=12)
    expected = generate_dense(model, [[token] for token in first], 12, (), jnp.float32)
    assert result.check().tokens.tolist() == expected
    assert len(np.unique(expected)) > 4


def test_cudnn_refuses_what_it_would_not_compute():
    options = {"window": None, "soft_cap": 30.0, "sinks": None}
    with pytest.raises(NotImplementedError, match=r"expected a model without soft_cap, got 30\.0"):
        llama.attend_cudnn(*[None] * 5, layer=0, scale=1.0, **options)


def test_rows_begin_on_pages_all_over_the_pool():
    case = Case(llama.SHAPES["tiny"].config(None), (33, 0, 100), 8, scan_layers=False)
    table = new_table(case)
    table.check()
    assert table.lengths.tolist() == [33, 0, 100]
    assert table.num_pages == sum(case.num_blocks) == 3 + 0 + 7
    held = table.pages[2][:7]
    assert (jnp.diff(held) != 1).any()
    assert (jnp.diff(held) != -1).any()


def test_values_are_drawn_at_random_and_norms_are_ones():
    case = Case(llama.SHAPES["tiny"].config(None), (33, 5), 8, scan_layers=True)
    model, cache = random_arrays(forward_shapes(case)), random_arrays(loops.paged_cache_shapes(case))
    (weights,) = model.args
    assert (weights["layers.mlp_norm.scale"] == 1).all()
    gate_up = weights["layers.mlp.gate_up.weight"]
    assert gate_up.dtype == cache.k.dtype == jnp.bfloat16
    for values in (gate_up, cache.k, cache.v):
        assert jnp.std(values.astype(jnp.float32)) == pytest.approx(values.shape[-1] ** -0.5, rel=0.05)
        assert (values[0] != values[1]).mean() > 0.9
    assert (cache.k != cache.v).mean() > 0.9


# --- Mistakes


@pytest.mark.parametrize("section", ["mesh", "attention"])
def test_a_mesh_wants_several_devices(section, capsys):
    with pytest.raises(SystemExit, match="2"):
        llama.parse_arguments(["--only", section])
    assert f"--only {section}: expected --devices of at least 2, got 1" in capsys.readouterr().err


def test_a_budget_without_room_for_a_row_is_refused():
    shape, args = llama.SHAPES["8b"], llama.parse_arguments([])
    with pytest.raises(ValueError, match=r"--budget-gib: expected room for a row of 8192 tokens, got 0\.5 GiB"):
        llama.cases_in_budget(shape, shape.config(None), args, GIB // 2)


def test_sections_are_those_that_the_devices_allow():
    assert llama.parse_arguments([]).only == ["compile", "step", "dense"]
    assert llama.parse_arguments(["--only", "mesh", "step", "--devices", "2"]).only == ["step", "mesh"]
