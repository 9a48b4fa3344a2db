"""Pages → output in plain JAX: a walk over tiles of pages with an online softmax. The meaning of the op.

Queries are grouped into query tiles whose tokens belong to one row and share one walk over its pages; in decode a query
tile is one token. The walk visits the pages between the first and the last key that a tile's queries see, so its cost
follows the longest live row and not the width of the block table. Query tiles walk in waves, one wave after another:
each lasts as long as its own longest walk, so that a prompt's first tokens do not walk as far as its last ones.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from paged_jax import layouts
from paged_jax.block_table import packed_rows
from pallas_kernels import softmax

_KEYS_PER_TILE = 128
_KEYS_PER_RAGGED_TILE = 64  # the scores of a tile of many queries are soon larger than a CPU's caches
_MAX_QUERIES_PER_TILE = 32  # more leave a short row's tile half empty, and cost a CPU as much
_QUERIES_PER_WAVE = 128  # more walk further above the diagonal; fewer leave little to do in parallel


class _QueryTiles(NamedTuple):
    """W waves, or one, of S tiles of Q query tokens each; entries that hold no token have token T and position −1."""

    token: Int32[Array, "*W S Q"]  # index in the packed tokens
    row: Int32[Array, "*W S"]
    position: Int32[Array, "*W S Q"]


def attend(
    q: Float[Array, "T N H"],
    k_pages: Shaped[Array, "..."],
    v_pages: Shaped[Array, "..."],
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    *,
    layout: str,
    k_scales: Float32[Array, "L P C K"] | None,
    v_scales: Float32[Array, "L P C K"] | None,
    query_lengths: Int32[Array, " B"] | None,
    layer: Int32[Array, ""],
    window: Int32[Array, ""] | None,
    sinks: Float[Array, " N"] | None,
    alibi_slopes: Float[Array, " N"] | None,
    scale: float,
    soft_cap: float | None,
    num_partitions: int | None,
) -> tuple[Float[Array, "T N Hv"], Float32[Array, "T N"]]:
    """Attention output in q's dtype and log-sum-exp; the arguments are `paged_attention`'s, validated there.

    O(query tiles · longest walk of their wave) work; each query tile and partition of one wave holds 64 to 128 gathered
    cells at a time, or a page if that is more.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = layouts.pool_sizes(layouts.pool_axes(layout)[0], k_pages.shape)["K"]
    group = num_heads // num_kv_heads
    tiles = _decode_tiles(lengths) if query_lengths is None else _ragged_tiles(lengths, query_lengths, num_tokens)
    if num_partitions is None:
        num_partitions = 1  # one loop serves all tiles: splitting it gains nothing

    slopes = None if alibi_slopes is None else alibi_slopes.astype(jnp.float32).reshape(1, 1, num_kv_heads, group, 1, 1)

    def fold_wave(wave):
        q_tiles = q.at[wave.token].get(mode="fill", fill_value=0).astype(jnp.float32)
        q_tiles = jnp.moveaxis(q_tiles.reshape(*wave.token.shape, num_kv_heads, group, head_dim), 1, 3)
        outs, lses = _fold_partitions(
            q_tiles,
            k_pages,
            v_pages,
            k_scales,
            v_scales,
            block_tables,
            wave,
            layer,
            window,
            slopes,
            layout=layout,
            scale=scale,
            soft_cap=soft_cap,
            num_partitions=num_partitions,
        )
        out, lse = softmax.merge(outs, lses) if num_partitions > 1 else (outs[0], lses[0])  # [S, K, G, Q, ..]
        if sinks is not None:
            out, lse = softmax.with_sink(out, lse, sinks.astype(jnp.float32).reshape(1, num_kv_heads, group, 1))
        return out.astype(q.dtype), lse

    out, lse = lax.map(fold_wave, tiles)

    def unpack(tiled, empty):  # [W, S, K, G, Q, ..] → [T, N, ..]; tokens of no row keep what an empty row has
        by_token = jnp.moveaxis(tiled, 4, 2).reshape(tiles.token.size, num_heads, *tiled.shape[5:])
        packed = jnp.full((num_tokens, num_heads, *tiled.shape[5:]), empty, tiled.dtype)
        return packed.at[tiles.token.reshape(-1)].set(by_token, mode="drop")

    return unpack(out, 0), unpack(lse, -jnp.inf)


def _decode_tiles(lengths: Int32[Array, " B"]) -> _QueryTiles:
    """One wave: no row is known to be shorter than another."""
    row = jnp.arange(lengths.size, dtype=jnp.int32)[None]
    return _QueryTiles(token=row[..., None], row=row, position=lengths[None, :, None] - 1)


