"""The decode benchmark on a host without a GPU: its data is sound, its peers compute attention and lower for CUDA."""

import csv
import dataclasses
import functools
import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for_cuda

from examples.benchmarks import decode, peers
from examples.benchmarks.decode import Problem, attend_paged, main, make_problem, measure, sweep
from examples.benchmarks.peers import PEERS, Contestant
from pallas_kernels.cases import DECODE_CASES, DecodeCase
from pallas_kernels.layouts import LAYOUTS

RAGGED = DecodeCase("ragged", (40, 1, 129, 16), 4, 2, 16)
EQUAL = DecodeCase("equal", (60, 64, 49), 6, 2, 128)
SPARE = dataclasses.replace(RAGGED, name="spare", spare_blocks=3, spare_pages=5)
HEADLINE = [case for case in DECODE_CASES if "headline" in case.tags]


@pytest.fixture(autouse=True)
def _little_data(monkeypatch):
    monkeypatch.setattr(decode, "_BYTES_IN_ROTATION", 1)
    monkeypatch.setattr(decode, "_SECONDS_PER_RUN", 0.0)


def abstract(case: DecodeCase, prepare=peers.as_posed):
    """The problem and the operands that `prepare` makes of it, without data, so that any size will do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_BYTES_IN_ROTATION", 1)

        def make():
            problem = make_problem(case)
            return (problem.q, problem.cache, problem.table), (problem.q, *prepare(problem))

        posed, operands = jax.eval_shape(make)
    return Problem(case, *posed, {}), operands


def test_cases_have_their_own_names_and_tags():
    assert len({case.name for case in DECODE_CASES}) == len(DECODE_CASES)
    assert {tag for case in DECODE_CASES for tag in case.tags} == {
        "headline",
        "model",
        "shape",
        "single",
        "quantised",
        "scaling",
    }


def test_shapes_to_compare_hold_the_same_bytes():
    expected = HEADLINE[0].kv_bytes
    assert {case.kv_bytes for case in DECODE_CASES if "shape" in case.tags} == {expected}


@pytest.mark.parametrize("case", [EQUAL, pytest.param(SPARE, marks=pytest.mark.full)], ids=lambda case: case.name)
def test_the_table_of_a_problem_is_sound(case):
    problem = make_problem(case)
    problem.table.check()
    assert problem.table.num_pages == case.num_pages == sum(-(-n // 16) for n in case.lengths) + case.spare_pages
    assert problem.table.max_blocks_per_row == max(case.num_blocks) + case.spare_blocks
    assert int(problem.table.num_free) == case.spare_pages


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_problem_has_pools_of_the_case_s_layout(layout):
    case = dataclasses.replace(RAGGED, layout=layout)
    problem, _ = abstract(case)
    expected = {"NHD": (16, 2, 16), "HND": (2, 16, 16), "head_major": (16, 16), "vllm": (2, 2, 16, 8)}[layout]
    assert problem.cache.layout == layout
    assert problem.cache.k.shape[-len(expected) :] == expected
    assert problem.cache.k.size == problem.cache.v.size == 4 * case.num_pages * 16 * 2 * 16


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.full)])
def test_a_quantised_problem_is_measured_as_it_is(kv_dtype):
    case = dataclasses.replace(RAGGED, kv_dtype=kv_dtype)
    problem = make_problem(case)
    assert problem.cache.k.dtype == kv_dtype
    assert case.kv_bytes == sum(case.lengths) * 2 * 2 * (16 + 4)
    measured = measure(problem, {"paged_jax": Contestant(attend_paged)}, 1)
    assert measured["max_error"]["paged_jax"] < 0.02
    assert set(decode.choose_peers(case, [])) == set()


def test_pages_of_a_pool_with_spare_ones_lie_all_over_it():
    case = dataclasses.replace(RAGGED, spare_pages=1000)
    held = np.asarray(make_problem(case).table.ref_counts).nonzero()[0]
    assert held.max() > 500


def error(name: str, case: DecodeCase, **setting) -> float:
    problem = make_problem(case)
    peer = PEERS[name]
    cache, table = peer.prepare(problem)
    expected = decode.reference(problem)
    out = peer.attend(problem, problem.q, cache, table, 0, **setting)
    assert out.shape == problem.q.shape
    return float(jnp.abs(out.astype(jnp.float32) - expected).max())


@pytest.mark.parametrize("case", [EQUAL, pytest.param(SPARE, marks=pytest.mark.full)], ids=lambda case: case.name)
def test_gathered_and_dense_peers_compute_attention(case):
    assert error("xla gather + dense", case) < 0.02
    assert error("cuDNN, not paged", case, implementation="xla") < 0.02


@pytest.mark.parametrize("k_splits", [1, 4])
def test_jax_s_op_computes_attention(k_splits):
    if not PEERS["JAX's own op"].fits(SPARE):
        pytest.skip("this JAX has no such op any more")
    assert error("JAX's own op", SPARE, k_splits=k_splits, interpret=True) < 0.02


def attend_pages_of_flash3(q, k_cache, v_cache, *, cache_seqlens, page_table, num_splits):
    """What flash-attn3-jax documents, in XLA."""
    assert num_splits >= 1
    k, v = (pool[page_table].reshape(q.shape[0], -1, *pool.shape[2:]) for pool in (k_cache, v_cache))
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=cache_seqlens)


def test_flash_attention_gets_pools_and_tables_as_documented(monkeypatch):
    stand_in = type("Module", (), {"flash_mha_with_kvcache": staticmethod(attend_pages_of_flash3)})
    monkeypatch.setitem(sys.modules, "flash_attn3_jax", stand_in)
    assert error("flash-attn3-jax", EQUAL, num_splits=2) < 0.02


def test_peers_are_left_out_by_rule(monkeypatch):
    def names(case):
        return set(decode.choose_peers(case, []))

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert names(HEADLINE[0]) == set(PEERS)
    assert names(RAGGED) == set(PEERS) - {"cuDNN, paged", "flash-attn3-jax"}  # pool of another size; head_dim 16
    assert "cuDNN, paged" not in names(dataclasses.replace(HEADLINE[0], spare_pages=1))
    assert "JAX's own op" not in names(dataclasses.replace(RAGGED, head_dim=80))
    for options in ({"window": 9}, {"soft_cap": 9.0}, {"sinks": True}, {"layout": "HND"}, {"dtype": "float32"}):
        assert names(dataclasses.replace(HEADLINE[0], **options)) == set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert names(HEADLINE[0]) == {"xla gather + dense", "cuDNN, not paged", "cuDNN, paged"}
    assert set(decode.choose_peers(HEADLINE[0], ["cuDNN"])) == {"cuDNN, not paged", "cuDNN, paged"}
    assert decode.choose_peers(HEADLINE[0], None) == {}


@pytest.mark.parametrize("case", [HEADLINE[0], HEADLINE[4], HEADLINE[8]], ids=lambda case: case.name)
def test_jax_s_op_lowers_for_cuda_at_full_size(case):
    peer = PEERS["JAX's own op"]
    if not peer.fits(case):
        pytest.skip("this JAX has no such op any more")
    problem, operands = abstract(case, peer.prepare)
    for setting in peer.settings:
        assert "triton" in lower_for_cuda(functools.partial(peer.attend, problem, layer=1, **setting), *operands)


@pytest.mark.parametrize("name", ["cuDNN, not paged", "cuDNN, paged"])
def test_cudnn_s_peers_lower_for_cuda_at_full_size(name, monkeypatch):
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    peer = PEERS[name]
    problem, operands = abstract(HEADLINE[0], peer.prepare)
    trace = jax.jit(functools.partial(peer.attend, problem, layer=1)).trace(*operands)
    text = trace.lower(lowering_platforms=("cuda",)).as_text()  # without the mesh of `lower_for_cuda`: it wants devices
    assert text.count("__cudnn$fmhaSoftmax") == 1
    assert ("\\22is_paged_attention\\22: true" in text) == (name == "cuDNN, paged")


def test_every_setting_of_a_sweep_lowers_for_cuda():
    contestants = sweep("16,32:1,2:3:0,1,2")
    assert len(contestants) == 12
    assert {"16x1x3 in automatic", "32x2x3 in 2"} < set(contestants)
    problem, operands = abstract(HEADLINE[2])
    for contestant in contestants.values():
        lower_for_cuda(functools.partial(contestant.attend, problem, layer=1), *operands)


@pytest.mark.full
def test_the_fastest_setting_that_works_counts_and_failures_have_reasons():
    def attend(problem, q, cache, table, layer, *, offset):
        if offset == 1:
            raise AssertionError
        return attend_paged(problem, q, cache, table, layer) + offset

    def fail(*_):
        raise ValueError("does not fit\nat all")

    settings = ({"offset": 1}, {"offset": 2})
    contestants = {"picky": Contestant(attend, settings=settings), "broken": Contestant(fail)}
    contestants["hopeless"] = Contestant(attend, settings=settings[:1])
    measured = measure(make_problem(RAGGED), {"paged_jax": Contestant(attend_paged)} | contestants, 2)
    assert measured["failures"] == {"broken": "ValueError: does not fit", "hopeless": "AssertionError: "}
    assert measured["settings"] == {"picky": {"offset": 2}}
    assert measured["microseconds"].keys() == {"paged_jax", "picky"}
    assert measured["max_error"]["paged_jax"] < 0.02
    assert measured["max_error"]["picky"] > 1.9
    assert measured["kv_bytes"] == RAGGED.kv_bytes


def test_the_command_writes_its_results(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(decode, "DECODE_CASES", (dataclasses.replace(RAGGED, tags=frozenset({"tiny"})), EQUAL))
    monkeypatch.setattr(decode, "measure_ceiling", lambda _: 10.0)
    out, table = tmp_path / "out.json", tmp_path / "out.csv"
    main(["--tag", "tiny", "--rounds", "2", "--peers", "gather", "--out", str(out), "--csv", str(table)])
    results = json.loads(out.read_text())
    assert results["ceiling_gb_per_s"] == 10.0
    assert results["cases"].keys() == {"ragged"}
    assert results["cases"]["ragged"]["microseconds"].keys() == {"paged_jax", "xla gather + dense"}
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["contestant"] for line in lines] == ["paged_jax", "xla gather + dense"]
    assert float(lines[0]["us"]) == pytest.approx(results["cases"]["ragged"]["microseconds"]["paged_jax"], abs=0.01)
    assert "ragged: 0 MB a layer" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_plot_shows_every_contestant(tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="needs the extra 'benchmarks'")
    from examples.benchmarks import plot

    cases = {
        "small": {"kv_bytes": 4_000_000, "microseconds": {"paged_jax": 10.0, "a peer": 20.0}},
        "large": {"kv_bytes": 1_000_000_000, "microseconds": {"paged_jax": 250.0}},
    }
    results = {"ceiling_gb_per_s": 4500.0, "environment": {"device": "a GPU"}, "cases": cases}
    source = tmp_path / "results.json"
    source.write_text(json.dumps(results))
    drawing = source.with_suffix(suffix)
    plot.main([str(source)] + (["--out", str(drawing)] if suffix == ".png" else []))
    content = drawing.read_bytes()
    if suffix == ".svg":
        for text in ("paged_jax", "a peer", "4500 GB/s", "a GPU"):
            assert text in content.decode()
        plot.main([str(source)])
        assert drawing.read_bytes() == content
    else:
        assert content.startswith(b"\x89PNG")
