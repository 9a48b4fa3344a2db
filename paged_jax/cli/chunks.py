"""Prompts of unequal lengths → chunks of one length, each of which one call prefills."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

_BUCKET = 64  # chunks are padded to a multiple, so that few lengths compile anew


@dataclasses.dataclass(frozen=True)
class Chunk:
    tokens: np.ndarray  # int32[T], of the rows in their order, without padding between those of a shard
    num_tokens: np.ndarray  # int32[B]
    max_context: int | None  # as `prefill` takes it: 0 if no row of the chunk has tokens in an earlier one


def cut_prompts(prompts: Sequence[Sequence[int]], budget: int, num_shards: int = 1) -> list[Chunk]:
    """Cuts the prompts, laid end to end, into as few chunks of at most `budget` tokens as there can be.

    All chunks are of one length: a program for fresh rows and one for rows that are continued serve them. The last
    token of each prompt is left to the decode loop, whose first step makes the first new token of it.

    Args:
        num_shards: shards of rows, which share the prompts equally; each has `budget` tokens of every chunk.

    Raises:
        ValueError: the prompts do not divide over the shards.
    """
    if len(prompts) % num_shards:
        raise ValueError(f"prompts: expected a multiple of the {num_shards} shards of rows, got {len(prompts)}")
    lengths = np.array([len(prompt) - 1 for prompt in prompts], np.int64).reshape(num_shards, -1)
    ends = np.cumsum(lengths, axis=1)
    most = int(ends[:, -1].max())
    count = -(-most // budget)
    if count == 0:
        return []
    size = min(budget, _round_up(-(-most // count), _BUCKET))
    packed = np.zeros((num_shards, count * size), np.int32)
    packed[np.arange(count * size) < ends[:, -1:]] = np.concatenate([prompt[:-1] for prompt in prompts])
    by_chunk = packed.reshape(num_shards, count, size).swapaxes(0, 1).reshape(count, -1)

    first = np.arange(count)[:, None, None] * size
    done, following = (np.clip(place - (ends - lengths), 0, lengths) for place in (first, first + size))
    num_tokens = (following - done).astype(np.int32)  # [chunk, shard, row]
    is_continued = np.any((done > 0) & (num_tokens > 0), axis=(1, 2)).tolist()
    return [
        Chunk(tokens, of_rows, None if continued else 0)
        for tokens, of_rows, continued in zip(by_chunk, num_tokens.reshape(count, -1), is_continued, strict=True)
    ]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
