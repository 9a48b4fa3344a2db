"""The generation benchmark on a tiny model: it measures who is there, and its dense forward is the model's."""

import json
import sys

import numpy as np
import pytest
from forwards import load_forward

from examples.benchmarks import generation
from paged_jax.models.weights.config_gguf import gguf_config
from paged_jax.models.weights.gguf import open_gguf

SIZES = {"2 x 5": (2, 5)}


@pytest.mark.full
def test_the_command_measures_decoding_and_reading(monkeypatch, tmp_path, model):
    monkeypatch.setattr(generation, "fetch_smollm2", lambda: model)
    monkeypatch.setattr(generation, "PREFILLS", SIZES)
    monkeypatch.setitem(sys.modules, "examples.benchmarks.hugging_face", None)  # as where there is no transformers
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["generation.py", "--tokens", "2", "--rounds", "2", "--out", str(out)])
    generation.main()
    results = json.loads(out.read_text())
    assert results["tokens_per_second"].keys() == {"paged_jax batch 1", "paged_jax batch 8"}
    assert results["compile_seconds"].keys() == results["tokens_per_second"].keys()
    assert {len(runs) for runs in results["seconds"].values()} == {2}
    (rates,), (seconds,) = results["prefill_tokens_per_second"].values(), results["prefill_seconds"].values()
    for kind in ("paged_jax", "dense forward"):
        assert rates[kind] == pytest.approx(10 / np.median(seconds[kind]))


def test_the_forward_beside_it_is_the_model_s(tiny, model):
    file = open_gguf(model)
    decoder = load_forward(file, gguf_config(file), np.dtype("float32"))
    rows = ([3, 1, 4, 1, 5], [2, 7, 1, 8, 2])
    hidden = generation.forward(decoder, np.concatenate(rows).astype(np.int32), rows=2)
    expected = np.concatenate([tiny.logits(row) for row in rows])
    np.testing.assert_allclose(decoder.func.decoder(*decoder.args).logits(hidden), expected, rtol=0, atol=2e-4)