def _ragged_tiles(lengths: Int32[Array, " B"], query_lengths: Int32[Array, " B"], num_tokens: int) -> _QueryTiles:
    """Cuts each row's packed tokens into query tiles; rows without tokens get none."""
    rows = lengths.size
    mean_queries = max(1, num_tokens // max(1, rows))
    queries = min(_MAX_QUERIES_PER_TILE, 1 << (mean_queries - 1).bit_length())
    num_tiles = num_tokens // queries + min(rows, num_tokens)  # each row may leave one tile partly filled
    waves = max(1, -(-num_tiles * queries // _QUERIES_PER_WAVE))
    num_tiles += -num_tiles % waves

    query_lengths = jnp.maximum(query_lengths, 0)
    row_tiles = _ceil_div(query_lengths, queries)
    tile_end = jnp.cumsum(row_tiles, dtype=jnp.int32)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    row = packed_rows(tile_end, num_tiles)

    def of_row(array):  # [S, 1]; zero for the tiles past the last row's
        return array.at[row].get(mode="fill", fill_value=0)[:, None]

    first_tile, first_token = tile_end - row_tiles, jnp.cumsum(query_lengths, dtype=jnp.int32) - query_lengths
    offset = (tile[:, None] - of_row(first_tile)) * queries + jnp.arange(queries, dtype=jnp.int32)[None, :]
    is_token = offset < of_row(query_lengths)
    tiles = _QueryTiles(
        token=jnp.where(is_token, of_row(first_token) + offset, num_tokens),
        row=row,
        position=jnp.where(is_token, of_row(lengths) - of_row(query_lengths) + offset, -1),
    )
    return _QueryTiles(*(array.reshape(waves, -1, *array.shape[1:]) for array in tiles))


def _fold_partitions(
    q_tiles: Float32[Array, "S K G Q H"],
    k_pages: Shaped[Array, "..."],
    v_pages: Shaped[Array, "..."],
    k_scales: Float32[Array, "L P C K"] | None,
    v_scales: Float32[Array, "L P C K"] | None,
    block_tables: Int32[Array, "B M"],
    tiles: _QueryTiles,
    layer: Int32[Array, ""],
    window: Int32[Array, ""] | None,
    slopes: Float32[Array, "1 1 K G 1 1"] | None,
    *,
    layout: str,
    scale: float,
    soft_cap: float | None,
    num_partitions: int,
) -> tuple[Float32[Array, "R S K G Q Hv"], Float32[Array, "R S K G Q"]]:
    """Normalised output and log-sum-exp of each of R partitions of each tile's keys."""
    num_tiles, num_kv_heads, group, queries, _ = q_tiles.shape
    k_axes, v_axes = layouts.pool_axes(layout)
    v_sizes = layouts.pool_sizes(v_axes, v_pages.shape)
    page_size, v_head_dim = v_sizes["C"], v_sizes["H"]
    blocks_per_tile = max(1, (_KEYS_PER_TILE if queries == 1 else _KEYS_PER_RAGGED_TILE) // page_size)

    # Keys that some query of the tile sees: [begin, end). Each tile walks key tiles that start at a block boundary.
    query = tiles.position[None]  # [1, S, Q]: partitions come first
    end = jnp.max(query, axis=-1) + 1
    if window is None:
        begin = jnp.zeros_like(end)
    else:
        first_query = jnp.min(jnp.where(query < 0, end[..., None], query), axis=-1)
        begin = jnp.clip(first_query - window + 1, 0, end)
    first_block = lax.div(begin, jnp.int32(page_size))
    num_key_tiles = _ceil_div(_ceil_div(end, page_size) - first_block, blocks_per_tile)
    per_partition = _ceil_div(num_key_tiles, num_partitions)
    first_key_tile = jnp.arange(num_partitions, dtype=jnp.int32)[:, None] * per_partition  # [R, S]
    end_key_tile = jnp.minimum(first_key_tile + per_partition, num_key_tiles)

    def fold_tile(i, state):
        key_tile = first_key_tile + i
        block = first_block + key_tile * blocks_per_tile
        block = block[..., None] + jnp.arange(blocks_per_tile, dtype=jnp.int32)[None, None, :]  # [R, S, blocks]
        position = block[..., None] * page_size + jnp.arange(page_size, dtype=jnp.int32)[None, None, None, :]
        position = position.reshape(num_partitions, num_tiles, blocks_per_tile * page_size)
        is_live = (position >= begin[..., None]) & (position < end[..., None]) & (key_tile < end_key_tile)[..., None]
        # A block none of the queries sees may hold anything in the table: look at page 0 instead.
        is_walked = is_live.reshape(*block.shape, page_size).any(axis=-1)
        page = block_tables.at[tiles.row[None, :, None], block].get(mode="clip", wrap_negative_indices=False)
        page = jnp.where(is_walked, page, 0)

        def gather(pool, axes, scales):  # [R, S, keys, K, dim]; dead cells are zero, since 0 · NaN is NaN
            pages = layouts.take_cells(pool, axes, scales, layer=layer, page=page)
            cells = pages.reshape(*position.shape, *pages.shape[-2:])
            return jnp.where(is_live[..., None, None], cells, 0).astype(jnp.float32)

        keys = gather(k_pages, k_axes, k_scales)
        scores = jnp.einsum("skgqh,rstkh->rskgqt", q_tiles, keys, precision=lax.Precision.HIGHEST) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        distance = query[..., None] - position[:, :, None, :]  # [R, S, Q, keys]
        if slopes is not None:
            scores -= slopes * distance[:, :, None, None].astype(jnp.float32)
        is_visible = is_live[:, :, None] & (distance >= 0)
        if window is not None:
            is_visible &= distance < window
        scores = jnp.where(is_visible[:, :, None, None], scores, -jnp.inf)

        def weigh(weights):
            values = gather(v_pages, v_axes, v_scales)
            return jnp.einsum("rskgqt,rstkh->rskgqh", weights, values, precision=lax.Precision.HIGHEST)

        return softmax.update(state, scores, weigh, unit=softmax.LOG2_E, masked=True)

    state = softmax.init((num_partitions, num_tiles, num_kv_heads, group, queries), v_head_dim)
    state = lax.fori_loop(0, jnp.max(per_partition, initial=0), fold_tile, state)
    return softmax.finish(state, unit=softmax.LOG2_E)


def _ceil_div(count: Int32[Array, "..."], size: int) -> Int32[Array, "..."]:
    """Counts are not negative, so one truncating division does; `//` compiles to several operations."""
    return lax.div(count + (size - 1), jnp.int32(size))
