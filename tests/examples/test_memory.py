"""The replay counts rows and waste as one can by hand, and the results in the repository reach their targets."""

import collections
import json
from pathlib import Path

import numpy as np
import pytest

from examples.benchmarks import memory
from paged_jax import BlockTable


@pytest.mark.parametrize(
    ("num_pages", "page_size", "rows", "waste"),
    [(40, 1, 6, 0), (7, 5, 3, 1 - 6 / 10), (5, 8, 5, 1 - 6 / 8)],  # the last one reserves each row contiguously
)
def test_equal_rows_fill_the_pool(num_pages, page_size, rows, waste):
    """Requests of six tokens that all end at once."""
    table = BlockTable.create(num_pages, page_size, max_rows=8, max_blocks_per_row=-(-8 // page_size))
    measured = memory.replay(table, collections.deque([(6, 6)] * 100), turns=4)
    assert measured == pytest.approx({"rows": rows, "tokens_per_row": 6, "waste": waste, "sent_back": 0})


def test_the_youngest_rows_are_sent_back_when_the_pool_runs_out():
    """Four rows of one token fill the pool, from which two can grow to eight: turn and turn about."""
    table = BlockTable.create(4, 4, max_rows=8, max_blocks_per_row=2)
    measured = memory.replay(table, collections.deque([(1, 8)] * 100), turns=4)
    assert measured == pytest.approx({"rows": 3, "tokens_per_row": 10 / 3, "waste": 1 - 10 / 16, "sent_back": 4})


@pytest.mark.parametrize("mean", memory.MEAN_LENGTHS)
def test_requests_have_the_mean_that_they_are_named_for(mean):
    starts, ends = np.array(memory.requests(mean)).T
    assert ends.mean() == pytest.approx(mean, rel=0.05)  # the cut takes a little off the longest
    assert ends.max() <= memory.MAX_LENGTH
    assert ((starts > 0) & (starts <= ends)).all()
    assert memory.requests(mean) == memory.requests(mean)


def test_results_and_plot_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "PAGE_SIZES", (16,))
    out = tmp_path / "memory.json"
    memory.main(["--turns", "6", "--out", str(out)])
    results = json.loads(out.read_text())
    assert results["environment"]["versions"]["jax"]
    for found in results["mean_lengths"].values():
        assert found["page_sizes"]["8192"]["rows"] == memory.POOL_BYTES / 2**17 / 8192  # 128 KiB of K and V a token
        assert found == found | memory.judge(found["page_sizes"])
    assert capsys.readouterr().out.count("target reached") == 3
    for text in ("mean length 2048", "contiguous", "Llama 3 8B"):
        assert text in (tmp_path / "memory.svg").read_text()


def test_the_measured_results_reach_the_target():
    folder = Path(memory.__file__).parent / "results"
    results = json.loads((folder / "memory.json").read_text())
    for mean in memory.MEAN_LENGTHS:
        page_sizes = results["mean_lengths"][str(mean)]["page_sizes"]
        assert [int(page_size) for page_size in page_sizes] == [*memory.PAGE_SIZES, memory.CONTIGUOUS]
        assert memory.judge(page_sizes)["is_target_reached"]
        assert max(measured["rows"] for measured in page_sizes.values()) < memory.MAX_ROWS
        assert page_sizes["1"]["waste"] == 0
    assert (folder / "memory.svg").stat().st_size > 0
