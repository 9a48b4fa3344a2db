"""Run a decoder over pages, for the tests of the model: prompts packed into one pass, and token by token."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import BlockTable, PagedCache


def new_pool(
    model: jax.tree_util.Partial, rows: int, page_size: int, tokens: int = 64
) -> tuple[PagedCache, BlockTable]:
    """Room for `tokens` tokens a row; cells that nothing was written to hold NaN."""
    config, blocks = model.func.config, -(-tokens // page_size)
    sizes = (config.num_layers, rows * blocks, page_size, config.attention.num_kv_heads, config.attention.head_dim)
    cache = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), PagedCache.create(*sizes, jnp.float32))
    return cache, BlockTable.create(rows * blocks, page_size, rows, blocks)


@functools.partial(jax.jit, static_argnames="size", donate_argnames="cache")
def forward(
    model: jax.tree_util.Partial, cache: PagedCache, table: BlockTable, tokens: Any, num_tokens: Any, size: int | None
) -> tuple[jax.Array, PagedCache, BlockTable]:
    table, step, _ = table.step(num_tokens, size=size)
    logits, cache = model(tokens, step, cache)
    return logits, cache, table


def packed(
    model: jax.tree_util.Partial, cache: PagedCache, table: BlockTable, pieces: Sequence[Sequence[int]], size: int
) -> tuple[list[np.ndarray], PagedCache, BlockTable]:
    """The logits of each row's next tokens, which are packed into one pass and padded to `size`."""
    counts = [len(piece) for piece in pieces]
    tokens = np.zeros(size, np.int32)
    tokens[: sum(counts)] = np.concatenate(pieces)
    logits, cache, table = forward(model, cache, table, tokens, np.array(counts, np.int32), size)
    return np.split(np.asarray(logits)[: sum(counts)], np.cumsum(counts)[:-1]), cache, table


def one_by_one(
    model: jax.tree_util.Partial, cache: PagedCache, table: BlockTable, rows: Sequence[Sequence[int]]
) -> tuple[list[np.ndarray], PagedCache, BlockTable]:
    """The logits of each row's next tokens, one of every row a step; rows end one after the other."""
    found: list[list[np.ndarray]] = [[] for _ in rows]
    for step in range(max(map(len, rows))):
        is_live = np.array([step < len(row) for row in rows])
        tokens = np.array([row[step] if live else 0 for row, live in zip(rows, is_live, strict=True)], np.int32)
        logits, cache, table = forward(model, cache, table, tokens, is_live.astype(np.int32), None)
        for row in np.flatnonzero(is_live):
            found[row].append(np.asarray(logits)[row])
    return [np.array(row) for row in found], cache, table
