"""The prefix cache: what is found, what is kept, what goes first, and what is refused."""

import hashlib

import jax.numpy as jnp
import numpy as np
import pytest
from tables import assert_same, counts, extend, held, release

from paged_jax import BlockTable, prefix_cache
from paged_jax.prefix_cache import PrefixCache

C = 4
PROMPT = list(range(100, 114))  # three full pages and two tokens


def rows(*which):
    return jnp.asarray([row in which for row in range(4)])


class Server:
    """A table and its prefix cache, and the one way in which a row gets its tokens."""

    def __init__(self, num_pages=20):
        self.prefixes = PrefixCache(C)
        self.table = BlockTable.create(num_pages, C, 4, 6)

    def start(self, row, tokens, salt=b""):
        """Adopts what is there, makes room for the rest and caches it; returns the number of tokens found."""
        self.table, found, ok = self.prefixes.adopt(self.table, row, tokens, salt=salt)
        assert ok
        assert self.table.lengths[row] == found
        grow = np.zeros(4, np.int32)
        grow[row] = len(tokens) - found
        self.table, ok = extend(self.table, grow)
        assert ok
        self.table = self.prefixes.insert(self.table, row, tokens, salt=salt)
        self.check()
        return found

    def end(self, *which):
        self.table = release(self.table, rows(*which))
        self.check()

    def evict(self, num_pages):
        self.table, freed = self.prefixes.evict(self.table, num_pages)
        self.check()
        return freed

    def check(self):
        self.table.check()
        self.prefixes.check(self.table)
        assert int((self.table.retained > 0).sum()) == self.prefixes.num_pages


# --- match, adopt, insert


@pytest.mark.parametrize(
    ("tokens", "num_pages"),
    [
        (PROMPT, 3),
        ([*PROMPT, 1, 2, 3], 3),
        (PROMPT[:13], 3),
        (PROMPT[:12], 2),
        (PROMPT[:9], 2),
        (PROMPT[:8], 1),
        (PROMPT[:5], 1),
        (PROMPT[:4], 0),
        (PROMPT[:1], 0),
        ([], 0),
        ([*PROMPT[:8], 0, *PROMPT[9:]], 2),
        ([*PROMPT[:4], 0, *PROMPT[5:]], 1),
        ([0, *PROMPT[1:]], 0),
        (PROMPT[4:], 0),
    ],
)
def test_the_longest_cached_prefix_is_found_and_a_token_is_left_to_compute(tokens, num_pages):
    server = Server()
    assert server.start(0, PROMPT) == 0
    pages = server.prefixes.match(tokens)
    assert pages.dtype == np.int32
    assert pages.tolist() == held(server.table, 0)[:num_pages]
    if tokens:
        assert server.start(1, tokens) == num_pages * C
        assert held(server.table, 1)[:num_pages] == held(server.table, 0)[:num_pages]


def test_only_full_pages_are_cached():
    server = Server()
    server.start(0, PROMPT)
    assert server.prefixes.num_pages == 3
    server.end(0)
    assert server.table.num_free == 17


def test_a_row_that_has_grown_is_cached_further():
    server = Server()
    server.start(0, PROMPT[:6])
    assert server.prefixes.num_pages == 1
    server.table, _ = extend(server.table, counts(8, 0, 0, 0))
    server.table = server.prefixes.insert(server.table, 0, PROMPT)
    server.check()
    assert server.prefixes.match(PROMPT).tolist() == held(server.table, 0)[:3]


def test_salts_share_nothing():
    server = Server()
    server.start(0, PROMPT, salt=b"adapter 1")
    assert server.start(1, PROMPT) == 0
    assert server.start(2, PROMPT, salt=b"adapter 2") == 0
    assert server.start(3, PROMPT, salt=b"adapter 1") == 12
    assert server.prefixes.num_pages == 9


def test_of_two_rows_that_computed_the_same_the_first_ones_pages_stay():
    server = Server()
    server.table, ok = extend(server.table, counts(14, 14, 0, 0))
    assert ok
    for row in (0, 1):
        server.table = server.prefixes.insert(server.table, row, PROMPT)
    server.check()
    assert server.prefixes.num_pages == 3
    assert server.prefixes.match(PROMPT).tolist() == held(server.table, 0)[:3]
    server.end(0, 1)
    assert server.table.num_free == 17


def test_inserting_again_changes_nothing():
    server = Server()
    server.start(0, PROMPT)
    before = server.table
    after = server.prefixes.insert(before, 0, PROMPT)
    assert_same(after, before)
    assert server.prefixes.num_pages == 3


