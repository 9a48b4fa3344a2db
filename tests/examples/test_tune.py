"""The tuner on a host without a GPU: it keeps the fastest that is right, writes after every shape, and goes on."""

import dataclasses
import json
import types

import numpy as np
import pytest

from examples.benchmarks import tune
from examples.benchmarks.decode import Chain, Problem, Run
from pallas_kernels.cases import DECODE_CASES, DecodeCase
from pallas_kernels.device import current_device
from pallas_kernels.paged_decode import config as configs
from pallas_kernels.paged_decode.config import Config, Shape

HEURISTIC, FAST, WRONG, BROKEN = KERNELS = [Config(tile, 1, 4) for tile in (16, 32, 64, 128)]
FASTEST = dataclasses.replace(FAST, programs_per_processor=8)
MICROSECONDS = {HEURISTIC: 4.0, FAST: 3.0, FASTEST: 2.0, WRONG: 1.0}
GRID = [*KERNELS, *(dataclasses.replace(config, programs_per_processor=8) for config in KERNELS)]

TAGS = frozenset({"tiny"})
CASES = (
    DecodeCase("short", (9, 1), 4, 2, 16, tags=TAGS),
    DecodeCase("long", (40, 33), 4, 2, 16, layout="HND", tags=TAGS),  # the library cannot tell it from the first
    DecodeCase("other", (9,), 4, 2, 16, tags=TAGS),
    DecodeCase("untagged", (9,), 4, 4, 16),
)
SHAPE = Shape(2, 16, 16, "bfloat16", "bfloat16", "NHD", 4)


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Kernels of which one is wrong and one does not compile, with times that are made up; which were compiled."""
    compiled = []

    def attend(problem, q, cache, table, layer, *, config, num_partitions):  # noqa: ARG001
        assert num_partitions is None
        if config.tile == BROKEN.tile:
            raise ValueError("out of shared memory")
        return q + 1 if config.tile == WRONG.tile else q

    def compile_chains(wanted):
        compiled.extend(attend.keywords["config"] for attend, _, _ in wanted)
        return [Chain(attend, 1) for attend, _, _ in wanted]

    def start(chain, operands, setting, expected):
        return Run(chain, operands, 1, setting, float(np.abs(chain.run(*operands, 0) - expected).max()))

    def seconds_per_call(attend, operands, calls):  # noqa: ARG001
        return MICROSECONDS.get(attend.keywords["config"], 5.0) / 1e6

    monkeypatch.setattr(configs, "candidates", lambda *_: GRID)
    monkeypatch.setattr(tune, "attend_configured", attend)

    def make_problem(case):
        q = np.zeros((len(case.lengths), case.num_heads, case.head_dim), np.float32)
        return Problem(case, q, types.SimpleNamespace(num_layers=1), None, {})

    monkeypatch.setattr(tune, "make_problem", make_problem)
    monkeypatch.setattr(tune, "reference", lambda problem: problem.q)
    monkeypatch.setattr(tune, "compile_chains", compile_chains)
    monkeypatch.setattr(tune, "start", start)
    monkeypatch.setattr(tune, "seconds_per_call", seconds_per_call)
    monkeypatch.setattr(tune, "DECODE_CASES", CASES)
    return compiled


def test_it_keeps_the_fastest_that_is_right_and_the_library_reads_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(configs, "TUNED", tmp_path)
    out = tmp_path / configs.file_name("a GPU")
    tune.main(["--tag", "tiny", "--out", str(out)])
    shown = capsys.readouterr().out
    assert "2 shapes of 3 cases to tune, 0 done before: 12 compilations" in shown
    assert "50.0% of the heuristic's time" in shown
    first, second = json.loads(out.read_text())["entries"]
    assert first["microseconds"] == {"short": 2.0, "long": 2.0}
    assert first["heuristic_microseconds"] == {"short": 4.0, "long": 4.0}
    assert second["microseconds"].keys() == {"other"}
    device = current_device()._replace(kind="a GPU")
    assert configs.choose(None, SHAPE, device) == FASTEST
    configs.tuned.cache_clear()


def test_it_goes_on_with_what_is_left(tmp_path, compiled, capsys):
    out = tmp_path / "new folder" / "out.json"
    tune.main(["--tag", "tiny", "--only", "other", "--out", str(out)])
    tune.main(["--tag", "tiny", "--out", str(out)])
    assert "1 shapes of 2 cases to tune, 1 done before" in capsys.readouterr().out
    assert [list(entry["microseconds"]) for entry in json.loads(out.read_text())["entries"]] == [
        ["other"], ["short", "long"],
    ]  # fmt: skip
    del compiled[:]
    tune.main(["--tag", "tiny", "--out", str(out)])
    assert not compiled


def test_it_stops_in_time_and_keeps_what_is_done(tmp_path, capsys):
    out = tmp_path / "out.json"
    tune.main(["--tag", "tiny", "--only", "other", "--out", str(out)])
    done = out.read_text()
    tune.main(["--tag", "tiny", "--seconds", "0", "--out", str(out)])
    assert "out of time; 1 shapes are done" in capsys.readouterr().out
    assert out.read_text() == done


def test_entries_of_another_device_are_not_mixed_with_ours(tmp_path):
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"environment": {"device": "another"}, "entries": []}))
    with pytest.raises(SystemExit, match=r"expected device .*, got another"):
        tune.main(["--out", str(out)])


def test_headline_cases_that_differ_in_their_lengths_only_share_a_shape():
    headline = [case for case in DECODE_CASES if "headline" in case.tags]
    shapes = tune.by_shape(headline)
    assert sum(map(len, shapes.values())) == len(headline) == 9
    (single,) = (cases for shape, cases in shapes.items() if shape.kv_rows == 8)
    assert [case.name for case in single] == ["1 x 32768", "1 x 1024"]
