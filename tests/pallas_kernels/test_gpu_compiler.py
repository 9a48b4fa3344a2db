"""Every kernel compiles for the GPUs that people have, in place; run with XLA's compiler for CUDA and without a GPU.

    JAX_PLATFORMS=cpu python -m pytest tests/pallas_kernels/test_gpu_compiler.py

runs a share that covers them, and `-m full` the others.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pools
import pytest
from gpu_compiler import WRITE_SAMPLE, compile_for, needs_gpu_compiler, on_gpus, use_device

from paged_jax import BlockTable, PagedCache, backends, cache_write_xla, cascade_attention, paged_attention
from pallas_kernels.cases import DECODE_CASES, PREFILL_CASES
from pallas_kernels.layouts import LAYOUTS
from pallas_kernels.token_fill import token_fill

pytestmark = [pytest.mark.gpu_compiler, needs_gpu_compiler]


def named(cases):
    return {case.name: case for case in cases}


def shapes(case):
    """Cache and table of a case, as shapes."""
    blocks = [-(-length // case.page_size) for length in case.lengths]
    sizes = (1, sum(blocks), case.page_size, case.num_kv_heads, case.head_dim)
    cache = jax.eval_shape(lambda: PagedCache.create(*sizes, case.kv_dtype or jnp.bfloat16, layout=case.layout))
    return cache, jax.eval_shape(lambda: BlockTable.create(sum(blocks), case.page_size, len(blocks), max(blocks)))


def queries(case, num_tokens):
    return jax.ShapeDtypeStruct((num_tokens, case.num_heads, case.head_dim), jnp.bfloat16)


@pytest.mark.parametrize(
    ("gpu", "case"),
    on_gpus("paged_decode", named(case for case in DECODE_CASES if "scaling" not in case.tags)),
)
def test_decode_compiles(gpu, case, monkeypatch):
    use_device(monkeypatch, gpu)
    sinks = jnp.zeros(case.num_heads) if case.sinks else None

    def attend(q, cache, table):
        options = {"window": case.window, "soft_cap": case.soft_cap, "sinks": sinks}
        return paged_attention(q, cache, table, implementation="triton", **options)

    cache, table = shapes(case)
    compiled = compile_for(gpu, attend, queries(case, len(case.lengths)), cache, table)
    assert "paged_decode" in compiled.as_text()


@pytest.mark.parametrize(("gpu", "case"), on_gpus("paged_prefill", {case.tag: case for case in PREFILL_CASES}))
def test_prefill_compiles(gpu, case, monkeypatch):
    use_device(monkeypatch, gpu)

    def attend(q, cache, table, query_lengths):
        return paged_attention(q, cache, table, query_lengths=query_lengths, implementation="triton")

    cache, table = shapes(case.pool)
    counts = jax.ShapeDtypeStruct((len(case.lengths),), jnp.int32)
    compiled = compile_for(gpu, attend, queries(case, sum(case.query_lengths)), cache, table, counts)
    assert "paged_prefill" in compiled.as_text()


CASCADES = [
    *(case.pool for case in PREFILL_CASES if case.tag == "cascade"),
    *(case for case in DECODE_CASES if "quantised" in case.tags or case.layout == "vllm"),
    *(case for case in DECODE_CASES if case.name.startswith(("Falcon", "SmolLM2")) or "head_dim 256" in case.name),
]


@pytest.mark.parametrize(("gpu", "case"), on_gpus("paged_cascade", named(CASCADES)))
def test_cascade_compiles(gpu, case, monkeypatch):
    use_device(monkeypatch, gpu)

    def attend(q, cache, table):
        return cascade_attention(q, cache, table, implementation="triton")

    compiled = compile_for(gpu, attend, queries(case, len(case.lengths)), *shapes(case))
    assert "paged_cascade" in compiled.as_text()


@pytest.mark.parametrize(
    ("write", "dtype", "layout"),
    [
        pytest.param(*case, marks=() if case in WRITE_SAMPLE else pytest.mark.full)
        for case in itertools.product(("xla", "triton"), ("float32", "bfloat16", "int8", "float8_e4m3fn"), LAYOUTS)
    ],
)
def test_a_scan_that_writes_and_attends_copies_no_pool(write, dtype, layout, monkeypatch):
    use_device(monkeypatch, "H200")
    cache = jax.eval_shape(lambda: PagedCache.create(3, 200, 4, 2, 16, dtype, layout=layout))
    table = jax.eval_shape(lambda: BlockTable.create(200, 4, 2, 5))
    names = ("k_pages", "v_pages", "k_scales", "v_scales")

    def forward(cache, table, q, k, v):
        table, step, _ = table.step(jnp.asarray([1, 1], jnp.int32))

        def body(held, inputs):
            layer, q, k, v = inputs
            arrays = {"k": k, "v": v, "slots": step.slots, "layer": layer} | dict(zip(names, held, strict=True))
            written = backends.write(arrays, reference=cache_write_xla.write, layout=layout, implementation=write)
            fields = zip(("k", "v", "k_scale", "v_scale"), written, strict=True)
            after = dataclasses.replace(cache, **dict(fields))
            return written, paged_attention(q, after, step.table, layer=layer, implementation="triton")

        held = (cache.k, cache.v, cache.k_scale, cache.v_scale)
        return *jax.lax.scan(body, held, (jnp.arange(3), q, k, v)), table

    q, k = (jax.ShapeDtypeStruct((3, 2, heads, 16), pools.of_tokens(getattr(jnp, dtype))) for heads in (4, 2))
    compiled = compile_for("H200", forward, cache, table, q, k, k, donate_argnums=(0,))
    assert pools.pool_copies(compiled.as_text(), cache) == []
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes


@pytest.mark.parametrize("gpu", ["L4", pytest.param("H200", marks=pytest.mark.full)])
def test_fill_writes_in_place(gpu):
    vectors = jax.ShapeDtypeStruct((4096, 32, 128), jnp.bfloat16)
    of_tokens = (jax.ShapeDtypeStruct((4096,), dtype) for dtype in (jnp.bool_, jnp.float32))
    compiled = compile_for(gpu, token_fill, vectors, *of_tokens, donate_argnums=(0,))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 4096 * 32 * 128 * 2
    assert memory.temp_size_in_bytes < 2**17
