"""Laws of sharing, as attention sees them: whose page it is makes no difference to any row's output.

All with implementation "xla" and one partition, so that equal means equal in every bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import release

from paged_jax import BlockTable, PagedCache, paged_attention
from paged_jax.prefix_cache import PrefixCache

P, C, M, B = 24, 3, 5, 4  # pages, cells per page, blocks per row, rows
HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY, T = 4, 2, 16, 2, 13, 16
LENGTHS = st.integers(0, C * M - 3)

FULL = pytest.mark.full

attend = functools.partial(paged_attention, num_partitions=1, implementation="xla")


def law(*strategies):
    """A test that holds for a few examples drawn from `strategies`, and for many others under the marker `full`."""

    def test_of(body):
        common = {"deadline": None, "database": None, "derandomize": True}
        few, many = (settings(max_examples=n, **common)(given(*strategies)(body)) for n in (10, 250))

        @pytest.mark.parametrize("holds", [pytest.param(few, id="few"), pytest.param(many, id="many", marks=FULL)])
        def test(holds):
            holds()

        test.__doc__ = body.__doc__
        return test

    return test_of


@dataclasses.dataclass
class Pool:
    """A table and a cache of one layer whose cells no row owns hold NaN; K and V are drawn for each write."""

    table: BlockTable
    cache: PagedCache
    rng: np.random.Generator

    def write(self, *num_tokens, values=None):
        """Grows the rows; `values` [tokens, 2, K, H] in row order, or new random ones. Returns those."""
        num_tokens = np.array(num_tokens, np.int32)
        values = self.draw(num_tokens.sum()) if values is None else values
        padded = np.full((64, *values.shape[1:]), np.nan, np.float32)
        padded[: len(values)] = values
        self.table, self.cache, ok = write(self.table, self.cache, num_tokens, padded)
        assert ok
        self.table.check()
        return values

    def draw(self, count):
        return self.rng.standard_normal((count, 2, KV_HEADS, HEAD_DIM)).astype(np.float32)

    def fork(self, parents, children):
        self.table, copies, ok = fork(self.table, np.array(parents, np.int32), np.array(children, np.int32))
        assert ok
        self.cache = copy_pages(self.cache, copies)

    def truncate(self, *lengths):
        self.table, copies, ok = truncate(self.table, np.array(lengths, np.int32))
        assert ok
        self.cache = copy_pages(self.cache, copies)

    def output(self):
        q = np.random.default_rng(1).standard_normal((B, HEADS, HEAD_DIM)).astype(np.float32)
        out = np.asarray(decode_attention(q, self.cache, self.table))
        assert np.isfinite(out).all()
        return out


@jax.jit
def write(table, cache, num_tokens, values):
    table, step, ok = table.step(num_tokens, size=64)
    return table, cache.write(0, values[:, 0], values[:, 1], step.slots), ok


fork, truncate = jax.jit(BlockTable.fork), jax.jit(BlockTable.truncate)
copy_pages = jax.jit(PagedCache.copy_pages)
decode_attention = jax.jit(attend)


def pool(seed):
    """Free pages lie in a random order."""
    rng = np.random.default_rng(seed)
    table = BlockTable.create(P, C, B, M)
    table = dataclasses.replace(table, free_pages=jnp.asarray(rng.permutation(P), jnp.int32))
    cache = PagedCache.create(1, P, C, KV_HEADS, HEAD_DIM, jnp.float32)
    return Pool(table, jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), cache), rng)


@law(LENGTHS, LENGTHS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_what_a_child_writes_shows_nowhere_else(length, other, grown, more, seed):
    rows = pool(seed)
    rows.write(length, other, 0, 0)
    before = rows.output()
    rows.fork([0, 0], [2, 3])
    forked = rows.output()
    np.testing.assert_array_equal(forked[:2], before[:2])
    rows.write(0, 0, grown, more)
    np.testing.assert_array_equal(rows.output()[:2], before[:2])
    alone = rows.output()
    rows.write(2, 3, 0, 0)  # nor does what the parent writes
    np.testing.assert_array_equal(rows.output()[2:], alone[2:])


@law(LENGTHS, st.integers(0, 3), st.integers(0, 3), st.integers(0, 99))
def test_a_shared_prefix_is_as_good_as_a_private_copy(length, mine, yours, seed):
    shared, private = pool(seed), pool(seed + 100)
    prefix = shared.write(length, 0, 0, 0)
    shared.fork([0], [3])
    tails = shared.write(mine, 0, 0, yours)
    private.write(length, 0, 0, length, values=np.concatenate([prefix, prefix]))
    private.write(mine, 0, 0, yours, values=tails)
    np.testing.assert_array_equal(shared.output(), private.output())


@law(LENGTHS, st.integers(0, 12), st.integers(0, 3), st.booleans(), st.integers(0, 99))
def test_a_row_cut_and_grown_again_equals_a_fresh_one(length, kept, grown, is_shared, seed):
    rows, fresh = pool(seed), pool(seed + 100)
    values = rows.write(length, 0, 0, 0)
    if is_shared:
        rows.fork([0], [1])
    before = rows.output()
    rows.truncate(kept, 99, 99, 99)
    tail = rows.write(grown, 0, 0, 0)
    fresh.write(min(kept, length) + grown, 0, 0, 0, values=np.concatenate([values[:kept], tail]))
    np.testing.assert_array_equal(rows.output()[0], fresh.output()[0])
    np.testing.assert_array_equal(rows.output()[1:], before[1:])


@law(LENGTHS, st.integers(0, 99))
def test_pages_zeroed_when_they_are_taken_lose_nothing(length, seed):
    """Zeroed first, copied to then: the child has its parent's output, and no other page was touched."""
    rows = pool(seed)
    rows.write(length, 5, 0, 0)
    before = rows.output()
    rows.table, rows.cache, taken = fork_into_zeroed(rows.table, rows.cache, np.array([0]), np.array([2]))
    after = rows.output()
    np.testing.assert_array_equal(after[:2], before[:2])
    np.testing.assert_array_equal(attend_as(rows, 0, 2), before[0])
    assert int(taken.sum()) == (length % C != 0)
    assert np.isnan(np.asarray(rows.cache.k)[0][~np.asarray(rows.table.ref_counts, bool)]).all()


