"""The plain-Python example is right: paged equals dense, whatever is drawn."""

import random
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "04_attention.py"


@pytest.mark.parametrize("seed", range(5))
def test_paged_equals_dense(seed, capsys):
    random.seed(seed)
    paged, dense = runpy.run_path(str(EXAMPLE))["main"]()
    assert paged == pytest.approx(dense, abs=1e-12)
    assert capsys.readouterr().out.count("\n") == 2
