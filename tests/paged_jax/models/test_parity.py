"""Every family equals transformers over pages: whole prompts, prompts in pieces, and decode token by token."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from forwards import load_forward
from paged_runs import new_pool, one_by_one, packed
from tiny_checkpoints import TINY

from paged_jax.models.weights.checkpoint import open_checkpoint
from paged_jax.models.weights.config_json import read_config

pytestmark = pytest.mark.parity

LENGTHS = (40, 17, 6)  # one prompt past every window, one that ends inside a page, one shorter than a window
PIECES = ((0, 13, 14, 29), (0, 0, 5, 9), (0, 2, 4, 4))  # where each prompt is cut; the rest is decoded
SIZE, PAGE_SIZE = 64, 5


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


def transformers_model(name: str, folder: Path) -> Any:
    """A random model of transformers, and its files. Norms, biases and sinks are random too, logits reach about 4."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model_type, fields = TINY[name]
    config = transformers.AutoConfig.for_model(model_type, **fields)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for path, weight in theirs.named_parameters():
            is_scale = path.endswith("norm.weight") and not model_type.startswith("gemma")
            weight.normal_(float(is_scale), 0.3 if weight.ndim == 1 else 0.1)
    theirs.save_pretrained(folder, max_shard_size="100KB")
    return theirs


def transformers_logits(theirs: Any, tokens: np.ndarray) -> np.ndarray:
    """[rows, T, V]; what follows a row's end changes nothing before it."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return theirs(torch.tensor(tokens)).logits.numpy()


def assert_close(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TINY)
def test_prompts_pieces_and_decode_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = transformers_model(name, tmp_path)
    tokens = np.random.default_rng(0).integers(3, 97, (len(LENGTHS), max(LENGTHS)))
    expected = [row[:n] for row, n in zip(transformers_logits(theirs, tokens), LENGTHS, strict=True)]
    assert np.abs(expected[0]).max() > 0.5
    rows = [row[:n].tolist() for row, n in zip(tokens, LENGTHS, strict=True)]
    model = load_forward(open_checkpoint(tmp_path), read_config(tmp_path), scan_layers=True)

    whole, _, table = packed(model, *new_pool(model, len(rows), PAGE_SIZE), rows, SIZE)
    table.check()
    assert_close(whole, expected)

    pool, found = new_pool(model, len(rows), PAGE_SIZE), []
    for i in range(3):
        pieces = [row[cuts[i] : cuts[i + 1]] for row, cuts in zip(rows, PIECES, strict=True)]
        logits, *pool = packed(model, *pool, pieces, SIZE)
        found.append(logits)
    logits, *_ = one_by_one(model, *pool, [row[cuts[-1] :] for row, cuts in zip(rows, PIECES, strict=True)])
    found.append(logits)
    assert_close([np.concatenate(parts) for parts in zip(*found, strict=True)], expected)


def test_longrope_serves_rows_past_the_original_length_as_transformers_does(tmp_path: Path) -> None:
    theirs = transformers_model("phi3 longrope", tmp_path)
    config = read_config(tmp_path)
    tokens = np.random.default_rng(0).integers(3, 97, (1, 80))
    expected = transformers_logits(theirs, tokens)[0]
    for length, is_close in ((80, True), (64, False)):
        model = load_forward(open_checkpoint(tmp_path), config.serving(length), scan_layers=True)
        (got,), *_ = packed(model, *new_pool(model, 1, PAGE_SIZE, 80), tokens.tolist(), 80)
        assert (np.abs(got - expected).max() < 1e-5) == is_close
