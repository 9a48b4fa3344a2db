"""Generate text with a real language model through a paged KV cache.

    python examples/generate.py "What is gravity? Answer in one sentence."

The answer goes to standard output, everything else to standard error. On first use the default model,
SmolLM2-135M-Instruct, is fetched into a cache folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from rich.console import Console
from rich.progress import track

from decoder.chat import render_chat
from decoder.fetch import FetchError, default_cache_dir, fetch_smollm2
from decoder.gguf import GGUFFile, open_gguf
from decoder.load import load_decoder, read_config
from decoder.model import Decoder, DecoderConfig, generate, prefill
from decoder.show import show_table
from decoder.stream import OrderedStream
from decoder.tokenizer import build_tokenizer, special_ids
from paged_jax import BlockTable, OutOfPages, PagedCache, Sampler, greedy

_TOKENS_PER_CALL = 16  # decoded, at most, between two writes to the stream
_PREFILL_BUCKET = 64  # prompts are padded to a multiple, so that few lengths compile anew
_SHARE_OF_FREE_MEMORY = 0.8  # what `--num-pages auto` takes at most


@dataclasses.dataclass(frozen=True)
class Pool:
    """Sizes of the cache."""

    num_pages: int
    page_size: int
    blocks_per_row: int
    page_bytes: int  # all layers, K and V


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    # The lowering of the GPU kernel still works; its end is announced for a later JAX.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    try:
        run(args, Console(stderr=True, highlight=False))
    except OutOfPages as problem:
        print(f"generate.py: error: {problem}. Give it more --num-pages or fewer --max-tokens.", file=sys.stderr)
        return 1
    except (ValueError, NotImplementedError, FetchError, OSError) as problem:
        print(f"generate.py: error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def run(args: argparse.Namespace, notes: Console) -> None:
    """Prompts → tokens → pages → answers. All that can be refused is refused before the weights are read."""
    texts = read_prompts(args)
    file = open_gguf(args.model or fetch_smollm2())
    config, tokenizer, special = read_config(file), build_tokenizer(file.metadata), special_ids(file.metadata)
    if not args.raw:
        rendered = [render_chat(file.metadata, [{"role": "user", "content": text}]) for text in texts]
    else:
        rendered = texts
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in rendered]
    if args.raw and special.add_bos:
        if special.bos is None:
            raise ValueError(
                f"{file.path}: expected a bos token, which the model wants first, got none in its metadata"
            )
        prompts = [[special.bos, *prompt] for prompt in prompts]
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise ValueError(
            f"{file.path}: expected an embedding for each of the tokenizer's {tokenizer.get_vocab_size()} tokens, "
            f"got {config.vocab_size}"
        )
    sample = Sampler(args.temperature, args.top_k, args.top_p) if args.temperature > 0 else greedy
    dtype = jnp.dtype(args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    pool = plan_pool(args, file, config, prompts, dtype)

    jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "compiled"))
    is_quiet = not notes.is_terminal
    model = load_decoder(
        file, dtype, track=lambda names: track(names, "Loading", console=notes, transient=True, disable=is_quiet)
    )
    table = BlockTable.create(pool.num_pages, pool.page_size, len(prompts), pool.blocks_per_row)
    cache = PagedCache.create(
        config.num_layers, pool.num_pages, pool.page_size, config.num_kv_heads, config.head_dim, dtype
    )
    titles = [textwrap.shorten(text, 72, placeholder=" …") for text in texts]
    stream = OrderedStream(tokenizer, special.end, titles, sys.stdout)
    answer(args, model, cache, table, prompts, sample, special.end, stream, pool, notes)


def answer(
    args: argparse.Namespace,
    model: Decoder,
    cache: PagedCache,
    table: BlockTable,
    prompts: list[list[int]],
    sample: Callable,
    end_tokens: frozenset[int],
    stream: OrderedStream,
    pool: Pool,
    notes: Console,
) -> None:
    """Prefills all prompts in one packed pass, then decodes the whole batch, streaming as it goes."""
    rows = len(prompts)
    # The last token of each prompt is left to the decode loop, whose first step makes the first new token of it.
    packed = np.concatenate([np.array(prompt[:-1], np.int32) for prompt in prompts])
    num_tokens = jnp.array([len(prompt) - 1 for prompt in prompts], jnp.int32)
    tokens = np.zeros(max(1, math.ceil(packed.size / _PREFILL_BUCKET)) * _PREFILL_BUCKET, np.int32)
    tokens[: packed.size] = packed
    tokens = jnp.asarray(tokens)
    options = {
        # A divisor, so that all calls are alike and compile once.
        "max_new_tokens": max(n for n in range(1, _TOKENS_PER_CALL + 1) if args.max_tokens % n == 0),
        "sample": sample,
        "stop_tokens": tuple(sorted(end_tokens)),
        "key": jax.random.key(args.seed) if args.temperature > 0 else None,
    }
    newest = jnp.array([prompt[-1] for prompt in prompts], jnp.int32)
    seconds: dict[str, float] = {}

    with timed("compile", seconds), notes.status("Compiling"):  # calls without a single token change nothing
        cache, table, _ = prefill(model, cache, table, tokens, jnp.zeros(rows, jnp.int32))
        result = generate(model, cache, table, newest, jnp.zeros(rows, bool), **options)
        jax.block_until_ready(result)
    with timed("prefill", seconds):
        cache, table, is_prefilled = prefill(model, result.cache, result.table, tokens, num_tokens)
        if not is_prefilled:  # cannot be: plan_pool counted the pages
            raise RuntimeError("the prompts were refused by the block table")
        jax.block_until_ready(cache)
    num_new, active = 0, jnp.ones(rows, bool)
    with timed("decode", seconds):
        for _ in range(args.max_tokens // options["max_new_tokens"]):
            result = generate(model, cache, table, newest, active, **options)
            cache, table, newest, active = result.cache, result.table, result.tokens[:, -1], result.active
            stream.write(np.asarray(result.tokens))
            num_new += int(result.num_tokens.sum())
            if not (result.ok and active.any()):
                break
    stream.close()
    report(seconds, packed.size, num_new, table, pool, prompts, args.max_tokens, notes)
    if args.show_table:
        notes.print(show_table(table))
    result.check()


def plan_pool(args: argparse.Namespace, file: GGUFFile, config: DecoderConfig, prompts: list[list[int]], dtype) -> Pool:
    """How large a cache to make; refuses prompts that can never fit.

    Raises:
        ValueError: a prompt and its answer are longer than the model can read, or the prompts need more pages than
            there are.
    """
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number}: expected at least one token, got an empty prompt")
        if len(prompt) + args.max_tokens > config.max_length:
            raise ValueError(
                f"prompt {number}: expected prompt and --max-tokens to fit the model's {config.max_length} positions, "
                f"got {len(prompt)} + {args.max_tokens} tokens"
            )
    sizes = (config.num_layers, args.page_size, config.num_kv_heads, config.head_dim, dtype)
    page_bytes = config.num_layers * args.page_size * config.num_kv_heads * config.head_dim * 2 * dtype.itemsize
    to_read = sum(math.ceil(len(prompt) / args.page_size) for prompt in prompts)
    to_finish = [math.ceil((len(prompt) + args.max_tokens) / args.page_size) for prompt in prompts]
    weight_bytes = sum(math.prod(info.shape) for info in file.tensors.values()) * dtype.itemsize
    room = max(0, free_bytes() - weight_bytes)
    if args.num_pages is not None and args.num_pages * page_bytes > room:
        raise ValueError(
            f"--num-pages: expected a cache that fits the {room / 1e6:.0f} MB of memory that are free, "
            f"got {args.num_pages} pages, {args.num_pages * page_bytes / 1e6:.0f} MB"
        )
    num_pages = args.num_pages
    if num_pages is None:
        num_pages = min(sum(to_finish), PagedCache.pages_for(int(room * _SHARE_OF_FREE_MEMORY), *sizes))
    if to_read > num_pages:
        raise ValueError(
            f"the prompts need {to_read} pages of {args.page_size} tokens, expected at most the cache's {num_pages}"
        )
    return Pool(num_pages, args.page_size, max(to_finish), page_bytes)


def free_bytes() -> int:
    """Memory that is free on the device that JAX computes on."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
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
    """Speed, and memory beside what a contiguous cache would have reserved for the same batch."""

    def rate(tokens: int, phase: str) -> str:
        return f"{tokens} tokens in {seconds[phase]:.2f} s, {tokens / seconds[phase]:.1f} tokens/s"

    def memory(cells: int) -> str:
        return f"{cells * pool.page_bytes / pool.page_size / 1e6:.1f} MB, {1 - held / cells:.0%} waste"

    held, pages_used = int(table.lengths.sum()), pool.num_pages - int(table.num_free)
    reserved = len(prompts) * (max(map(len, prompts)) + max_tokens)
    notes.print(
        f"prefill     {rate(num_prefilled, 'prefill')}\n"
        f"decode      {rate(num_new, 'decode')} (compiled in {seconds['compile']:.1f} s)\n"
        f"paged       {pages_used} of {pool.num_pages} pages used for {held} tokens: "
        f"{memory(pages_used * pool.page_size)}\n"
        f"contiguous  would reserve {len(prompts)} x {reserved // len(prompts)} tokens: {memory(reserved)}"
    )


