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
from jaxtyping import Array, Bool, Int, Int32

from paged_jax.integers import require_int32_slots, require_positive
from paged_jax.table_check import check_table
from pallas_kernels.integers import as_int32

if TYPE_CHECKING:
    from paged_jax.step import PagedStep


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
        new_blocks = self._blocks(self.lengths + growth) - self.num_blocks
        rank = jnp.cumsum(new_blocks, dtype=jnp.int32)  # pages for this row and those before it
        needed = rank[-1]
        ok = jnp.all(growth == num_tokens) & (needed <= self.num_free)
        lengths = self.lengths + jnp.where(ok, growth, 0)

        first, end = self.num_blocks[:, None], self._blocks(lengths)[:, None]
        block = _iota(self.max_blocks_per_row)[None, :]
        is_new = (first <= block) & (block < end)
        page = self._from_top((rank - new_blocks)[:, None] + block - first)
        from_top = _iota(min(self.num_pages, self.pages.size))  # no extension takes more pages than these
        taken = jnp.where(ok & (from_top < needed), self._from_top(from_top), self.num_pages)
        table = dataclasses.replace(
            self,
            pages=jnp.where(is_new, page, self.pages),
            lengths=lengths,
            ref_counts=self.ref_counts.at[taken].set(1, mode="drop"),
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

        row, block = _iota(self.max_rows), _iota(self.max_blocks_per_row)[None, :]
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

    def fork(
        self, parents: Int[Array, " n"], children: Int[Array, " n"]
    ) -> tuple[BlockTable, PageCopies, Bool[Array, ""]]:
        """Starts each child row as a copy of its parent: both hold the parent's full pages.

        A partly filled last page, which both rows would go on to write, becomes a page of the child's own: apply the
        returned copies (one entry per child) with `cache.copy_pages` before the next write. A parent may have several
        children. It is read as it was before the call; an empty parent has empty children. Entries whose parent or
        child is outside [0, B) do nothing. (Copy-on-write as in vLLM's parallel sampling, at the fork itself: a later
        `extend` never has to copy.)

        Refused (`ok` False, table unchanged, copies all padding): a child that holds tokens (a live row forked onto
        itself too) or stands twice, too few pages for the copies. O(n·M + B) int32 work, whatever the pool's size.

        Raises:
            ValueError: the arguments are not two integer arrays of the same shape [n].
        """
        parents, children = as_int32("parents", parents), as_int32("children", children)
        if parents.ndim != 1 or parents.shape != children.shape:
            raise ValueError(
                f"parents, children: expected two 1-D arrays of one length, got shapes {parents.shape}, "
                f"{children.shape}"
            )
        is_real = self._is_row(parents) & self._is_row(children)
        parent, child = jnp.where(is_real, parents, 0), jnp.where(is_real, children, self.max_rows)
        lengths = self.lengths[parent]
        is_copied = is_real & (lengths % self.page_size != 0)
        needed = jnp.sum(is_copied, dtype=jnp.int32)
        ok = self._may_start(child) & (needed <= self.num_free)

        is_copied &= ok
        own = jnp.where(is_copied, self._from_top(jnp.cumsum(is_copied, dtype=jnp.int32) - 1), self.num_pages)
        num_full, block = (lengths // self.page_size)[:, None], _iota(self.max_blocks_per_row)[None, :]
        pages = jnp.where((block < num_full) & (is_real & ok)[:, None], self.pages[parent], self.num_pages)
        pages = jnp.where(block == num_full, own[:, None], pages)
        last = self.pages[parent, jnp.where(is_copied, lengths // self.page_size, 0)]
        table = self._start(jnp.where(ok, child, self.max_rows), pages, lengths)
        table = dataclasses.replace(table, num_free=self.num_free - jnp.where(ok, needed, 0))
        return table, PageCopies(src=jnp.where(is_copied, last, self.num_pages), dst=own), ok

    def adopt(
        self, rows: Int[Array, " n"], pages: Int[Array, "n m"], num_tokens: Int[Array, " n"]
    ) -> tuple[BlockTable, Bool[Array, ""]]:
        """Starts each empty row on pages that are held already: its first `num_tokens` tokens lie in them.

        The pages must be full and stay as they are (a cached prefix): the row reads them and never writes them, since
        it goes on at a page boundary. Entries of `pages` behind a row's tokens are not read, and entries whose row is
        outside [0, B) do nothing.

        Refused (`ok` False, table unchanged): a row that holds tokens or stands twice; a page that is free, outside
        [0, P), or twice in one row; a `num_tokens` that is negative, no multiple of `page_size`, more than m pages
        hold, or more than `max_blocks_per_row` blocks. O(n·(M + m log m) + B) int32 work, whatever the pool's size.

        Raises:
            ValueError: the arguments are not integer arrays of shapes [n], [n, m] and [n].
        """
        rows, pages, num_tokens = (
            as_int32(name, array) for name, array in (("rows", rows), ("pages", pages), ("num_tokens", num_tokens))
        )
        if rows.ndim != 1 or pages.ndim != 2 or not rows.shape == pages.shape[:1] == num_tokens.shape:
            raise ValueError(
                f"rows, pages, num_tokens: expected shapes [n], [n, m], [n], got {rows.shape}, {pages.shape}, "
                f"{num_tokens.shape}"
            )
        is_real = self._is_row(rows)
        num_tokens = jnp.where(is_real, num_tokens, 0)
        most = min(pages.shape[1], self.max_blocks_per_row) * self.page_size
        is_whole = (num_tokens >= 0) & (num_tokens <= most) & (num_tokens % self.page_size == 0)
        is_read = _iota(pages.shape[1])[None, :] < (num_tokens // self.page_size)[:, None]
        held = self._held(pages)
        in_order = jnp.sort(jnp.where(is_read, held, self.num_pages), axis=1)
        is_repeated = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] < self.num_pages)
        row = jnp.where(is_real, rows, self.max_rows)
        ok = jnp.all(is_whole) & jnp.all(~is_read | (held < self.num_pages)) & ~jnp.any(is_repeated)
        ok &= self._may_start(row)

        adopted = jnp.full((rows.size, self.max_blocks_per_row), self.num_pages, jnp.int32)
        width = min(pages.shape[1], self.max_blocks_per_row)
        adopted = adopted.at[:, :width].set(jnp.where(is_read & ok, held, self.num_pages)[:, :width])
        return self._start(jnp.where(ok, row, self.max_rows), adopted, num_tokens), ok

    def retain(self, pages: Int[Array, " n"]) -> BlockTable:
        """Adds a reference from outside to each page: it stays held when its rows end.

        A page that stands twice gets two. Free pages and entries outside [0, P) are passed over. O(n + P) int32 work.

        Raises:
            ValueError: `pages` is not a 1-D integer array.
        """
        held = self._held(_list_of_pages(pages))
        return dataclasses.replace(
            self,
            ref_counts=self.ref_counts.at[held].add(1, mode="drop"),
            retained=self.retained.at[held].add(1, mode="drop"),
        )

    def drop(self, pages: Int[Array, " n"]) -> BlockTable:
        """Takes back a reference that `retain` added to each page; pages that lose their last holder become free.

        Stops at zero retained: a row's reference is never taken. Entries outside [0, P) are passed over. O(n + P) int32
        work.

        Raises:
            ValueError: `pages` is not a 1-D integer array.
        """
        asked = jnp.zeros(self.num_pages, jnp.int32).at[self._held(_list_of_pages(pages))].add(1, mode="drop")
        dropped = jnp.minimum(asked, self.retained)
        table = self._count(self.ref_counts - dropped)
        return dataclasses.replace(table, retained=self.retained - dropped)

    def taken_since(self, before: BlockTable) -> Bool[Array, " P"]:
        """The pages that were free in `before`, an earlier state of this table, and are held now.

        For hygiene, `cache.zero_pages(table.taken_since(before))`, and then the copies that `fork` or `truncate` asked
        for: their destinations are among these pages. O(P) work.

        Raises:
            ValueError: `before` has another number of pages.
        """
        if before.num_pages != self.num_pages:
            raise ValueError(f"before: expected a table of {self.num_pages} pages, got one of {before.num_pages}")
        return (before.ref_counts == 0) & (self.ref_counts > 0)

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
        check_table(self)

    def _blocks(self, lengths: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """Blocks that so many tokens fill or begin; ceil without the overflow of `lengths + page_size - 1`."""
        return lengths // self.page_size + (lengths % self.page_size != 0).astype(jnp.int32)

    def _from_top(self, rank: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """The rank-th page from the top of the free stack; anything where the stack is not that deep."""
        return self.free_pages.at[self.num_free - 1 - rank].get(mode="clip")

    def _drop_blocks(self, kept: Int32[Array, " B"]) -> BlockTable:
        """Keeps only the first `kept` blocks of each row and frees what nobody holds; lengths are the caller's."""
        block = _iota(self.max_blocks_per_row)[None, :]
        is_dropped = (kept[:, None] <= block) & (block < self.num_blocks[:, None])
        ref_counts = self.ref_counts.at[jnp.where(is_dropped, self.pages, self.num_pages)].add(-1, mode="drop")
        return dataclasses.replace(self._count(ref_counts), pages=jnp.where(is_dropped, self.num_pages, self.pages))

    def _count(self, ref_counts: Int32[Array, " P"]) -> BlockTable:
        """Lowers the counts to these; pages that lose their last holder go on the free stack, each once."""
        is_freed = (self.ref_counts > 0) & (ref_counts == 0)
        rank = jnp.cumsum(is_freed, dtype=jnp.int32)
        stack_entry = jnp.where(is_freed, self.num_free + rank - 1, self.num_pages)
        return dataclasses.replace(
            self,
            ref_counts=ref_counts,
            free_pages=self.free_pages.at[stack_entry].set(_iota(self.num_pages), mode="drop"),
            num_free=self.num_free + rank[-1],
        )

    def _is_row(self, rows: Int32[Array, " n"]) -> Bool[Array, " n"]:
        return (rows >= 0) & (rows < self.max_rows)

    def _held(self, pages: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """The pages themselves where someone holds them, else padding."""
        is_held = (pages >= 0) & (self.ref_counts.at[pages].get(mode="fill", fill_value=0) > 0)
        return jnp.where(is_held, pages, self.num_pages)

    def _may_start(self, rows: Int32[Array, " n"]) -> Bool[Array, ""]:
        """Whether each row is empty and stands once; B stands for none."""
        times = jnp.zeros(self.max_rows, jnp.int32).at[rows].add(1, mode="drop")
        return jnp.all((times == 0) | ((times == 1) & (self.lengths == 0)))

    def _start(self, rows: Int32[Array, " n"], pages: Int32[Array, "n M"], lengths: Int32[Array, " n"]) -> BlockTable:
        """Starts empty rows with one more reference to each of these pages; row B and page P stand for none."""
        return dataclasses.replace(
            self,
            pages=self.pages.at[rows].set(pages, mode="drop"),
            lengths=self.lengths.at[rows].set(lengths, mode="drop"),
            ref_counts=self.ref_counts.at[pages].add(1, mode="drop"),
        )


def _iota(size: int) -> Int32[Array, " size"]:
    return jnp.arange(size, dtype=jnp.int32)  # int32 also where 64-bit types are enabled


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


def _list_of_pages(pages: Int[Array, " n"]) -> Int32[Array, " n"]:
    pages = as_int32("pages", pages)
    if pages.ndim != 1:
        raise ValueError(f"pages: expected a 1-D array, got shape {pages.shape}")
    return pages


def _select(ok: Bool[Array, ""], new, old):
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
