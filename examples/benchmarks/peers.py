"""The peers that decode attention is measured beside: one function each, and the data in the form that it wants.

A peer is asked only for cases that it can do. Whatever it needs done once (pools in another order, a table without
padding) is done before the time starts; what it needs at every step is inside.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from paged_jax import BlockTable
from pallas_kernels.cases import DecodeCase

if TYPE_CHECKING:
    from examples.benchmarks.decode import Problem

_TOKENS_PER_TILE = 128  # that JAX's op loads at once: 8 pages of 16 by its own default


def as_posed(problem: Problem) -> tuple[Any, BlockTable]:
    """The problem's own pools and table."""
    return problem.cache, problem.table


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A way to attend, with what it needs to be measured."""

    attend: Callable  # (problem, q, cache, table, layer, **setting) -> out
    prepare: Callable[[Problem], tuple[Any, BlockTable]] = as_posed  # the cache and table that it takes
    fits: Callable[[DecodeCase], bool] = lambda case: True  # noqa: ARG005
    settings: tuple[dict[str, Any], ...] = ({},)  # to try; the fastest counts


def attend_gathered(problem: Problem, q, cache, table, layer: int):  # noqa: ARG001
    """XLA gathers the rows' pages into dense arrays, then attends."""
    k, v = (pool[layer, table.pages].reshape(q.shape[0], -1, *pool.shape[3:]) for pool in (cache.k, cache.v))
    return jax.nn.dot_product_attention(
        q[:, None], k, v, key_value_seq_lengths=table.lengths, query_seq_lengths=jnp.ones_like(table.lengths),
    )[:, 0]  # fmt: skip


def attend_jax_op(problem: Problem, q, cache, table, layer: int, *, k_splits: int, interpret: bool = False):
    """JAX's own deprecated op on head-major pools; it wants tables of certain widths, and q scaled."""
    with warnings.catch_warnings():  # the module announces its end when it is imported
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    width, pages_per_tile = table.pages.shape[1], max(1, _TOKENS_PER_TILE // problem.case.page_size)
    pages_per_split = -(-width // k_splits)
    if pages_per_split < pages_per_tile:  # one tile per split, which Triton wants to be a power of two
        pages_per_split = 1 << (pages_per_split - 1).bit_length()
    else:
        pages_per_split = -(-pages_per_split // pages_per_tile) * pages_per_tile
    pages = jnp.pad(table.pages, ((0, 0), (0, k_splits * pages_per_split - width)))
    return paged_attention(
        q * q.shape[-1] ** -0.5, *cache[layer], pages, table.lengths,
        k_splits=k_splits, pages_per_compute_block=pages_per_tile, interpret=interpret,
    )  # fmt: skip


def attend_dense(problem: Problem, q, cache, table, layer: int, *, implementation: Literal["cudnn", "xla"] = "cudnn"):  # noqa: ARG001
    """cuDNN on K and V that lie in one piece per row: what is possible without paging."""
    return jax.nn.dot_product_attention(
        q[:, None], *cache[layer], key_value_seq_lengths=table.lengths, implementation=implementation,
    )[:, 0]  # fmt: skip


def attend_cudnn_paged(problem: Problem, q, cache, table, layer: int):  # noqa: ARG001
    """cuDNN on a paged pool."""
    # There is no public way to it; a benchmark may break with a new JAX, which then shows as a failure.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    (k, v), pages = cache[layer], table.pages[:, None, :, None]
    return paged_attention(
        q[:, None], k, v, jnp.ones_like(table.lengths), table.lengths, pages, pages,
        scale=q.shape[-1] ** -0.5, mask_type=MaskType.PADDING,
    )[:, 0]  # type: ignore[index]  # fmt: skip


def attend_flash3(problem: Problem, q, cache, table, layer: int, *, num_splits: int):  # noqa: ARG001
    """FlashAttention-3's CUDA kernels through XLA's foreign functions."""
    from flash_attn3_jax import flash_mha_with_kvcache  # pyright: ignore[reportMissingImports]

    return flash_mha_with_kvcache(
        q[:, None], *cache[layer], cache_seqlens=table.lengths, page_table=table.pages, num_splits=num_splits,
    )[:, 0]  # fmt: skip


def by_layer(problem: Problem) -> tuple[Any, BlockTable]:
    """A pair (K, V) of pools for each layer, since a foreign function cannot reach into a stacked one."""
    return _each_layer(problem, lambda pool, layer: pool[layer]), _without_padding(problem)


def head_major(problem: Problem) -> tuple[Any, BlockTable]:
    """A pair of pools for each layer, the kv head first."""
    return _each_layer(problem, lambda pool, layer: jnp.moveaxis(pool[layer], 2, 0)), _without_padding(problem)


def dense(problem: Problem) -> tuple[Any, BlockTable]:
    """K and V of each layer with the tokens of a row in order: [B, tokens, K, H]."""
    pages = _without_padding(problem).pages[:, : max(problem.case.num_blocks)]
    rows = pages.shape[0]
    cache = _each_layer(problem, lambda pool, layer: pool[layer, pages].reshape(rows, -1, *pool.shape[3:]))
    return cache, problem.table


def _each_layer(problem: Problem, take: Callable) -> tuple[tuple[jax.Array, jax.Array], ...]:
    cache, layers = problem.cache, range(problem.cache.num_layers)
    take = jax.jit(take, static_argnums=1)
    return tuple((take(cache.k, layer), take(cache.v, layer)) for layer in layers)


def _without_padding(problem: Problem) -> BlockTable:
    """The table with some page of the pool in every entry: peers may load what they then mask."""
    pages = jnp.minimum(problem.table.pages, problem.table.num_pages - 1)
    return dataclasses.replace(problem.table, pages=pages)


def _is_common(case: DecodeCase) -> bool:
    """Whether it is what all peers can do: no options, the usual layout."""
    is_usual = case.layout == "NHD" and case.kv_dtype is None
    return case.is_plain and is_usual and case.dtype in ("bfloat16", "float16")


def _fits_jax_op(case: DecodeCase) -> bool:
    is_there = importlib.util.find_spec("jax.experimental.pallas.ops.gpu.paged_attention") is not None
    return is_there and _is_common(case) and case.head_dim.bit_count() == 1 and case.page_size.bit_count() == 1


def _fits_cudnn_paged(case: DecodeCase) -> bool:
    """It takes a pool of exactly as many pages as the table has entries."""
    return _is_common(case) and case.num_pages == len(case.lengths) * (max(case.num_blocks) + case.spare_blocks)


def _fits_flash3(case: DecodeCase) -> bool:
    """The published wheel has head_dim 128 only."""
    return importlib.util.find_spec("flash_attn3_jax") is not None and _is_common(case) and case.head_dim == 128


PEERS = {
    "xla gather + dense": Contestant(attend_gathered, fits=_is_common),
    "JAX's own op": Contestant(
        attend_jax_op, head_major, _fits_jax_op, tuple({"k_splits": splits} for splits in (1, 4, 8, 16, 32))
    ),
    "cuDNN, not paged": Contestant(attend_dense, dense, _is_common),
    "cuDNN, paged": Contestant(attend_cudnn_paged, by_layer, _fits_cudnn_paged),
    "flash-attn3-jax": Contestant(
        attend_flash3, by_layer, _fits_flash3, tuple({"num_splits": splits} for splits in (1, 2, 4, 8, 16, 32))
    ),
}
