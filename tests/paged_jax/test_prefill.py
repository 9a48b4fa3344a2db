"""Prefill attention is paged attention, whichever way is taken; the rule that takes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from attention_cases import BF16, F16, F32, meaning
from grid import sampled
from lowering import lower_for_cuda
from tolerances import assert_accurate

from paged_jax import BlockTable, PagedCache, cudnn, paged_attention, prefill, prefill_attention, prefill_way
from pallas_kernels.token_fill import token_fill

SINKS = np.linspace(-1, 1, 4, dtype=np.float32)


def problem(lengths, query_lengths, padding=0, dtype=BF16, **sizes):
    """A pool, and q, k and v of its rows' last tokens; padding tokens are NaN."""
    pool = pools.build(lengths, dtype=dtype, **{"head_dim": 64, "layers": 2, "layer": 1} | sizes)
    q = np.random.default_rng(3).standard_normal((sum(query_lengths) + padding, 4, 64)).astype(dtype)
    q[sum(query_lengths) :] = np.nan
    k, v = (
        np.concatenate(
            [row[len(row) - n :] for row, n in zip(rows, query_lengths, strict=True)]
            + [np.full((padding, *rows[0].shape[1:]), np.nan, dtype)]
        ).astype(dtype)
        for rows in (pool.k_rows, pool.v_rows)
    )
    return pool, q, k, v


def attend(pool, q, k, v, query_lengths, return_lse=True, **options):
    arrays = {name: jnp.asarray(value) for name, value in options.items() if isinstance(value, np.ndarray)}
    static = {name: value for name, value in options.items() if name not in arrays}

    @jax.jit
    def run(q, k, v, cache, table, layer, query_lengths, arrays):
        return prefill_attention(
            q, k, v, cache, table, layer=layer, query_lengths=query_lengths, return_lse=return_lse, **arrays, **static
        )

    counts = jnp.asarray(query_lengths, jnp.int32)
    return run(*map(jnp.asarray, (q, k, v)), pool.cache, pool.table, pool.layer, counts, arrays)


