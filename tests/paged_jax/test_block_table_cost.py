"""The block table's operations cost O(B·M + P) int32 work: seen in what they are traced to, not timed."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr

from paged_jax import BlockTable

B, M, P, N = 8, 32, 1009, 3  # rows, blocks per row, pages, entries of a fork, an adoption, a retain

OPERATIONS = {
    "extend": (BlockTable.extend, jnp.zeros(B, jnp.int32)),
    "truncate": (BlockTable.truncate, jnp.zeros(B, jnp.int32)),
    "release": (BlockTable.release, jnp.zeros(B, bool)),
    "fork": (BlockTable.fork, jnp.zeros(N, jnp.int32), jnp.zeros(N, jnp.int32)),
    "adopt": (BlockTable.adopt, jnp.zeros(N, jnp.int32), jnp.zeros((N, M), jnp.int32), jnp.zeros(N, jnp.int32)),
    "retain": (BlockTable.retain, jnp.zeros(N, jnp.int32)),
    "drop": (BlockTable.drop, jnp.zeros(N, jnp.int32)),
    "step": (BlockTable.step, jnp.zeros(B, jnp.int32)),
    "slots": (BlockTable.slots, jnp.zeros(N, jnp.int32), jnp.zeros(N, jnp.int32)),
    "taken_since": (lambda table: table.taken_since(table),),
}
POOL_SIZED_WORK = {"truncate", "release", "drop", "taken_since"}  # of the others, the pool's size is no matter


def operations(jaxpr):
    """Every primitive with its results, those of inner functions too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, [variable.aval for variable in equation.outvars]
        for parameter in equation.params.values():
            if isinstance(parameter, ClosedJaxpr):
                yield from operations(parameter.jaxpr)


def traced(name, num_pages):
    function, *arguments = OPERATIONS[name]
    return list(operations(jax.make_jaxpr(function)(BlockTable.create(num_pages, 4, B, M), *arguments).jaxpr))


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_loop_and_nothing_larger_than_the_table_and_the_pool(name):
    found = traced(name, P)
    assert not {primitive for primitive, _ in found} & {"while", "scan", "cond"}
    results = [(primitive, aval) for primitive, avals in found for aval in avals]
    assert max(aval.size for _, aval in results) <= max(P, 2 * B * M)  # twice: indices of a scatter in two dimensions
    assert {str(aval.dtype) for _, aval in results} <= {"int32", "bool", "uint32"}
    assert all(aval.size <= N * M for primitive, aval in results if primitive == "sort")


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - POOL_SIZED_WORK))
def test_the_pools_size_changes_nothing_but_the_counts_that_are_updated(name):
    """What is as large as the pool is a scatter into `ref_counts` or `retained`, which is in place in a jitted loop."""
    large = {primitive for primitive, avals in traced(name, 50 * P) if any(aval.size >= 50 * P for aval in avals)}
    assert large <= {"scatter", "scatter-add", "jit", "pjit"}
