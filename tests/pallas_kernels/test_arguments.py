"""The kernels' public functions refuse raw arrays that do not fit, and say what was expected and what was given."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grid import crossed

from pallas_kernels import cache_write, paged_cascade, paged_decode, paged_prefill

POOL = (9, 4, 2, 16)  # [P, C, K, H]
GOOD = {
    "q": jnp.ones((3, 4, 16)),
    "k_pages": jnp.ones(POOL),
    "v_pages": jnp.arange(1152.0).reshape(POOL) % 101,
    "block_tables": jnp.arange(9).reshape(3, 3),
    "lengths": jnp.asarray([5, 2, 9]),
}
SCALES = {"k_scales": jnp.ones(POOL[:3]), "v_scales": jnp.ones(POOL[:3])}
ONE_BYTE = {"k_pages": jnp.ones(POOL, jnp.int8), "v_pages": jnp.ones(POOL, jnp.int8)}
attend = {
    "decode": functools.partial(paged_decode, interpret=True),
    "prefill": functools.partial(paged_prefill, query_lengths=jnp.ones(3, jnp.int32), interpret=True),
    "cascade": functools.partial(paged_cascade, num_shared=jnp.int32(0), interpret=True),
}
every_kernel = pytest.mark.parametrize("attend", attend.values(), ids=attend)

MISTAKES = {
    "heads that kv heads do not divide": {"q": jnp.ones((3, 5, 16))},
    "q of another head_dim": {"q": jnp.ones((3, 4, 32))},
    "q of rank 2": {"q": jnp.ones((3, 64))},
    "q of integers": {"q": jnp.ones((3, 4, 16), jnp.int32)},
    "fewer lengths": {"lengths": jnp.asarray([5, 2])},
    "more lengths": {"lengths": jnp.asarray([5, 2, 9, 1])},
    "lengths of floats": {"lengths": jnp.asarray([5.0, 2.0, 9.0])},
    "tables of floats": {"block_tables": jnp.ones((3, 3))},
    "tables of rank 1": {"block_tables": jnp.arange(9)},
    "tables of no blocks": {"block_tables": jnp.zeros((3, 0), jnp.int32)},
    "V of fewer pages": {"v_pages": jnp.ones((8, 4, 2, 16))},
    "V of fewer cells": {"v_pages": jnp.ones((9, 3, 2, 16))},
    "V of fewer heads": {"v_pages": jnp.ones((9, 4, 1, 16))},
    "V of another rank": {"v_pages": jnp.ones((1, *POOL))},
    "K of an unknown dtype": {"k_pages": jnp.ones(POOL, jnp.int32)},
    "an unknown layout": {"layout": "nonsense"},
    "one byte without scales": ONE_BYTE,
    "one byte with one scale": ONE_BYTE | {"k_scales": SCALES["k_scales"]},
    "scales of other shapes": ONE_BYTE | {"k_scales": jnp.ones(POOL[:2]), "v_scales": SCALES["v_scales"]},
    "scales of another dtype": ONE_BYTE | SCALES | {"v_scales": jnp.ones(POOL[:3], jnp.bfloat16)},
    "scales without need": SCALES,
    "a layer of one": {"layer": 0},
    "a soft cap of none": {"soft_cap": 0.0},
    "a negative soft cap": {"soft_cap": -1.0},
    "a scale that is no number": {"scale": float("nan")},
    "sinks of other heads": {"sinks": jnp.ones(3)},
    "one sink": {"sinks": 1.0},
    "slopes of integers": {"alibi_slopes": jnp.ones(4, jnp.int32)},
}
OF_SOME = {
    "a window of none": {"window": 0},
    "a window of several": {"window": jnp.ones(2, jnp.int32)},
    "no partitions": {"num_partitions": 0},
}


@every_kernel
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_what_does_not_fit_is_refused(mistake, attend):
    with pytest.raises(ValueError, match=r"(?s)expected.*got"):
        attend(**GOOD | mistake)


@pytest.mark.parametrize("attend", [attend["decode"], attend["prefill"]], ids=["decode", "prefill"])
@pytest.mark.parametrize("mistake", OF_SOME.values(), ids=OF_SOME)
def test_options_of_some_kernels_that_do_not_fit_are_refused(mistake, attend):
    with pytest.raises(ValueError, match=r"(?s)expected.*got"):
        attend(**GOOD | mistake)


@every_kernel
@pytest.mark.parametrize("layer", [3, -1, 0.5, jnp.zeros(1, jnp.int32)], ids=str)
def test_a_layer_that_is_not_there_is_refused(layer, attend):
    stacked = {name: GOOD[name][None] for name in ("k_pages", "v_pages")}
    with pytest.raises(ValueError, match=r"layer: expected an int"):
        attend(**GOOD | stacked, layer=layer)


def test_rows_and_tokens_that_differ_are_refused():
    for name in ("decode", "cascade"):
        with pytest.raises(ValueError, match="q: expected one token for each of 3 rows, got 2"):
            attend[name](**GOOD | {"q": GOOD["q"][:2]})
    with pytest.raises(ValueError, match=r"num_shared: expected shape \[\], got \(3,\)"):
        attend["cascade"](**GOOD, num_shared=jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"query_lengths: expected shape \[3\], got \(4,\)"):
        attend["prefill"](**GOOD, query_lengths=jnp.asarray([0, 1, 2, 3]))  # cumulative ones


@every_kernel
def test_head_dims_that_the_kernel_cannot_do_are_named(attend):
    small = {name: GOOD[name][..., :12] for name in ("q", "k_pages", "v_pages")}
    with pytest.raises(NotImplementedError, match="takes a head_dim that is a multiple of 8 from 16 to 256, not 12"):
        attend(**GOOD | small)


@every_kernel
def test_it_is_forward_only(attend):
    with pytest.raises(NotImplementedError, match="forward only"):
        jax.grad(lambda q: attend(**GOOD | {"q": q}).sum())(GOOD["q"])


TABLES, LENGTHS = (np.asarray(GOOD[name]) for name in ("block_tables", "lengths"))
KINDS = {
    "uint8 and a list": {"block_tables": TABLES.astype(np.uint8), "lengths": LENGTHS.tolist()},
    "lists and int64": {"block_tables": TABLES.tolist(), "lengths": LENGTHS.astype(np.int64)},
}


@pytest.mark.parametrize(("kernel", "kind"), crossed([*attend], [*KINDS]))
def test_integers_of_any_kind_will_do(kernel, kind):
    out = attend[kernel](**GOOD | KINDS[kind])
    arrays = (GOOD[name] for name in ("q", "k_pages", "v_pages", "block_tables", "lengths"))
    truth, _ = oracle.paged(*arrays, np.ones(3, int), scale=0.25)
    np.testing.assert_allclose(out, truth, atol=1e-5)


WRITE = {
    "k": jnp.ones((3, 2, 16)),
    "v": jnp.ones((3, 2, 16)),
    "slots": jnp.asarray([0, 7, 36]),
    "k_pages": jnp.zeros(POOL),
    "v_pages": jnp.zeros(POOL),
}


@pytest.mark.parametrize(
    "mistake",
    [
        {"k": jnp.ones((3, 1, 16))},
        {"v": jnp.ones((3, 2, 8))},
        {"slots": jnp.asarray([0, 7])},
        {"slots": jnp.asarray([0.0, 7.0, 8.0])},
        {"v_pages": jnp.zeros((8, 4, 2, 16))},
        {"layer": 1},
        ONE_BYTE,
        {"layout": "nonsense"},
    ],
    ids=lambda mistake: ", ".join(mistake),
)
def test_a_write_that_does_not_fit_is_refused(mistake):
    with pytest.raises(ValueError, match=r"(?s)expected.*got"):
        cache_write(**WRITE | mistake, interpret=True)


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_write_to_a_layer_that_is_not_there_writes_nowhere(layer):
    stacked = {name: jnp.zeros((2, *POOL)) for name in ("k_pages", "v_pages")}
    write = jax.jit(functools.partial(cache_write, interpret=True))
    for pool in write(**WRITE | stacked, layer=jnp.int32(layer))[:2]:
        assert not np.any(pool)
