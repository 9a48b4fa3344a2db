"""A walk over the keys of one row, which the kernels share: tiles are looked up, loaded, scored and folded."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels import arguments, pairs, partition, softmax
from pallas_kernels.layouts import pool_index, pool_sizes, require_addressable
from pallas_kernels.quantisation import power_of_two, product_dtype

iota = functools.partial(jnp.arange, dtype=jnp.int32)

_SHORTEST_RUN = 8  # 16 bytes of two-byte values, what one thread loads at once


class Pools(NamedTuple):
    """What kernels read of a cache: arrays outside of a kernel, references to them inside."""

    k: Any  # pool of K, or of pairs of its values
    v: Any  # pool of V, likewise
    k_scales: Any  # [L, P, C, K] or None
    v_scales: Any
    tables: Any  # [B, M]
    layer: Any  # [1]


class Form(NamedTuple):
    """What these pools are of; static."""

    axes: tuple[str, str]  # of the pools of K and V
    dtypes: tuple[np.dtype, np.dtype]  # of their values
    num_kv_heads: int
    head_dim: int
    v_head_dim: int


class Keys(NamedTuple):
    """The keys and values of one row and kv head, for the walk over positions [begin, end)."""

    pools: Pools
    form: Form
    layer: Int32[Array, ""]
    row: Int32[Array, ""]
    kv_head: Int32[Array, ""]
    begin: int | Int32[Array, ""]
    end: Int32[Array, ""]


class Stretch(NamedTuple):
    """Tiles [first, end) of a walk, whose queries may be blind to some of their keys if they are masked."""

    first: int | Int32[Array, ""]
    end: int | Int32[Array, ""]
    masked: bool


def open_pools(
    k_pages: Float[Array, "*L P C K H"],
    v_pages: Float[Array, "*L P C K Hv"],
    k_scales: Float32[Array, "*L P C K"] | None,
    v_scales: Float32[Array, "*L P C K"] | None,
    block_tables: Int32[Array, "B M"],
    *,
    layer: int | Int[Array, ""] | None,
    layout: str,
) -> tuple[Pools, Form]:
    """The arguments of a public function, which describes them, as the walk takes them.

    Raises:
        ValueError: the layout is unknown, or the arrays are not as it says, or do not fit each other.
        NotImplementedError: a head_dim or a pool of a size that the kernels cannot do.
    """
    axes, pools, scales, layer = arguments.stack_pools(k_pages, v_pages, k_scales, v_scales, layer=layer, layout=layout)
    k_sizes, v_sizes = (pool_sizes(of, pool.shape) for of, pool in zip(axes, pools, strict=True))
    form = Form(axes, (k_pages.dtype, v_pages.dtype), k_sizes["K"], k_sizes["H"], v_sizes["H"])
    if obstacle := arguments.head_dim_obstacle(form.head_dim, form.v_head_dim):
        raise NotImplementedError(f"the kernel {obstacle}")
    tables = arguments.validate_integers("block_tables", block_tables, (None, None))
    if not tables.shape[1]:
        raise ValueError(f"block_tables: expected at least one block for each row, got shape {tables.shape}")
    k, v = (pairs.view(of, pool) for of, pool in zip(axes, pools, strict=True))
    require_addressable(k, v)
    return Pools(k, v, *scales, tables, layer), form


def share(
    num_keys: Int32[Array, ""], index: Int32[Array, ""], count: np.int32 | Int32[Array, ""], tile: int
) -> tuple[Stretch, ...]:
    """The `index`-th of `count` shares of the tiles of keys that every query sees; the one that is partial is last."""
    num_tiles = partition.ceil_div(num_keys, tile)
    each = lax.div(num_tiles + (count - 1), count)
    first = index * each
    end = jnp.minimum(first + each, num_tiles)
    full_end = jnp.maximum(first, jnp.minimum(end, lax.div(num_keys, np.int32(tile))))
    return Stretch(first, full_end, masked=False), Stretch(full_end, end, masked=True)


def fold(
    q: Array,  # [Q, dim], lanes past the head_dim zero
    query: Int32[Array, "..."],  # position of each query, [Q] or [] for one of all
    keys: Keys,
    stretches: tuple[Stretch, ...],
    *,
    tile: int,
    scale: float,
    soft_cap: float | None,
    slopes: Float32[Array, " Q"] | None,
    window: Int32[Array, ""] | None,
    ptx: bool,
) -> tuple[Float32[Array, "Q v_dim"], Float32[Array, " Q"]]:
    """The normalised output and log-sum-exp of queries over the tiles of `stretches`.

    Tile i holds the keys from `begin + i * tile` on. In a stretch that is not masked, every query sees every key. Dims
    are powers of two; those of the output past V's head_dim are zero.

    Where a pool is of pairs its tiles are in two parts, of the even and of the odd dims, and so are the queries that
    meet those of K and the output from those of V.
    """
    pools, (k_axes, v_axes), (k_values, v_values) = keys.pools, keys.form.axes, keys.form.dtypes
    page_size, v_head_dim = (pool_sizes(v_axes, pools.v.shape)[axis] for axis in "CH")
    v_lanes = pl.next_power_of_2(v_head_dim)
    run = math.gcd(tile, page_size)  # cells of one page that lie together in a tile, as long as the walk begins at 0
    is_in_runs = v_axes.endswith("C") and run >= _SHORTEST_RUN and isinstance(keys.begin, int)
    k_dtype, v_dtype = (product_dtype(q.dtype, dtype) for dtype in (k_values, v_values))
    dot = functools.partial(plgpu.dot, precision=lax.Precision.HIGHEST if k_dtype == jnp.float32 else None)
    # Numbers from pairs may be too small by a power of two: half of it goes into the product's other factor, and half
    # into the product, which is so within float32's range in between.
    is_k_paired, is_v_paired = (pool.dtype == pairs.WORD for pool in (pools.k, pools.v))
    k_half = 2.0 ** (pairs.shortfall(k_values, k_dtype, ptx=ptx) // 2 if is_k_paired else 0)
    v_half = 2.0 ** (pairs.shortfall(v_values, v_dtype, ptx=ptx) // 2 if is_v_paired else 0)
    q, scale = q * k_half, scale * k_half
    queries = [part.astype(k_dtype) for part in (pairs.split(q) if is_k_paired else (q,))]
    # A positive scale that is all that happens to a score goes into the softmax's unit instead of every score.
    is_scale_all = soft_cap is None and slopes is None and scale > 0
    unit = scale * softmax.LOG2_E if is_scale_all else softmax.LOG2_E
    # Weights times scales of V can be too small for float16: a power of two goes in there, and out at the end.
    lift = 1.0 if pools.v_scales is None else power_of_two(v_values)

    def numbers(tile, dtype, product):
        is_paired = tile.dtype == pairs.WORD
        return pairs.take_apart(tile, dtype, product, ptx=ptx) if is_paired else (tile.astype(product),)

    def fold_tile(i, state, *, masked: bool):
        position = keys.begin + i * tile + iota(tile)
        is_live = position < keys.end if masked else None
        page = load(pools.tables.at[keys.row, lax.div(position, np.int32(page_size))], is_live)
        cell = lax.rem(position, np.int32(page_size))
        load_k = _load_pieces if k_axes.endswith("x") else _load_heads
        k = load_k(keys, pools.k, k_axes, page, cell, is_live, queries[0].shape[1])
        k = numbers(k, k_values, k_dtype)
        products = (dot(of_q, of_k, trans_b=True) for of_q, of_k in zip(queries, k, strict=True))
        scores = functools.reduce(jnp.add, products)
        if pools.k_scales is not None:
            scores *= _load_scales(keys, pools.k_scales, page, cell, is_live)[None, :]
        if not is_scale_all:
            scores = scores * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        distance = position[None, :] - query.reshape(-1, 1)
        if slopes is not None:
            scores += slopes[:, None] * distance.astype(jnp.float32)
        if is_live is not None:
            is_visible = is_live[None, :] & (distance <= 0)
            if window is not None:
                is_visible &= distance > -window
            scores = jnp.where(is_visible, scores, -jnp.inf)

        def weigh(weights):
            if pools.v_scales is not None:
                weights *= lift * v_half * _load_scales(keys, pools.v_scales, page, cell, is_live)[None, :]
            return tuple(dot(weights.astype(v_dtype), of_v) for of_v in numbers(v, v_values, v_dtype))

        if is_in_runs:
            v = _load_runs(keys, pools.v, v_axes, i * tile, tile, run, v_lanes, masked=masked)
        else:
            v = _load_heads(keys, pools.v, v_axes, page, cell, is_live, v_lanes)
        return softmax.update(state, scores, weigh, unit=unit, masked=masked)

    state = softmax.init(q.shape[:1], (v_lanes, v_lanes) if is_v_paired else (v_lanes,))
    for first, end, masked in stretches:
        state = lax.fori_loop(first, end, functools.partial(fold_tile, masked=masked), state)
    outs, lse = softmax.finish(state, unit=unit)
    out = pairs.join(*outs) if is_v_paired else outs[0]
    return (out if lift == v_half == 1 else out * (v_half / lift)), lse


def load(at, mask):
    """What lies there, zero where masked; None loads everything without a mask."""
    zero = 0.0 if at.dtype.name.startswith("float8") else 0  # the lowering casts no integer to float8
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=zero)


def _load_heads(keys: Keys, ref, axes: str, page, cell, is_live, lanes: int):
    """[tile, dim]: the head's part of each token; zero in dead cells, as 0 · NaN is NaN, and past the head_dim."""
    head_dim, dim = pool_sizes(axes, ref.shape)["H"], iota(lanes)
    mask = _all_of(
        (page.size, lanes),
        None if is_live is None else is_live[:, None],
        None if lanes == head_dim else (dim < head_dim)[None, :],
    )
    at = pool_index(axes, ref.shape, L=keys.layer, P=page[:, None], C=cell[:, None], K=keys.kv_head, H=dim[None, :])
    return load(ref.at[at], mask)


