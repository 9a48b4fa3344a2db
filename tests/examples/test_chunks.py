"""Prompts cut into chunks: nothing is lost or padded in vain, and what a chunk promises of its rows is true."""

import numpy as np
import pytest

from decoder.chunks import cut_prompts

BUDGETS = [1, 2, 7, 63, 64, 65, 100, 128, 1000, 2048]
LENGTHS = [[1], [2], [1, 1, 1], [65], [66], [300, 1, 2, 40], [1, 5, 1, 700, 1], [129, 129], [33] * 9, [3000]]


def prompts_of(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 1000, length).tolist() for length in lengths]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_chunks_hold_the_prompts_but_their_last_tokens(lengths: list[int]) -> None:
    prompts = prompts_of(lengths)
    for budget in BUDGETS:
        rows: list[list[int]] = [[] for _ in prompts]
        for chunk in cut_prompts(prompts, budget):
            held = [len(row) for row in rows]
            ends = np.cumsum(chunk.num_tokens)
            for row, piece in zip(rows, np.split(chunk.tokens, ends), strict=False):
                row += piece.tolist()
            is_continued = any(before and added for before, added in zip(held, chunk.num_tokens, strict=True))
            assert chunk.max_context == (None if is_continued else 0)
            assert chunk.num_tokens.min() >= 0
        assert rows == [prompt[:-1] for prompt in prompts]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_chunks_are_few_and_of_one_length(lengths: list[int]) -> None:
    prompts, total = prompts_of(lengths), sum(lengths) - len(lengths)
    for budget in BUDGETS:
        chunks = cut_prompts(prompts, budget)
        assert len(chunks) == -(-total // budget)
        assert len({chunk.tokens.size for chunk in chunks}) <= 1
        assert all(chunk.tokens.size <= budget for chunk in chunks)
        assert all(chunk.num_tokens.any() for chunk in chunks)
        assert sum(chunk.tokens.size for chunk in chunks) - total < 64 * max(1, len(chunks))
        assert all(array.dtype == np.int32 for chunk in chunks for array in (chunk.tokens, chunk.num_tokens))