@jax.jit
def fork_into_zeroed(before, cache, parents, children):
    table, copies, _ = before.fork(parents, children)
    taken = table.taken_since(before)
    return table, cache.zero_pages(taken).copy_pages(copies), taken


def attend_as(rows, row, other):
    """The output of `other`'s pages for `row`'s query."""
    table = dataclasses.replace(
        rows.table,
        pages=rows.table.pages.at[row].set(rows.table.pages[other]),
        lengths=rows.table.lengths.at[row].set(rows.table.lengths[other]),
    )
    return Pool(table, rows.cache, rows.rng).output()[row]


# --- logits


def forward(weights, tokens, step, cache):
    """A small attention-only model with positions: logits [T, V] and the cache."""
    angles = step.positions[:, None].astype(jnp.float32) * weights["frequency"][None, :]
    x = weights["embedding"][tokens] + jnp.sin(angles)
    for layer in range(LAYERS):
        q, k, v = (jnp.einsum("td,dnh->tnh", x, weights[name][layer]) for name in "qkv")
        cache = cache.write(layer, k, v, step.slots)
        y = attend(q, cache, step.table, layer=layer, query_lengths=step.query_lengths)
        x = x + jnp.einsum("tnh,nhd->td", y, weights["o"][layer])
    return x @ weights["embedding"].T, cache


@jax.jit
def prefill(weights, tokens, num_tokens, cache, table):
    """Logits of each row's last new token."""
    table, step, ok = table.step(num_tokens, size=T)
    logits, cache = forward(weights, tokens, step, cache)
    return logits.at[step.last].get(mode="fill", fill_value=0), cache, table, ok


@pytest.fixture(scope="module")
def weights():
    rng, width = np.random.default_rng(0), 32
    shapes = {"q": (width, HEADS, HEAD_DIM), "k": (width, KV_HEADS, HEAD_DIM), "v": (width, KV_HEADS, HEAD_DIM)}
    drawn = {name: rng.standard_normal((LAYERS, *shape)) / width**0.5 for name, shape in shapes.items()}
    drawn["o"] = rng.standard_normal((LAYERS, HEADS, HEAD_DIM, width)) / (HEADS * HEAD_DIM) ** 0.5
    drawn |= {"embedding": rng.standard_normal((VOCABULARY, width)), "frequency": rng.random(width)}
    return {name: jnp.asarray(value, jnp.float32) for name, value in drawn.items()}


def start(weights, cache, table, row, prompt, prefixes=None):
    """Logits after the prompt, whose cached prefix is not computed again; and how many tokens that were."""
    found = 0
    if prefixes is not None:
        table, found, ok = prefixes.adopt(table, row, prompt)
        assert ok
    tokens, num_tokens = np.zeros(T, np.int32), np.zeros(B, np.int32)
    tokens[: len(prompt) - found], num_tokens[row] = prompt[found:], len(prompt) - found
    logits, cache, table, ok = prefill(weights, tokens, num_tokens, cache, table)
    assert ok
    if prefixes is not None:
        table = prefixes.insert(table, row, prompt)
    return np.asarray(logits[row]), cache, table, found


@pytest.mark.parametrize("common", [0, 1, 2, 3, 4, 6, 10, 12])
def test_a_hit_gives_the_same_logits_as_computing(weights, common, highest_precision):  # noqa: ARG001
    """Row 0 leaves its prompt in the cache, pages of row 1 come and go, and row 2's prompt begins like row 0's."""
    rng = np.random.default_rng(common)
    old, between = rng.integers(0, VOCABULARY, (2, 12))
    prompt = np.concatenate([old[:common], (old[common:] + 1) % VOCABULARY, [5]])[: max(common, 9)]
    empty = BlockTable.create(P, C, B, M), PagedCache.create(LAYERS, P, C, KV_HEADS, HEAD_DIM, jnp.float32)
    expected, *_ = start(weights, empty[1], empty[0], 1, prompt)

    prefixes, (table, cache) = PrefixCache(C), empty
    for row, tokens in enumerate((old, between)):
        _, cache, table, found = start(weights, cache, table, row, tokens, prefixes)
        assert found == 0
    table = release(table, np.array([True, True, False, False]))
    table, freed = prefixes.evict(table, 1)
    assert freed == 1  # the tail of row 0's prompt
    logits, cache, table, found = start(weights, cache, table, 2, prompt, prefixes)
    assert found == min(common // C, 3, (len(prompt) - 1) // C) * C
    table.check()
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
