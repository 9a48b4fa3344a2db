"""The write benchmark on a host without a GPU: both ways leave the same pools behind."""

import json

import pytest

from examples.benchmarks import write


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["triton_interpret"])
def test_the_command_measures_both_ways(monkeypatch, tmp_path, implementation):
    for name, value in {"LAYERS": 2, "PAGE_SIZE": 4, "KV_HEADS": 2, "HEAD_DIM": 16, "_CALLS": 1}.items():
        monkeypatch.setattr(write, name, value)
    monkeypatch.setattr(write, "DTYPES", ("bfloat16", "int8"))
    monkeypatch.setattr(write, "TOKENS", (5,))
    monkeypatch.setattr(write, "PAGES", (8,))
    choose = write.backends.write
    monkeypatch.setattr(
        write.backends,
        "write",
        lambda *args, **options: choose(
            *args, **options | ({"implementation": implementation} if options["implementation"] == "triton" else {})
        ),
    )
    out = tmp_path / "out.json"
    write.main(["--rounds", "1", "--out", str(out)])
    cases = json.loads(out.read_text())["cases"]
    assert [case["dtype"] for case in cases] == ["bfloat16", "int8"]
    assert all(case["same"] and case["microseconds"].keys() == {"xla", "triton"} for case in cases)
