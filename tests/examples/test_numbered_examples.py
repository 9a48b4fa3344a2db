"""The lessons on the block table show what a plain Python list would, and their pictures what the table holds."""

import contextlib
import importlib
import io
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LESSONS = ("01_block_table", "02_slots_and_pages", "03_sharing")
PAGE_SIZE = 4  # in all lessons


@pytest.fixture(scope="module", autouse=True)
def picture():
    """What the lessons draw with: their neighbour, which Python finds beside a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("picture")
    del sys.modules["picture"]


@pytest.fixture(scope="module")
def lesson(tmp_path_factory, picture):  # noqa: ARG001
    """Runs a lesson once; returns its scenes, all that it printed, and its PNG."""
    told = {}

    def tell(name):
        if name not in told:
            printed, png = io.StringIO(), tmp_path_factory.mktemp("pool") / "pool.png"
            with contextlib.redirect_stdout(printed):
                scenes = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](["--png", str(png)])
            told[name] = scenes, printed.getvalue(), png
        return told[name]

    return tell


def printed_pages(text):
    """The pages of each row, scene by scene, as the lesson printed them."""
    rows = re.findall(r"^  row (\d+): (\d+) tokens in pages \[(.*)\]$", text, re.MULTILINE)
    found = [(int(length), [int(page) for page in pages.split()]) for _, length, pages in rows]
    num_rows = 1 + max(int(row) for row, _, _ in rows)
    return [found[first : first + num_rows] for first in range(0, len(found), num_rows)]


class Pool:
    """Rows as plain lists of pages, and a list as the stack of free ones."""

    def __init__(self, num_pages, num_rows):
        self.free = list(reversed(range(num_pages)))
        self.rows = [(0, []) for _ in range(num_rows)]

    def extend(self, *num_tokens):
        for row, count in enumerate(num_tokens):
            length, pages = self.rows[row]
            while len(pages) * PAGE_SIZE < length + count:
                pages = [*pages, self.free.pop()]
            self.rows[row] = length + count, pages
        return list(self.rows)

    def release(self, row):
        self.free += sorted(self.rows[row][1])
        self.rows[row] = 0, []
        return list(self.rows)

    def slots(self, row):
        length, pages = self.rows[row]
        return [pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE for position in range(length)]


def numbers(text, name):
    return [int(word) for word in re.search(rf"^{name}:? *\[?([\d ]+)\]?$", text, re.MULTILINE)[1].split()]


def test_01_rows_take_the_pages_that_a_list_would_give(lesson):
    scenes, text, _ = lesson("01_block_table")
    pool = Pool(7, 3)
    expected = [pool.extend(), pool.extend(6, 3, 0), pool.extend(1, 3, 0), pool.release(0), pool.extend(0, 3, 10)]
    assert printed_pages(text) == [*expected, expected[-1]]  # the last request is refused
    assert pool.rows[1][1] != sorted(pool.rows[1][1])  # out of order
    assert "ok is False" in scenes[-1].title
    assert "19 tokens in 6 pages, 24 cells" in text
    assert numbers(text, "free pages, the next one first") == pool.free[::-1]


def test_02_tokens_lie_in_the_slots_that_a_list_would_give(lesson):
    scenes, text, _ = lesson("02_slots_and_pages")
    pool = Pool(6, 2)
    expected = [pool.extend(3, 5)]
    slots = [*pool.slots(0), *pool.slots(1), 24, 24]
    assert numbers(text, "slots") == slots
    assert numbers(text, "rows") == [0] * 3 + [1] * 5 + [2] * 2
    assert numbers(text, "positions") == [0, 1, 2, 0, 1, 2, 3, 4, 0, 0]
    expected += [pool.extend(1, 1), pool.extend(1, 0)]
    assert printed_pages(text) == expected
    assert numbers(text, "slots of row 0") == [*pool.slots(0), 24]

    cells = ["0"] * 24
    for row, tokens in ((0, range(10, 15)), (1, range(20, 26))):
        for slot, token in zip(pool.slots(row), tokens, strict=True):
            cells[slot] = str(token)
    assert scenes[-1].cells.ravel().tolist() == cells
    assert "[[10 11 12 13 14  0  0  0  0  0  0  0]\n [20 21 22 23 24 25  0  0  0  0  0  0]]" in text


def test_03_each_row_reads_its_own_text(lesson, picture):
    scenes, text, _ = lesson("03_sharing")

    def texts(scene):
        tables = zip(scene.table.pages, scene.table.lengths, scene.table.num_blocks, strict=True)
        return ["".join(scene.cells[np.asarray(pages[:n])].ravel())[:length] for pages, length, n in tables]

    assert [texts(scene) for scene in scenes] == [
        ["the cat sa", "", ""],
        ["the cat sa", "the cat sa", ""],
        ["the cat sat up", "the cat sang", ""],
        ["", "", ""],
        ["", "", "the cat ran"],
        ["", "", "the car"],
        ["", "", "the car"],
    ]
    assert "".join(scenes[5].cells[:3].ravel()) == "the cat sat "  # what is cached stays as it was
    assert [sum(page.is_shared for page in picture.classify(scene.table)) for scene in scenes] == [0, 2, 2, 0, 2, 1, 1]
    assert picture.classify(scenes[2].table)[:5] == [
        picture.Page((0, 1), 4),
        picture.Page((0, 1), 4),
        picture.Page((0,), 4),
        picture.Page((1,), 4),
        picture.Page((0,), 2),
    ]
    assert picture.classify(scenes[5].table)[:5] == [
        picture.Page((picture.CACHE, 2), 4),
        picture.Page((picture.CACHE,), 4),
        picture.Page((picture.CACHE,), 4),
        picture.Page((), 0),
        picture.Page((2,), 3),
    ]
    assert "8 of its tokens are there already" in text
    assert "frees 2 pages" in text


@pytest.mark.parametrize("name", LESSONS)
def test_pictures_show_what_the_table_holds(name, lesson, picture):
    scenes, text, png = lesson(name)
    for scene in scenes:
        scene.table.check()
        pages = picture.classify(scene.table)
        assert [len(page.holders) for page in pages] == scene.table.ref_counts.tolist()
        assert sum(page.is_shared for page in pages) == (scene.table.ref_counts > 1).sum()
        assert sum(not page.holders for page in pages) == scene.table.num_free
        assert all(page.num_filled > 0 for page in pages if page.holders)
        assert scene.title in text
    assert text.count("held by") == len(scenes)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_printing_needs_no_matplotlib(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "picture")
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    main = runpy.run_path(str(EXAMPLES / "01_block_table.py"))["main"]
    main([])
    assert "|■■··|" in capsys.readouterr().out
    with pytest.raises(ImportError):
        main(["--png", "never.png"])


@pytest.mark.parametrize("name", LESSONS)
def test_lessons_are_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 80
