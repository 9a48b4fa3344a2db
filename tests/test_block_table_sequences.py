"""Any sequence of operations leaves the block table as a plain Python model has it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_block_table import INT_MAX, assert_same, counts, extend, held, real_copies, release, truncate

from paged_jax import BlockTable


class Model:
    """The same table as lists and a set. Which free page is taken is the table's choice: it is read back."""

    num_pages, page_size, width, batch, size = 7, 3, 4, 3, 8

    def __init__(self):
        self.rows, self.lengths = [[] for _ in range(self.batch)], [0] * self.batch
        self.free = set(range(self.num_pages))

    def extend(self, num_tokens, limit=None):
        blocks = [-(-(length + n) // self.page_size) for length, n in zip(self.lengths, num_tokens, strict=True)]
        need = sum(blocks) - sum(map(len, self.rows))
        most = self.batch * self.width * self.page_size if limit is None else limit
        if min(num_tokens) < 0 or sum(num_tokens) > most or max(blocks) > self.width or need > len(self.free):
            return False
        self.lengths = [length + n for length, n in zip(self.lengths, num_tokens, strict=True)]
        return True

    def truncate(self, lengths):
        if min(lengths) < 0:
            return False
        self.lengths = [min(pair) for pair in zip(self.lengths, lengths, strict=True)]
        return True

    def release(self, ended):
        self.lengths = [0 if end else length for length, end in zip(self.lengths, ended, strict=True)]
        return True

    def agree(self, table):
        """The table's rows keep their pages, drop those behind their end and take new ones from the free."""
        np.testing.assert_array_equal(table.lengths, self.lengths)
        freed, taken = set(), []
        for row, old in enumerate(self.rows):
            new = held(table, row)
            assert new[: len(old)] == old[: len(new)]
            freed |= set(old[len(new) :])
            taken += new[len(old) :]
            self.rows[row] = new
        assert len(set(taken)) == len(taken)
        assert set(taken) <= self.free
        self.free = (self.free - set(taken)) | freed
        assert set(np.asarray(table.free_pages)[: int(table.num_free)].tolist()) == self.free


step_one = jax.jit(BlockTable.step)
step_packed = jax.jit(functools.partial(BlockTable.step, size=Model.size))

per_row = functools.partial(st.lists, min_size=Model.batch, max_size=Model.batch)
OPERATIONS = st.one_of(
    st.tuples(st.just("extend"), per_row(st.integers(0, 5))),
    st.tuples(st.just("extend"), per_row(st.sampled_from([0, 3, 6, 9]))),
    st.tuples(st.just("extend"), per_row(st.sampled_from([-1, 0, 1, 3, 12, 13, INT_MAX]))),
    st.tuples(st.just("truncate"), per_row(st.integers(-1, 13))),
    st.tuples(st.just("truncate"), per_row(st.integers(0, 13))),
    st.tuples(st.just("release"), per_row(st.booleans())),
    st.tuples(st.just("step"), per_row(st.integers(0, 1))),
    st.tuples(st.just("packed step"), per_row(st.integers(-1, 5))),
    st.tuples(st.just("packed step"), per_row(st.integers(0, 3))),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(OPERATIONS, min_size=5, max_size=25))
def test_any_sequence_of_operations_agrees_with_the_model(operations):
    table, model = BlockTable.create(Model.num_pages, Model.page_size, Model.batch, Model.width), Model()
    for name, argument in operations:
        before = table
        if name == "extend":
            expected = model.extend(argument)
            table, ok = extend(table, counts(*argument))
        elif name == "truncate":
            expected = model.truncate(argument)
            table, copies, ok = truncate(table, counts(*argument))
            assert real_copies(copies, Model.num_pages) == []
        elif name == "release":
            expected, ok = model.release(argument), True
            table = release(table, jnp.asarray(argument))
        elif name == "step":
            expected = model.extend(argument)
            table, _, ok = step_one(table, counts(*argument))
        else:
            expected = model.extend(argument, limit=Model.size)
            table, _, ok = step_packed(table, counts(*argument))
        assert bool(ok) == expected, f"{name} {argument}"
        table.check()
        if not expected:
            assert_same(table, before)
        model.agree(table)
