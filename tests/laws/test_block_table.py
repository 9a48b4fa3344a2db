"""Laws of the block table: any sequence of operations agrees with a plain Python model, down to the cells' contents.

680 sequences of 50 operations, and 20 000 others under the marker `full`.
"""

import functools
from itertools import accumulate, chain
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from paged_jax import BlockTable, PageCopies, PagedStep

P, C, M, B, T = 11, 3, 4, 5, 8  # pages, cells per page, blocks per row, rows, tokens of a packed step
OPERATIONS, BYTES = 50, 12  # operations of a sequence, bytes that one is drawn from
SHARDS = [
    *((shard, 170) for shard in range(4)),
    *(pytest.param(4 + i, 1000, marks=pytest.mark.full) for i in range(20)),
]
EMPTY = BlockTable.create(P, C, B, M)


class Outcome(NamedTuple):
    """What one operation returned, and what the new table says of it."""

    table: BlockTable
    taken: jax.Array
    ok: jax.Array
    copies: PageCopies | None
    slots: jax.Array | None


def call(name, options, table, *arguments):
    result = getattr(table, name)(*arguments, **options)
    after, *extra, ok = result if isinstance(result, tuple) else (result, jnp.asarray(True))
    copies = next((value for value in extra if isinstance(value, PageCopies)), None)
    slots = next((value.slots for value in extra if isinstance(value, PagedStep)), None)
    return Outcome(after, after.taken_since(table), ok, copies, slots)


def in_one_transfer(function):
    """The call under jit, and its outcome on the host: one array comes over, because each takes its time."""

    def flat(*arguments):
        found = function(*arguments)
        return found.table, jnp.concatenate([leaf.ravel().astype(jnp.int32) for leaf in jax.tree.leaves(found)])

    compiled, outcomes, parts = jax.jit(flat), [], []

    def run(*arguments):
        if not outcomes:
            outcomes.append(jax.eval_shape(function, *arguments))
            leaves = jax.tree.leaves(outcomes[0])
            ends = accumulate(leaf.size for leaf in leaves)
            parts.extend((end - leaf.size, end, leaf.shape) for end, leaf in zip(ends, leaves, strict=True))
        table, numbers = compiled(*arguments)
        numbers = np.asarray(numbers)
        leaves = [numbers[start:end].reshape(shape) for start, end, shape in parts]
        return table, jax.tree.unflatten(jax.tree.structure(outcomes[0]), leaves)

    return run


METHODS = ("extend", "step", "truncate", "release", "fork", "adopt", "retain", "drop")
RUN = {name: in_one_transfer(functools.partial(call, name, {})) for name in METHODS}
RUN["packed step"] = in_one_transfer(functools.partial(call, "step", {"size": T}))


