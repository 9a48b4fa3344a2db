"""A static batch of prompts, answered: prefilled in chunks, then decoded and streamed some tokens at a time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from paged_jax.block_table import BlockTable
from paged_jax.cache import PagedCache
from paged_jax.cli.chunks import cut_prompts
from paged_jax.cli.pool import Pool
from paged_jax.cli.report import note_not_finite, report
from paged_jax.cli.show import show_table
from paged_jax.cli.stream import OrderedStream
from paged_jax.models.programs import generate, lower_prefill


def answer(
    args: argparse.Namespace,
    forward: jax.tree_util.Partial,
    cache: PagedCache,
    table: BlockTable,
    prompts: list[list[int]],
    options: dict[str, Any],
    stream: OrderedStream,
    pool: Pool,
    notes: Console,
) -> tuple[list[list[int]], bool]:
    """Prefills the prompts, packed into chunks, then decodes the whole batch, streaming as it goes.

    Returns:
        Each prompt's new tokens, and whether all had finite logits to the end; a note names those that had not.

    Raises:
        OutOfPages: the pool was too small; what was generated until then is written.
    """
    rows = table.lengths.size
    padded = [*prompts, *[[0]] * (rows - len(prompts))]  # the last shards may have rows without a prompt, never active
    chunks = cut_prompts(padded, args.prefill_tokens, args.mesh["rows"])
    newest = jnp.array([prompt[-1] for prompt in padded], jnp.int32)
    seconds: dict[str, float] = {}

    with timed("compile", seconds), notes.status("Compiling"):
        programs = {
            max_context: lower_prefill(
                forward, cache, table, chunk.tokens, chunk.num_tokens, max_context=max_context
            ).compile()
            for max_context, chunk in {chunk.max_context: chunk for chunk in chunks}.items()
        }
        result = generate(
            forward, cache, table, newest, jnp.zeros(rows, bool), **options
        )  # no row is active: no change
        jax.block_until_ready(result)
    cache, table = result.cache, result.table
    with timed("prefill", seconds):
        is_quick = not notes.is_terminal or len(chunks) == 1
        for chunk in track(chunks, "Prefilling", console=notes, transient=True, disable=is_quick):
            program = programs[chunk.max_context]
            cache, table, is_prefilled = program(forward, cache, table, chunk.tokens, chunk.num_tokens)
            if not np.all(is_prefilled):  # cannot be: plan_pool counted the pages
                raise RuntimeError("the prompts were refused by the block table")
        jax.block_until_ready(cache)
    active, new_tokens = jnp.arange(rows) < len(prompts), [[] for _ in prompts]
    finite = np.ones(len(prompts), bool)
    with timed("decode", seconds):
        for _ in range(args.max_tokens // options["max_new_tokens"]):
            result = generate(forward, cache, table, newest, active, **options)
            cache, table, newest, active = result.cache, result.table, result.tokens[:, -1], result.active
            of_prompts = np.asarray(result.tokens)[: len(prompts)]
            finite &= np.asarray(result.finite)[: len(prompts)]
            stream.write(of_prompts)
            for row, tokens_of_row in zip(new_tokens, of_prompts, strict=True):
                row += tokens_of_row[tokens_of_row >= 0].tolist()
            if not (np.all(result.ok) and np.any(active)):
                break
    stream.close()
    num_prefilled = sum(int(chunk.num_tokens.sum()) for chunk in chunks)
    report(seconds, num_prefilled, sum(map(len, new_tokens)), table, pool, prompts, args.max_tokens, notes)
    if args.show_table:
        notes.print(show_table(table))
    note_not_finite(finite, new_tokens, pool, notes)
    result.check()
    return new_tokens, bool(finite.all())


@contextmanager
def timed(phase: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
