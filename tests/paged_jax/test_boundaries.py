"""At the edges of types and sizes: 64-bit mode, integers beyond int32, no tokens at all, caches of another kind."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from lowering import lower_for_cuda
from tables import grown

from paged_jax import (
    cascade_attention,
    cascade_pays,
    layouts,
    merge_attention,
    paged_attention,
    shared_blocks,
)
from pallas_kernels import paged_decode

LENGTHS = (5, 0, 9)


@pytest.fixture
def cache():
    k = jax.random.normal(jax.random.key(0), (1, 9, 4, 2, 16))
    return pools.cache_of(k, k + 1)


@pytest.fixture
def table():
    return grown(9, 4, 4, *LENGTHS)


@pytest.fixture
def q():
    return jax.random.normal(jax.random.key(1), (3, 4, 16))


@contextlib.contextmanager
def wide_integers():
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


OPTIONS = {"plain": {}, "partitions": {"num_partitions": 2}, "everything": {"window": 3, "soft_cap": 2.0, "scale": 0.3}}


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        pytest.param(implementation, options, id=f"{implementation}-{name}", marks=pytest.mark.full if is_full else ())
        for implementation, default in ((None, ("partitions",)), ("triton_interpret", ("everything",)))
        for name, options in OPTIONS.items()
        for is_full in [name not in default]
    ],
)  # without a GPU, None is "xla"
def test_64_bit_mode_changes_nothing(implementation, options, cache, table, q):
    slopes = np.linspace(0.1, 0.4, 4)  # float64 there, float32 otherwise

    @jax.jit
    def attend(q, cache, table, slopes):
        return paged_attention(
            q, cache, table, alibi_slopes=slopes, implementation=implementation, return_lse=True, **options
        )

    expected = attend(q, cache, table, slopes)
    with wide_integers():
        assert jnp.asarray(slopes).dtype == jnp.float64
        got = attend(q, cache, table, slopes)
    for array, reference in zip(got, expected, strict=True):
        assert array.dtype == jnp.float32
        np.testing.assert_allclose(array, reference, rtol=1e-6)


def test_the_table_stays_int32_in_64_bit_mode(table):
    @jax.jit  # one program instead of one for each operation
    def grow_cut_and_release(table, num_tokens, lengths, ended):
        grown, step, ok = table.step(num_tokens, size=8)
        cut, _, _ = grown.truncate(lengths)
        return ok, grown, step, cut, cut.release(ended)

    with wide_integers():
        given = jnp.asarray([1, 0, 2]), jnp.asarray([2, 0, 9]), jnp.asarray([True, False, False])
        assert given[0].dtype == jnp.int64
        ok, *found = grow_cut_and_release(table, *given)
    assert ok
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"int32"}
    found[2].check()


@pytest.mark.parametrize(
    "options", [pytest.param({}, id="plain", marks=pytest.mark.full), pytest.param({"window": 3}, id="window")]
)
def test_ragged_queries_of_the_kernel_in_64_bit_mode(options, cache, table, q):
    def attend():
        counts = np.minimum(np.asarray(table.lengths), 1)
        return paged_attention(q, cache, table, query_lengths=counts, implementation="triton_interpret", **options)

    expected = attend()
    with wide_integers():
        got = attend()
    np.testing.assert_allclose(got, expected, rtol=1e-6)


BEYOND = [2**31, 2**32, 2**40, -(2**40)]


@pytest.mark.parametrize("number", BEYOND)
def test_integers_beyond_int32_stay_out_of_range(number, cache, table):
    assert table.slots(np.array([number]), np.array([0])) == 9 * 4
    assert table.slots(np.array([0]), np.array([number])) == 9 * 4
    refused, ok = table.extend(np.array([number + 1, 0, 0]))
    assert not ok
    assert (refused.lengths == table.lengths).all()
    written = cache.write(0, jnp.ones((1, 2, 16)), jnp.ones((1, 2, 16)), np.array([number]))
    assert (written.k == cache.k).all()


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**63 - 1])
def test_the_widest_windows_see_every_key(window, cache, table, q):
    np.testing.assert_array_equal(paged_attention(q, cache, table, window=window), paged_attention(q, cache, table))


@pytest.mark.parametrize("implementation", [None, "xla", "triton_interpret"])
@pytest.mark.parametrize("query_lengths", [None, [], [0, 0, 0]], ids=["no rows", "no rows, ragged", "no tokens"])
def test_no_query_tokens_give_no_output(query_lengths, implementation, cache, table):
    if not query_lengths:
        table = dataclasses.replace(table, pages=table.pages[:0], lengths=table.lengths[:0])
    if query_lengths is not None:
        query_lengths = np.asarray(query_lengths, np.int32)

    def attend(q, cache, table):
        options = {"query_lengths": query_lengths, "return_lse": True}
        return paged_attention(q, cache, table, implementation=implementation, **options)

    out, lse = attend(jnp.zeros((0, 4, 16)), cache, table)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)
    if implementation is None:
        lower_for_cuda(attend, jnp.zeros((0, 4, 16)), cache, table)


@pytest.mark.parametrize("implementation", [None, "xla", "triton_interpret"])
def test_no_rows_share_nothing(implementation, cache, table):
    table = dataclasses.replace(table, pages=table.pages[:0], lengths=table.lengths[:0])
    options = {"return_lse": True, "implementation": implementation}
    out, lse = cascade_attention(jnp.zeros((0, 4, 16)), cache, table, **options)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)
    assert shared_blocks(table) == 0
    assert not cascade_pays(cache, table)


@pytest.mark.parametrize("implementation", [pytest.param("xla", marks=pytest.mark.full), "triton_interpret"])
def test_cascades_in_64_bit_mode(implementation, cache, table, q):
    attend = jax.jit(functools.partial(cascade_attention, implementation=implementation))
    expected = attend(q, cache, table)
    with wide_integers():
        got = attend(q, cache, table)
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=1e-6)


OTHER_KINDS = {
    "scales": lambda cache: dataclasses.replace(cache, k_scale=jnp.ones((1, 9, 4, 2)), v_scale=jnp.ones((1, 9, 4, 2))),
    "one scale": lambda cache: dataclasses.replace(cache, k_scale=jnp.ones((1, 9, 4, 2))),
    "dtype": lambda cache: dataclasses.replace(cache, k=cache.k.astype(jnp.int8), v=cache.v.astype(jnp.int8)),
}


@pytest.mark.parametrize("other", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_a_cache_of_another_kind_is_refused(other, cache, table, q):
    with pytest.raises(ValueError, match=r"cache: expected k_scale .* beside k of .*, got"):
        paged_attention(q, other(cache), table)
    with pytest.raises(ValueError, match=r"cache: expected k_scale .* beside k of .*, got"):
        other(cache).write(0, jnp.ones((1, 2, 16)), jnp.ones((1, 2, 16)), jnp.zeros(1, jnp.int32))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": jnp.zeros(5, jnp.int32)},
        {"lengths": jnp.zeros((3, 1), jnp.int32)},
        {"lengths": jnp.zeros(3)},
        {"pages": jnp.zeros((5, 4), jnp.int32)},
        {"pages": jnp.zeros(3, jnp.int32)},
        {"pages": jnp.zeros((3, 4))},
        {"pages": jnp.zeros((3, 0), jnp.int32)},
        {"pages": jnp.zeros((3, 4), jnp.int16)},
        {"lengths": jnp.zeros(3, jnp.uint32)},
    ],
    ids=lambda wrong: ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in wrong.items()),
)
def test_a_table_of_other_shapes_or_dtypes_is_refused(wrong, cache, table, q):
    with pytest.raises(ValueError, match=r"table: expected.*pages.*lengths.*got"):
        paged_attention(q, cache, dataclasses.replace(table, **wrong))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "vllm" else pytest.mark.full) for name in pools.LAYOUTS]
)
def test_the_raw_kernel_takes_one_layer_or_a_stack(layout, cache, table, q):
    expected, lse = paged_attention(q, cache, table, implementation="triton_interpret", return_lse=True)
    cache = layouts.convert(cache, layout)
    raw = functools.partial(paged_decode, q, block_tables=table.pages, lengths=table.lengths, interpret=True)
    one_layer = raw(k_pages=cache.k[0], v_pages=cache.v[0], layout=layout)
    np.testing.assert_array_equal(one_layer, expected)
    stacked = raw(k_pages=cache.k, v_pages=cache.v, layer=0, layout=layout, return_lse=True)
    np.testing.assert_array_equal(stacked[1], lse)
    with pytest.raises(ValueError, match="axes"):
        raw(k_pages=cache.k, v_pages=cache.v, layout=layout)


def test_the_raw_kernel_refuses_an_unknown_layout(cache, table, q):
    with pytest.raises(ValueError, match=r"(?s)layout: expected.*got 'nonsense'"):
        paged_decode(q, cache.k, cache.v, table.pages, table.lengths, layer=0, layout="nonsense", interpret=True)


def test_parts_to_merge_must_be_of_one_shape_and_floating():
    with pytest.raises(ValueError, match="one shape"):
        merge_attention([jnp.ones((2, 3, 4)), jnp.ones((2, 3, 5))], [jnp.ones((2, 3))] * 2)
    with pytest.raises(ValueError, match="floating"):
        merge_attention(jnp.ones((2, 3, 4), jnp.int32), jnp.ones((2, 3)))
