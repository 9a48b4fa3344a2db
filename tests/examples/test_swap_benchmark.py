"""The swap benchmark on a host without a GPU: rows leave and come back, and what they hold is counted right."""

import json

import pytest

from examples.benchmarks import swap


@pytest.mark.full
def test_the_command_measures_rows_and_a_plain_array(monkeypatch, tmp_path):
    for name, value in {"LAYERS": 2, "PAGE_SIZE": 4, "KV_HEADS": 2, "HEAD_DIM": 16}.items():
        monkeypatch.setattr(swap, name, value)
    out = tmp_path / "out.json"
    swap.main(["--rows", "3", "--tokens", "10", "--rounds", "1", "--out", str(out)])
    results = json.loads(out.read_text())
    assert results["bytes"] == 3 * 3 * 4 * (2 * 2) * 2 * 16 * 2  # pages, cells, layers of K and V, heads, dims, bytes
    assert all(rate > 0 for rate in results["gb_per_s"].values())
    assert results["gb_per_s"].keys() == {"swap_out", "swap_in", "array to the host", "array from the host"}
