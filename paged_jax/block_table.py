"""Tokens → block table → slots: which page of the pool holds which block of which row.

The table is a frozen pytree of int32 arrays and every method is a pure, vectorised function of it, so that pages are
allocated and freed inside `jax.jit`, `lax.scan` and `lax.while_loop`. The idea is vLLM's block manager (Kwon et al.,
"Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023), held as arrays.

Refusal is a value: when an operation cannot be carried out for all rows it changes nothing and returns `ok=False`.
Padding is an index just past the end (page `num_pages`, slot `num_pages * page_size`), which scatters drop; never −1,
which JAX wraps to the last element.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Int, Int32

if TYPE_CHECKING:
    from paged_jax.step import PagedStep

_INT32_MAX = 2**31 - 1


@functools.partial(jax.tree_util.register_dataclass, data_fields=["src", "dst"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PageCopies:
    """Pages to copy before the next write: page `src[i]` to page `dst[i]`; padding entries are `num_pages` in both.

    No page is both a source and a destination, so the order of the copies does not matter.
    """

    src: Int32[Array, " n"]
    dst: Int32[Array, " n"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pages", "lengths", "ref_counts", "retained", "free_pages", "num_free"],
    meta_fields=["page_size"],
)
@dataclasses.dataclass(frozen=True)
class BlockTable:
    """Row × block → page, with the pool's reference counts and its stack of free pages.

    Sizes: B rows, M blocks per row at most, P pages of `page_size` tokens each.
    """

    pages: Int32[Array, "B M"]  # entries past a row's last block are num_pages, never read
    lengths: Int32[Array, " B"]  # tokens held by each row; 0 = empty row
    ref_counts: Int32[Array, " P"]  # holders of each page: rows + retained
    retained: Int32[Array, " P"]  # of those, references held from outside (a prefix cache)
    free_pages: Int32[Array, " P"]  # a stack: the first num_free entries are free
    num_free: Int32[Array, ""]
    page_size: int

    @staticmethod
    def create(num_pages: int, page_size: int, max_rows: int, max_blocks_per_row: int) -> BlockTable:
        """An empty table: every row empty, every page free.

        Args:
            num_pages: pages in the pool, P.
            page_size: tokens per page; any positive number.
            max_rows: rows, B.
            max_blocks_per_row: blocks a row may hold, M; a row holds at most `M * page_size` tokens.

        Raises:
            ValueError: a size is not a positive int, or the pool's slots do not fit int32.
        """
        require_positive(
            num_pages=num_pages, page_size=page_size, max_rows=max_rows, max_blocks_per_row=max_blocks_per_row
        )
        require_int32_slots(num_pages, page_size)
        require_int32_slots(max_blocks_per_row, page_size)
        return BlockTable(
            pages=jnp.full((max_rows, max_blocks_per_row), num_pages, jnp.int32),
            lengths=jnp.zeros(max_rows, jnp.int32),
            ref_counts=jnp.zeros(num_pages, jnp.int32),
            retained=jnp.zeros(num_pages, jnp.int32),
            free_pages=jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32),  # page 0 is on top
            num_free=jnp.int32(num_pages),
            page_size=int(page_size),
        )

    @property
    def num_pages(self) -> int:
        """Pages in the pool, P; also the padding entry of `pages`."""
        return self.ref_counts.shape[0]

    @property
    def max_rows(self) -> int:
        """Rows, B; also the padding row."""
        return self.pages.shape[0]

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks a row may hold, M."""
        return self.pages.shape[1]

    @property
    def num_blocks(self) -> Int32[Array, " B"]:
        """Blocks held by each row."""
        return self._blocks(self.lengths)

    def extend(self, num_tokens: Int[Array, " B"]) -> tuple[BlockTable, Bool[Array, ""]]:
        """Grows each row by `num_tokens[row]` tokens, taking pages from the free stack where a new block begins.

        Refused (`ok` False, table unchanged): too few free pages, a row longer than `max_blocks_per_row` blocks, a
        negative count. O(B·M) int32 work, whatever the pool's size.

        Raises:
            ValueError: `num_tokens` is not an integer array of shape [B].
        """
        num_tokens = _per_row("num_tokens", num_tokens, self.max_rows)
        room = self.max_blocks_per_row * self.page_size - self.lengths
        growth = jnp.clip(num_tokens, 0, room)  # a huge count must not wrap around before it is refused
        needed = jnp.sum(self._blocks(self.lengths + growth) - self.num_blocks, dtype=jnp.int32)
        ok = jnp.all(growth == num_tokens) & (needed <= self.num_free)
        lengths = self.lengths + jnp.where(ok, growth, 0)

        first, end = self.num_blocks[:, None], self._blocks(lengths)[:, None]
        block = _iota(self.max_blocks_per_row)
        is_new = (first <= block) & (block < end)
        taken_by_earlier_rows = jnp.cumsum(end - first, axis=0, dtype=jnp.int32) - (end - first)
        page = self._from_top(taken_by_earlier_rows + block - first)
        table = dataclasses.replace(
            self,
            pages=jnp.where(is_new, page, self.pages),
            lengths=lengths,
            ref_counts=self.ref_counts.at[jnp.where(is_new, page, self.num_pages)].set(1, mode="drop"),
            num_free=self.num_free - jnp.where(ok, needed, 0),
        )
        return table, ok

    def truncate(self, lengths: Int[Array, " B"]) -> tuple[BlockTable, PageCopies, Bool[Array, ""]]:
        """Drops each row's tokens from position `lengths[row]` on; pages that lose their last holder become free.

        A length above the row's own changes nothing for that row. A row cut inside a page that others hold too gets a
        page of its own, so that its next write shows nowhere else: apply the returned copies (one entry per row) with
        `cache.copy_pages` before the next write. Rows cut inside the same page, which nobody else holds, leave it to
        the last of them.

        Refused (`ok` False, table unchanged, copies all padding): a negative length, too few pages for the copies.
        O(B·M + P) int32 work.

        Raises:
            ValueError: `lengths` is not an integer array of shape [B].
        """
        lengths = _per_row("lengths", lengths, self.max_rows)
        kept = jnp.clip(lengths, 0, self.lengths)
        table = self._drop_blocks(self._blocks(kept))

        row, block = _iota(self.max_rows), _iota(self.max_blocks_per_row)
        is_cut = (kept < self.lengths) & (kept % self.page_size != 0)
        cut_block = jnp.where(is_cut, kept // self.page_size, 0)
        page = jnp.where(is_cut, table.pages[row, cut_block], self.num_pages)
        cutters = jnp.zeros(self.num_pages, jnp.int32).at[page].add(1, mode="drop")
        last_cutter = jnp.zeros(self.num_pages, jnp.int32).at[page].max(row, mode="drop")
        all_holders_cut = (cutters == table.ref_counts).at[page].get(mode="fill", fill_value=False)
        may_keep = all_holders_cut & (last_cutter.at[page].get(mode="fill", fill_value=-1) == row)
        copies = is_cut & ~may_keep

        needed = jnp.sum(copies, dtype=jnp.int32)
        ok = jnp.all(lengths >= 0) & (needed <= table.num_free)
        own = jnp.where(copies, table._from_top(jnp.cumsum(copies, dtype=jnp.int32) - 1), self.num_pages)
        shared = jnp.where(copies, page, self.num_pages)
        table = dataclasses.replace(
            table,
            pages=jnp.where(copies[:, None] & (block == cut_block[:, None]), own[:, None], table.pages),
            lengths=kept,
            ref_counts=table.ref_counts.at[shared].add(-1, mode="drop").at[own].set(1, mode="drop"),
            num_free=table.num_free - needed,
        )
        padding = jnp.full(self.max_rows, self.num_pages, jnp.int32)
        return (*_select(ok, (table, PageCopies(shared, own)), (self, PageCopies(padding, padding))), ok)

    def release(self, rows: Bool[Array, " B"]) -> BlockTable:
        """Ends the rows marked True: they become empty, and pages that lose their last holder become free.

        O(B·M + P) int32 work.

        Raises:
            ValueError: `rows` is not a bool array of shape [B].
        """
        rows = jnp.asarray(rows)
        if rows.shape != (self.max_rows,) or rows.dtype != jnp.bool_:
            raise ValueError(f"rows: expected bool[{self.max_rows}], got {rows.dtype}{list(rows.shape)}")
        table = self._drop_blocks(jnp.where(rows, 0, self.num_blocks))
        return dataclasses.replace(table, lengths=jnp.where(rows, 0, self.lengths))

    def slots(self, positions: Int[Array, "..."], rows: Int[Array, "..."]) -> Int32[Array, "..."]:
        """The slot of the token at each position of each row; the two arrays are broadcast together.

        The padding slot `num_pages * page_size` stands for a position outside [0, length) or a row outside [0, B).

        Raises:
            ValueError: an argument is not of an integer dtype, or the shapes do not broadcast.
        """
        positions, rows = jnp.broadcast_arrays(as_int32("positions", positions), as_int32("rows", rows))
        row = jnp.clip(rows, 0, self.max_rows - 1)
        held = (row == rows) & (positions >= 0) & (positions < self.lengths[row])
        position = jnp.where(held, positions, 0)
        slot = self.pages[row, position // self.page_size] * self.page_size + position % self.page_size
        return jnp.where(held, slot, self.num_pages * self.page_size)

    def step(
        self, num_tokens: Int[Array, " B"], *, size: int | None = None
    ) -> tuple[BlockTable, PagedStep, Bool[Array, ""]]:
        """Grows the rows and describes the forward pass over their new tokens: see `paged_jax.step.plan_step`."""
        from paged_jax.step import plan_step  # the step knows the table; only this shorthand points back

        return plan_step(self, num_tokens, size=size)

    def check(self) -> None:
        """Checks every invariant on the host, for concrete arrays.

        Raises:
            ValueError: names the first broken invariant, with its row, block and page.
        """
        pages, lengths, ref_counts, retained, free_pages = (
            np.asarray(array) for array in (self.pages, self.lengths, self.ref_counts, self.retained, self.free_pages)
        )
        num_free, capacity = int(self.num_free), self.max_blocks_per_row * self.page_size

        for row in np.flatnonzero((lengths < 0) | (lengths > capacity)):
            raise ValueError(f"row {row}: expected a length in [0, {capacity}], got {lengths[row]}")
        if not 0 <= num_free <= self.num_pages:
            raise ValueError(f"num_free: expected a count in [0, {self.num_pages}], got {num_free}")

        held = np.arange(self.max_blocks_per_row) < -(-lengths[:, None] // self.page_size)
        for row, block in np.argwhere(held & ((pages < 0) | (pages >= self.num_pages))):
            raise ValueError(
                f"row {row}, block {block}: expected a page in [0, {self.num_pages}), got {pages[row, block]}"
            )
        for row, block in np.argwhere(~held & (pages != self.num_pages)):
            raise ValueError(
                f"row {row}, block {block}: expected padding ({self.num_pages}) past the row's last block, "
                f"got page {pages[row, block]}"
            )
        for row in range(self.max_rows):
            _, first_block = np.unique(pages[row, held[row]], return_index=True)
            repeated = np.setdiff1d(np.arange(held[row].sum()), first_block)
            if repeated.size:
                raise ValueError(
                    f"row {row}, block {repeated[0]}: page {pages[row, repeated[0]]} stands in an earlier block too"
                )

        stack = free_pages[:num_free]
        for entry in np.flatnonzero((stack < 0) | (stack >= self.num_pages)):
            raise ValueError(f"free_pages[{entry}]: expected a page in [0, {self.num_pages}), got {stack[entry]}")
        times_free = np.bincount(stack, minlength=self.num_pages)
        for page in np.flatnonzero(times_free > 1):
            raise ValueError(f"page {page}: expected at most once on the free stack, got {times_free[page]} times")

        holders = np.bincount(pages[held], minlength=self.num_pages)
        for page in np.flatnonzero(retained < 0):
            raise ValueError(f"page {page}: expected a retained count of at least 0, got {retained[page]}")
        for page in np.flatnonzero(ref_counts != holders + retained):
            raise ValueError(
                f"page {page}: expected ref_counts = rows + retained = {holders[page]} + {retained[page]}, "
                f"got {ref_counts[page]}"
            )
        for page in np.flatnonzero((ref_counts > 0) & (times_free > 0)):
            rows = np.argwhere(held & (pages == page))
            where = f"row {rows[0][0]}, block {rows[0][1]}" if rows.size else "a reference from outside"
            raise ValueError(f"page {page}: on the free stack, but held by {where}")
        for page in np.flatnonzero((ref_counts == 0) & (times_free == 0)):
            raise ValueError(f"page {page}: neither free nor held (free + held must be all {self.num_pages} pages)")

    def _blocks(self, lengths: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """Blocks that so many tokens fill or begin; ceil without the overflow of `lengths + page_size - 1`."""
        return lengths // self.page_size + (lengths % self.page_size != 0)

    def _from_top(self, rank: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """The rank-th page from the top of the free stack; anything where the stack is not that deep."""
        return self.free_pages.at[self.num_free - 1 - rank].get(mode="clip")

    def _drop_blocks(self, kept: Int32[Array, " B"]) -> BlockTable:
        """Keeps only the first `kept` blocks of each row and frees what nobody holds; lengths are the caller's."""
        block = _iota(self.max_blocks_per_row)
        is_dropped = (kept[:, None] <= block) & (block < self.num_blocks[:, None])
        ref_counts = self.ref_counts.at[jnp.where(is_dropped, self.pages, self.num_pages)].add(-1, mode="drop")
        is_freed = (self.ref_counts > 0) & (ref_counts == 0)
        stack_entry = jnp.where(is_freed, self.num_free + jnp.cumsum(is_freed, dtype=jnp.int32) - 1, self.num_pages)
        return dataclasses.replace(
            self,
            pages=jnp.where(is_dropped, self.num_pages, self.pages),
            ref_counts=ref_counts,
            free_pages=self.free_pages.at[stack_entry].set(_iota(self.num_pages), mode="drop"),
            num_free=self.num_free + jnp.sum(is_freed, dtype=jnp.int32),
        )


def require_positive(**sizes: int) -> None:
    """Raises ValueError, by name, for a size that is not a positive int."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"{name}: expected a positive int, got {size!r}")


def require_int32_slots(num_pages: int, page_size: int) -> None:
    """Raises ValueError for so many pages that their tokens cannot be counted in int32."""
    if int(num_pages) * int(page_size) > _INT32_MAX:
        raise ValueError(
            f"pages: slots and positions are int32, expected at most {_INT32_MAX} tokens, "
            f"got {num_pages} pages of {page_size}"
        )


def _iota(size: int) -> Int32[Array, " size"]:
    return jnp.arange(size, dtype=jnp.int32)  # int32 also where 64-bit types are enabled


def as_int32(name: str, array: ArrayLike) -> Int32[Array, "..."]:
    """The integers as int32; those that do not fit become the nearest that does, and so stay out of range.

    Raises:
        ValueError: `array` is not of an integer dtype.
    """
    if not isinstance(array, jax.Array):  # to numpy first: JAX would let a large integer wrap around
        array = np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name}: expected an integer dtype, got {array.dtype}{list(array.shape)}")
    if jnp.iinfo(array.dtype).max > _INT32_MAX:
        array = array.clip(max(jnp.iinfo(array.dtype).min, -_INT32_MAX - 1), _INT32_MAX)
    return jnp.asarray(array).astype(jnp.int32)


def packed_rows(ends: Int32[Array, " B"], size: int) -> Int32[Array, " size"]:
    """The row that each of `size` packed entries belongs to, where row r's end before `ends[r]`; B past the last.

    O(B + size) work.
    """
    return jnp.cumsum(jnp.zeros(size, jnp.int32).at[ends].add(1, mode="drop"), dtype=jnp.int32)


def _per_row(name: str, array: Int[Array, " B"], rows: int) -> Int32[Array, " B"]:
    array = as_int32(name, array)
    if array.shape != (rows,):
        raise ValueError(f"{name}: expected one entry per row, shape ({rows},), got shape {array.shape}")
    return array


def _select(ok: Bool[Array, ""], new, old):
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