def attend_in_xla(q, k, v, query_starts, query_lengths, key_starts, key_lengths, *, scale, is_causal, return_lse):
    """What cuDNN computes, row by row; where it says nothing there is NaN."""
    tokens, keys = jnp.arange(q.shape[0]), jnp.arange(k.shape[0])
    of_query, of_key = (
        (at[:, None] >= starts[None, :-1]) & (at[:, None] < (starts[:-1] + lengths)[None])
        for at, starts, lengths in ((tokens, query_starts, query_lengths), (keys, key_starts, key_lengths))
    )
    mask = (of_query[:, None] & of_key[None]).any(-1)
    local_query = tokens - jnp.where(of_query, query_starts[None, :-1], 0).sum(-1)
    local_key = keys - jnp.where(of_key, key_starts[None, :-1], 0).sum(-1)
    if is_causal:
        mask &= local_key[None, :] <= local_query[:, None]
    k, v = (jnp.where(of_key.any(-1)[:, None, None], x, 0) for x in (k, v))
    k, v = (jnp.repeat(x.astype(jnp.float32), q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.where(mask[None], scale * jnp.einsum("tnh,snh->nts", q.astype(jnp.float32), k), -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("nts,snh->tnh", jnp.exp(scores - lse[..., None]), v).astype(q.dtype)
    by_row = jnp.full((query_lengths.size, *lse.shape[::-1]), jnp.nan)
    row = jnp.where(of_query.any(-1), of_query.argmax(-1), query_lengths.size)
    return (out, by_row.at[row, local_query].set(lse.T, mode="drop")) if return_lse else out


def choose_as_on_cuda(branches, other, operands):
    """Dense where that is asked for; the kernel for paged attention cannot run on this host."""
    return (branches["cuda"] if branches.keys() == {"cuda"} else other)(operands)


@pytest.fixture
def dense(monkeypatch):
    """The dense way for any number of tokens: on a GPU with cuDNN, and elsewhere with a stand-in."""
    monkeypatch.setattr(prefill, "_MANY_TOKENS", 1)
    monkeypatch.setattr(prefill, "_MOST_CONTEXT", 10**6)
    if jax.default_backend() != "gpu":
        monkeypatch.setattr(cudnn, "is_there", lambda _: True)
        monkeypatch.setattr(cudnn, "attend", attend_in_xla)
        monkeypatch.setattr(prefill, "token_fill", functools.partial(token_fill, interpret=True))
        monkeypatch.setattr(prefill.platform_choice, "choose", choose_as_on_cuda)


CASES = {
    "fresh prompts": ((9, 0, 17, 1, 30), (9, 0, 17, 1, 30), {}, {"max_context": 0}),
    "one fresh prompt, padding": ((41,), (41,), {"padding": 7}, {"max_context": 0}),
    "fresh prompts, padding, sinks": ((9, 17, 0), (9, 17, 0), {"padding": 5}, {"max_context": 0, "sinks": SINKS}),
    "chunks": ((30, 9, 17, 0, 8), (13, 9, 0, 0, 3), {}, {}),
    "a chunk, float16": ((41,), (13,), {"padding": 3, "dtype": F16}, {"max_context": 30}),
    "chunks, sinks, vllm": ((30, 9, 17), (13, 9, 1), {"padding": 3, "layout": "vllm"}, {"sinks": SINKS, "scale": 0.2}),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize(("lengths", "counts", "sizes", "options"), CASES.values(), ids=CASES)
def test_cudnn_is_dense_attention(lengths, counts, sizes, options):
    assert_dense(lengths, counts, sizes, options)


@pytest.mark.usefixtures("dense")
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN itself is tested there")
@pytest.mark.parametrize(
    "case", sampled(CASES, ["fresh prompts, padding, sinks", "a chunk, float16", "chunks, sinks, vllm"])
)
def test_the_dense_way_is_dense_attention(case):
    assert_dense(*case)


def assert_dense(lengths, counts, sizes, options):
    pool, q, k, v = problem(lengths, counts, **sizes)
    out, lse = attend(pool, q, k, v, counts, **options)
    meant = {name: value for name, value in options.items() if name != "max_context"}
    truth, plain = meaning(q, pool, counts, meant)
    assert_accurate(out, truth[0], plain[0])
    assert_accurate(lse, truth[1], plain[1])
    alone = attend(pool, q, k, v, counts, **options, return_lse=False)
    np.testing.assert_array_equal(np.asarray(alone, np.float32), np.asarray(out, np.float32))


@pytest.mark.usefixtures("dense")
def test_a_row_that_held_more_than_promised_gets_nan_and_no_other():
    pool, q, k, v = problem((20, 9, 13), (9, 9, 3))
    out, _ = attend(pool, q, k, v, (9, 9, 3), max_context=10)
    whole, _ = attend(pool, q, k, v, (9, 9, 3), max_context=11)
    bad = np.isnan(np.asarray(out, np.float32)).all((1, 2))
    assert bad.tolist() == [True] * 9 + [False] * 12
    np.testing.assert_array_equal(np.asarray(out[9:], np.float32), np.asarray(whole[9:], np.float32))


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_without_cudnn_and_by_name_it_is_paged_attention(implementation):
    if jax.default_backend() == "gpu" and implementation is None:
        pytest.skip("cuDNN is there")
    counts = (9, 0, 3)
    pool, q, k, v = problem((20, 9, 13), counts, dtype=F32)
    out, lse = attend(pool, q, k, v, counts, window=np.int32(9), implementation=implementation)
    expected, expected_lse = jax.jit(
        functools.partial(paged_attention, return_lse=True, implementation=implementation, layer=1, window=9)
    )(jnp.asarray(q), pool.cache, pool.table, query_lengths=jnp.asarray(counts))
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize(
    ("tokens", "rows", "max_context", "dtype", "head_dim", "expected"),
    [
        (512, 1, 0, "bfloat16", 128, "dense"),
        (4096, 64, 0, "float16", 64, "dense"),
        (511, 1, 0, "bfloat16", 128, "paged"),
        (2048, 1, 32768, "bfloat16", 128, "dense and gathered"),
        (2048, 4, 8192, "bfloat16", 128, "dense and gathered"),
        (2048, 4, 8193, "bfloat16", 128, "paged"),
        (2048, 1, 0, "float32", 128, "paged"),
        (2048, 1, 0, "bfloat16", 136, "paged"),
        (2048, 1, 0, "bfloat16", 68, "paged"),
    ],
)
def test_the_rule(tokens, rows, max_context, dtype, head_dim, expected):
    assert way(tokens, rows, max_context, dtype, head_dim) == expected


def way(
    tokens=2048, rows=1, max_context=0, dtype="bfloat16", head_dim=128, *, is_plain=True, cache_dtype=None, **of_cache
):
    cache = jax.eval_shape(lambda: PagedCache.create(1, 8, 16, 2, head_dim, cache_dtype or dtype, **of_cache))
    q, k = (jax.ShapeDtypeStruct((tokens, heads, head_dim), dtype) for heads in (8, 2))
    v = jax.ShapeDtypeStruct((tokens, 2, cache.v_head_dim), dtype)
    return prefill_way(q, k, v, cache, rows=rows, max_context=max_context, is_plain=is_plain)


@pytest.mark.parametrize(
    "lack",
    [{"is_plain": False}, {"cache_dtype": "int8"}, {"cache_dtype": "float16"}, {"v_head_dim": 64}],
    ids=str,
)
def test_what_cudnn_lacks_goes_by_pages(lack):
    assert way() == "dense"
    assert way(**lack) == "paged"


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize(
    "options", [{"soft_cap": 5.0}, {"alibi_slopes": np.linspace(0.1, 0.5, 4, dtype=np.float32)}, {"window": 3}], ids=str
)
def test_an_option_alone_is_heeded(options):
    counts = (9, 0, 3)
    pool, q, k, v = problem((20, 9, 13), counts)
    out, lse = attend(pool, q, k, v, counts, **options)
    truth, plain = meaning(q, pool, counts, options)
    assert_accurate(out, truth[0], plain[0])
    assert_accurate(lse, truth[1], plain[1])


@pytest.mark.usefixtures("dense")
def test_tokens_beyond_the_packed_ones_belong_to_no_row():
    """A row whose tokens are cut off at T is as it is for paged attention: the first of its tokens are there."""
    counts, cut = (9, 6), (9, 3)
    pool, q, k, v = problem((20, 13), counts)
    q, k, v = (x[: sum(cut)] for x in (q, k, v))
    out, lse = attend(pool, q, k, v, counts)
    expected, expected_lse = attend(pool, q, k, v, counts, implementation="xla")
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=0.02)
    np.testing.assert_allclose(lse, expected_lse, atol=0.02)


@pytest.mark.parametrize(
    ("rows", "options", "calls"),
    [
        (1, {"max_context": 0}, 1),
        (3, {"max_context": 1000}, 2),
        (1, {"max_context": 0, "window": 9}, 0),
        (3, {"max_context": 0, "soft_cap": 9.0, "alibi_slopes": jnp.ones(8)}, 0),
        (3, {"max_context": 0, "implementation": "triton"}, 0),
    ],
    ids=str,
)
def test_what_is_lowered_for_cuda(rows, options, calls, monkeypatch):
    private = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{private}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{private}.check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_there", lambda _: True)
    table = jax.eval_shape(lambda: BlockTable.create(256, 16, rows, 128))
    cache = jax.eval_shape(lambda: PagedCache.create(2, 256, 16, 2, 64))
    q, k, v = (jax.ShapeDtypeStruct((1024, heads, 64), BF16) for heads in (8, 2, 2))
    counts = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def run(q, k, v, cache, table, counts):
        return prefill_attention(q, k, v, cache, table, query_lengths=counts, layer=1, **options)

    if calls:  # cuDNN's lowering wants none of the abstract mesh that a kernel's wants, so it lowers alone
        monkeypatch.setattr(prefill, "token_fill", lambda vectors, *_: vectors)
        trace = jax.jit(run).trace(q, k, v, cache, table, counts)
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    else:
        text = lower_for_cuda(run, q, k, v, cache, table, counts)
    assert text.count("@__cudnn$fmhaSoftmax") == calls
    assert ("paged_prefill" in text) == (calls == 0)
    if "implementation" not in options:
        assert "cudnn" not in jax.jit(run).lower(q, k, v, cache, table, counts).as_text()


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
def test_it_is_forward_only(which, implementation):
    counts = (9, 0, 3)
    pool, *qkv = problem((20, 9, 13), counts)
    qkv = [jnp.asarray(x) for x in qkv]

    def total(*qkv):
        return attend(pool, *qkv, counts, return_lse=False, implementation=implementation).sum()

    with pytest.raises(NotImplementedError, match="forward only"):
        jax.grad(total, argnums=which)(*qkv)


@pytest.mark.usefixtures("dense")
def test_windows_layers_and_contexts_of_any_integer_kind_and_arrays_of_any_kind():
    counts = (9, 0, 3)
    pool, q, k, v = problem((20, 9, 13), counts, dtype=F32)
    expected, _ = attend(pool, q, k, v, counts)
    run = functools.partial(prefill_attention, q, k, v, pool.cache, pool.table, query_lengths=list(counts))
    for options in ({"window": 2**40}, {"window": np.int64(20)}, {"max_context": np.int64(11)}):
        np.testing.assert_allclose(run(layer=np.int32(1), **options), expected, atol=1e-5)


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k": jnp.zeros((12, 2, 32), BF16)},
            r"k: expected a floating array of shape \(12, 2, 64\), as the tokens were written",
        ),
        ({"v": jnp.zeros((11, 2, 64), BF16)}, r"v: expected a floating array of shape \(12, 2, 64\)"),
        ({"v": jnp.zeros((12, 2, 64), jnp.int32)}, r"v: expected a floating array .*, got int32"),
        ({"q": jnp.zeros((12, 3, 64), BF16)}, "q: expected shape"),
        ({"q": 1.0}, "q: expected shape"),
        ({"layer": 9, "max_context": 0}, r"layer: expected an int in \[0, 2\), got 9"),
        ({"layer": -1}, r"layer: expected an int in \[0, 2\), got -1"),
        ({"window": 0}, "window: expected an int of at least 1, got 0"),
        ({"soft_cap": -1.0}, "soft_cap: expected a positive number"),
        ({"max_context": -1}, "max_context: expected None or an int of at least 0"),
        ({"max_context": jnp.int32(3)}, "max_context: expected None or an int"),
        (
            {"query_lengths": jnp.zeros(4, jnp.int32)},
            "query_lengths: expected one count for each of the table's 3 rows",
        ),
        ({"sinks": jnp.zeros(3)}, "sinks: expected a floating array"),
    ],
)
def test_bad_input(change, message):
    pool, q, k, v = problem((20, 9, 13), (9, 0, 3))
    arguments = {"q": jnp.asarray(q), "k": jnp.asarray(k), "v": jnp.asarray(v), "cache": pool.cache}
    arguments |= {"table": pool.table, "query_lengths": [9, 0, 3]}
    with pytest.raises(ValueError, match=message):
        prefill_attention(**arguments | change)
