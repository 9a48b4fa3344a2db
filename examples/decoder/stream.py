"""New tokens of a batch → text on a stream, row after row."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TextIO

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

Writer = Callable[[int], str | None]  # a row's next token → what it adds to the row's text


def text_writer(tokenizer: Tokenizer) -> Writer:
    """Of one row. Nothing comes out while the bytes so far end inside a character."""
    return functools.partial(DecodeStream(skip_special_tokens=True).step, tokenizer)


def id_writer() -> Writer:
    """Of one row: token ids between commas."""
    separators = itertools.chain([""], itertools.repeat(","))
    return lambda token: f"{next(separators)}{token}"


class OrderedStream:
    """Writes the first unfinished row as its tokens come; the rows behind it wait for their turn.

    Several rows get a title each, one alone gets none.
    """

    def __init__(
        self, new_writer: Callable[[], Writer], end_tokens: frozenset[int], titles: Sequence[str], out: TextIO
    ):
        self._end_tokens, self._titles, self._out = end_tokens, titles, out
        self._writers = [new_writer() for _ in titles]
        self._waiting = ["" for _ in titles]  # text of each row that is not written yet
        self._is_done = [False for _ in titles]
        self._current = 0
        self._begin_row()

    def write(self, new_tokens: np.ndarray) -> None:
        """Takes new tokens, int[rows, n], −1 after a row's end."""
        for row, tokens in enumerate(new_tokens):
            for token in tokens[tokens >= 0].tolist():
                self._is_done[row] |= token in self._end_tokens
                self._waiting[row] += self._writers[row](token) or ""
        self._advance()

    def close(self) -> None:
        """Writes what waits; no more tokens will come."""
        self._is_done = [True for _ in self._titles]
        self._advance()

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
