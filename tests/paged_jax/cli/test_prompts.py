"""Prompts from text files as other programs write them: line ends, separators within lines, byte order marks."""

import codecs
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paged_jax.cli.arguments import parse_arguments
from paged_jax.cli.prompts import read_prompts

Read = Callable[[bytes], list[str]]


@pytest.fixture(params=["a file", "standard input"])
def read(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Bytes → the prompts in them."""

    def read(content: bytes) -> list[str]:
        path = tmp_path / "prompts.txt"
        path.write_bytes(content)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        return read_prompts(parse_arguments(["generate", "--file", str(path) if request.param == "a file" else "-"]))

    return read


@pytest.mark.parametrize("separator", "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r")
def test_a_prompt_ends_at_a_newline_alone(read: Read, separator: str) -> None:
    assert read(f"one{separator}prompt\nanother\n".encode()) == [f"one{separator}prompt", "another"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["no mark", "mark"])
def test_line_ends_and_byte_order_marks_are_no_text(read: Read, end: str, mark: bytes) -> None:
    assert read(mark + end.join(["one", "", "two", ""]).encode()) == ["one", "two"]
    assert read(mark + f"one{end}\ufefftwo".encode()) == ["one", "\ufefftwo"]  # elsewhere it is a character


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_refused_by_name(read: Read, encoding: str) -> None:
    with pytest.raises(ValueError, match=r"--file .*: expected UTF-8 text, got UTF-16, by its byte order mark"):
        read("\ufeffone".encode(encoding))