def test_a_hash_alone_is_not_believed(monkeypatch):
    """With a digest of one byte, two pages of other tokens soon have the same one."""
    monkeypatch.setattr(prefix_cache, "_DIGEST_BYTES", 1)
    root = hashlib.blake2b(b"", digest_size=1, person=b"salt").digest()

    def digest(token):
        return hashlib.blake2b(root + np.full(C, token, np.int32).tobytes(), digest_size=1).digest()

    other = next(token for token in range(1, 9999) if digest(token) == digest(0))
    server = Server()
    server.start(0, [0] * C)
    assert server.prefixes.match([*[0] * C, 0]).size == 1
    assert server.prefixes.match([*[other] * C, 0]).size == 0
    server.start(1, [other] * (2 * C))
    assert server.prefixes.num_pages == 1
    assert server.prefixes.match([*[0] * C, 0]).tolist() == held(server.table, 0)


def test_token_ids_of_any_integer_type_are_the_same():
    server = Server()
    server.start(0, np.asarray(PROMPT, np.uint16))
    assert server.prefixes.match(np.asarray(PROMPT, np.int64)).size == 3
    assert server.prefixes.match(tuple(PROMPT)).size == 3
    assert server.prefixes.match(jnp.asarray(PROMPT)).size == 3


def test_a_live_row_is_not_started():
    server = Server()
    server.start(0, PROMPT)
    before = server.table
    after, _, ok = server.prefixes.adopt(before, 0, PROMPT)
    assert not ok
    assert_same(after, before)


def test_a_look_neither_uses_nor_counts():
    server = Server()
    server.start(0, PROMPT)
    server.start(1, [1] * 9)
    server.end(0, 1)
    server.prefixes.match(PROMPT)
    assert server.prefixes.tokens_asked == 14 + 9
    assert server.evict(3) == 3
    assert server.prefixes.match(PROMPT).size == 0
    assert server.prefixes.match([1] * 9).size == 2


def test_a_miss_costs_one_hash_whatever_the_prompts_length(monkeypatch):
    server = Server()
    server.start(0, PROMPT)
    calls, blake2b = [], hashlib.blake2b
    monkeypatch.setattr(hashlib, "blake2b", lambda *args, **options: calls.append(args) or blake2b(*args, **options))
    server.prefixes.match([7] * 20)
    assert len(calls) == 1 + 1  # the salt's, the first page's
    calls.clear()
    server.prefixes.match(PROMPT)
    assert len(calls) == 1 + 3


# --- evict


def test_a_chain_goes_from_its_tail():
    server = Server()
    server.start(0, PROMPT)
    pages = held(server.table, 0)
    server.end(0)
    for left in (2, 1, 0):
        assert server.evict(1) == 1
        assert server.prefixes.match(PROMPT).tolist() == pages[:left]
    assert server.evict(1) == 0
    assert server.table.num_free == 20


def test_the_least_recently_used_goes_first():
    server = Server()
    first, second, third = ([token] * 9 for token in (1, 2, 3))
    for row, tokens in enumerate((first, second, third)):
        server.start(row, tokens)
    server.end(0, 1, 2)
    server.start(0, first)
    server.end(0)
    assert server.evict(3) == 3
    assert [server.prefixes.match(tokens).size for tokens in (first, second, third)] == [2, 0, 1]
    assert server.evict(2) == 2
    assert [server.prefixes.match(tokens).size for tokens in (first, second, third)] == [1, 0, 0]


def test_a_shared_head_stays_as_long_as_one_of_its_tails():
    server = Server()
    server.start(0, [*PROMPT[:8], *[1] * 5])
    server.start(1, [*PROMPT[:8], *[2] * 5])
    assert server.prefixes.num_pages == 4
    server.end(0, 1)
    assert server.evict(1) == 1
    assert server.prefixes.match([*PROMPT[:8], *[2] * 5]).size == 3
    assert server.evict(1) == 1
    assert server.prefixes.match([*PROMPT[:8], *[2] * 5]).size == 2
    assert server.evict(9) == 2


def test_pages_that_rows_hold_stay_and_count_as_used():
    server = Server()
    server.start(0, PROMPT)
    server.start(1, [1] * 9)
    server.end(1)
    assert server.evict(9) == 2  # only what row 1 left
    assert server.prefixes.match(PROMPT).size == 3
    assert server.evict(9) == 0
    server.start(1, [1] * 9)
    server.end(0, 1)
    assert server.evict(3) == 3
    assert server.prefixes.match(PROMPT).size == 0


def test_a_head_stays_while_a_row_holds_only_its_tail():
    """Row 1 computed the first page itself; the second page, which only it computed, hangs on row 0's first."""
    server = Server()
    server.table, _ = extend(server.table, counts(4, 8, 0, 0))
    server.table = server.prefixes.insert(server.table, 0, PROMPT[:4])
    server.table = server.prefixes.insert(server.table, 1, PROMPT[:8])
    server.end(0)
    assert server.evict(9) == 0
    assert server.prefixes.match(PROMPT).size == 2
    server.end(1)
    assert server.evict(9) == 2


