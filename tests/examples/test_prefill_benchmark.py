"""The prefill benchmark on a host without a GPU: its data is sound, and who can run there computes attention."""

import json

import numpy as np
import pytest

from examples.benchmarks import decode, prefill
from pallas_kernels.cases import PREFILL_CASES, PrefillCase

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
TINY = (
    PrefillCase("fresh", (20, 20), (20, 20), "fresh", **SIZES),
    PrefillCase("chunk", (40, 19), (9, 3), "chunk", **SIZES),
    PrefillCase("decoding", (40, 19), (1, 1), "mixed", **SIZES),
    PrefillCase("shared", (40, 37), (1, 1), "cascade", shared_tokens=32, **SIZES),
)


@pytest.mark.full
def test_the_command_measures_who_can_run_and_says_why_others_cannot(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(decode, "_BYTES_IN_ROTATION", 1)
    monkeypatch.setattr(decode, "_SECONDS_PER_RUN", 0.0)
    monkeypatch.setattr(decode, "_DEPTH", 2)
    monkeypatch.setattr(prefill, "PREFILL_CASES", TINY)
    monkeypatch.setattr(prefill, "measure_ceiling", lambda _: 10.0)
    out = tmp_path / "out.json"
    prefill.main(["--rounds", "1", "--out", str(out)])
    cases = json.loads(out.read_text())["cases"]
    assert cases.keys() == {case.name for case in TINY}
    assert cases["fresh"]["microseconds"].keys() >= {"paged_jax", "paged_jax, pages", "XLA"}
    assert cases["fresh"]["failures"].keys() >= {"cuDNN"}
    assert cases["chunk"]["microseconds"].keys() == {"paged_jax", "paged_jax, pages"}
    assert cases["decoding"]["microseconds"].keys() == {"paged_jax, pages", "paged_jax, decode"}
    assert cases["shared"]["microseconds"].keys() == {"paged_jax, cascade", "paged_jax, each row"}
    for case in cases.values():
        assert max(case["max_error"].values()) < 0.02
    assert "failed: " in capsys.readouterr().out


def test_operations_are_those_of_visible_keys():
    case = PrefillCase("two rows", (5, 3), (2, 3), "chunk", num_heads=2, num_kv_heads=1, head_dim=16)
    visible = sum((np.arange(length - count, length) + 1).sum() for length, count in ((5, 2), (3, 3)))
    assert case.flops == 4 * visible * 2 * 16
    assert case.max_context == 3


def test_cases_have_their_own_names():
    assert len({case.name for case in PREFILL_CASES}) == len(PREFILL_CASES)


@pytest.mark.parametrize("case", [case for case in PREFILL_CASES if case.tag == "mixed"], ids=lambda case: case.name)
def test_a_mixed_batch_is_measured_beside_its_parts(case):
    names = prefill.contestants(case).keys()
    assert "paged_jax, pages" in names
