"""jax.export: a decode step leaves the process, for GPUs from a host without one, and for several platforms at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import triton as plgpu
from lowering import cuda_device

from paged_jax import BlockTable, PagedCache, paged_attention

# JAX 0.10 has the name in no public place.
TRITON = getattr(plgpu, "CUSTOM_CALL_TARGET_NAME", "__gpu$xla.gpu.triton")
ROWS, PAGES, PAGE_SIZE = 2, 6, 4


def decode_step(cache, table, q, k, v, implementation=None):
    table, step, ok = table.step(jnp.ones(ROWS, jnp.int32))
    cache = cache.write(0, k, v, step.slots)
    return cache, table, step, paged_attention(q, cache, step.table, implementation=implementation), ok


def arguments(layout="NHD", dtype=jnp.float32):
    table, _ = BlockTable.create(PAGES, PAGE_SIZE, ROWS, 3).extend(jnp.asarray([3, 6]))
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


@pytest.mark.parametrize("implementation", [None, "triton"])
@pytest.mark.parametrize("layout", ["NHD", "vllm"])
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
        outputs, expected = exported.call(*arguments(dtype=dtype)), decode_step(*arguments(dtype=dtype))
        assert_same_step(*(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), x) for x in (outputs, expected)))


@pytest.mark.parametrize("platforms", [["cpu"], ["cpu", "cuda"], ["cuda", "rocm", "tpu", "cpu"]], ids=", ".join)
def test_one_export_serves_all_its_platforms(platforms):
    exported = export(arguments(), platforms)
    assert (TRITON in exported.mlir_module()) == ("cuda" in platforms)
    if jax.default_backend() == "gpu" and "cuda" not in platforms:
        pytest.skip("not exported for this platform")
    assert_same_step(exported.call(*arguments()), decode_step(*arguments(), implementation="xla"))


@pytest.mark.parametrize("platforms", [["cpu"], ["cpu", "cuda"], ["tpu"]], ids=", ".join)
def test_the_kernel_by_name_says_where_it_runs(platforms):
    with pytest.raises(NotImplementedError, match=r"'triton' runs on cuda and rocm only.*another platform"):
        export(arguments(), platforms, "triton")