class Model:
    """Rows as lists of stamps, one for each token ever written, and the pool's cells with the stamps in them.

    Which free page is taken is the table's choice, so pages are read back from it. All else is predicted: what is
    refused, every count, and that each row finds its own stamps in its cells, whatever was written elsewhere.
    """

    def __init__(self):
        self.rows = [[] for _ in range(B)]
        self.pages = [[] for _ in range(B)]
        self.retained = [0] * P
        self.cells = np.full((P, C), -1)
        self.last_stamp = self.last_written = 0

    def predict(self, name, arguments):
        """Carries the operation out and says whether it can be: a refused one changes nothing here either."""
        most = {"step": (B,), "packed step": (T,)}.get(name, ())
        return getattr(self, "extend" if most else name)(*arguments, *most)

    @property
    def holders(self):
        return np.bincount([*chain(*self.pages)], minlength=P) + self.retained

    @property
    def num_free(self):
        return int((self.holders == 0).sum())

    def extend(self, num_tokens, most=B * M * C):
        lengths = [len(row) + n for row, n in zip(self.rows, num_tokens, strict=True)]
        blocks = [-(-length // C) for length in lengths]
        needed = sum(blocks) - sum(map(len, self.pages))
        if min(num_tokens) < 0 or sum(num_tokens) > most or max(blocks) > M or needed > self.num_free:
            return False
        for row, n in zip(self.rows, num_tokens, strict=True):
            row += range(self.last_stamp + 1, self.last_stamp + n + 1)
            self.last_stamp += n
        return True

    def truncate(self, lengths):
        if min(lengths) < 0:
            return False
        kept = [min(len(row), length) for row, length in zip(self.rows, lengths, strict=True)]
        pages = [row[: -(-n // C)] for row, n in zip(self.pages, kept, strict=True)]
        holders = np.bincount([*chain(*pages)], minlength=P) + self.retained
        cutters = [pages[row][-1] for row, n in enumerate(kept) if n < len(self.rows[row]) and n % C]
        copies = sum(cutters.count(page) - (cutters.count(page) == holders[page]) for page in set(cutters))
        if copies > (holders == 0).sum():
            return False
        self.rows = [row[:n] for row, n in zip(self.rows, kept, strict=True)]
        return True

    def release(self, ended):
        self.rows = [[] if end else row for row, end in zip(self.rows, ended, strict=True)]
        return True

    def fork(self, parents, children):
        real = [(p, c) for p, c in zip(parents, children, strict=True) if 0 <= p < B and 0 <= c < B]
        started = [c for _, c in real]
        copies = sum(len(self.rows[p]) % C != 0 for p, _ in real)
        if any(self.rows[c] or started.count(c) > 1 for c in started) or copies > self.num_free:
            return False
        for child, row in [(c, list(self.rows[p])) for p, c in real]:
            self.rows[child] = row
        return True

    def adopt(self, rows, pages, num_tokens):
        holders = self.holders
        real = [entry for entry in zip(rows, pages, num_tokens, strict=True) if 0 <= entry[0] < B]
        started = [row for row, _, _ in real]
        for row, of_row, n in real:
            if self.rows[row] or started.count(row) > 1 or n < 0 or n % C or n > C * min(M, len(of_row)):
                return False
            read = of_row[: n // C]
            if len(set(read)) < len(read) or not all(0 <= page < P and holders[page] for page in read):
                return False
        for row, of_row, n in real:
            self.rows[row] = self.cells[of_row[: n // C]].ravel().tolist()
        return True

    def is_misuse(self, _rows, adopted, _num_tokens):
        """Whether one of the adopted pages is not full yet: its row goes on to write there."""
        written = {pages[-1] for row, pages in zip(self.rows, self.pages, strict=True) if len(row) % C}
        return not written.isdisjoint(chain(*adopted))

    def retain(self, pages):
        holders = self.holders
        for page in pages:
            if 0 <= page < P and holders[page]:
                self.retained[page] += 1
        return True

    def drop(self, pages):
        for page in pages:
            if 0 <= page < P and self.retained[page]:
                self.retained[page] -= 1
        return True

    def agree(self, found):
        """Compares everything, after the caller's part: copy what `copies` says, then write the new tokens."""
        table = found.table
        assert table.lengths.tolist() == list(map(len, self.rows))
        blocks = -(-table.lengths // C)
        assert (table.pages[np.arange(M) >= blocks[:, None]] == P).all()
        was_held = self.holders > 0
        self.pages = [pages[:n].tolist() for pages, n in zip(table.pages, blocks, strict=True)]
        assert all(len(set(row)) == len(row) and set(row) <= set(range(P)) for row in self.pages)
        holders = self.holders
        assert table.ref_counts.tolist() == holders.tolist()
        assert table.retained.tolist() == self.retained
        assert sorted(table.free_pages[: table.num_free].tolist()) == np.flatnonzero(holders == 0).tolist()
        assert (found.taken == (~was_held & (holders > 0))).all()

        if found.copies is not None:
            src, dst = found.copies.src, found.copies.dst
            assert ((src < P) == (dst < P)).all()
            self.cells[dst[dst < P]] = self.cells[src[src < P]]
        cells, stamps = self.cells.reshape(-1), np.array([*chain(*self.rows)], int)
        slots = (table.pages[:, :, None] * C + np.arange(C)).reshape(B, M * C)
        slots = slots[np.arange(M * C) < table.lengths[:, None]]  # of every token, row by row
        is_new = stamps > self.last_written
        cells[slots[is_new]] = stamps[is_new]
        self.last_written = self.last_stamp
        if found.slots is not None:
            assert sorted(found.slots[found.slots < P * C].tolist()) == sorted(slots[is_new].tolist())
        assert (cells[slots] == stamps).all()


def decode(data, model):
    """An operation from bytes. Some are mistakes; the others look at the model for what would succeed."""
    kind, *x = data
    empty = [row for row in range(B) if not model.rows[row]] or [0]
    filled = [row for row in range(B) if model.rows[row]] or [0]
    full = [row[: len(stamps) // C] for row, stamps in zip(model.pages, model.rows, strict=True) if len(stamps) >= C]
    full = [*full, [page for page in range(P) if model.retained[page]]]

    def per_row(least, most, values=x):
        return [least + value % (most - least + 1) for value in values[:B]]

    match kind % 20:
        case 0 | 1:
            return "extend", per_row(0, 2)
        case 2:
            return "extend", per_row(-1, 13)
        case 3:
            return "extend", [C * (value % 5 == 0) for value in x[:B]]
        case 4 | 5:
            return "step", per_row(0, 1)
        case 6:
            return "packed step", per_row(0, 2)
        case 7:
            return "packed step", per_row(-1, 4)
        case 8:
            return "truncate", per_row(0, 14)
        case 9:
            return "truncate", [
                len(row) - (value % 4 == 0) * (value % 3) for row, value in zip(model.rows, x, strict=False)
            ]
        case 10 | 11:
            return "release", [value % 3 == 0 for value in x[:B]]
        case 12:
            return "fork", per_row(-1, B, x[:2]), per_row(-1, B, x[2:4])
        case 13 | 14:
            at = x[0] % len(empty)
            others = [*empty[at + 1 :], B, *empty[:at]]
            return "fork", [filled[value % len(filled)] for value in x[1:3]], [empty[at], others[x[3] % len(others)]]
        case 15:
            return "retain", per_row(-1, P, x[:3])
        case 16:
            row = model.pages[x[0] % B] or [P]
            return "retain", [row[value % len(row)] for value in x[1:4]]
        case 17:
            return "drop", per_row(-1, P, x[:5])
        case 18:
            return (
                "adopt",
                per_row(-1, B, x[:2]),
                [per_row(0, P, x[2:5]), per_row(-1, P, x[5:8])],
                [C * (v % 4) - v % 2 for v in x[8:10]],
            )
        case _:
            pages = [(full[value % len(full)] + [P, P, P])[:3] for value in x[:2]]
            if x[3] % 5 == 0:
                pages[0] = pages[0][:1] * 3
            at = x[2] % len(empty)
            return "adopt", [empty[at], (empty[at + 1 :] or [B])[0]], pages, [C * (3 - row.count(P)) for row in pages]


def as_arrays(arguments):
    return [np.asarray(values, bool if isinstance(values[0], bool) else np.int32) for values in arguments]


def unchanged(table, before):
    return all((a == b).all() for a, b in zip(jax.tree.leaves(table), jax.tree.leaves(before), strict=True))


@pytest.mark.parametrize(("shard", "sequences"), SHARDS)
def test_any_sequence_of_operations_agrees_with_the_model(shard, sequences):
    @seed(shard)  # every shard its own sequences, and the same ones each time
    @settings(max_examples=sequences, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(min_size=OPERATIONS * BYTES, max_size=OPERATIONS * BYTES))
    def holds(data):
        model, table, before = Model(), EMPTY, jax.tree.map(np.asarray, EMPTY)
        for i in range(0, len(data), BYTES):
            name, *arguments = decode(data[i : i + BYTES], model)
            if name == "adopt" and model.is_misuse(*arguments):
                continue
            note(f"{name} {arguments}")
            table, found = RUN[name](table, *as_arrays(arguments))
            expected = model.predict(name, arguments)
            assert bool(found.ok) == expected
            assert expected or unchanged(found.table, before)
            model.agree(found)
            before = found.table
        table.check()

        table, _ = RUN["release"](table, np.ones(B, bool))
        for _ in range(max(model.retained)):
            for i in range(0, P, 5):
                table, _ = RUN["drop"](table, np.arange(i, i + 5, dtype=np.int32))
        for field in ("pages", "lengths", "ref_counts", "retained", "num_free"):
            np.testing.assert_array_equal(getattr(table, field), getattr(EMPTY, field))
        assert sorted(table.free_pages.tolist()) == list(range(P))

    holds()
