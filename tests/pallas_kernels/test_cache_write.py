"""The write kernel stores what XLA's scatter stores, bit for bit, and lowers for CUDA in every layout and dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from grid import crossed
from lowering import lower_for_cuda

from paged_jax import PagedCache, backends, cache_write_xla
from pallas_kernels import cache_write

LAYERS, PAGES, PAGE_SIZE, HEADS, DIM, V_DIM = 2, 6, 5, 2, 48, 80
PADDING = PAGES * PAGE_SIZE
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, *pools.QUANTISED)
SLOTS = {
    "one token": (17,),
    "all kinds": (7, 0, PADDING, -1, 29, -PADDING, PADDING + 1, 2**31 - 1, -(2**31), 12, 13, 14, 15),
    "every slot": np.random.default_rng(0).permutation(PADDING),
    "none": (),
}


def filled(dtype, layout):
    """Every cell holds something."""
    create = functools.partial(PagedCache.create, LAYERS, PAGES, PAGE_SIZE, HEADS, DIM, dtype, v_head_dim=V_DIM)
    return jax.tree.map(
        lambda leaf: np.resize(np.arange(1, 100), leaf.shape).astype(leaf.dtype),
        jax.eval_shape(functools.partial(create, layout=layout)),
    )


def operands(cache, slots, k_dtype=jnp.float32, v_dtype=jnp.bfloat16, layer=1):
    rng = np.random.default_rng(len(slots))
    k, v = (
        (100 * rng.standard_normal((len(slots), HEADS, dim))).astype(dtype)
        for dim, dtype in ((DIM, k_dtype), (V_DIM, v_dtype))
    )
    is_live = (np.asarray(slots) >= 0) & (np.asarray(slots) < PADDING)
    k[~is_live] = np.nan  # padding tokens hold anything
    arrays = {"k": k, "v": v, "slots": np.asarray(slots, np.int32), "layer": np.int32(layer)}
    return arrays | {
        "k_pages": cache.k, "v_pages": cache.v, "k_scales": cache.k_scale, "v_scales": cache.v_scale
    }  # fmt: skip


def write(arrays, layout, implementation):
    function = functools.partial(
        backends.write, reference=cache_write_xla.write, layout=layout, implementation=implementation
    )
    return jax.jit(function)(arrays)


@pytest.mark.parametrize(
    ("dtype", "layout", "slots"),
    [
        (jnp.float32, "NHD", "all kinds"),
        (jnp.bfloat16, "vllm", "every slot"),
        (jnp.float16, "head_major", "one token"),
        (jnp.int8, "vllm", "all kinds"),
        (jnp.float8_e4m3fn, "HND", "all kinds"),
        pytest.param(jnp.float8_e5m2, "NHD", "every slot", marks=pytest.mark.full),
        (jnp.int8, "HND", "none"),
    ],
)
def test_it_writes_the_bits_that_xla_writes(dtype, layout, slots):
    arrays = operands(filled(dtype, layout), SLOTS[slots])
    expected, got = (write(arrays, layout, name) for name in ("xla", "triton_interpret"))
    for ours, reference in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == reference.dtype
        assert np.asarray(ours).tobytes() == np.asarray(reference).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", pools.LAYOUTS)
def test_on_a_gpu_it_writes_what_xla_writes(dtype, layout):
    """Of quantised values one in a hundred may be the neighbour: compilers divide differently."""
    arrays = operands(filled(dtype, layout), SLOTS["all kinds"])
    expected, got = (write(arrays, layout, name) for name in ("xla", "triton"))
    for ours, reference in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        ours, reference = (np.asarray(x, np.float32) for x in (ours, reference))
        if dtype not in pools.QUANTISED:
            np.testing.assert_array_equal(ours, reference)
        else:
            np.testing.assert_allclose(ours, reference, rtol=0.26, atol=1)
            assert (ours != reference).mean() < 0.01 or ours.ndim == 4  # scales may be an ulp apart


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
def test_it_writes_in_place(dtype):
    cache = PagedCache.create(LAYERS, 64, PAGE_SIZE, HEADS, DIM, dtype, v_head_dim=V_DIM)

    def write(pools, k, v, slots):
        def body(pools, layer):
            return cache_write(k, v, slots, *pools, layer=layer), None

        return jax.lax.scan(body, pools, jnp.arange(LAYERS))[0]

    arrays = operands(cache, SLOTS["all kinds"])
    donated = (cache.k, cache.v, cache.k_scale, cache.v_scale)
    compiled = (
        jax.jit(write, donate_argnums=0).lower(donated, *(arrays[name] for name in ("k", "v", "slots"))).compile()
    )
    assert pools.pool_copies(compiled.as_text(), cache) == []


@pytest.mark.parametrize(("dtype", "layout"), crossed(DTYPES, [*pools.LAYOUTS]))
def test_every_layout_and_dtype_lowers(dtype, layout):
    cache = filled(dtype, layout)
    text = lower_for_cuda(lambda a: write(a, layout, "triton"), operands(cache, SLOTS["every slot"], jnp.float16))
    assert "cache_write" in text
    assert "triton" in text


@pytest.mark.parametrize(
    ("dtype", "tokens", "is_kernel"),
    [(jnp.bfloat16, 511, False), (jnp.bfloat16, 512, True), (jnp.int8, 0, True), (jnp.int8, 1, True)],
)
def test_what_writes_on_cuda_follows_from_shapes(dtype, tokens, is_kernel):
    """And elsewhere XLA does, unless the kernel is asked for, which says where it runs."""
    arrays = operands(filled(dtype, "NHD"), [PADDING] * tokens)
    assert ("cache_write" in lower_for_cuda(lambda a: write(a, "NHD", None), arrays)) == (is_kernel and tokens > 0)
    if jax.default_backend() != "gpu":
        write(arrays, "NHD", None)
        with pytest.raises(NotImplementedError, match="'triton' runs on cuda and rocm only"):
            write(arrays, "NHD", "triton")


def test_pools_that_the_kernel_cannot_address_are_written_by_xla():
    struct = jax.ShapeDtypeStruct
    pool, scales = struct((1, 3 * 2**17, 16, 4, 128), jnp.int8), struct((1, 3 * 2**17, 16, 4), jnp.float32)
    new, slots = struct((4, 4, 128), jnp.bfloat16), struct((4,), jnp.int32)
    arrays = {"k": new, "v": new, "slots": slots, "layer": struct((), jnp.int32)}
    arrays |= {"k_pages": pool, "v_pages": pool, "k_scales": scales, "v_scales": scales}
    assert "cache_write" not in lower_for_cuda(lambda a: write(a, "NHD", None), arrays)


def test_the_raw_kernel_takes_one_layer_or_a_stack():
    cache = filled(jnp.int8, "vllm")
    arrays = operands(cache, SLOTS["all kinds"])
    kernel = jax.jit(functools.partial(cache_write, layout="vllm", interpret=True))
    stacked = kernel(**arrays)
    one = {name: array[1] for name, array in arrays.items() if name.endswith(("pages", "scales"))}
    single = kernel(arrays["k"], arrays["v"], arrays["slots"], **one)
    for layer, pool in zip(single, stacked, strict=True):
        assert layer.shape == pool.shape[1:]
        np.testing.assert_array_equal(layer, pool[1])


def test_a_pool_that_would_be_addressed_wrongly_is_refused():
    pool = jax.ShapeDtypeStruct((2**17 + 1, 16, 8, 128), jnp.int8)
    tokens, slots = jax.ShapeDtypeStruct((1, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1,), jnp.int32)
    scales = jax.ShapeDtypeStruct(pool.shape[:3], jnp.float32)
    with pytest.raises(NotImplementedError, match=r"k_pages: the kernel cannot address a pool of \d+ elements"):
        jax.eval_shape(cache_write, tokens, tokens, slots, pool, pool, scales, scales)
