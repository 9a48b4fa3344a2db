"""Block tables for the tests: their methods compiled, and what is asked of them on the host."""

import dataclasses

import jax
import numpy as np

from paged_jax import BlockTable

INT_MAX = 2**31 - 1

extend = jax.jit(BlockTable.extend)
truncate = jax.jit(BlockTable.truncate)
release = jax.jit(BlockTable.release)


def counts(*values):
    return jax.device_put(np.array(values, np.int32))  # `jnp.asarray` compiles a program for each shape


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(table, other):
    """Bit for bit, whatever the stack holds past its top."""
    for field in dataclasses.fields(BlockTable):
        np.testing.assert_array_equal(getattr(table, field.name), getattr(other, field.name), err_msg=field.name)


def held(table, row):
    """The pages of one row, in block order."""
    blocks = -(-int(table.lengths[row]) // table.page_size)
    return np.asarray(table.pages)[row, :blocks].tolist()


def real_copies(copies, num_pages):
    pairs = zip(np.asarray(copies.src).tolist(), np.asarray(copies.dst).tolist(), strict=True)
    return [pair for pair in pairs if pair != (num_pages, num_pages)]


def grown(num_pages, page_size, width, *lengths):
    table, ok = extend(BlockTable.create(num_pages, page_size, len(lengths), width), counts(*lengths))
    assert ok
    table.check()
    return table
