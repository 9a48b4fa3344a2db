"""A block table and its pool, drawn for a terminal."""

import jax
import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paged_jax import BlockTable

_ROW_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_PAGES_PER_LINE = 64


def show_table(table: BlockTable) -> RenderableType:
    """Each row's pages in the order of its blocks, and the pool: which page belongs to which row.

    Tables stacked by shards of rows are drawn one after the other.
    """
    if table.pages.ndim == 3:
        return Group(*(_show_shard(table, shard) for shard in range(table.pages.shape[0])))
    pages, lengths, num_blocks = (np.asarray(array) for array in (table.pages, table.lengths, table.num_blocks))
    rows = Table(box=None, header_style="dim")
    rows.add_column("row", justify="right")
    rows.add_column("tokens", justify="right")
    rows.add_column("pages, block by block")
    owner = np.full(table.num_pages, -1)
    for row in range(table.max_rows):
        held = pages[row, : num_blocks[row]]
        owner[held] = row
        rows.add_row(str(row), str(lengths[row]), Text(" ".join(map(str, held)), style=_colour(row)))
    return Group(rows, Text(), _pool(owner, table.page_size))


def _show_shard(stacked: BlockTable, shard: int) -> RenderableType:
    table = jax.tree.map(lambda leaf: np.asarray(leaf)[shard], stacked)
    title = f"shard of rows {shard}, of which row 0 is prompt {shard * table.max_rows + 1}"
    return Group(Text(title), show_table(table))


def _pool(owner: np.ndarray, page_size: int) -> Text:
    drawn = Text(f"pool: {owner.size} pages of {page_size} tokens, {(owner < 0).sum()} free (·)\n", style="dim")
    for first in range(0, owner.size, _PAGES_PER_LINE):
        line = owner[first : first + _PAGES_PER_LINE]
        drawn.append(f"{first:>6} ", style="dim")
        for row in line:
            drawn.append("·" if row < 0 else "■", style="dim" if row < 0 else _colour(row))
        drawn.append("\n")
    return drawn


def _colour(row: int) -> str:
    return _ROW_COLOURS[row % len(_ROW_COLOURS)]
