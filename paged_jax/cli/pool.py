"""How large a cache a batch of prompts gets, and what is refused because it can never fit."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from paged_jax.cache import PagedCache
from paged_jax.models.config import ModelConfig
from paged_jax.models.weights.shapes import parameter_shapes

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
