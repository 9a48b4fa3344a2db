"""Generate text with a real language model through a paged KV cache.

    python examples/generate.py "What is gravity? Answer in one sentence."
    python examples/generate.py --model path/to/Qwen3-0.6B "What is gravity?"

The answer goes to standard output, everything else to standard error. On first use the default model,
SmolLM2-135M-Instruct, is fetched into a cache folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from rich.console import Console
from rich.progress import track

from decoder import sharding as on_mesh
from decoder.arguments import choose_sampler, parse_arguments, read_prompts
from decoder.chunks import cut_prompts
from decoder.config import ModelConfig
from decoder.dense import generate_dense
from decoder.fetch import FetchError, default_cache_dir, fetch_smollm2
from decoder.load import load_decoder
from decoder.model import Decoder, generate, prefill
from decoder.pretrained import Pretrained, open_pretrained
from decoder.shapes import parameter_shapes
from decoder.sharding import Split, parameter_shardings
from decoder.show import show_table
from decoder.stream import OrderedStream, Writer, id_writer, text_writer
from paged_jax import BlockTable, OutOfPages, PagedCache, greedy, sharding

_TOKENS_PER_CALL = 16  # decoded, at most, between two writes to the stream
_SHARE_OF_FREE_MEMORY = 0.8  # what `--num-pages auto` takes at most


@dataclasses.dataclass(frozen=True)
class Pool:
    """Sizes of the cache, of each shard of rows."""

    num_pages: int
    page_size: int
    rows: int
    blocks_per_row: int
    dtype: np.dtype
    page_bytes: int  # all layers, K and V, with the scales of a quantised cache
    plain_dtype: np.dtype  # the model's own, of a cache that is not told otherwise
    plain_page_bytes: int


class DenseMismatch(RuntimeError):
    """A token differs between the paged and the dense cache."""


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv, (__doc__ or "").split("\n\n")[0])
    # The lowering of the GPU kernel still works; its end is announced for a later JAX.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    try:
        run(args, Console(stderr=True, highlight=False))
    except OutOfPages as problem:
        print(f"generate.py: error: {problem}. Give it more --num-pages or fewer --max-tokens.", file=sys.stderr)
        return 1
    except DenseMismatch as problem:
        print(f"generate.py: error: {problem}", file=sys.stderr)
        return 1
    except (ValueError, NotImplementedError, FetchError, OSError) as problem:
        print(f"generate.py: error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def run(args: argparse.Namespace, notes: Console) -> None:
    """Prompts → tokens → pages → answers. All that can be refused is refused before the weights are read."""
    texts = [] if args.token_ids else read_prompts(args)
    if args.model is None:
        choose_sampler(args, None)  # the default model's files say nothing of it: refused before they are fetched
    pretrained = open_pretrained(args.model or fetch_smollm2())
    prompts, titles, new_writer = encode(args, pretrained, texts)
    sampler = choose_sampler(args, pretrained.sampler)
    dtype = jnp.dtype(args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    config = pretrained.config.serving(max(map(len, prompts)) + args.max_tokens)
    split = new_split(**args.mesh)
    shardings = None if split is None else parameter_shardings(config, split)
    pool = plan_pool(args, config, prompts, dtype)
    if args.compare_dense and pool.dtype != dtype:
        raise ValueError(
            f"--compare-dense: expected a cache of the model's dtype, {dtype}, whose tokens a dense one repeats, got "
            f"--cache-dtype {pool.dtype}"
        )

    jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "compiled"))
    is_quiet = not notes.is_terminal
    model = load_decoder(
        pretrained.source,
        config,
        dtype,
        scan_layers=args.scan_layers,
        device=shardings,
        track=lambda names: track(names, "Loading", console=notes, transient=True, disable=is_quiet),
    )
    attention = config.attention
    sizes = (config.num_layers, pool.num_pages, pool.page_size, attention.num_kv_heads, attention.head_dim, pool.dtype)
    table_sizes = (pool.num_pages, pool.page_size, pool.rows, pool.blocks_per_row)
    if split is None:
        cache, table = PagedCache.create(*sizes), BlockTable.create(*table_sizes)
    else:
        cache = sharding.create_cache(split.mesh, *sizes, heads=split.heads, rows=split.rows)
        table = sharding.create_table(split.mesh, *table_sizes, rows=split.rows)
    stream = OrderedStream(new_writer, pretrained.end_tokens, titles, sys.stdout)
    options = {
        # A divisor, so that all calls are alike and compile once.
        "max_new_tokens": max(n for n in range(1, _TOKENS_PER_CALL + 1) if args.max_tokens % n == 0),
        "sample": sampler or greedy,
        "stop_tokens": tuple(sorted(pretrained.end_tokens)),
        "key": None if sampler is None else jax.random.key(args.seed or 0),
    }
    rows = answer(args, split, model, cache, table, prompts, options, stream, pool, notes)
    if args.compare_dense:
        with notes.status("Comparing with a dense cache"):
            expected = generate_dense(model, prompts, args.max_tokens, pretrained.end_tokens, dtype)
        compare(rows, expected, notes)


def new_split(rows: int, heads: int) -> Split | None:
    """None for one device, which needs no mesh.

    Raises:
        ValueError: there are fewer devices.
    """
    if rows * heads == 1:
        return None
    return Split(sharding.make_mesh(rows=rows, heads=heads), heads="heads", rows="rows" if rows > 1 else None)


def encode(
    args: argparse.Namespace, pretrained: Pretrained, texts: Sequence[str]
) -> tuple[list[list[int]], list[str], Callable[[], Writer]]:
    """The prompts as token ids, a title for each, and how their answers are written.

    Raises:
        ValueError, NotImplementedError: the text cannot be encoded, or the model has no such tokens.
    """
    if args.token_ids:
        prompts, new_writer = args.token_ids, id_writer
        titles = [",".join(map(str, prompt)) for prompt in prompts]
    else:
        text = pretrained.text()
        prompts = [text.encode(prompt, is_raw=args.raw) for prompt in texts]
        titles = [textwrap.shorten(prompt, 72, placeholder=" …") for prompt in texts]
        new_writer = functools.partial(text_writer, text.tokenizer)
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number}: expected at least one token, got an empty prompt")
        if max(prompt) >= pretrained.config.vocab_size:
            raise ValueError(
                f"prompt {number}: expected token ids below {pretrained.config.vocab_size}, for which the model has "
                f"embeddings, got {max(prompt)}"
            )
    return prompts, titles, new_writer


def answer(
    args: argparse.Namespace,
    split: Split | None,
    model: Decoder,
    cache: PagedCache,
    table: BlockTable,
    prompts: list[list[int]],
    options: dict[str, Any],
    stream: OrderedStream,
    pool: Pool,
    notes: Console,
) -> list[list[int]]:
    """Prefills the prompts, packed into chunks, then decodes the whole batch, streaming as it goes.

    Returns:
        Each prompt's new tokens.

    Raises:
        OutOfPages: the pool was too small; what was generated until then is written.
    """
    rows = table.lengths.size
    padded = [*prompts, *[[0]] * (rows - len(prompts))]  # the last shards may have rows without a prompt, never active
    chunks = cut_prompts(padded, args.prefill_tokens, args.mesh["rows"])
    newest = jnp.array([prompt[-1] for prompt in padded], jnp.int32)
    seconds: dict[str, float] = {}
    lower_prefill: Any = prefill.lower if split is None else functools.partial(on_mesh.lower_prefill, split)
    run: Any = generate if split is None else functools.partial(on_mesh.generate, split)

    with timed("compile", seconds), notes.status("Compiling"):
        programs = {
            max_context: lower_prefill(
                model, cache, table, chunk.tokens, chunk.num_tokens, max_context=max_context
            ).compile()
            for max_context, chunk in {chunk.max_context: chunk for chunk in chunks}.items()
        }
        result = run(model, cache, table, newest, jnp.zeros(rows, bool), **options)  # no row is active: no change
        jax.block_until_ready(result)
    cache, table = result.cache, result.table
    with timed("prefill", seconds):
        is_quick = not notes.is_terminal or len(chunks) == 1
        for chunk in track(chunks, "Prefilling", console=notes, transient=True, disable=is_quick):
            program = programs[chunk.max_context]
            cache, table, is_prefilled = program(model, cache, table, chunk.tokens, chunk.num_tokens)
            if not np.all(is_prefilled):  # cannot be: plan_pool counted the pages
                raise RuntimeError("the prompts were refused by the block table")
        jax.block_until_ready(cache)
    active, new_tokens = jnp.arange(rows) < len(prompts), [[] for _ in prompts]
    with timed("decode", seconds):
        for _ in range(args.max_tokens // options["max_new_tokens"]):
            result = run(model, cache, table, newest, active, **options)
            cache, table, newest, active = result.cache, result.table, result.tokens[:, -1], result.active
            of_prompts = np.asarray(result.tokens)[: len(prompts)]
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
    result.check()
    return new_tokens


def compare(rows: list[list[int]], expected: list[list[int]], notes: Console) -> None:
    """Raises DenseMismatch, which names the first token of the paged cache's that is not the dense one's."""
    for number, (got, dense) in enumerate(zip(rows, expected, strict=True), 1):
        for place, tokens in enumerate(itertools.zip_longest(dense, got), 1):
            if len(set(tokens)) > 1:
                one, other = ("no more" if token is None else token for token in tokens)
                raise DenseMismatch(
                    f"prompt {number}, new token {place}: expected {one}, as from a dense cache, got {other}"
                )
    notes.print(f"dense       a contiguous cache gives the same {sum(map(len, rows))} tokens")


def plan_pool(args: argparse.Namespace, config: ModelConfig, prompts: list[list[int]], dtype) -> Pool:
    """How large a cache to make, for a model of `dtype`; refuses prompts that can never fit.

    Raises:
        ValueError: a prompt and its answer are longer than the model can read, the weights do not fit the memory, or
            the prompts need more pages than there are.
        NotImplementedError: the device has no caches of that dtype.
    """
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) + args.max_tokens > config.max_length:
            raise ValueError(
                f"prompt {number}: expected prompt and --max-tokens to fit the model's {config.max_length} positions, "
                f"got {len(prompt)} + {args.max_tokens} tokens"
            )
    cache_dtype = jnp.dtype(args.cache_dtype or dtype)
    page_bytes, plain_page_bytes = (bytes_of_page(config, args.page_size, kind) for kind in (cache_dtype, dtype))
    shards = args.mesh["rows"]
    rows = math.ceil(len(prompts) / shards)
    pages_to_read, pages_to_finish = (
        [math.ceil((len(prompt) + new_tokens) / args.page_size) for prompt in prompts]
        for new_tokens in (0, args.max_tokens)
    )
    to_read, to_finish = (
        max(sum(pages[first : first + rows]) for first in range(0, len(prompts), rows))  # of the fullest shard
        for pages in (pages_to_read, pages_to_finish)
    )
    weight_bytes = sum(map(math.prod, parameter_shapes(config).values())) * dtype.itemsize
    free = free_bytes(shards * args.mesh["heads"]) // shards
    if weight_bytes > free:
        raise ValueError(
            f"the weights: expected at most the {free / 1e6:.1f} MB of memory that are free, "
            f"got {weight_bytes / 1e6:.1f} MB"
        )
    room = free - weight_bytes
    if args.num_pages is not None and args.num_pages * page_bytes > room:
        raise ValueError(
            f"--num-pages: expected a cache that fits the {room / 1e6:.0f} MB of memory that are free, "
            f"got {args.num_pages} pages, {args.num_pages * page_bytes / 1e6:.0f} MB"
        )
    num_pages = args.num_pages
    if num_pages is None:
        num_pages = min(to_finish, int(room * _SHARE_OF_FREE_MEMORY) // page_bytes)
    if to_read > num_pages:
        whose = "the prompts" if shards == 1 else "the prompts of a shard of rows"
        limit = f"the cache's {num_pages}"
        if args.num_pages is None:
            limit += f", which fit {_SHARE_OF_FREE_MEMORY:.0%} of the {room / 1e6:.1f} MB that the weights leave free"
        raise ValueError(f"{whose} need {to_read} pages of {args.page_size} tokens, expected at most {limit}")
    blocks_per_row = max(pages_to_finish)
    return Pool(num_pages, args.page_size, rows, blocks_per_row, cache_dtype, page_bytes, dtype, plain_page_bytes)


def bytes_of_page(config: ModelConfig, page_size: int, dtype: np.dtype) -> int:
    """Of a cache with one page, which is described but not made.

    Raises:
        NotImplementedError: the device has no caches of this dtype; the message names those it has.
    """
    attention = config.attention
    sizes = (config.num_layers, 1, page_size, attention.num_kv_heads, attention.head_dim)
    page = jax.eval_shape(functools.partial(PagedCache.create, *sizes, dtype))
    return sum(pool.size * pool.dtype.itemsize for pool in jax.tree.leaves(page))


def free_bytes(num_devices: int) -> int:
    """Memory that is free on the first devices together, which get equal shares; on CPUs, the host's."""
    stats = [device.memory_stats() or {} for device in jax.devices()[:num_devices]]
    if all("bytes_limit" in of_device for of_device in stats):
        return num_devices * min(of_device["bytes_limit"] - of_device["bytes_in_use"] for of_device in stats)
    return psutil.virtual_memory().available


