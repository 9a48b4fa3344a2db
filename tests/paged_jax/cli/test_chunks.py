"""Prompts cut into chunks: nothing is lost or padded in vain, and what a chunk promises of its rows is true."""

import numpy as np
import pytest

from paged_jax.cli.chunks import cut_prompts

BUDGETS = [1, 2, 7, 63, 64, 65, 100, 128, 1000, 2048]
LENGTHS = [[1], [2], [1, 1, 1], [65], [66], [300, 1, 2, 40], [1, 5, 1, 700, 1], [129, 129], [33] * 9, [3000]]


def prompts_of(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 1000, length).tolist() for length in lengths]


CASES = pytest.mark.parametrize(
    ("lengths", "shards"),
    [(lengths, shards) for lengths in LENGTHS for shards in (1, 2, 3) if len(lengths) % shards == 0],
    ids=str,
)


@CASES
def test_the_chunks_hold_the_prompts_but_their_last_tokens(lengths: list[int], shards: int) -> None:
    prompts = prompts_of(lengths)
    for budget in BUDGETS:
        rows: list[list[int]] = [[] for _ in prompts]
        for chunk in cut_prompts(prompts, budget, shards):
            held = [len(row) for row in rows]
            starts = np.arange(shards) * (chunk.tokens.size // shards)
            for row, count in enumerate(chunk.num_tokens):
                shard = row * shards // len(rows)
                rows[row] += chunk.tokens[starts[shard] : starts[shard] + count].tolist()
                starts[shard] += count
            is_continued = any(before and added for before, added in zip(held, chunk.num_tokens, strict=True))
            assert chunk.max_context == (None if is_continued else 0)
            assert chunk.num_tokens.min() >= 0
        assert rows == [prompt[:-1] for prompt in prompts]


@CASES
def test_the_chunks_are_few_and_of_one_length(lengths: list[int], shards: int) -> None:
    prompts, most = prompts_of(lengths), (np.reshape(lengths, (shards, -1)) - 1).sum(axis=1).max()
    for budget in BUDGETS:
        chunks = cut_prompts(prompts, budget, shards)
        assert len(chunks) == -(-most // budget)
        assert len({chunk.tokens.size for chunk in chunks}) <= 1
        assert all(chunk.tokens.size <= shards * budget for chunk in chunks)
        assert all(chunk.num_tokens.any() for chunk in chunks)
        assert sum(chunk.tokens.size // shards for chunk in chunks) - most < 64 * max(1, len(chunks))
        assert all(array.dtype == np.int32 for chunk in chunks for array in (chunk.tokens, chunk.num_tokens))


def test_prompts_that_do_not_divide_over_the_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="prompts: expected a multiple of the 2 shards of rows, got 3"):
        cut_prompts([[1], [2, 3], [4]], 64, 2)
