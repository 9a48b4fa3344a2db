"""Pools as a long-lived server has them: pages in any order, and everything that no row owns poisoned."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax

NOISE = "noise"
POISONS = (np.nan, np.inf, 1e30, NOISE)

# What a table holds past a row's last block.
PADDING, MINUS_ONE, HUGE, OTHERS = "num_pages", "-1", "huge", "other rows' pages"
GARBAGE = (PADDING, MINUS_ONE, HUGE, OTHERS)

# Where the axes [L, P, C, K, H] go in each layout; vLLM's K is packed as well.
LAYOUTS = {"NHD": (0, 1, 2, 3, 4), "HND": (0, 1, 3, 2, 4), "head_major": (0, 3, 1, 2, 4), "vllm": (0, 1, 3, 4, 2)}

# Dtypes of a pool whose writes must be in place.
WRITTEN_IN_PLACE = (
    jnp.float32,
    jnp.float16,
    pytest.param(
        jnp.bfloat16,
        marks=pytest.mark.xfail(
            jax.__version_info__ < (0, 11) and jax.default_backend() == "cpu",
            reason="XLA of JAX 0.10 widens a bfloat16 array to float32 and back wherever a CPU updates part of it",
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class Pool:
    cache: paged_jax.PagedCache
    table: paged_jax.BlockTable
    k_rows: list  # of [length, K, H], as the cache holds them
    v_rows: list  # of [length, K, Hv]
    lengths: np.ndarray
    layer: int


def block_table(rows, lengths, num_pages, page_size, *, width=None, retained=None, garbage=PADDING, seed=0):
    """A table from lists of pages; counts and the free stack follow from them."""
    rng = np.random.default_rng(seed)
    width = max([1, *map(len, rows)]) if width is None else width
    pages = np.full((len(rows), width), num_pages, np.int64)
    held = sorted({page for row in rows for page in row})
    if garbage == MINUS_ONE:
        pages[:] = -1
    elif garbage == HUGE:
        pages[:] = rng.choice([num_pages + 1, 10**6, 2**31 - 1, -(2**31)], pages.shape)
    elif garbage == OTHERS and held:
        pages[:] = rng.choice(held, pages.shape)
    counts = np.zeros(num_pages, np.int32) if retained is None else np.array(retained, np.int32)
    retained = counts.copy()
    for r, row in enumerate(rows):
        pages[r, : len(row)] = row
        np.add.at(counts, row, 1)
    free = rng.permutation(np.flatnonzero(counts == 0))
    stack = np.full(num_pages, num_pages)
    stack[: len(free)] = free
    return paged_jax.BlockTable(
        pages=jnp.asarray(pages, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        ref_counts=jnp.asarray(counts, jnp.int32),
        retained=jnp.asarray(retained, jnp.int32),
        free_pages=jnp.asarray(stack, jnp.int32),
        num_free=jnp.asarray(len(free), jnp.int32),
        page_size=page_size,
    )


def laid_out(pool, layout, name):
    """A pool [L, P, C, K, H] as a layout has it in memory; `name` is "k" or "v"."""
    pool = np.transpose(pool, LAYOUTS[layout])
    if (layout, name) == ("vllm", "k"):  # [L, P, K, H, C] → [L, P, K, H / x, C, x]
        x = 16 // pool.dtype.itemsize
        pool = pool.reshape(*pool.shape[:3], pool.shape[3] // x, x, pool.shape[4]).swapaxes(-1, -2)
    return pool


def nhd(pool, layout, name):
    """The inverse of `laid_out`."""
    pool = np.asarray(pool)
    if (layout, name) == ("vllm", "k"):
        *outer, pieces, cells, x = pool.shape
        pool = pool.swapaxes(-1, -2).reshape(*outer, pieces * x, cells)
    return np.transpose(pool, np.argsort(LAYOUTS[layout]))


def cache_of(k, v, layout="NHD"):
    """A cache that holds K [L, P, C, K, H] and V, laid out."""
    return paged_jax.PagedCache(
        k=jnp.asarray(laid_out(np.asarray(k), layout, "k")),
        v=jnp.asarray(laid_out(np.asarray(v), layout, "v")),
        k_scale=None,
        v_scale=None,
        layout=layout,
        page_size=k.shape[2],
    )


def contents(cache):
    """K and V of a cache as [L, P, C, K, H]."""
    return nhd(cache.k, cache.layout, "k"), nhd(cache.v, cache.layout, "v")


def _poisoned(shape, dtype, poison, rng):
    if poison is NOISE:
        return (100 * rng.standard_normal(shape)).astype(dtype)
    if np.isfinite(poison):
        poison = min(poison, float(jnp.finfo(dtype).max))
    return np.full(shape, poison, dtype)


def build(
    lengths,
    *,
    page_size=8,
    num_kv_heads=2,
    head_dim=16,
    v_head_dim=None,
    dtype=jnp.float32,
    layout="NHD",
    layers=1,
    layer=0,
    spare_pages=3,
    width=None,
    shared=None,
    poison=np.nan,
    garbage=PADDING,
    magnitude=1.0,
    seed=0,
    placement=0,
):
    """A cache and table that hold random rows of these lengths in `layer`; all else is poison.

    `seed` decides the values and `placement` the pages, so that one changes without the other. `shared=(parent,
    child, n)` makes the first n blocks of row `child` those of row `parent`.
    """
    dtype, lengths = np.dtype(dtype), np.asarray(lengths, np.int32)
    values, places = np.random.default_rng(seed), np.random.default_rng([placement, 1])
    dims = (head_dim, head_dim if v_head_dim is None else v_head_dim)
    rows = [
        [(magnitude * values.standard_normal((n, num_kv_heads, dim))).astype(dtype) for n in lengths] for dim in dims
    ]
    blocks = -(-lengths // page_size)
    num_pages = int(blocks.sum()) + spare_pages
    order = iter(places.permutation(num_pages).tolist())
    pages = [[next(order) for _ in range(n)] for n in blocks]
    if shared is not None:
        parent, child, n = shared
        pages[child][:n] = pages[parent][:n]
        for row in rows:
            row[child][: n * page_size] = row[parent][: n * page_size]

    pools = []
    for dim, of_rows in zip(dims, rows, strict=True):
        pool = _poisoned((layers, num_pages, page_size, num_kv_heads, dim), dtype, poison, places)
        for row, row_pages in zip(of_rows, pages, strict=True):
            for i, page in enumerate(row_pages):
                cells = row[i * page_size : (i + 1) * page_size]
                pool[layer, page, : len(cells)] = cells
        pools.append(pool)
    table = block_table(pages, lengths, num_pages, page_size, width=width, garbage=garbage, seed=placement)
    return Pool(cache_of(*pools, layout), table, *rows, lengths, layer)


_WHOLE = re.compile(r"= \(?\w+\[([\d,]*)\]\S* (copy|copy-start|convert|select|dynamic-slice|slice|transpose)\(")


def pool_copies(hlo, cache):
    """The operations of a compiled program that make as many elements as one layer's pool holds."""
    smallest = min(math.prod(pool.shape[1:]) for pool in (cache.k, cache.v))
    found = ((shape, math.prod(int(n) for n in shape.split(",") if n), name) for shape, name in _WHOLE.findall(hlo))
    return [f"{name}[{shape}]" for shape, size, name in found if size >= smallest]
