"""Small files of a model: text and JSON objects, and errors that name the file they are about."""

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


def read_text(path: Path, error: type[ValueError] = ValueError) -> str:
    """Raises `error` if the file is not UTF-8, OSError if it is not there."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path}: expected UTF-8 text, got {problem}") from problem


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
