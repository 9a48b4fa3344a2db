"""New tokens of a batch → text on a stream, row after row."""

from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

import numpy as np


class Pieces(Protocol):
    """One row's tokens → what they add to its text, as `text_stream.TextStream` has it."""

    def push(self, tokens: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class IdPieces:
    """Token ids between commas."""

    def __init__(self):
        self._separator = ""

    def push(self, tokens: Sequence[int]) -> str:
        written = ""
        for token in tokens:
            written += f"{self._separator}{token}"
            self._separator = ","
        return written

    def finish(self) -> str:
        return ""


class OrderedStream:
    """Writes the first unfinished row as its tokens come; the rows behind it wait for their turn.

    Several rows get a title each, one alone gets none.
    """

    def __init__(
        self, new_pieces: Callable[[], Pieces], end_tokens: frozenset[int], titles: Sequence[str], out: TextIO
    ):
        self._end_tokens, self._titles, self._out = end_tokens, titles, out
        self._pieces = [new_pieces() for _ in titles]
        self._waiting = ["" for _ in titles]  # text of each row that is not written yet
        self._is_done = [False for _ in titles]
        self._current = 0
        self._begin_row()

    def write(self, new_tokens: np.ndarray) -> None:
        """Takes new tokens, int[rows, n], −1 after a row's end."""
        for row, padded in enumerate(new_tokens):
            tokens = padded[padded >= 0].tolist()
            self._waiting[row] += self._pieces[row].push(tokens)
            if len(tokens) < len(padded) or not self._end_tokens.isdisjoint(tokens):
                self._end(row)
        self._advance()

    def close(self) -> None:
        """Writes what waits; no more tokens will come."""
        for row in range(len(self._titles)):
            self._end(row)
        self._advance()

    def _end(self, row: int) -> None:
        if not self._is_done[row]:
            self._waiting[row] += self._pieces[row].finish()
            self._is_done[row] = True

    def _advance(self) -> None:
        while self._current < len(self._titles):
            self._out.write(self._waiting[self._current])
            self._waiting[self._current] = ""
            if not self._is_done[self._current]:
                break
            self._out.write("\n")
            self._current += 1
            self._begin_row()
        self._out.flush()

    def _begin_row(self) -> None:
        if len(self._titles) > 1 and self._current < len(self._titles):
            self._out.write(f"[{self._current + 1}/{len(self._titles)}] {self._titles[self._current]}\n")
