"""The paged layer equals the dense one: in numpy for every option, and against Flax's own with the same weights."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pools
import pytest
import rope_oracle
from flax import nnx
from grid import sampled

from paged_jax import BlockTable, PagedCache
from paged_jax.layers import PagedAttention, RopeConfig, Rotation, attention_factor

pytestmark = pytest.mark.usefixtures("highest_precision")

FEATURES, HEADS, KV_HEADS, HEAD_DIM = 24, 4, 2, 16
NO_WINDOW = 2**31 - 1
YARN = RopeConfig("yarn", 150_000.0, factor=32.0, original_max_position_embeddings=64, truncate=False)

# What the layer is made with, and what it is called with.
CASES = {
    "plain": ({}, {}),
    "one kv head, V of another head_dim": ({"num_kv_heads": 1, "v_head_dim": 8}, {}),
    "Llama: rope": ({"rope": RopeConfig()}, {}),
    "Qwen 2: biases of q, k and v": ({"rope": RopeConfig(), "qkv_bias": True}, {}),
    "Qwen 3: norm of q and k": ({"rope": RopeConfig(), "qk_norm": functools.partial(nnx.RMSNorm, epsilon=1e-5)}, {}),
    "Gemma 2: soft cap, scale and window": ({"rope": RopeConfig(), "soft_cap": 0.5, "scale": 0.4}, {"window": 5}),
    "Phi 3: partial rope": ({"rope": RopeConfig(partial_rotary_factor=0.75)}, {"window": 7}),
    "gpt-oss: sinks, yarn and biases": (
        {"rope": YARN, "qkv_bias": True, "out_bias": True, "has_sinks": True},
        {"window": 3},
    ),
}

# Tokens of each row, step by step: whole prompts, pieces that follow, then tokens one by one. Rows join and pause.
PACKED = ((7, 1, 0), (2, 0, 5))
DECODED = ((1, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1))
SIZE = 9  # of a packed step, with padding
SCHEDULE = [(counts, SIZE) for counts in PACKED] + [(counts, None) for counts in DECODED]
LENGTHS = np.sum(PACKED + DECODED, axis=0)


def made(seed=0, **options):
    """A layer whose every parameter is random, biases, scales and sinks too."""
    options = {"num_kv_heads": KV_HEADS} | options
    layer = nnx.eval_shape(lambda: PagedAttention(FEATURES, HEADS, HEAD_DIM, **options, rngs=nnx.Rngs(seed)))
    shuffled(layer, seed)
    return layer


def shuffled(module, seed):
    rng = np.random.default_rng(seed)
    state = nnx.state(module, nnx.Param)
    noise = jax.tree.map(lambda leaf: jax.device_put((0.2 * rng.standard_normal(leaf.shape)).astype(leaf.dtype)), state)
    nnx.update(module, noise)


def new_pool(rows=3, layers=1, blocks=5, num_kv_heads=KV_HEADS, dtype=jnp.float32, **options):
    """Pages in any order, every cell NaN."""
    pages = rows * blocks + 2
    cache = PagedCache.create(layers, pages, 4, num_kv_heads, HEAD_DIM, dtype, **options)
    table = BlockTable.create(pages, 4, rows, blocks)
    order = jnp.asarray(np.random.default_rng(3).permutation(pages), jnp.int32)
    return jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), cache), dataclasses.replace(table, free_pages=order)


def hidden(counts, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, FEATURES)).astype(np.float32) for n in counts]


@functools.partial(jax.jit, static_argnames="size")
def plan(table, counts, size):
    return table.step(counts, size=size)


def outputs(forward, cache, table, rows):
    """Each row's outputs [n, D], the rows fed to `forward` as SCHEDULE says; padding tokens are NaN."""
    done, got = np.zeros(len(rows), int), [[] for _ in rows]
    for counts, size in SCHEDULE:
        pieces = [row[start : start + n] for row, start, n in zip(rows, done, counts, strict=True)]
        x = np.full((size or len(rows), FEATURES), np.nan, np.float32)
        places = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
        if size is None:
            places = [np.asarray([r])[:n] for r, n in enumerate(counts)]
        for place, piece in zip(places, pieces, strict=True):
            x[place] = piece
        table, step, ok = plan(table, np.asarray(counts, np.int32), size)
        assert ok
        y, cache = forward(jnp.asarray(x), cache, step)
        for row, place in enumerate(places):
            got[row].append(np.asarray(y)[place])
        done += counts
    table.check()
    return [np.concatenate(row) for row in got]


