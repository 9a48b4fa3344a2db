"""Every attention kernel that can be chosen lowers for CUDA on a host without a GPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from grid import DIMS, DTYPES, HEADS, LAYOUTS, PAGE_SIZES, QUANTISED, sampled
from lowering import lower_for_cuda

from paged_jax import BlockTable, PagedCache, cascade_attention, paged_attention

PARTITIONS = [None, 1, 3]


def case(pairs, i):
    """Every value of every axis, each beside ever other neighbours: the axes have coprime or shifted cycles."""
    heads, dims = HEADS[i % 9], DIMS[(i + i // 9) % 9]
    page_size, layout, partitions = PAGE_SIZES[i % 8], LAYOUTS[(i + i // 4) % 4], PARTITIONS[(i + i // 3) % 3]
    return *heads, *dims, page_size, *pairs[(i + i // 6) % len(pairs)], partitions, layout


CASES = {
    f"{heads}x{kv_heads}-{dim}x{v_dim}-page{page_size}-{q_dtype}-{kv_dtype}-{partitions}-{layout}": values
    for pairs, i in [*((DTYPES, i) for i in range(54)), *((QUANTISED, i) for i in range(0, 54, 3))]
    for values in [case(pairs, i)]
    for heads, kv_heads, dim, v_dim, page_size, q_dtype, kv_dtype, partitions, layout in [values]
}
DECODE_SAMPLE = [*[*CASES][:12], *[*CASES][54::2]]
EVERY_SIXTH, NEXT_TO_IT = (dict([*CASES.items()][first::6]) for first in (0, 1))


def test_the_sample_has_every_value_of_every_axis():
    """What kernels lower for by default, besides options; a case of CASES each."""
    found = [{*values} for values in zip(*(CASES[name] for name in DECODE_SAMPLE), strict=True)]
    assert found == [{*values} for values in zip(*CASES.values(), strict=True)]


def lower_decode(
    num_heads,
    num_kv_heads,
    head_dim,
    v_head_dim,
    page_size,
    q_dtype,
    kv_dtype,
    num_partitions,
    layout="NHD",
    tokens=None,
    is_cascade=False,
    **options,
):
    table = jax.eval_shape(lambda: BlockTable.create(11, page_size, 3, 4))
    cache = jax.eval_shape(
        lambda: PagedCache.create(
            2, 11, page_size, num_kv_heads, head_dim, kv_dtype, v_head_dim=v_head_dim, layout=layout
        )
    )
    q = jax.ShapeDtypeStruct((tokens or 3, num_heads, head_dim), q_dtype)
    if tokens:
        options["query_lengths"] = jax.ShapeDtypeStruct((3,), jnp.int32)
    arrays = {name: option for name, option in options.items() if isinstance(option, jax.ShapeDtypeStruct)}
    static = {name: option for name, option in options.items() if name not in arrays}

    op = cascade_attention if is_cascade else functools.partial(paged_attention, num_partitions=num_partitions)

    def attend(q, cache, table, layer, arrays):
        return op(q, cache, table, layer=layer, return_lse=True, implementation="triton", **arrays, **static)

    return lower_for_cuda(attend, q, cache, table, jax.ShapeDtypeStruct((), jnp.int32), arrays)


@pytest.mark.parametrize("case", sampled(CASES, DECODE_SAMPLE))
def test_every_shape_and_dtype_lowers(case):
    text = lower_decode(*case)
    assert "paged_decode" in text
    assert "triton" in text


OPTIONS = {
    "scale": 0.3,
    "window": jax.ShapeDtypeStruct((), jnp.int32),
    "soft_cap": 30.0,
    "sinks": jax.ShapeDtypeStruct((8,), jnp.float32),
    "alibi_slopes": jax.ShapeDtypeStruct((8,), jnp.bfloat16),
}


@pytest.mark.parametrize(
    "names",
    [
        *itertools.combinations(OPTIONS, 1),
        *(pytest.param(pair, marks=pytest.mark.full) for pair in itertools.combinations(OPTIONS, 2)),
        (*OPTIONS,),
    ],
    ids=", ".join,
)
def test_every_option_lowers(names):
    text = lower_decode(8, 2, 128, 128, 16, "bfloat16", "bfloat16", None, **{name: OPTIONS[name] for name in names})
    assert "paged_decode" in text


TOKENS = {"one": 3, "four": 12, "hundreds": 2048}  # for each of 3 rows


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        pytest.param(case, TOKENS[count], id=f"{name}-{count}", marks=() if (i + j) % 3 == 0 else pytest.mark.full)
        for i, (name, case) in enumerate(EVERY_SIXTH.items())
        for j, count in enumerate(TOKENS)
    ],
)
def test_ragged_queries_lower(case, tokens):
    *sizes, _, layout = case
    sinks = jax.ShapeDtypeStruct((sizes[0],), jnp.float32)
    options = {"window": OPTIONS["window"], "sinks": sinks} if tokens == 12 else {}
    text = lower_decode(*sizes, None, layout, tokens, **options)
    assert "paged_prefill" in text
    assert "triton" in text


@pytest.mark.parametrize("case", sampled(NEXT_TO_IT, [*NEXT_TO_IT][::2]))
def test_cascades_lower(case):
    *sizes, _, layout = case
    options = {}
    if sizes[4] > 16:  # cells a page
        options = {name: OPTIONS[name] for name in ("scale", "soft_cap")}
        options["alibi_slopes"] = options["sinks"] = jax.ShapeDtypeStruct((sizes[0],), jnp.float32)
    text = lower_decode(*sizes, None, layout, is_cascade=True, **options)
    assert "paged_cascade" in text
    assert "merge_cascade" in text


def test_automatic_choice_takes_the_kernel_on_cuda_only():
    table, cache = BlockTable.create(4, 16, 2, 2), PagedCache.create(1, 4, 16, 2, 64)
    q = jnp.zeros((2, 4, 64), jnp.bfloat16)
    assert "paged_decode" in lower_for_cuda(paged_attention, q, cache, table)
    assert "paged_decode" not in jax.jit(paged_attention).lower(q, cache, table).as_text()
