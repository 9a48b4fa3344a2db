"""A block table's pool, as text and as a PNG: who holds each page, and which of its cells are filled.

In the PNG each row has a colour and its number, pages with several holders are hatched, cells that are held but not
filled (waste) are grey, and free pages are white.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paged_jax import BlockTable

CACHE = -1  # among the rows that hold a page, a reference from outside: a prefix cache's

_ROWS, _CACHE, _WASTE = ("#56b4e9", "#e69f00", "#5fc49f", "#e29ac4"), "#f0e442", "#bdbdbd"
_SHARED = "///"


class Page(NamedTuple):
    """What one page of the pool holds."""

    holders: tuple[int, ...]  # rows, and CACHE; none if the page is free
    num_filled: int  # cells with a token; the others are waste if anyone holds the page

    @property
    def is_shared(self) -> bool:
        return len(self.holders) > 1


class Scene(NamedTuple):
    """A moment in the life of a pool."""

    title: str
    table: BlockTable
    cells: np.ndarray  # str [P, C], written into the cells that are filled


def arguments(description: str | None, argv: list[str] | None) -> argparse.Namespace:
    """What an example is told on its command line."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    parser.add_argument("--png", type=Path, help="draw the pool here, too (needs matplotlib); by default only print")
    return parser.parse_args(argv)


def classify(table: BlockTable) -> list[Page]:
    """Each page of the pool: who holds it, and how far it is filled."""
    pages, lengths, retained = (np.asarray(array) for array in (table.pages, table.lengths, table.retained))
    holders = [[CACHE] * count for count in retained]
    num_filled = [table.page_size if count else 0 for count in retained]  # a prefix cache keeps only full pages
    for row, length in enumerate(lengths.tolist()):
        for block, first in enumerate(range(0, length, table.page_size)):
            page = pages[row, block]
            holders[page].append(row)
            num_filled[page] = max(num_filled[page], min(length - first, table.page_size))
    return [Page(tuple(rows), filled) for rows, filled in zip(holders, num_filled, strict=True)]


def show(title: str, table: BlockTable, cells: np.ndarray | None = None) -> Scene:
    """Prints each row's pages in the order of its blocks, and the pool; returns what `draw` draws.

    Filled cells show their entry of `cells`, str [P, C], or else a square; waste is a dot.
    """
    if cells is None:
        cells = np.full((table.num_pages, table.page_size), "■")
    print(f"\n{title}")
    rows = (np.asarray(array) for array in (table.pages, table.lengths, table.num_blocks))
    for row, (pages, length, num_blocks) in enumerate(zip(*rows, strict=True)):
        print(f"  row {row}: {length} tokens in pages {pages[:num_blocks]}")
    columns = [(str(p), _text(page, cells[p]), _holders(page, "", "+")) for p, page in enumerate(classify(table))]
    width = max(len(entry) for column in columns for entry in column)
    for name, entries in zip(("page", "cells", "held by"), zip(*columns, strict=True), strict=True):
        print(f"  {name:7}", *(f"{entry:^{width}}" for entry in entries))
    return Scene(title, table, cells)


def _text(page: Page, cells: np.ndarray) -> str:
    rest = "·" if page.holders else " "
    width = cells.dtype.itemsize // 4  # of the longest entry in the whole pool, four bytes a character
    shown = [text if i < page.num_filled else rest * width for i, text in enumerate(cells)]
    return f"|{(' ' if width > 1 else '').join(f'{text:>{width}}' for text in shown)}|"


def _holders(page: Page, row: str, cache: str) -> str:
    return ", ".join(cache if holder == CACHE else f"{row}{holder}" for holder in page.holders) or "free"


def draw(scenes: list[Scene], path: Path) -> None:
    """Draws the scenes one below the other, as a PNG."""
    from matplotlib.figure import Figure  # here, because printing does not need it
    from matplotlib.patches import Patch

    width = scenes[0].table.num_pages * (scenes[0].table.page_size + 1)
    figure = Figure(figsize=(width * 0.26, len(scenes) * 1.15 + 0.5), layout="constrained")
    rows = set()
    for scene, axes in zip(scenes, figure.subplots(len(scenes), squeeze=False)[:, 0], strict=True):
        axes.set(xlim=(-0.1, width), ylim=(-0.8, 1.9), aspect="equal")
        axes.set_axis_off()
        axes.set_title(scene.title, loc="left", fontsize=9)
        for p, page in enumerate(classify(scene.table)):
            _draw_page(axes, p, page, scene.cells[p])
            rows.update(page.holders)

    def patch(label: str, colour: str, hatch: str | None = None) -> Patch:
        return Patch(facecolor=colour, edgecolor="black", hatch=hatch, label=label)

    legend = [patch("cache" if row == CACHE else f"row {row}", _colour(row)) for row in sorted(rows)]
    legend += [patch("shared", "white", _SHARED), patch("waste", _WASTE), patch("free", "white")]
    figure.legend(handles=legend, loc="outside lower left", ncols=len(legend), frameon=False, fontsize=9)
    figure.savefig(path, format="png", dpi=120)


def _draw_page(axes, p: int, page: Page, cells: np.ndarray) -> None:
    from matplotlib.patches import Rectangle

    left, size, holders = p * (len(cells) + 1), len(cells), sorted(set(page.holders))
    if holders:
        axes.add_patch(Rectangle((left, 0), size, 1, facecolor=_WASTE))
    for i, row in enumerate(holders):  # one stripe for each of them
        height = 1 / len(holders)
        axes.add_patch(Rectangle((left, 1 - (i + 1) * height), page.num_filled, height, facecolor=_colour(row)))
    hatch = _SHARED if page.is_shared else None
    axes.add_patch(Rectangle((left, 0), size, 1, fill=False, edgecolor="black", hatch=hatch, hatch_linewidth=0.4))
    axes.vlines(left + np.arange(1, size), 0, 1, color="black", linewidth=0.4)
    for cell, text in enumerate(cells[: page.num_filled]):
        axes.text(left + cell + 0.5, 0.45, text, ha="center", va="center", fontsize=9, fontweight="bold")
    axes.text(left + size / 2, 1.15, f"page {p}", ha="center", fontsize=7)
    axes.text(left + size / 2, -0.65, _holders(page, "row ", "cache"), ha="center", fontsize=7)


def _colour(row: int) -> str:
    return _CACHE if row == CACHE else _ROWS[row % len(_ROWS)]