@contextmanager
def timed(phase: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts from the command line, then the file's lines.

    Raises:
        ValueError: there are none, or one is empty.
    """
    prompts = list(args.prompts)
    if args.file is not None:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
        prompts += [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError('expected a prompt, as an argument ("What is gravity?") or in a --file, got none')
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise ValueError(f"prompt {number}: expected some text, got {prompt!r}")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as problem:  # bytes of another encoding, as the command line hands them over
            raise ValueError(f"prompt {number}: expected UTF-8 text, got {prompt!r}") from problem
    return prompts


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="generate.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="one or more prompts, generated in one batch")
    parser.add_argument("--file", metavar="PATH", help="more prompts, one a line; - reads standard input")
    parser.add_argument("--max-tokens", type=positive_int, default=256, metavar="N", help="new tokens a prompt (256)")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--model", metavar="PATH", help="a GGUF file of a Llama-type model (SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="weights and cache (by device)")
    sampling = parser.add_argument_group("sampling", "greedy unless --temperature is given")
    sampling.add_argument("--temperature", type=finite_float, default=0.0, metavar="T", help="0 is greedy (0)")
    sampling.add_argument("--top-k", type=positive_int, metavar="K", help="keep the K likeliest tokens")
    sampling.add_argument("--top-p", type=probability, metavar="P", help="keep the likeliest tokens, to probability P")
    sampling.add_argument("--seed", type=seed, metavar="N", help="of the random numbers (0)")
    paging = parser.add_argument_group("paging")
    paging.add_argument("--page-size", type=positive_int, default=16, metavar="N", help="tokens per page (16)")
    paging.add_argument(
        "--num-pages", type=pages_or_auto, metavar="N|auto", help="pages in the pool (auto: by need and free memory)"
    )
    paging.add_argument("--show-table", action="store_true", help="draw each row's block table and the pool")
    args = parser.parse_args(argv)
    if args.temperature == 0:
        for name in ("top_k", "top_p", "seed"):
            if getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')} needs --temperature above 0: without it the choice is greedy")
    args.top_p = 1.0 if args.top_p is None else args.top_p
    args.seed = 0 if args.seed is None else args.seed
    return args


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def pages_or_auto(text: str) -> int | None:
    return None if text == "auto" else positive_int(text)


def finite_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"expected a finite number of at least 0, got {text!r}")
    return value


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {2**32 - 1}, got {text!r}")
    return int(text)


def probability(text: str) -> float:
    value = finite_float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 1, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
