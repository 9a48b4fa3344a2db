"""Laws of the prefix cache: whatever rows come and go, a page that is found holds the tokens it is found for.

140 sequences of 50 operations, and 4 000 others under the marker `full`.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from tables import extend, release

from paged_jax import BlockTable
from paged_jax.prefix_cache import PrefixCache

P, C, M, B = 10, 2, 4, 3  # pages, cells per page, blocks per row, rows
OPERATIONS, BYTES = 50, 6  # operations of a sequence, bytes that one is drawn from
SHARDS = [*((shard, 70) for shard in range(2)), *(pytest.param(2 + i, 400, marks=pytest.mark.full) for i in range(10))]
SALTS = (b"", b"other")


class Server:
    """Rows over a pool whose cells hold, instead of K and V, what these depend on: the salt and all tokens so far."""

    def __init__(self):
        self.prefixes, self.table = PrefixCache(C), BlockTable.create(P, C, B, M)
        self.cells = np.empty((P, C), object)
        self.rows = [None] * B  # of (salt, tokens)
        self.last_use = {}  # of each cached prefix, (salt, tokens): a time, or None if it was in use at an eviction
        self.time = 0

    def full(self, salt, tokens):
        return [(salt, tokens[:end]) for end in range(C, len(tokens) + 1, C)]

    def found(self, salt, tokens):
        """The cached prefixes that `tokens` may start on."""
        prefixes = self.full(salt, tokens[:-1])
        missing = next((i for i, prefix in enumerate(prefixes) if prefix not in self.last_use), len(prefixes))
        return prefixes[:missing]

    def pages(self, row):
        tokens = self.rows[row][1] if self.rows[row] else ()
        return np.asarray(self.table.pages)[row, : -(-len(tokens) // C)]

    def holds_its_tokens(self, row, start=0):
        salt, tokens = self.rows[row]
        cells = self.cells[self.pages(row)].ravel()
        return all(cells[i] == (salt, tokens[: i + 1]) for i in range(start, len(tokens)))

    def use(self, prefixes):
        self.time += 1
        self.last_use |= dict.fromkeys(prefixes, self.time)

    def grow(self, row, more):
        """True if there was room for them; writes the new tokens."""
        salt, tokens = self.rows[row]
        num_tokens = np.zeros(B, np.int32)
        num_tokens[row] = len(more)
        self.table, ok = extend(self.table, num_tokens)
        if not ok:
            return False
        self.rows[row] = salt, tokens + more
        flat = self.cells.reshape(-1)
        slots = (self.pages(row)[:, None] * C + np.arange(C)).ravel()
        for i in range(len(tokens), len(tokens + more)):
            flat[slots[i]] = (salt, (tokens + more)[: i + 1])
        return True

    def start(self, row, salt, tokens):
        expected = self.found(salt, tokens)
        assert self.prefixes.match(tokens, salt=salt).size == len(expected)
        self.table, num_found, ok = self.prefixes.adopt(self.table, row, tokens, salt=salt)
        if self.rows[row] is not None:
            assert not ok
            self.use(expected)
            return
        assert ok
        assert num_found == len(expected) * C
        self.use(expected)
        self.rows[row] = salt, tokens[:num_found]
        assert self.holds_its_tokens(row)
        if not self.grow(row, tokens[num_found:]):
            self.evict(M)
            if not self.grow(row, tokens[num_found:]):
                self.release(row)

    def insert(self, row, count):
        if self.rows[row] is not None:
            salt, tokens = self.rows[row]
            tokens = tokens[: len(tokens) - count]
            self.table = self.prefixes.insert(self.table, row, tokens, salt=salt)
            self.use(self.full(salt, tokens))

    def release(self, row):
        self.table = release(self.table, np.arange(B) == row)
        self.rows[row] = None

    def evict(self, num_pages):
        cached = {prefix: self.prefixes.match([*prefix[1], 0], salt=prefix[0])[-1] for prefix in self.last_use}
        assert len(set(cached.values())) == len(cached)
        held = {page for row in range(B) for page in self.pages(row).tolist()}
        in_use = {
            prefix
            for prefix, page in cached.items()
            if page in held
            for prefix in self.full(*prefix)  # and its whole chain
        }
        self.table, freed = self.prefixes.evict(self.table, num_pages)
        left = {(s, t) for s, t in cached if self.prefixes.match([*t, 0], salt=s).size == len(t) // C}
        gone = set(cached) - left
        assert len(gone) == freed == min(num_pages, len(cached) - len(in_use))
        assert gone.isdisjoint(in_use)
        assert all(set(self.full(*prefix)) <= left for prefix in left)  # tails went before heads
        times = [self.last_use[prefix] for prefix in gone if self.last_use[prefix]]
        spared = [self.last_use[prefix] for prefix in left - in_use if self.last_use[prefix]]
        assert max(times, default=0) <= min(spared, default=self.time)  # the least recently used went first
        self.last_use = {prefix: None if prefix in in_use else self.last_use[prefix] for prefix in left}

    def reset(self):
        self.table, ok = self.prefixes.reset(self.table)
        assert ok == (self.rows == [None] * B)
        if ok:
            self.last_use = {}

    def check(self):
        assert self.prefixes.num_pages == len(self.last_use)
        assert np.asarray(self.table.retained).sum() == len(self.last_use)
        for row in range(B):
            if self.rows[row] is not None:
                assert self.holds_its_tokens(row)

    def operate(self, kind, row, salt, size, *bits):
        row, salt = row % B, SALTS[salt % 5 == 0]
        tokens = tuple(np.unpackbits(np.array(bits, np.uint8)).tolist())[: size % (C * M) + 1]
        note(f"{kind % 8} row {row} {salt} {tokens} {self.rows[row]}")
        match kind % 8:
            case 0 | 1 | 2:
                self.start(row, salt, tokens)
            case 3:
                if self.rows[row] is not None:
                    self.grow(row, tokens[:2])
            case 4:
                self.insert(row, 0)
            case 5:
                self.insert(row, min(size % 3, len((self.rows[row] or (0, ()))[1])))
            case 6:
                self.release(row)
            case _ if size % 8 == 0:
                self.reset()
            case _:
                self.evict(size % 4)
        self.check()


@pytest.mark.parametrize(("shard", "sequences"), SHARDS)
def test_a_page_that_is_found_holds_what_it_is_found_for(shard, sequences):
    @seed(shard)  # every shard its own sequences, and the same ones each time
    @settings(max_examples=sequences, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(min_size=OPERATIONS * BYTES, max_size=OPERATIONS * BYTES))
    def holds(data):
        server = Server()
        for i in range(0, len(data), BYTES):
            server.operate(*data[i : i + BYTES])
        server.table.check()
        server.prefixes.check(server.table)
        for row in range(B):
            server.release(row)
        server.evict(P)
        assert server.prefixes.num_pages == 0
        assert server.table.num_free == P
        server.table.check()

    holds()
