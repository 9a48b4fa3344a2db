"""Small files of a model, as other programs write them: text, JSON objects, and errors that name the file."""

import codecs
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def naming(path: Path, error: type[ValueError] = ValueError) -> Iterator[None]:
    """Whatever is refused inside becomes an `error` whose message begins with the file."""
    try:
        yield
    except (ValueError, NotImplementedError, RecursionError) as problem:  # the last: a value too deep to be shown
        raise error(f"{path}: {problem}") from problem


def decode_text(data: bytes, place: str, error: type[ValueError] = ValueError) -> str:
    """The text of UTF-8, without the byte order mark that some programs put first. Raises `error` at anything else."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise error(f"{place}: expected UTF-8 text, got UTF-16, by its byte order mark")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{place}: expected UTF-8 text, got {problem}") from problem


def read_text(path: Path, error: type[ValueError] = ValueError) -> str:
    """Raises `error` if the file is not UTF-8, OSError if it is not there."""
    return decode_text(path.read_bytes(), str(path), error)


def read_object(path: Path, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """Raises `error` if the file is no JSON object, OSError if it is not there."""
    text = read_text(path, error)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{path}: expected JSON, got {problem}") from problem
    if not isinstance(found, dict):
        raise error(f"{path}: expected a JSON object, got {found!r:.60}")
    return found


def read_settings(path: Path) -> dict[str, Any]:
    """A JSON object that a folder may have; empty if it has none. Raises ValueError as `read_object`."""
    return read_object(path) if path.is_file() else {}
