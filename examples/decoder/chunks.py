"""Prompts of unequal lengths → chunks of one length, each of which one call prefills."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

_BUCKET = 64  # chunks are padded to a multiple, so that few lengths compile anew


@dataclasses.dataclass(frozen=True)
class Chunk:
    tokens: np.ndarray  # int32[T], of the rows in their order, without padding between them
    num_tokens: np.ndarray  # int32[B]
    max_context: int | None  # as `prefill` takes it: 0 if no row of the chunk has tokens in an earlier one


def cut_prompts(prompts: Sequence[Sequence[int]], budget: int) -> list[Chunk]:
    """Cuts the prompts, laid end to end, into as few chunks of at most `budget` tokens as there can be.

    All chunks are of one length: a program for fresh rows and one for rows that are continued serve them. The last
    token of each prompt is left to the decode loop, whose first step makes the first new token of it.
    """
    lengths = np.array([len(prompt) - 1 for prompt in prompts], np.int64)
    ends = np.cumsum(lengths)
    count = -(-int(ends[-1]) // budget)
    if count == 0:
        return []
    size = min(budget, _round_up(-(-int(ends[-1]) // count), _BUCKET))
    packed = np.zeros(count * size, np.int32)
    packed[: ends[-1]] = np.concatenate([prompt[:-1] for prompt in prompts])

    first = np.arange(count)[:, None] * size
    done, following = (np.clip(place - (ends - lengths), 0, lengths) for place in (first, first + size))  # [chunk, row]
    num_tokens = (following - done).astype(np.int32)
    is_continued = np.any((done > 0) & (num_tokens > 0), axis=1).tolist()
    return [
        Chunk(tokens, of_rows, None if continued else 0)
        for tokens, of_rows, continued in zip(packed.reshape(count, size), num_tokens, is_continued, strict=True)
    ]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
