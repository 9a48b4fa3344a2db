"""Tokens as they come → the text that is certain by then: joined, the pieces are the decoding of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character
_FIRST_IDS = 1024  # where vocabularies keep the tokens of single bytes


class TextStream:
    """The text of one sequence, piece by piece. What it has given out never changes.

    A token may take back text that the decoder wrote before it: the last byte of a character turns three replacement
    characters into one real one; and a decoder with byte fallback makes replacement characters of a whole run of byte
    tokens if one of them does not fit. So text is certain when it stays as it is with a byte after it that fits
    nowhere, and does not end in a replacement character. The rest is held back until more tokens come, or the end.

    Each token costs two decodings of the last few tokens, however long the sequence is.
    """

    def __init__(self, decode: Decode, stray_byte: int | None):
        """As `text_streams` makes it: `stray_byte` is a token whose decoding alone is a replacement character."""
        self._decode, self._stray_byte = decode, stray_byte
        self._tokens: list[int] = []  # those that are decoded: of the sequence, the last ones
        self._num_old = 0  # of those, the ones whose text is out, kept because what follows may look different alone
        self._written = 0  # characters of their decoding that are out

    def push(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that has become certain, "" if none has."""
        pieces = []
        for token in tokens:
            self._tokens.append(token)
            if self._stray_byte is None and _REPLACEMENT in self._decode([token]):
                self._stray_byte = token
            text = self._decode(self._tokens)
            certain = text
            if self._stray_byte is not None:
                certain = _common_beginning(text, self._decode([*self._tokens, self._stray_byte]))
            certain = certain.rstrip(_REPLACEMENT)
            if len(certain) > self._written:
                pieces.append(certain[self._written :])
                self._written = len(certain)
            if certain == text:
                self._forget()
        return "".join(pieces)

    def finish(self) -> str:
        """The text that was held back; no more tokens will come."""
        return self._decode(self._tokens)[self._written :]

    def _forget(self) -> None:
        """Leaves out the tokens before the last piece that has some text of its own, as all text is out."""
        recent = self._tokens[self._num_old :]
        text = self._decode(recent)
        if text.strip():
            self._tokens, self._num_old, self._written = recent, len(recent), len(text)


def _common_beginning(one: str, other: str) -> str:
    for i, (mine, its) in enumerate(zip(one, other, strict=False)):
        if mine != its:
            return one[:i]
    return min(one, other, key=len)


def text_streams(decode: Decode) -> Callable[[], TextStream]:
    """Makes the streams of a decoder, one for each sequence.

    Args:
        decode: token ids → text. Any of a `tokenizers` or transformers tokenizer will do.
    """
    stray_byte = _find_stray_byte(decode)
    return lambda: TextStream(decode, stray_byte)


def _find_stray_byte(decode: Decode) -> int | None:
    """A token of one byte that is no character by itself; None if the vocabulary seems to have none.

    The last one found: the bytes that begin a character come last, and one of those fits after nothing.
    """
    found = None
    for token in range(_FIRST_IDS):
        try:
            text = decode([token])
        except Exception:  # a small vocabulary, whose decoder refuses what is beyond
            break
        if text == _REPLACEMENT:
            found = token
        elif found is not None and len(text) > 1:
            break
    return found