def report(
    seconds: dict[str, float],
    num_prefilled: int,
    num_new: int,
    table: BlockTable,
    pool: Pool,
    prompts: list[list[int]],
    max_tokens: int,
    notes: Console,
) -> None:
    """Speed, and memory beside what a contiguous cache, and one of the model's dtype, would take for the same batch."""

    def rate(tokens: int, phase: str) -> str:
        return f"{tokens} tokens in {seconds[phase]:.2f} s, {tokens / seconds[phase]:.1f} tokens/s"

    def memory(cells: int) -> str:
        return f"{cells * pool.page_bytes / pool.page_size / 1e6:.1f} MB, {1 - held / cells:.0%} waste"

    held, pages_used = int(table.lengths.sum()), table.free_pages.size - int(table.num_free.sum())
    reserved = len(prompts) * (max(map(len, prompts)) + max_tokens)
    notes.print(
        f"prefill     {rate(num_prefilled, 'prefill')}\n"
        f"decode      {rate(num_new, 'decode')} (compiled in {seconds['compile']:.1f} s)\n"
        f"paged       {pages_used} of {table.free_pages.size} pages used for {held} tokens: "
        f"{memory(pages_used * pool.page_size)}\n"
        f"contiguous  would reserve {len(prompts)} x {reserved // len(prompts)} tokens: {memory(reserved)}"
    )
    if pool.dtype != pool.plain_dtype:
        notes.print(
            f"cache dtype {pool.dtype}; {pool.plain_dtype} would take "
            f"{pages_used * pool.plain_page_bytes / 1e6:.1f} MB for the same pages"
        )


@contextmanager
def timed(phase: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
