"""Values of a block table, checked on the host: names the first that is wrong by its row, block and page.

Inside jit values cannot be seen, so nothing there looks at them; these functions take concrete arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import ArrayLike, Bool, Int

if TYPE_CHECKING:
    from paged_jax.block_table import BlockTable


def check_block_tables(
    block_tables: Int[ArrayLike, "B M"], lengths: Int[ArrayLike, " B"], *, num_pages: int, page_size: int
) -> None:
    """Checks raw arrays as `pallas_kernels.paged_decode` takes them; entries past a row's last block may be anything.

    Raises:
        ValueError: shapes or dtypes do not fit, a length is outside [0, M·page_size], or a page that a row reads is
            outside [0, num_pages) or stands in two of its blocks; names row and block.
    """
    pages, lengths = np.asarray(block_tables), np.asarray(lengths)
    if pages.ndim != 2 or lengths.shape != pages.shape[:1]:
        raise ValueError(f"block_tables, lengths: expected shapes [B, M], [B], got {pages.shape}, {lengths.shape}")
    if not all(np.issubdtype(array.dtype, np.integer) for array in (pages, lengths)):
        raise ValueError(f"block_tables, lengths: expected integer dtypes, got {pages.dtype} and {lengths.dtype}")
    _check_rows(pages, lengths, num_pages, page_size)


def check_query_lengths(query_lengths: Int[ArrayLike, " B"], lengths: Int[ArrayLike, " B"], *, num_tokens: int) -> None:
    """Checks the counts that `paged_attention` takes for packed query tokens, with concrete values.

    Inside jit none of this raises: tokens beyond T belong to no row, and queries that see no key give zeros.

    Args:
        query_lengths: tokens of each row among the packed ones.
        lengths: tokens that the rows hold, those included.
        num_tokens: T, the packed tokens and their padding.

    Raises:
        ValueError: shapes do not fit (cumulative counts have one entry more), a count is negative or above what its row
            holds, or all together are more than T.
    """
    counts, held = np.asarray(query_lengths), np.asarray(lengths)
    if counts.ndim != 1 or counts.shape != held.shape or not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(
            f"query_lengths: expected an integer count for each row, shape {held.shape}, not cumulative ones, "
            f"got {counts.dtype}{list(counts.shape)}"
        )
    for row in np.flatnonzero((counts < 0) | (counts > held)):
        raise ValueError(f"row {row}: expected a count of queries in [0, {held[row]}], got {counts[row]}")
    if counts.sum() > num_tokens:
        raise ValueError(f"query_lengths: expected at most {num_tokens} tokens in all, got {counts.sum()}")


def check_table(table: BlockTable) -> None:
    """Checks every invariant of a table: see `BlockTable.check`. O(B·M + P) work, and a copy of the table to the host.

    Raises:
        ValueError: names the first broken invariant, with its row, block and page.
    """
    pages, lengths, ref_counts, retained, free_pages = (
        np.asarray(array) for array in (table.pages, table.lengths, table.ref_counts, table.retained, table.free_pages)
    )
    num_free, num_pages = int(table.num_free), table.num_pages

    is_held = _check_rows(pages, lengths, num_pages, table.page_size)
    for row, block in np.argwhere(~is_held & (pages != num_pages)):
        raise ValueError(
            f"row {row}, block {block}: expected padding ({num_pages}) past the row's last block, "
            f"got page {pages[row, block]}"
        )

    if not 0 <= num_free <= num_pages:
        raise ValueError(f"num_free: expected a count in [0, {num_pages}], got {num_free}")
    stack = free_pages[:num_free]
    for entry in np.flatnonzero((stack < 0) | (stack >= num_pages)):
        raise ValueError(f"free_pages[{entry}]: expected a page in [0, {num_pages}), got {stack[entry]}")
    times_free = np.bincount(stack, minlength=num_pages)
    for page in np.flatnonzero(times_free > 1):
        raise ValueError(f"page {page}: expected at most once on the free stack, got {times_free[page]} times")

    holders = np.bincount(pages[is_held], minlength=num_pages)
    for page in np.flatnonzero(retained < 0):
        raise ValueError(f"page {page}: expected a retained count of at least 0, got {retained[page]}")
    for page in np.flatnonzero(ref_counts != holders + retained):
        raise ValueError(
            f"page {page}: expected ref_counts = rows + retained = {holders[page]} + {retained[page]}, "
            f"got {ref_counts[page]}; held by {_holders(pages, is_held, retained, int(page))}"
        )
    for page in np.flatnonzero((ref_counts > 0) & (times_free > 0)):
        raise ValueError(f"page {page}: on the free stack, but held by {_holders(pages, is_held, retained, int(page))}")
    for page in np.flatnonzero((ref_counts == 0) & (times_free == 0)):
        raise ValueError(f"page {page}: neither free nor held (free + held must be all {num_pages} pages)")


def _check_rows(pages: np.ndarray, lengths: np.ndarray, num_pages: int, page_size: int) -> Bool[np.ndarray, "B M"]:
    """Checks lengths and the pages that rows read; returns which entries those are."""
    num_rows, width = pages.shape
    lengths = lengths.astype(np.int64)  # unsigned ones would wrap around below
    for row in np.flatnonzero((lengths < 0) | (lengths > width * page_size)):
        raise ValueError(f"row {row}: expected a length in [0, {width * page_size}], got {lengths[row]}")
    is_held = np.arange(width) < -(-lengths[:, None] // page_size)
    for row, block in np.argwhere(is_held & ((pages < 0) | (pages >= num_pages))):
        raise ValueError(f"row {row}, block {block}: expected a page in [0, {num_pages}), got {pages[row, block]}")
    for row in range(num_rows):
        _, first_block = np.unique(pages[row, is_held[row]], return_index=True)
        for block in np.setdiff1d(np.arange(is_held[row].sum()), first_block):
            raise ValueError(
                f"row {row}, block {block}: page {pages[row, block]} stands in an earlier block of this row too"
            )
    return is_held


def _holders(pages: np.ndarray, is_held: np.ndarray, retained: np.ndarray, page: int) -> str:
    """Where a page is held, in words."""
    places = [f"row {row}, block {block}" for row, block in np.argwhere(is_held & (pages == page))[:3]]
    if retained[page]:
        places.append(f"{retained[page]} references from outside")
    return "; ".join(places) or "nobody"
