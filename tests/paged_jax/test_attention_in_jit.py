"""Attention inside a user's program: scans over layers, growing rows, donated caches, gradients, mistakes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from attention_cases import DECODE, F32, GPU, RAGGED, attend_as, bits, every, meaning, posed
from lowering import lower_for_cuda
from tolerances import assert_accurate

from paged_jax import BlockTable, PagedCache, paged_attention

pytestmark = pytest.mark.usefixtures("highest_precision")


def stacked(layers, **kw):
    """One cache whose every layer holds rows of its own on the same pages."""
    each = [pools.build(**kw, seed=layer) for layer in range(layers)]
    k, v = (jnp.asarray(np.concatenate([getattr(pool.cache, name) for pool in each])) for name in "kv")
    cache = dataclasses.replace(each[0].cache, k=k, v=v)
    return [dataclasses.replace(pool, cache=cache, layer=layer) for layer, pool in enumerate(each)]


def assert_scans_over_layers(implementation, query_lengths):
    layers = stacked(3, lengths=(0, 9, 21))
    windows = np.asarray([4, 2**31 - 1, 9], np.int32)
    tokens = 3 if query_lengths is None else sum(query_lengths)
    q = np.random.default_rng(1).standard_normal((3, tokens, 4, 16)).astype(np.float32)

    @jax.jit
    def scan(q, windows, cache, table, query_lengths):
        def body(cache, inputs):
            layer, q, window = inputs
            out = paged_attention(
                q,
                cache,
                table,
                layer=layer,
                query_lengths=query_lengths,
                window=window,
                return_lse=True,
                implementation=implementation,
            )
            return cache, out

        return jax.lax.scan(body, cache, (jnp.arange(3), q, windows))[1]

    counts = None if query_lengths is None else np.asarray(query_lengths, np.int32)
    outs, lses = scan(q, windows, layers[0].cache, layers[0].table, counts)
    for n, pool in enumerate(layers):
        truth, plain = meaning(q[n], pool, query_lengths, {"window": int(windows[n])})
        assert_accurate(outs[n], truth[0], plain[0])
        assert_accurate(lses[n], truth[1], plain[1])


@every
def test_decode_in_a_scan_over_layers_reads_each_layer_through_its_own_window(implementation):
    assert_scans_over_layers(implementation, None)


@every
def test_ragged_queries_in_a_scan_over_layers_read_each_layer_through_its_own_window(implementation):
    assert_scans_over_layers(implementation, (0, 9, 4))


@pytest.mark.parametrize("implementation", [pytest.param("xla"), GPU])
@pytest.mark.parametrize(("dtype", "layout"), pools.WRITTEN_IN_PLACE_IN_LAYOUTS)
def test_a_scan_that_writes_and_attends_copies_no_pool(implementation, dtype, layout):
    cache = PagedCache.create(3, 200, 4, 2, 16, dtype, layout=layout)
    table = pools.block_table([[5, 9], [3]], [7, 3], 200, 4, width=5)

    def forward(cache, table, q, k, v):
        table, step, _ = table.step(jnp.asarray([1, 1], jnp.int32))

        def body(cache, inputs):
            layer, q, k, v = inputs
            cache = cache.write(layer, k, v, step.slots)
            return cache, paged_attention(q, cache, step.table, layer=layer, implementation=implementation)

        return *jax.lax.scan(body, cache, (jnp.arange(3), q, k, v)), table

    q, k = (np.ones((3, 2, heads, 16), pools.of_tokens(dtype)) for heads in (4, 2))
    compiled = jax.jit(forward, donate_argnums=0).lower(cache, table, q, k, k).compile()
    assert pools.pool_copies(compiled.as_text(), cache) == []
    before = [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(cache)]
    after, outs, _ = compiled(cache, table, q, k, k)
    assert [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(after)] == before
    assert np.isfinite(np.asarray(outs, np.float32)).all()


@every
def test_rows_grow_without_a_new_trace(implementation):
    traces, counted = [], []

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(cache, table, q, layer):
        traces.append(1)
        table, step, ok = table.step(jnp.asarray([1, 0, 1], jnp.int32))
        kv = jnp.ones((3, 2, 16))
        cache = cache.write(layer, kv, kv, step.slots)
        return cache, table, ok, paged_attention(q, cache, step.table, layer=layer, implementation=implementation)

    cache, table = PagedCache.create(2, 12, 4, 2, 16, F32), BlockTable.create(12, 4, 3, 9)
    for n in range(20):
        cache, table, ok, out = decode(cache, table, jnp.ones((3, 4, 16)), jnp.int32(1))
        assert ok
        np.testing.assert_array_equal(table.lengths, [n + 1, 0, n + 1])
        np.testing.assert_allclose(out, np.broadcast_to([[[1.0]], [[0.0]], [[1.0]]], out.shape), rtol=1e-6)
        counted.append(len(traces))
    # The first call may be the one that loads Pallas, after which JAX traces once more.
    assert counted[-1] == counted[1]


@every
def test_the_layer_may_be_an_int_or_traced(implementation):
    q, pool, options, truth, plain = posed(DECODE["plain"])
    attend = functools.partial(paged_attention, q, pool.cache, pool.table, implementation=implementation, **options)
    expected = attend(layer=1)
    assert_accurate(expected, truth[0], plain[0])
    for out in (attend(layer=jnp.int32(1)), jax.jit(lambda: attend(layer=1))()):
        assert_accurate(out, expected, expected)


@every
def test_without_return_lse_the_output_comes_alone(implementation):
    case = DECODE["partitions of everything"]
    q, pool, options, _, _ = posed(case)
    attend = functools.partial(paged_attention, layer=1, implementation=implementation, **options)
    alone = jax.jit(attend)(q, pool.cache, pool.table)
    out, _ = attend_as(case, implementation)(q, pool)
    assert bits(alone) == bits(out)


# --- mistakes


def attempt(implementation=None, q=(3, 4, 16), q_dtype=F32, table_page_size=8, **options):
    """paged_attention on 3 rows and 2 layers of 2 kv heads, traced and never run."""
    cache = PagedCache.create(2, 5, 8, 2, 16, F32)
    table = BlockTable.create(5, table_page_size, 3, 4)
    return jax.eval_shape(
        lambda q: paged_attention(q, cache, table, implementation=implementation, **options),
        jax.ShapeDtypeStruct(q, q_dtype),
    )


MISTAKES = {
    "q of rank 2": {"q": (3, 64)},
    "q of rank 4": {"q": (3, 1, 4, 16)},
    "heads that kv heads do not divide": {"q": (3, 5, 16)},
    "fewer heads than kv heads": {"q": (3, 1, 16)},
    "another head_dim": {"q": (3, 4, 24)},
    "fewer tokens than rows": {"q": (2, 4, 16)},
    "more tokens than rows": {"q": (4, 4, 16)},
    "integer q": {"q_dtype": jnp.int32},
    "an unknown implementation": {"implementation": "nonsense"},
    "another page_size": {"table_page_size": 4},
    "query_lengths of two rows": {"query_lengths": jnp.ones(2, jnp.int32)},
    "query_lengths of rank 2": {"query_lengths": jnp.ones((3, 1), jnp.int32)},
    "float query_lengths": {"query_lengths": jnp.ones(3)},
    "sinks per kv head": {"sinks": jnp.ones(2)},
    "sinks of rank 2": {"sinks": jnp.ones((4, 1))},
    "scalar sinks": {"sinks": jnp.ones(())},
    "integer sinks": {"sinks": jnp.ones(4, jnp.int32)},
    "slopes per kv head": {"alibi_slopes": jnp.ones(2)},
    "slopes of rank 2": {"alibi_slopes": jnp.ones((1, 4))},
    "integer slopes": {"alibi_slopes": jnp.ones(4, jnp.int32)},
    "window 0": {"window": 0},
    "window -1": {"window": -1},
    "window True": {"window": True},
    "float window": {"window": 2.5},
    "traced float window": {"window": jnp.float32(2)},
    "window per row": {"window": jnp.ones(3, jnp.int32)},
    "soft_cap 0": {"soft_cap": 0.0},
    "soft_cap -1": {"soft_cap": -1.0},
    "soft_cap inf": {"soft_cap": float("inf")},
    "traced scale": {"scale": jnp.float32(1)},
    "num_partitions 0": {"num_partitions": 0},
    "num_partitions -2": {"num_partitions": -2},
    "num_partitions 1.5": {"num_partitions": 1.5},
    "layer -1": {"layer": -1},
    "layer 2 of 2": {"layer": 2},
    "float layer": {"layer": jnp.float32(0)},
    "layer of rank 1": {"layer": jnp.zeros(1, jnp.int32)},
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("implementation", [None, "triton_interpret"])
def test_a_callers_mistake_says_what_was_expected(mistake, implementation):
    with pytest.raises(ValueError, match=r"(?is)expected.*got"):
        attempt(**{"implementation": implementation} | mistake)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(8, 16), (20, 16), (264, 16), (16, 12), (16, 512)])
def test_a_head_dim_that_the_kernel_cannot_do_is_named(head_dim, v_head_dim):
    """Who asks for the kernel hears why not; who leaves the choice open gets the reference, also on a GPU."""
    cache, table = PagedCache.create(1, 5, 8, 2, head_dim, F32, v_head_dim=v_head_dim), BlockTable.create(5, 8, 3, 4)
    q = np.ones((3, 4, head_dim), np.float32)
    for implementation in ("triton", "triton_interpret"):
        with pytest.raises(NotImplementedError, match=r"head_dim that is a multiple of 8 from 16 to 256, not \d+"):
            paged_attention(q, cache, table, implementation=implementation)
    assert "paged_decode" not in lower_for_cuda(paged_attention, q, cache, table)
    assert jax.jit(paged_attention).lower(q, cache, table).out_info.shape == (3, 4, v_head_dim)


def test_the_attempt_without_a_mistake_passes():
    assert attempt().shape == (3, 4, 16)
    assert attempt(query_lengths=jnp.ones(3, jnp.int32), q=(7, 4, 16)).shape == (7, 4, 16)


@every
@pytest.mark.parametrize("argument", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f))], ids=["grad", "jit of grad"])
def test_differentiating_says_forward_only(implementation, argument, transform):
    q, pool, _, _, _ = posed(DECODE["a table of one block"])

    def loss(x):
        inputs = {"q": jnp.asarray(q), "k": pool.cache.k, "v": pool.cache.v, "sinks": jnp.zeros(4)} | {argument: x}
        cache = dataclasses.replace(pool.cache, k=inputs["k"], v=inputs["v"])
        return paged_attention(
            inputs["q"], cache, pool.table, layer=1, sinks=inputs["sinks"], implementation=implementation
        ).sum()

    start = {"q": jnp.asarray(q), "k": pool.cache.k, "v": pool.cache.v, "sinks": jnp.zeros(4)}[argument]
    with pytest.raises(NotImplementedError, match=r"(?i)forward.only"):
        transform(loss)(start)


@every
def test_differentiating_ragged_queries_says_forward_only(implementation):
    q, pool, _, _, _ = posed(RAGGED["one query per row"])
    counts = jnp.ones(4, jnp.int32)

    def loss(q):
        return paged_attention(
            q, pool.cache, pool.table, layer=1, query_lengths=counts, implementation=implementation
        ).sum()

    with pytest.raises(NotImplementedError, match=r"(?i)forward.only"):
        jax.jvp(loss, (jnp.asarray(q),), (jnp.asarray(q),))
