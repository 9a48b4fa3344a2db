"""jax.export: a decode step leaves the process, for GPUs from a host without one, and for several platforms at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import crossed
from jax.experimental.pallas import triton as plgpu
from lowering import cuda_device
from tables import grown

from paged_jax import PagedCache, decode, paged_attention

# JAX 0.10 has the name in no public place.
TRITON = getattr(plgpu, "CUSTOM_CALL_TARGET_NAME", "__gpu$xla.gpu.triton")
ROWS, PAGES, PAGE_SIZE = 2, 6, 4


def decode_step(cache, table, q, k, v, implementation=None):
    table, step, ok = table.step(jnp.ones(ROWS, jnp.int32))
    cache = cache.write(0, k, v, step.slots)
    return cache, table, step, paged_attention(q, cache, step.table, implementation=implementation), ok


compiled_step = jax.jit(decode_step, static_argnames="implementation")


def arguments(layout="NHD", dtype=jnp.float32):
    table = grown(PAGES, PAGE_SIZE, 3, 3, 6)
    cache = PagedCache.create(1, PAGES, PAGE_SIZE, 2, 16, dtype, layout=layout)
    q, k, v = (jax.random.normal(jax.random.key(heads), (ROWS, heads, 16)) for heads in (4, 2, 2))
    return cache, table, q, k, v


def export(arguments, platforms, implementation=None):
    """The step, exported for these platforms, written out and read back."""
    allowed = [jax.export.DisabledSafetyCheck.custom_call(TRITON)]
    step = jax.jit(decode_step, static_argnames="implementation", donate_argnums=(0, 1))
    with cuda_device():
        exported = jax.export.export(step, platforms=platforms, disabled_checks=allowed)(
            *arguments, implementation=implementation
        )
    return jax.export.deserialize(exported.serialize())


def assert_same_step(outputs, expected):
    assert jax.tree.structure(outputs) == jax.tree.structure(expected)
    for array, reference in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(array, reference, rtol=1e-6)


@pytest.mark.parametrize(("implementation", "layout"), crossed([None, "triton"], ["NHD", "vllm"]))
def test_a_decode_step_is_exported_for_cuda_from_a_host_without_one(implementation, layout):
    exported = export(arguments(layout), ["cuda"], implementation)
    assert exported.platforms == ("cuda",)
    assert TRITON in exported.mlir_module()
    structure = jax.tree.structure(jax.eval_shape(decode_step, *arguments(layout)))
    assert exported.out_tree == structure  # caches, tables and steps come back as such


def test_a_step_over_a_quantised_cache_is_exported_with_its_scales():
    dtype = jnp.float8_e4m3fn
    exported = export(arguments(dtype=dtype), ["cpu", "cuda"])
    assert TRITON in exported.mlir_module()
    if jax.default_backend() != "gpu":
        outputs, expected = exported.call(*arguments(dtype=dtype)), compiled_step(*arguments(dtype=dtype))
        assert_same_step(*(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), x) for x in (outputs, expected)))


@pytest.mark.parametrize(
    "platforms",
    [["cpu"], pytest.param(["cpu", "cuda"], marks=pytest.mark.full), ["cuda", "rocm", "tpu", "cpu"]],
    ids=", ".join,
)
def test_one_export_serves_all_its_platforms(platforms):
    exported = export(arguments(), platforms)
    assert (TRITON in exported.mlir_module()) == ("cuda" in platforms)
    if jax.default_backend() == "gpu" and "cuda" not in platforms:
        pytest.skip("not exported for this platform")
    assert_same_step(exported.call(*arguments()), compiled_step(*arguments(), implementation="xla"))


@pytest.mark.parametrize("platforms", [["cpu"], ["cpu", "cuda"], ["tpu"]], ids=", ".join)
def test_the_kernel_by_name_says_where_it_runs(platforms):
    with pytest.raises(NotImplementedError, match=r"'triton' runs on cuda and rocm only.*another platform"):
        export(arguments(), platforms, "triton")


@pytest.mark.parametrize("query_lengths", [None, jnp.asarray([1, 1])], ids=["decode", "ragged"])
def test_each_gpu_platform_has_its_own_instructions(query_lengths):
    """NVIDIA's notation is in what is lowered for cuda, and in nothing lowered for rocm beside it."""
    table = arguments()[1]
    cache = PagedCache.create(1, PAGES, PAGE_SIZE, 2, 32, jnp.int8)
    q = jnp.ones((ROWS, 4, 32), jnp.bfloat16)

    def attend(q, cache, table):
        return paged_attention(q, cache, table, query_lengths=query_lengths)

    def text(*platforms):
        with cuda_device():
            return jax.jit(attend).trace(q, cache, table).lower(lowering_platforms=platforms).as_text()

    cuda, rocm, both = text("cuda"), text("rocm"), text("rocm", "cuda")
    assert TRITON in rocm
    assert "lop3" in cuda
    assert "lop3" not in rocm
    assert both.count("lop3") == cuda.count("lop3")


def test_a_decode_loop_is_exported_with_its_result():
    def forward(tokens, step, cache):
        k = jax.nn.one_hot(tokens, 16)[:, None].repeat(2, axis=1)
        cache = cache.write(0, k, k, step.slots)
        return paged_attention(k.repeat(2, axis=1), cache, step.table).reshape(tokens.size, -1), cache

    cache, table, *_ = arguments()
    run = jax.jit(functools.partial(decode, forward, max_new_tokens=3))
    operands = cache, table, jnp.asarray([3, 5]), jnp.asarray([True, True])
    exported = jax.export.deserialize(jax.export.export(run, platforms=["cpu"])(*operands).serialize())
    assert_same_step(exported.call(*operands), run(*operands))