def _load_pieces(keys: Keys, ref, axes: str, page, cell, is_live, lanes: int):
    """As `_load_heads`, where an `x` axis is last: in memory's order, pieces of neighbouring tokens together."""
    head_dim, x = pool_sizes(axes, ref.shape)["H"], ref.shape[-1]
    dim = x * iota(lanes // x)[:, None, None] + iota(x)[None, None, :]
    mask = _all_of(
        (lanes // x, page.size, x),
        None if is_live is None else is_live[None, :, None],
        None if lanes == head_dim else dim < head_dim,
    )
    page, cell = page[None, :, None], cell[None, :, None]
    at = pool_index(axes, ref.shape, L=keys.layer, P=page, C=cell, K=keys.kv_head, H=dim)
    return load(ref.at[at], mask).transpose(1, 0, 2).reshape(page.size, lanes)


def _load_runs(keys: Keys, ref, axes: str, first, tile: int, run: int, lanes: int, *, masked: bool):
    """As `_load_heads`, where cells are the last axis: in memory's order, runs of cells that one page holds."""
    sizes, dim = pool_sizes(axes, ref.shape), iota(lanes)
    start = first + run * iota(tile // run)
    block, cell = lax.div(start, np.int32(sizes["C"])), lax.rem(start, np.int32(sizes["C"]))
    page = load(keys.pools.tables.at[keys.row, block], start < keys.end if masked else None)
    cell, position = (array[:, None, None] + iota(run)[None, None, :] for array in (cell, start))
    mask = _all_of(
        (tile // run, lanes, run),
        position < keys.end if masked else None,
        None if lanes == sizes["H"] else (dim < sizes["H"])[None, :, None],
    )
    page, dim = page[:, None, None], dim[None, :, None]
    at = pool_index(axes, ref.shape, L=keys.layer, P=page, C=cell, K=keys.kv_head, H=dim)
    return load(ref.at[at], mask).transpose(0, 2, 1).reshape(tile, lanes)


def _load_scales(keys: Keys, ref, page, cell, is_live):
    """[tile]: what each token's quantised values are to be multiplied with; zero for dead cells."""
    return load(ref.at[keys.layer, page, cell, keys.kv_head], is_live)


def _all_of(shape: tuple[int, ...], *masks):
    masks = [jnp.broadcast_to(mask, shape) for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, masks) if masks else None
