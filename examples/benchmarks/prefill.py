"""Attention of several tokens per row on a GPU: prompts, chunks, drafts, mixed batches and shared prefixes.

    python -m examples.benchmarks.prefill --out examples/benchmarks/results/prefill-h200.json

Times are taken as `decode.py` takes them, in a chain of layers inside one `jax.jit`, errors checked in the same run.
"""

import argparse
import dataclasses
import functools
import gc
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.benchmarks.decode import Problem, make_problem, measure, measure_ceiling
from examples.benchmarks.environment import describe
from examples.benchmarks.peers import Contestant
from paged_jax import cascade_attention, cudnn, paged_attention, prefill_attention
from paged_jax.layouts import take_pages
from pallas_kernels.cases import PREFILL_CASES, PrefillCase
from pallas_kernels.layouts import LAYOUTS


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--tag", nargs="+", help="only cases with one of these tags (fresh, chunk, mixed, drafts, single, cascade)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results, rewritten after every case")
    args = parser.parse_args(arguments)
    results = {
        "benchmark": "prefill",
        "environment": describe("flash-attn3-jax", "nvidia-cudnn-cu13"),
        "ceiling_gb_per_s": measure_ceiling(args.rounds),
        "cases": {},
    }
    for case in (case for case in PREFILL_CASES if not args.tag or case.tag in args.tag):
        start = time.perf_counter()
        measured = measure(pose(case), contestants(case), args.rounds)
        results["cases"][case.name] = {"tag": case.tag, "flops": case.flops} | measured
        gc.collect()  # the data of a case goes before that of the next comes
        show(case, measured, time.perf_counter() - start)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def pose(case: PrefillCase) -> Problem:
    """Random rows, as `decode.make_problem` has them, and q of the tokens of the step."""
    problem = make_problem(case.pool)
    q = jax.random.normal(jax.random.key(9), (sum(case.query_lengths), case.num_heads, case.head_dim), jnp.bfloat16)
    table = problem.table
    if case.shared_tokens:
        pages = table.pages.at[:, : case.shared_tokens // case.page_size]
        table = dataclasses.replace(table, pages=pages.set(table.pages[:1, : case.shared_tokens // case.page_size]))
    options = {"query_lengths": jnp.asarray(case.query_lengths, jnp.int32)}
    return dataclasses.replace(problem, q=q, table=table, options=options)


def contestants(case: PrefillCase) -> dict[str, Contestant]:
    """Our ways, and the peers that can do the case."""
    walk = {"paged_jax, pages": Contestant(attend_pages)}
    if case.tag == "cascade":
        return {"paged_jax, cascade": Contestant(attend_cascade), "paged_jax, each row": Contestant(attend_decode)}
    if max(case.query_lengths) == 1:
        return walk | {"paged_jax, decode": Contestant(attend_decode)}
    at_hand = functools.partial(with_tokens, case)
    context = functools.partial(attend_prefill, max_context=case.max_context)
    ours = {"paged_jax": Contestant(context, at_hand)} | walk
    if case.tag != "fresh":
        return ours
    ours |= {"cuDNN, packed": Contestant(attend_packed, at_hand)}
    if len(set(case.query_lengths)) > 1:
        return ours
    dense = {
        "cuDNN": functools.partial(attend_dense, implementation="cudnn"),
        "XLA": functools.partial(attend_dense, implementation="xla"),
        "JAX's Pallas mha": attend_mha,
        "flash-attn3-jax": attend_flash3,
    }
    return ours | {name: Contestant(attend, at_hand) for name, attend in dense.items()}


def with_tokens(case: PrefillCase, problem: Problem) -> tuple[Any, Any]:
    """For each layer the pools, and K and V of the step's tokens, which the pools hold as well."""
    rows = np.repeat(np.arange(len(case.lengths)), case.query_lengths)
    position = np.concatenate(
        [np.arange(n - count, n) for n, count in zip(case.lengths, case.query_lengths, strict=True)]
    )
    page = problem.table.pages[rows, position // case.page_size]

    @functools.partial(jax.jit, static_argnums=1)
    def take(pool, axes, layer):
        pages = take_pages(pool, axes, layer=layer, page=page)
        return pages[jnp.arange(position.size), position % case.page_size]

    cache, axes = problem.cache, LAYOUTS[problem.cache.layout]
    k, v = (
        [take(pool, of, jnp.int32(layer)) for layer in range(cache.num_layers)]
        for pool, of in zip((cache.k, cache.v), axes, strict=True)
    )
    return (cache, tuple(k), tuple(v)), problem.table


def attend_prefill(problem: Problem, q, cache, table, layer: int, *, max_context: int):
    pools, k, v = cache
    return prefill_attention(
        q, k[layer], v[layer], pools, table, layer=layer, max_context=max_context, **problem.options
    )  # fmt: skip


def attend_pages(problem: Problem, q, cache, table, layer: int):
    return paged_attention(q, cache, table, layer=layer, **problem.options)


def attend_decode(problem: Problem, q, cache, table, layer: int):  # noqa: ARG001
    return paged_attention(q, cache, table, layer=layer)


def attend_cascade(problem: Problem, q, cache, table, layer: int):  # noqa: ARG001
    return cascade_attention(q, cache, table, layer=layer)


def attend_dense(problem: Problem, q, cache, table, layer: int, *, implementation):  # noqa: ARG001
    """`jax.nn.dot_product_attention` on rows of one length."""
    q, k, v = _by_row(table, q, cache, layer)
    return _packed(jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation))


def attend_packed(problem: Problem, q, cache, table, layer: int):  # noqa: ARG001
    """cuDNN alone on rows of any lengths, packed: what is left of our time goes to what the library adds."""
    _, k, v = cache
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(table.lengths, dtype=jnp.int32)])
    rows = (starts, table.lengths)
    return cudnn.attend(
        q, k[layer], v[layer], *rows, *rows, scale=q.shape[-1] ** -0.5, is_causal=True, return_lse=False
    )  # fmt: skip


def attend_mha(problem: Problem, q, cache, table, layer: int):  # noqa: ARG001
    """JAX's Pallas-Triton attention, which wants as many kv heads as query heads."""
    with warnings.catch_warnings():  # the module announces its end when it is imported
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.attention import mha

    q, k, v = _by_row(table, q, cache, layer)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    return _packed(mha(q, k, v, segment_ids=None, causal=True, sm_scale=q.shape[-1] ** -0.5))


def attend_flash3(problem: Problem, q, cache, table, layer: int):  # noqa: ARG001
    """FlashAttention-3's CUDA kernels through XLA's foreign functions."""
    from flash_attn3_jax import flash_mha  # pyright: ignore[reportMissingImports]

    return _packed(flash_mha(*_by_row(table, q, cache, layer), is_causal=True))


def _by_row(table, q, cache, layer: int):
    _, k, v = cache
    return (x.reshape(table.max_rows, -1, *x.shape[1:]) for x in (q, k[layer], v[layer]))


def _packed(out):
    return out.reshape(-1, *out.shape[2:])


def show(case: PrefillCase, measured: dict[str, Any], seconds: float) -> None:
    print(f"{case.name}: {case.flops / 1e9:.0f} GFLOP, {case.pool.kv_bytes / 1e6:.0f} MB a layer, took {seconds:.0f} s")
    for name, microseconds in measured["microseconds"].items():
        print(
            f"  {name:20} {microseconds:9.1f} us {case.flops / microseconds / 1e6:6.0f} TFLOP/s  "
            f"error {measured['max_error'][name]:.1e}"
        )
    for name, reason in measured["failures"].items():
        print(f"  {name:20} failed: {reason}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
