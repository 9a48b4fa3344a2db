"""Token-hash chain → pages: which computed pages of the pool hold the start of a new prompt (host side).

A full page is known by a chained hash of its own tokens and all tokens before it, so a prompt finds the longest run of
pages that earlier rows computed. The idea is vLLM's automatic prefix caching; that a chain goes from its tail is what
SGLang's RadixAttention does with the leaves of its tree.

The block table stays the one owner of pages: each page here is held by one reference of `BlockTable.retain`, which
`BlockTable.drop` gives back on eviction. Hence a page found here is never free, and nobody writes it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from paged_jax.block_table import BlockTable
from paged_jax.integers import require_positive

Tokens = Sequence[int] | Int[Array | np.ndarray, " n"]

_DIGEST_BYTES = 32
_LEAST_PAGES_PER_CALL = 64  # calls are padded to powers of two from here on, so that jit compiles few of them


@dataclasses.dataclass(frozen=True)
class _CachedPage:
    """A page with what it is known by; its key is the hash of `parent` and `tokens`."""

    parent: bytes  # key of the page before it; the first page of a chain has the salt's digest, which is no page's key
    tokens: bytes  # its own tokens, as int32
    page: int


class PrefixCache:
    """Computed pages by the tokens they hold, and the order in which they were used.

    Methods that move references take the table and return the new one: go on with that. Each costs by the pages that it
    touches, plus at most one call of a jitted method of the table (O(P) int32 work on the device). `row` and `prompt`
    below are an empty row and its token ids:

        prefixes = PrefixCache(page_size=16)

        table, num_cached, ok = prefixes.adopt(table, row, prompt)  # the row starts on the pages that are there
        ...                                                         # step and forward over prompt[num_cached:]
        table = prefixes.insert(table, row, prompt)                 # from now on its full pages are found
        ...                                                         # decode
        table = table.release(is_done)                              # what is cached outlives the row
        table, num_freed = prefixes.evict(table, 100)               # when free pages run short

    Adopt first and evict then: pages that a row holds stay.
    """

    def __init__(self, page_size: int):
        """An empty cache for tables of this page size.

        Raises:
            ValueError: `page_size` is not a positive int.
        """
        require_positive(page_size=page_size)
        self.page_size = int(page_size)
        self.tokens_asked = 0  # tokens of all prompts given to `adopt`
        self.tokens_found = 0  # of those, the ones that did not have to be computed
        # From least to most recently used. Whoever uses a page uses its whole chain, tail first, so that a page always
        # stands before its parent: the first page has no other behind it, and may go.
        self._pages: OrderedDict[bytes, _CachedPage] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """Pages held."""
        return len(self._pages)

    @property
    def hit_rate(self) -> float:
        """The share of all prompts' tokens that were found; 0 before the first prompt."""
        return self.tokens_found / max(self.tokens_asked, 1)

    def match(self, tokens: Tokens, *, salt: bytes = b"") -> Int32[np.ndarray, " m"]:
        """The pages of the longest cached prefix of `tokens`, in order. A look: it neither uses nor counts them.

        At least one token is left to compute, so a prompt that is cached whole gives up its last page.

        Args:
            tokens: token ids.
            salt: whatever else K and V depend on (adapter, tenant, image): prompts of different salts share nothing.

        Raises:
            ValueError: `tokens` is not a 1-D sequence of integers in int32, or `salt` is not bytes.
        """
        return np.array([self._pages[key].page for key in self._match(_token_ids(tokens), salt)], np.int32)

    def adopt(
        self, table: BlockTable, row: int, tokens: Tokens, *, salt: bytes = b""
    ) -> tuple[BlockTable, int, Bool[Array, ""]]:
        """Starts an empty row on the longest cached prefix of `tokens`, as `match` finds it.

        Returns:
            The table, how many tokens the row holds now, and `ok`, which is not waited for. Refused (`ok` False, table
            unchanged): a row that holds tokens already.

        Raises:
            ValueError: as `match`; the table has another page size; `row` is outside [0, B); `tokens` are more than a
                row of the table may hold.
        """
        self._require(table, row)
        tokens, capacity = _token_ids(tokens), table.max_blocks_per_row * table.page_size
        if tokens.size > capacity:
            raise ValueError(f"tokens: expected at most {capacity}, all that a row may hold, got {tokens.size}")
        keys = self._match(tokens, salt)
        num_found = len(keys) * self.page_size
        self.tokens_asked += tokens.size
        self.tokens_found += num_found
        if not keys:  # a miss moves no page and leaves the table's arrays where they are
            return table, 0, _is_empty(table.lengths, row)
        self._use(reversed(keys))
        table, ok = _adopt(table, row, _padded([self._pages[key].page for key in keys], table), num_found)
        return table, num_found, ok

    def insert(self, table: BlockTable, row: int, tokens: Tokens, *, salt: bytes = b"") -> BlockTable:
        """Caches the full pages under a row's first n tokens, whose K and V are computed or on their way.

        Where a page of the same tokens is cached already, that one stays. Waits for the row's pages to reach the host.

        Args:
            tokens: the row's tokens from its start; a last page that they do not fill is left out. Draft tokens that
                may still be rejected are not among them.

        Raises:
            ValueError: as `match`; the table has another page size; `row` is outside [0, B) or holds fewer tokens.
        """
        self._require(table, row)
        tokens = _token_ids(tokens)
        row_pages, length = jax.device_get(_row(table, row))
        if tokens.size > length:
            raise ValueError(f"tokens: expected at most the {length} that row {row} holds, got {tokens.size}")
        keys, added = [], []
        for page, (key, parent, page_tokens) in zip(row_pages.tolist(), self._chain(tokens, salt), strict=False):
            if key not in self._pages:
                self._pages[key] = _CachedPage(parent, page_tokens, page)
                added.append(page)
            elif not self._holds(key, parent, page_tokens):
                break  # two contents with one hash: the first one keeps it
            keys.append(key)
        self._use(reversed(keys))
        return _retain(table, _padded(added, table)) if added else table

    def evict(self, table: BlockTable, num_pages: int) -> tuple[BlockTable, int]:
        """Frees up to `num_pages` pages, least recently used first, and of each chain the tail before the head.

        A page that a row holds would not become free: it and its chain count as used now. Waits for the table's
        reference counts to reach the host.

        Returns:
            The table, and how many pages were freed.

        Raises:
            ValueError: the table has another page size, or `num_pages` is negative.
        """
        self._require(table)
        if num_pages < 0:
            raise ValueError(f"num_pages: expected at least 0, got {num_pages}")
        holders = np.asarray(table.ref_counts)
        freed, in_use = [], set()
        while len(freed) < num_pages and self._pages:
            key, cached = next(iter(self._pages.items()))
            if key in in_use:  # then so are all others
                break
            if holders[cached.page] > 1:
                chain = list(self._to_head(key))
                in_use.update(chain)
                self._use(chain)
            else:
                freed.append(cached.page)
                del self._pages[key]
        return _drop(table, _padded(freed, table)) if freed else table, len(freed)

    def reset(self, table: BlockTable) -> tuple[BlockTable, bool]:
        """Forgets everything, statistics too: for a change of the model's weights.

        Refused (`ok` False, nothing changes) while any row holds tokens, since what the old weights computed could
        still be inserted. Waits for the table's lengths to reach the host.

        Returns:
            The table, and `ok`.

        Raises:
            ValueError: the table has another page size.
        """
        self._require(table)
        if np.asarray(table.lengths).any():
            return table, False
        pages = [cached.page for cached in self._pages.values()]
        self._pages.clear()
        self.tokens_asked = self.tokens_found = 0
        return _drop(table, _padded(pages, table)) if pages else table, True

    def check(self, table: BlockTable) -> None:
        """Checks on the host that the table holds a reference for every page here.

        Raises:
            ValueError: names the first page that is not retained, or is cached twice.
        """
        self._require(table)
        retained = np.asarray(table.retained).copy()
        for cached in self._pages.values():
            if not 0 <= cached.page < table.num_pages or retained[cached.page] < 1:
                raise ValueError(
                    f"page {cached.page}: cached, but the table holds no reference for it: expected the table that the "
                    f"last method returned, got another"
                )
            retained[cached.page] -= 1

    def _match(self, tokens: Int32[np.ndarray, " n"], salt: bytes) -> list[bytes]:
        """Keys of the longest cached prefix, head first, that leaves a token over."""
        keys = []
        for key, parent, page_tokens in self._chain(tokens[:-1], salt):
            if not self._holds(key, parent, page_tokens):
                break
            keys.append(key)
        return keys

    def _chain(self, tokens: Int32[np.ndarray, " n"], salt: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Key, parent's key and tokens of each page that the tokens fill."""
        if not isinstance(salt, bytes):
            raise ValueError(f"salt: expected bytes, got {type(salt).__name__}")
        key = hashlib.blake2b(salt, digest_size=_DIGEST_BYTES, person=b"salt").digest()
        data, step = tokens.tobytes(), self.page_size * tokens.itemsize
        for end in range(step, len(data) + 1, step):
            parent, page_tokens = key, data[end - step : end]
            key = hashlib.blake2b(parent + page_tokens, digest_size=_DIGEST_BYTES).digest()
            yield key, parent, page_tokens

    def _holds(self, key: bytes, parent: bytes, page_tokens: bytes) -> bool:
        """Whether the page is cached: a hash alone is not believed."""
        cached = self._pages.get(key)
        return cached is not None and cached.tokens == page_tokens and cached.parent == parent

    def _to_head(self, key: bytes) -> Iterator[bytes]:
        """The key, its parent's and so on."""
        while key in self._pages:
            yield key
            key = self._pages[key].parent

    def _use(self, tail_to_head: Iterable[bytes]) -> None:
        for key in tail_to_head:
            self._pages.move_to_end(key)

    def _require(self, table: BlockTable, row: int = 0) -> None:
        if table.page_size != self.page_size:
            raise ValueError(f"table: expected one with pages of {self.page_size} tokens, got {table.page_size}")
        if not 0 <= row < table.max_rows:
            raise ValueError(f"row: expected one in [0, {table.max_rows}), got {row}")


@jax.jit
def _adopt(table: BlockTable, row, pages: Int32[Array, " m"], num_tokens) -> tuple[BlockTable, Bool[Array, ""]]:
    return table.adopt(jnp.int32(row)[None], pages[None], jnp.int32(num_tokens)[None])


@jax.jit
def _is_empty(lengths: Int32[Array, " B"], row) -> Bool[Array, ""]:
    return lengths[row] == 0


@jax.jit
def _row(table: BlockTable, row) -> tuple[Int32[Array, " M"], Int32[Array, ""]]:
    return table.pages[row], table.lengths[row]


_retain = jax.jit(BlockTable.retain)
_drop = jax.jit(BlockTable.drop)


def _padded(pages: Sequence[int], table: BlockTable) -> Int32[np.ndarray, " m"]:
    """The pages, padded to a power of two."""
    padded = np.full(max(_LEAST_PAGES_PER_CALL, 1 << (len(pages) - 1).bit_length()), table.num_pages, np.int32)
    padded[: len(pages)] = pages
    return padded


def _token_ids(tokens: Tokens) -> Int32[np.ndarray, " n"]:
    """The tokens as int32; none may wrap around, for then two prompts would look alike."""
    ids = np.asarray(tokens)
    if ids.size == 0:
        ids = ids.astype(np.int32)  # an empty list is of floats
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"tokens: expected a 1-D sequence of integers, got {ids.dtype}{list(ids.shape)}")
    if ids.size and (ids.min() < -(2**31) or ids.max() >= 2**31):
        raise ValueError(f"tokens: expected ids in int32, got values in [{ids.min()}, {ids.max()}]")
    return ids.astype(np.int32)