def test_a_reused_page_does_not_serve_its_old_tokens():
    server = Server(num_pages=4)
    server.start(0, PROMPT[:13])
    server.end(0)
    assert server.evict(3) == 3
    assert server.start(1, [1] * 13) == 0  # takes every page of the pool
    assert server.prefixes.match(PROMPT).size == 0


def test_evicting_none_evicts_none():
    server = Server()
    server.start(0, PROMPT)
    server.end(0)
    assert server.evict(0) == 0
    assert server.prefixes.num_pages == 3


def test_the_number_of_pages_does_not_compile_anew():
    calls, server = (prefix_cache._adopt, prefix_cache._retain, prefix_cache._drop), Server()
    for call in calls:
        call.clear_cache()
    for count in (1, 5, 9, 14, 17):
        for _ in range(2):  # a miss, then a hit where a page is full
            server.start(0, [count] * count)
            server.end(0)
        server.evict(count % 3)
    assert [call._cache_size() for call in calls] == [1, 1, 1]


# --- statistics and reset


def test_the_hit_rate_is_the_share_of_tokens_found():
    server = Server()
    assert server.prefixes.hit_rate == 0
    server.start(0, PROMPT)
    server.start(1, PROMPT)
    assert (server.prefixes.tokens_asked, server.prefixes.tokens_found) == (28, 12)
    assert server.prefixes.hit_rate == pytest.approx(12 / 28)
    assert server.prefixes.num_pages == 3


def test_reset_is_refused_while_rows_hold_pages():
    server = Server()
    server.start(0, PROMPT)
    before = server.table
    after, ok = server.prefixes.reset(before)
    assert ok is False
    assert_same(after, before)
    assert server.prefixes.num_pages == 3
    server.end(0)
    server.table, ok = server.prefixes.reset(server.table)
    assert ok is True
    server.check()
    assert server.table.num_free == 20
    assert (server.prefixes.num_pages, server.prefixes.hit_rate, server.prefixes.tokens_asked) == (0, 0, 0)
    assert server.prefixes.match(PROMPT).size == 0
    assert server.prefixes.reset(server.table)[1]


# --- mistakes


def other_table():
    return BlockTable.create(20, C + 1, 4, 6)


MISTAKES = {
    "a page size of 0": lambda _: PrefixCache(0),
    "float tokens": lambda s: s.prefixes.match([1.0, 2.0]),
    "bool tokens": lambda s: s.prefixes.match([True, False]),
    "tokens of rank 2": lambda s: s.prefixes.match([[1, 2]]),
    "a token that would wrap around": lambda s: s.prefixes.match([1, 2**32]),
    "a token below int32": lambda s: s.prefixes.match([-(2**31) - 1]),
    "a salt that is a str": lambda s: s.prefixes.match(PROMPT, salt="adapter"),
    "adopt: a row past the table": lambda s: s.prefixes.adopt(s.table, 4, PROMPT),
    "adopt: row -1": lambda s: s.prefixes.adopt(s.table, -1, PROMPT),
    "adopt: another page size": lambda s: s.prefixes.adopt(other_table(), 0, PROMPT),
    "adopt: longer than a row may be": lambda s: s.prefixes.adopt(s.table, 1, [1] * 25),
    "insert: more tokens than the row holds": lambda s: s.prefixes.insert(s.table, 0, [*PROMPT, 1]),
    "insert: an empty row": lambda s: s.prefixes.insert(s.table, 1, PROMPT),
    "insert: a row past the table": lambda s: s.prefixes.insert(s.table, 4, PROMPT),
    "insert: another page size": lambda s: s.prefixes.insert(other_table(), 0, []),
    "evict: a negative number": lambda s: s.prefixes.evict(s.table, -1),
    "evict: another page size": lambda s: s.prefixes.evict(other_table(), 1),
    "reset: another page size": lambda s: s.prefixes.reset(other_table()),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_raises_and_changes_nothing(mistake):
    server = Server()
    server.start(0, PROMPT)
    with pytest.raises(ValueError, match=r"expected .*got"):
        mistake(server)
    server.check()
    assert (server.prefixes.num_pages, server.prefixes.tokens_asked) == (3, 14)


def test_check_finds_a_table_that_was_forgotten():
    server = Server()
    before = server.table
    server.start(0, PROMPT)
    with pytest.raises(ValueError, match=r"page \d+: .*expected .*got"):
        server.prefixes.check(before)
