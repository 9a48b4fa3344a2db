"""Rows that make room for others: their pages go to host memory and come back, so that nothing is computed again.

`swap_out` gathers the pages of rows into a small pool of their own, moves that to the host and ends the rows; `swap_in`
starts rows on new pages and scatters the small pool back. What comes back is what went, bit for bit, in other places.
(vLLM preempts requests in this way: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023.)

Both are called on the host, and run the same programs whatever the rows hold: only `max_pages` is a shape.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from paged_jax.block_table import BlockTable, packed_rows
from paged_jax.cache import PagedCache
from paged_jax.cache_check import validate_pools, validate_table
from paged_jax.integers import require_positive
from pallas_kernels.integers import as_int32


@functools.partial(jax.tree_util.register_dataclass, data_fields=["pool", "lengths"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class SwappedRows:
    """What rows held when they left: entry i's blocks lie in the pool one after another, behind those of entry i − 1.

    In pinned host memory where the device has it, so that it comes and goes at the speed of the device's host link.
    """

    pool: PagedCache  # of as many pages as were allowed; those past the last block hold anything
    lengths: Int32[Array, " n"]  # tokens of each entry; 0 where the entry was no row, or nothing was swapped


def swap_out(
    table: BlockTable, cache: PagedCache, rows: Int[Array, " n"], *, max_pages: int
) -> tuple[BlockTable, SwappedRows, Bool[Array, ""]]:
    """Moves the pages of rows to the host, scales too, and ends the rows.

    A page that others hold as well is copied, and stays with them. Entries outside [0, B) are passed over. Neither
    argument is donated.

    Args:
        rows: the rows to swap out.
        max_pages: pages that the rows hold together at most; so many are copied. Each number compiles once.

    Returns:
        The table without the rows, what they held, and `ok`. Refused (`ok` False, table unchanged, lengths all 0): a
        row that stands twice, rows that hold more than `max_pages` pages together.

    Raises:
        ValueError: `rows` is not a 1-D integer array, `max_pages` not a positive int, or the table for another cache.
    """
    require_positive(max_pages=max_pages)
    validate_table(cache, table)
    table, swapped, ok = _gather(table, cache, _validate_rows(rows), max_pages)
    return table, dataclasses.replace(swapped, pool=jax.tree.map(_on_host, swapped.pool)), ok


def swap_in(
    table: BlockTable, cache: PagedCache, swapped: SwappedRows, rows: Int[Array, " n"]
) -> tuple[BlockTable, PagedCache, Bool[Array, ""]]:
    """Starts empty rows with what rows held that were swapped out, on pages of their own.

    They need not be the rows that left. Entries whose row is outside [0, B) are passed over, and can be swapped in
    another time: `swapped` stays as it is.

    The cache is donated, so use the one that comes back. It comes back committed to its device (as by
    `jax.device_put`), for which JAX compiles the programs that use it once more unless it was so before.

    Args:
        rows: where each entry of `swapped` goes.

    Returns:
        The table and the cache with the rows, and `ok`. Refused (`ok` False, table and cache unchanged): a row that
        holds tokens or stands twice, too few free pages, more blocks than a row may hold.

    Raises:
        ValueError: `rows` does not have one integer per entry, the table is for another cache, or the rows come from a
            cache of other layers, page size, kv heads, head_dims, dtype or layout.
    """
    validate_table(cache, table)
    validate_pools(swapped.pool)
    rows = _validate_rows(rows)
    if rows.shape != swapped.lengths.shape:
        raise ValueError(f"rows: expected one for each of {swapped.lengths.size} entries, got shape {rows.shape}")
    expected, got = _kind(cache), _kind(swapped.pool)
    if expected != got:
        raise ValueError(f"swapped: expected rows of a cache with {expected}, got {got}")
    table, page, ok = _start_rows(table, swapped.lengths, rows, swapped.pool.num_pages)
    on_device = jax.tree.map(lambda host, pool: jax.device_put(host, pool.sharding), swapped.pool, cache)
    return table, _scatter(cache, on_device, page), ok


@functools.partial(jax.jit, static_argnames="max_pages")
def _gather(table, cache, rows, max_pages):
    row, times = _counted(table, rows)
    lengths = table.lengths.at[row].get(mode="fill", fill_value=0)
    blocks = _num_blocks(table, lengths)
    ok = jnp.all(times <= 1) & (jnp.sum(blocks, dtype=jnp.int32) <= max_pages)
    page = _packed_pages(table, row, blocks, max_pages)

    def take(pool, axis):
        index = (*[slice(None)] * axis, page)
        return pool.at[index].get(mode="clip", wrap_negative_indices=False)

    pool = {name: take(getattr(cache, name), axis) for name, axis in cache.page_axes.items()}
    swapped = SwappedRows(dataclasses.replace(cache, **pool), jnp.where(ok, lengths, 0))
    return table.release((times > 0) & ok), swapped, ok


@functools.partial(jax.jit, static_argnames="max_pages")
def _start_rows(table, lengths, rows, max_pages):
    row, times = _counted(table, rows)
    may_start = jnp.all((times == 0) | ((times == 1) & (table.lengths == 0)))
    num_tokens = jnp.zeros(table.max_rows, jnp.int32).at[row].set(jnp.where(may_start, lengths, 0), mode="drop")
    table, has_room = table.extend(num_tokens)
    ok = may_start & has_room
    row = jnp.where(ok, row, table.max_rows)
    return table, _packed_pages(table, row, _num_blocks(table, lengths), max_pages), ok


@functools.partial(jax.jit, donate_argnames="cache")
def _scatter(cache, pool, page):
    # Distinct pages past the end stand for those that go nowhere: XLA then scatters without atomics.
    page = jnp.where(page < cache.num_pages, page, cache.num_pages + jnp.arange(page.size, dtype=jnp.int32))

    def put(pool, pages, axis):
        index = (*[slice(None)] * axis, page)
        return pool.at[index].set(pages, mode="drop", unique_indices=True, wrap_negative_indices=False)

    pools = {name: put(getattr(cache, name), getattr(pool, name), axis) for name, axis in cache.page_axes.items()}
    return dataclasses.replace(cache, **pools)


def _counted(table: BlockTable, rows: Int32[Array, " n"]) -> tuple[Int32[Array, " n"], Int32[Array, " B"]]:
    """The rows, B for those that are none, and how often each stands there."""
    row = jnp.where((rows >= 0) & (rows < table.max_rows), rows, table.max_rows)
    return row, jnp.zeros(table.max_rows, jnp.int32).at[row].add(1, mode="drop")


def _num_blocks(table: BlockTable, lengths: Int32[Array, " n"]) -> Int32[Array, " n"]:
    return lengths // table.page_size + (lengths % table.page_size != 0).astype(jnp.int32)


def _packed_pages(
    table: BlockTable, row: Int32[Array, " n"], blocks: Int32[Array, " n"], size: int
) -> Int32[Array, " size"]:
    """The page of each entry's blocks, entry after entry; padding for those of no row and past the last block."""
    if not blocks.size:  # of no rows nothing can be gathered
        return jnp.full(size, table.num_pages, jnp.int32)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    entry = packed_rows(ends, size)
    block = jnp.arange(size, dtype=jnp.int32) - (ends - blocks).at[entry].get(mode="fill", fill_value=0)
    row = row.at[entry].get(mode="fill", fill_value=table.max_rows)
    return table.pages.at[row, block].get(mode="fill", fill_value=table.num_pages)


def _on_host(array: Array) -> Array:
    """In pinned host memory, sharded as it was; in numpy's where the device has none."""
    sharding = array.sharding
    if all("pinned_host" in {memory.kind for memory in d.addressable_memories()} for d in sharding.device_set):
        return jax.device_put(array, sharding.with_memory_kind("pinned_host"))
    return jax.device_get(array)


def _kind(cache: PagedCache) -> str:
    """What caches must have in common for pages to go from one to the other."""
    sizes = f"{cache.num_layers} layers, pages of {cache.page_size} cells, {cache.num_kv_heads} kv heads"
    dims = f"head_dims {cache.head_dim} and {cache.v_head_dim}"
    return f"{sizes}, {dims}, dtypes {cache.k.dtype} and {cache.v.dtype}, layout {cache.layout!r}"


def _validate_rows(rows: Int[Array, " n"]) -> Int32[Array, " n"]:
    rows = as_int32("rows", rows)
    if rows.ndim != 1:
        raise ValueError(f"rows: expected a 1-D array, got shape {rows.shape}")
    return rows