def paged(layer, rows, **call):
    """Split once, merged inside jit."""
    sizes = {"num_kv_heads": layer.key.kernel.shape[1], "v_head_dim": layer.value.kernel.shape[2]}
    cache, table = new_pool(**sizes)
    graphdef, weights = nnx.split(layer)

    @jax.jit
    def forward(weights, x, cache, step):
        return nnx.merge(graphdef, weights)(x, cache, step, layer=0, **call)

    return outputs(functools.partial(forward, weights), cache, table, rows)


def dense(layer, x, *, window=None):
    """The layer's meaning for one row x [n, D]: numpy, float64."""

    def project(linear, x, axes):
        y = np.tensordot(x, np.asarray(linear.kernel[...], np.float64), axes)
        return y if linear.bias is None else y + np.asarray(linear.bias[...], np.float64)

    def normed(norm, heads):
        if norm is None:
            return heads
        rms = np.sqrt((heads**2).mean(-1, keepdims=True) + norm.epsilon)
        return heads / rms * np.asarray(norm.scale[...], np.float64)

    def turned(heads):
        if layer.rope is None:
            return heads
        return rope_oracle.rotate(heads, range(len(x)), layer.rope, attention_factor(layer.rope))

    x = np.asarray(x, np.float64)
    q, k, v = (project(linear, x, 1) for linear in (layer.query, layer.key, layer.value))
    q, k = turned(normed(layer.query_ln, q)), turned(normed(layer.key_ln, k))
    out, _ = oracle.attention(
        q,
        [k],
        [v],
        [len(x)],
        [len(x)],
        scale=HEAD_DIM**-0.5 if layer.scale is None else layer.scale,
        window=window,
        soft_cap=layer.soft_cap,
        sinks=None if layer.sinks is None else layer.sinks[...],
    )
    return project(layer.out, out, 2)


def assert_same(got, expected, atol=5e-6):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=atol)


CONTAINED = ("plain", "Llama: rope", "Qwen 2: biases of q, k and v")  # in others


@pytest.mark.parametrize("case", sampled(CASES, CASES.keys() - CONTAINED))
def test_prefill_chunks_and_decode_equal_the_dense_formula(case):
    options, call = case
    layer, rows = made(**options), hidden(LENGTHS)
    assert_same(paged(layer, rows, **call), [dense(layer, row, **call) for row in rows])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="biases", marks=pytest.mark.full),
        pytest.param({"use_bias": False}, id="no biases", marks=pytest.mark.full),
        pytest.param({"normalize_qk": True}, id="biases, normed q and k"),
    ],
)
def test_a_converted_layer_equals_flax_s_own(options):
    sizes = {"qkv_features": HEADS * HEAD_DIM, "num_kv_heads": KV_HEADS}
    theirs = nnx.MultiHeadAttention(HEADS, FEATURES, **sizes, **options, decode=False, rngs=nnx.Rngs(0))
    shuffled(theirs, 0)
    ours, rows = PagedAttention.from_dense(theirs), hidden(LENGTHS)
    assert jax.tree.leaves(nnx.state(ours))[0] is jax.tree.leaves(nnx.state(theirs))[0]  # the weights are shared
    padded = np.stack([np.pad(row, ((0, max(LENGTHS) - len(row)), (0, 0))) for row in rows])
    expected = nnx.jit(lambda theirs, x: theirs(x, is_causal=True))(theirs, padded)
    assert_same(paged(ours, rows), [row[:n] for row, n in zip(expected, LENGTHS, strict=True)])


def test_a_dense_layer_s_state_fits_the_paged_one():
    theirs = nnx.MultiHeadAttention(HEADS, FEATURES, qkv_features=HEADS * HEAD_DIM, decode=False, rngs=nnx.Rngs(1))
    ours = PagedAttention(FEATURES, HEADS, HEAD_DIM, qkv_bias=True, out_bias=True, rngs=nnx.Rngs(0))
    assert jax.tree.map(jnp.shape, nnx.state(ours)) == jax.tree.map(jnp.shape, nnx.state(theirs))


