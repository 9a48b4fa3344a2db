"""New tokens of a batch → text on a stream, row after row."""

from collections.abc import Sequence
from typing import TextIO

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class OrderedStream:
    """Writes the first unfinished row as its tokens come; the rows behind it wait for their turn.

    Several rows get a title each, one alone gets none.
    """

    def __init__(self, tokenizer: Tokenizer, end_tokens: frozenset[int], titles: Sequence[str], out: TextIO):
        self._tokenizer, self._end_tokens, self._titles, self._out = tokenizer, end_tokens, titles, out
        self._decoders = [DecodeStream(skip_special_tokens=True) for _ in titles]
        self._waiting = ["" for _ in titles]  # text of each row that is not written yet
        self._is_done = [False for _ in titles]
        self._current = 0
        self._begin_row()

    def write(self, new_tokens: np.ndarray) -> None:
        """Takes new tokens, int[rows, n], −1 after a row's end."""
        for row, tokens in enumerate(new_tokens):
            for token in tokens[tokens >= 0].tolist():
                self._is_done[row] |= token in self._end_tokens
                # Nothing comes out while the bytes so far end inside a character.
                self._waiting[row] += self._decoders[row].step(self._tokenizer, token) or ""
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
