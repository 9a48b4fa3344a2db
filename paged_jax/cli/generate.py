"""`paged-jax generate`: text from a real language model through a paged KV cache.

The answer goes to standard output, everything else to standard error. On first use the default model,
SmolLM2-135M-Instruct, is fetched into a cache folder.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track

from paged_jax import sharding
from paged_jax.block_table import BlockTable
from paged_jax.cache import PagedCache
from paged_jax.cli.arguments import choose_sampler
from paged_jax.cli.batch import answer
from paged_jax.cli.pool import plan_pool
from paged_jax.cli.prompts import read_prompts
from paged_jax.cli.report import DenseMismatch, compare
from paged_jax.cli.stream import IdPieces, OrderedStream, Pieces
from paged_jax.decode import OutOfPages
from paged_jax.models.dense import generate_dense
from paged_jax.models.even_keys import even_keys
from paged_jax.models.loaded import default_dtype, load_weights
from paged_jax.models.mesh import Split
from paged_jax.models.network import Network
from paged_jax.models.pretrained import Pretrained, open_pretrained
from paged_jax.models.weights.fetch import FetchError, default_cache_dir, fetch_smollm2
from paged_jax.sampling import greedy
from paged_jax.text_stream import text_streams

_TOKENS_PER_CALL = 16  # decoded, at most, between two writes to the stream


def command(args: argparse.Namespace) -> int:
    """Runs the verb; every error that is not ours is one line. Returns the exit status."""
    # The lowering of the GPU kernel still works; its end is announced for a later JAX.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    try:
        return run(args, Console(stderr=True, highlight=False))
    except OutOfPages as problem:
        print(f"paged-jax generate: error: {problem}. Give it more --num-pages or fewer --max-tokens.", file=sys.stderr)
        return 1
    except DenseMismatch as problem:
        print(f"paged-jax generate: error: {problem}", file=sys.stderr)
        return 1
    except (ValueError, NotImplementedError, FetchError, OSError) as problem:
        print(f"paged-jax generate: error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace, notes: Console) -> int:
    """Prompts → tokens → pages → answers. All that can be refused is refused before the weights are read.

    Returns:
        The exit status: 1 if an answer ended because its logits were not finite.
    """
    texts = [] if args.token_ids else read_prompts(args)
    if args.model is None:
        choose_sampler(args, None)  # the default model's files say nothing of it: refused before they are fetched
    pretrained = open_pretrained(args.model or fetch_smollm2())
    for note in pretrained.notes:
        notes.print(f"note: {note}", markup=False, soft_wrap=True)
    prompts, titles, new_pieces = encode(args, pretrained, texts)
    sampler = choose_sampler(args, pretrained.sampler)
    dtype = jnp.dtype(args.dtype or default_dtype())
    config = pretrained.config.serving(max(map(len, prompts)) + args.max_tokens)
    network = Network(config, args.scan_layers, new_split(**args.mesh))
    if network.split is not None:
        network.specs()  # says what does not divide
    pool = plan_pool(args, config, prompts, dtype)
    if args.compare_dense and pool.dtype != dtype:
        raise ValueError(
            f"--compare-dense: expected a cache of the model's dtype, {dtype}, whose tokens a dense one repeats, got "
            f"--cache-dtype {pool.dtype}"
        )

    jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "compiled"))
    is_quiet = not notes.is_terminal
    weights = load_weights(
        pretrained.source,
        network,
        dtype,
        track=lambda names: track(names, "Loading", console=notes, transient=True, disable=is_quiet),
    )
    if pool.dtype == jnp.int8:
        weights = even_keys(config, weights)
    forward = jax.tree_util.Partial(network, weights)
    attention = config.attention
    sizes = (config.num_layers, pool.num_pages, pool.page_size, attention.num_kv_heads, attention.head_dim, pool.dtype)
    table_sizes = (pool.num_pages, pool.page_size, pool.rows, pool.blocks_per_row)
    split = network.split
    if split is None:
        cache, table = PagedCache.create(*sizes), BlockTable.create(*table_sizes)
    else:
        cache = sharding.create_cache(split.mesh, *sizes, heads=split.heads, rows=split.rows)
        table = sharding.create_table(split.mesh, *table_sizes, rows=split.rows)
    stream = OrderedStream(new_pieces, pretrained.end_tokens, titles, sys.stdout)
    options = {
        # A divisor, so that all calls are alike and compile once.
        "max_new_tokens": max(n for n in range(1, _TOKENS_PER_CALL + 1) if args.max_tokens % n == 0),
        "sample": sampler or greedy,
        "stop_tokens": tuple(sorted(pretrained.end_tokens)),
        "key": None if sampler is None else jax.random.key(args.seed or 0),
    }
    rows, is_finite = answer(args, forward, cache, table, prompts, options, stream, pool, notes)
    if not is_finite:  # nor would a dense cache's be
        return 1
    if args.compare_dense:
        with notes.status("Comparing with a dense cache"):
            expected = generate_dense(forward, prompts, args.max_tokens, pretrained.end_tokens, dtype)
        compare(rows, expected, notes)
    return 0


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
) -> tuple[list[list[int]], list[str], Callable[[], Pieces]]:
    """The prompts as token ids, a title for each, and how their answers are written.

    Raises:
        ValueError, NotImplementedError: the text cannot be encoded, or the model has no such tokens.
    """
    if args.token_ids:
        prompts, new_pieces = args.token_ids, IdPieces
        titles = [",".join(map(str, prompt)) for prompt in prompts]
    else:
        text = pretrained.text()
        prompts = [text.encode(prompt, is_raw=args.raw) for prompt in texts]
        titles = [textwrap.shorten(prompt, 72, placeholder=" …") for prompt in texts]
        new_pieces = text_streams(text.decode)
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number}: expected at least one token, got an empty prompt")
        if max(prompt) >= pretrained.config.vocab_size:
            raise ValueError(
                f"prompt {number}: expected token ids below {pretrained.config.vocab_size}, for which the model has "
                f"embeddings, got {max(prompt)}"
            )
    return prompts, titles, new_pieces
