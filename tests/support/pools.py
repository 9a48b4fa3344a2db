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

# Largest magnitude of the dtypes whose vectors come with a scale each.
QUANTISED = {jnp.int8: 127, jnp.float8_e4m3fn: 448, jnp.float8_e5m2: 57344}
_LARGEST = {np.dtype(dtype): largest for dtype, largest in QUANTISED.items()}

# Dtypes of a pool whose writes must be in place.
_WIDENED = pytest.mark.xfail(
    jax.__version_info__ < (0, 11) and jax.default_backend() == "cpu",
    reason="XLA of JAX 0.10 widens a bfloat16 array to float32 and back wherever a CPU updates part of it",
)
WRITTEN_IN_PLACE = (jnp.float32, jnp.float16, pytest.param(jnp.bfloat16, marks=_WIDENED), jnp.int8)
_BY_DEFAULT = {
    (jnp.float32, "NHD"),
    (jnp.float32, "vllm"),
    (jnp.float16, "HND"),
    (jnp.float16, "head_major"),
    (jnp.bfloat16, "NHD"),
    (jnp.int8, "vllm"),
}
WRITTEN_IN_PLACE_IN_LAYOUTS = [
    pytest.param(
        dtype,
        layout,
        marks=[_WIDENED] * (dtype == jnp.bfloat16) + [pytest.mark.full] * ((dtype, layout) not in _BY_DEFAULT),
    )
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16, jnp.int8)
    for layout in (LAYOUTS if dtype != jnp.int8 else ("NHD", "vllm"))
]


def of_tokens(dtype):
    """The dtype of what is written to a pool of this dtype."""
    return jnp.float32 if dtype in QUANTISED else dtype


@dataclasses.dataclass(frozen=True)
class Pool:
    cache: paged_jax.PagedCache
    table: paged_jax.BlockTable
    k_rows: list  # of [length, K, H], as the cache holds them: in float64 values times scales if it is quantised
    v_rows: list  # of [length, K, Hv]
    lengths: np.ndarray
    layer: int


def int32(array):
    """On the device; `jnp.asarray` compiles a program for each shape."""
    return jax.device_put(np.array(array, np.int32))


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
        pages=int32(pages),
        lengths=int32(lengths),
        ref_counts=int32(counts),
        retained=int32(retained),
        free_pages=int32(stack),
        num_free=int32(len(free)),
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


def cache_of(k, v, layout="NHD", k_scale=None, v_scale=None):
    """A cache that holds K [L, P, C, K, H] and V, laid out."""
    k_scale, v_scale = (None if scale is None else jnp.array(scale, jnp.float32) for scale in (k_scale, v_scale))
    return paged_jax.PagedCache(
        k=jnp.array(laid_out(np.asarray(k), layout, "k")),  # copied: JAX cannot donate what numpy holds
        v=jnp.array(laid_out(np.asarray(v), layout, "v")),
        k_scale=k_scale,
        v_scale=v_scale,
        layout=layout,
        page_size=k.shape[2],
    )


def contents(cache):
    """K and V of a cache as [L, P, C, K, H]; of a quantised one in float64, values times scales."""
    k, v = nhd(cache.k, cache.layout, "k"), nhd(cache.v, cache.layout, "v")
    if cache.k_scale is None:
        return k, v
    return dequantised(k, np.asarray(cache.k_scale)), dequantised(v, np.asarray(cache.v_scale))


def quantised(vectors, dtype):
    """The nearest values [.., H] of a dtype of one byte, and their scales [..]; no vector may be zero."""
    scale = np.abs(vectors).max(-1) / np.float32(_LARGEST[dtype])
    values = vectors / scale[..., None]
    return (np.rint(values) if dtype == np.int8 else values).astype(dtype), scale


def dequantised(values, scale):
    with np.errstate(invalid="ignore"):  # dead cells may hold anything
        return values.astype(np.float64) * scale.astype(np.float64)[..., None]


def _poisoned(shape, dtype, poison, rng):
    if dtype == np.int8:  # of NaN and infinity it has no notion
        return rng.integers(-128, 128, shape, dtype) if poison is NOISE else np.full(shape, 127, dtype)
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
    num_pages=None,
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
    wide = np.dtype(np.float32) if dtype in _LARGEST else dtype
    rows = [
        [(magnitude * values.standard_normal((n, num_kv_heads, dim))).astype(wide) for n in lengths] for dim in dims
    ]
    blocks = -(-lengths // page_size)
    num_pages = int(blocks.sum()) + spare_pages if num_pages is None else num_pages
    order = iter(places.permutation(num_pages).tolist())
    pages = [[next(order) for _ in range(n)] for n in blocks]
    if shared is not None:
        parent, child, n = shared
        pages[child][:n] = pages[parent][:n]
        for row in rows:
            row[child][: n * page_size] = row[parent][: n * page_size]

    def placed(rows, shape, dtype):
        pool = _poisoned((layers, num_pages, page_size, num_kv_heads, *shape), dtype, poison, places)
        for row, row_pages in zip(rows, pages, strict=True):
            for i, page in enumerate(row_pages):
                cells = row[i * page_size : (i + 1) * page_size]
                pool[layer, page, : len(cells)] = cells
        return pool

    table = block_table(pages, lengths, num_pages, page_size, width=width, garbage=garbage, seed=placement)
    if dtype not in _LARGEST:
        cache = cache_of(*(placed(of_rows, (dim,), dtype) for dim, of_rows in zip(dims, rows, strict=True)), layout)
        return Pool(cache, table, *rows, lengths, layer)
    held, scales = zip(
        *([*zip(*(quantised(row, dtype) for row in of_rows), strict=True)] for of_rows in rows), strict=True
    )
    cache = cache_of(
        *(placed(of_rows, (dim,), dtype) for dim, of_rows in zip(dims, held, strict=True)),
        layout,
        *(placed(of_rows, (), np.dtype(np.float32)) for of_rows in scales),
    )
    rows = [[*map(dequantised, values, factors)] for values, factors in zip(held, scales, strict=True)]
    return Pool(cache, table, *rows, lengths, layer)


_WHOLE = re.compile(r"= \(?\w+\[([\d,]*)\]\S* (copy|copy-start|convert|select|dynamic-slice|slice|transpose)\(")


def pool_copies(hlo, cache):
    """The operations of a compiled program that make as many elements as one layer's pool holds, or all its scales."""
    smallest = min(math.prod(pool.shape[1:]) for pool in (cache.k, cache.v))
    scales = [] if cache.k_scale is None else [cache.k_scale.shape, cache.k_scale.shape[1:]]
    found = ((tuple(int(n) for n in shape.split(",") if n), name) for shape, name in _WHOLE.findall(hlo))
    return [f"{name}{shape}" for shape, name in found if math.prod(shape) >= smallest or shape in scales]