def test_a_shared_rotation_stands_in_for_the_layer_s_own():
    layer, rows = made(rope=RopeConfig(rope_theta=100.0)), hidden(LENGTHS)
    without = made()

    graphdef, weights = nnx.split(without)

    @jax.jit
    def forward(weights, x, cache, step):
        rotation = Rotation.at(step.positions, layer.rope, HEAD_DIM)
        return nnx.merge(graphdef, weights)(x, cache, step, layer=0, rotation=rotation)

    assert_same(outputs(functools.partial(forward, weights), *new_pool(), rows), [dense(layer, row) for row in rows])


def test_half_precision_stays():
    options = {"rope": RopeConfig(), "qk_norm": nnx.RMSNorm, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    cache, table = new_pool(dtype=jnp.bfloat16)
    _, step, _ = plan(table, jnp.ones(3, jnp.int32), None)

    def run(x):
        layer = PagedAttention(FEATURES, HEADS, HEAD_DIM, num_kv_heads=KV_HEADS, **options, rngs=nnx.Rngs(0))
        return nnx.state(layer), layer(x, cache, step, layer=0)

    with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix dtypes
        made = jax.eval_shape(run, jax.ShapeDtypeStruct((3, FEATURES), jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype(jnp.bfloat16)}


# --- In a model of several layers


WINDOWS = (4, NO_WINDOW)


def loop(layers):
    """A Python loop; split once, merged inside jit."""
    graphdef, weights = nnx.split(nnx.List(layers))

    def forward(weights, x, cache, step):
        for i, layer in enumerate(nnx.merge(graphdef, weights)):
            y, cache = layer(x, cache, step, layer=i, window=WINDOWS[i])
            x = x + y
        return x, cache

    return forward, weights


def stacked(layers):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *[nnx.state(layer) for layer in layers])


def scan(layers):
    """`lax.scan` over stacked parameters, merged in its body; layer and window are traced."""
    graphdef, _ = nnx.split(layers[0])

    def forward(weights, x, cache, step):
        def body(carry, inputs):
            x, cache = carry
            weights, i, window = inputs
            y, cache = nnx.merge(graphdef, weights)(x, cache, step, layer=i, window=window)
            return (x + y, cache), None

        inputs = (weights, jnp.arange(len(WINDOWS)), jnp.asarray(WINDOWS, jnp.int32))
        return jax.lax.scan(body, (x, cache), inputs)[0]

    return forward, stacked(layers)


def nnx_scan(layers):
    """`nnx.scan` over one layer whose parameters are stacked, as `nnx.vmap` makes them."""
    graphdef, _ = nnx.split(layers[0])

    @nnx.scan(in_axes=(nnx.Carry, None, 0, 0, 0), out_axes=nnx.Carry)
    def body(carry, step, layer, i, window):
        x, cache = carry
        y, cache = layer(x, cache, step, layer=i, window=window)
        return x + y, cache

    def forward(weights, x, cache, step):
        indices = jnp.arange(len(WINDOWS))
        return body((x, cache), step, nnx.merge(graphdef, weights), indices, jnp.asarray(WINDOWS, jnp.int32))

    return forward, stacked(layers)


@pytest.mark.parametrize("model", [pytest.param(loop, marks=pytest.mark.full), scan, nnx_scan])
def test_a_model_equals_the_dense_formula_and_copies_no_pool(model):
    """Every step writes into the very same buffers, and compiles once for prefill and once for decode."""
    layers = [made(seed, rope=RopeConfig(), qkv_bias=True) for seed in range(len(WINDOWS))]
    forward, weights = model(layers)
    rows, programs = hidden(LENGTHS), {}
    cache, table = new_pool(layers=len(WINDOWS), blocks=100)
    pointer = cache.k.unsafe_buffer_pointer()

    def run(x, cache, step):
        if x.shape not in programs:
            jitted = jax.jit(forward, donate_argnames="cache")
            programs[x.shape] = jitted.lower(weights, x, cache, step).compile()
            assert pools.pool_copies(programs[x.shape].as_text(), cache) == []
        y, cache = programs[x.shape](weights, x, cache, step)
        assert cache.k.unsafe_buffer_pointer() == pointer
        return y, cache

    expected = rows
    for layer, window in zip(layers, WINDOWS, strict=True):
        expected = [x + dense(layer, x, window=window) for x in expected]
    assert_same(outputs(run, cache, table, rows), expected, atol=2e-5)


def test_rows_grow_without_a_new_trace():
    """Split once and merged inside jit: Flax costs at the first call, and never again."""
    graphdef, weights = nnx.split(made(rope=RopeConfig()))
    traces = []

    @functools.partial(jax.jit, donate_argnames="cache")
    def advance(weights, cache, table, x):
        traces.append(1)
        table, step, ok = table.step(jnp.ones(3, jnp.int32))
        y, cache = nnx.merge(graphdef, weights)(x, cache, step, layer=0)
        return y, cache, table, ok

    cache, table = new_pool()
    for _ in range(20):
        y, cache, table, ok = advance(weights, cache, table, jnp.ones((3, FEATURES)))
        assert ok
    assert np.isfinite(y).all()
    assert len(traces) == 1


# --- Mistakes, and what is missing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of 4 heads, got 3"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected a positive int, got 0"),
        ({"v_head_dim": -1}, "v_head_dim: expected a positive int, got -1"),
        ({"rope": RopeConfig("linear")}, "linear rope: expected factor, got None"),
        ({"rope": RopeConfig(partial_rotary_factor=0.3125)}, "expected an even number of elements .* 16, got 5"),
    ],
)
def test_a_layer_that_cannot_be_says_why(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


@pytest.mark.parametrize("shape", [(1, 3, FEATURES), (3, FEATURES + 1), (4, FEATURES), (FEATURES, 3)])
def test_hidden_states_that_do_not_fit_are_refused(shape):
    cache, table = new_pool()
    _, step, _ = plan(table, jnp.ones(3, jnp.int32), None)
    with pytest.raises(ValueError, match=r"x: expected shape \(3, 24\) \(the step's tokens, features\), got"):
        made()(jnp.ones(shape), cache, step, layer=0)


def test_what_rows_held_before_is_said_of_prompts_and_not_of_decode_steps():
    cache, table = new_pool()
    x, layer = jnp.asarray(np.concatenate(hidden((2, 1, 3)))), made()
    _, step, _ = plan(table, jnp.array([2, 1, 3]), 6)
    y, _ = layer(x, cache, step, layer=0)
    fresh, _ = layer(x, cache, step, layer=0, max_context=0)
    np.testing.assert_array_equal(fresh, y)
    with pytest.raises(ValueError, match="max_context: expected None or an int of at least 0"):
        layer(x, cache, step, layer=0, max_context=-1)
    _, step, _ = plan(table, jnp.ones(3, jnp.int32), None)
    with pytest.raises(ValueError, match="max_context: expected None in a decode step, got 0"):
        layer(x[:3], cache, step, layer=0, max_context=0)


def test_a_pool_of_other_heads_is_refused():
    cache, table = new_pool(num_kv_heads=KV_HEADS + 1)
    _, step, _ = plan(table, jnp.ones(3, jnp.int32), None)
    with pytest.raises(ValueError, match=r"k: expected shape \(3, 3, 16\).* got \(3, 2, 16\)"):
        made()(jnp.ones((3, FEATURES)), cache, step, layer=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_features": 8}, "expected one size .* got 24, 24 and 8"),
        ({"in_kv_features": 8}, "expected one size .* got 24, 8 and 24"),
        ({"attention_fn": jax.nn.dot_product_attention}, r"expected attention_fn nnx\.dot_product_attention, got <"),
    ],
)
def test_a_dense_layer_that_cannot_be_converted_says_why(options, message):
    theirs = nnx.eval_shape(lambda: nnx.MultiHeadAttention(4, FEATURES, **options, decode=False, rngs=nnx.Rngs(0)))
    with pytest.raises(NotImplementedError, match=message):
        PagedAttention.from_dense(theirs)


def test_flax_is_needed_for_the_layers_alone():
    program = """
import sys
sys.modules["flax"] = None
import paged_jax
try:
    import paged_jax.layers
except ImportError as problem:
    print(problem)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == 'paged_jax.layers: expected Flax, got none: pip install "paged-jax[flax]"\n'
