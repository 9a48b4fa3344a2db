"""Prompts and chunks of prompts → output, with the K and V of their tokens at hand: the fastest way the device has."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from paged_jax import cudnn, layouts, platform_choice
from paged_jax.attention import merge_attention, paged_attention
from paged_jax.block_table import BlockTable, packed_rows
from paged_jax.cache import PagedCache
from pallas_kernels import arguments, softmax
from pallas_kernels.integers import as_int32
from pallas_kernels.token_fill import token_fill

_MANY_TOKENS = 512  # below, launching several kernels costs more than dense attention gains
_MOST_CONTEXT = 16  # times the tokens: what is gathered at most, in case that little of it is there


def prefill_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K Hv"],
    cache: PagedCache,
    table: BlockTable,
    *,
    query_lengths: Int[Array, " B"],
    max_context: int | None = None,
    layer: int | Int[Array, ""] = 0,
    scale: float | None = None,
    window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:  # out, or (out, lse), as of paged_attention
    """What `paged_attention` computes for packed tokens, given the very K and V that they have written to the cache.

    Over K and V that lie in one piece cuDNN is nearly twice as fast as any walk over pages. So tokens attend to each
    other there, and where it pays also to what their rows held before, gathered once; `prefill_way` is the rule.

    Args:
        k, v: of the tokens of q, as `cache.write` took them.
        max_context: how many tokens any row of the step held before it, at most; static. 0: all are fresh prompts, and
            no page is read. None: what the table has room for. A row that held more gets NaN, and so does one that
            has more tokens in the step than it holds.
        implementation: None follows the rule and the platform; one of those of `paged_attention` walks the pages.

    The other arguments, the result and the errors are those of `paged_attention`.
    """
    room = table.max_blocks_per_row * table.page_size
    if max_context is not None and (
        isinstance(max_context, bool) or not isinstance(max_context, (int, np.integer)) or max_context < 0
    ):
        raise ValueError(f"max_context: expected None or an int of at least 0 (it is static), got {max_context!r}")
    max_context = room if max_context is None else min(int(max_context), room)
    q, k, v = (jnp.asarray(array) for array in (q, k, v))
    arguments.validate_queries(q, cache.num_kv_heads, cache.head_dim)
    for name, array, dim in (("k", k, cache.head_dim), ("v", v, cache.v_head_dim)):
        expected = (q.shape[0], cache.num_kv_heads, dim)
        if array.shape != expected or array.dtype.name not in arguments.FLOATS:
            raise ValueError(
                f"{name}: expected a floating array of shape {expected}, as the tokens were written, "
                f"got {array.dtype}{list(array.shape)}"
            )
    options = arguments.validate_options(
        q,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        num_partitions=None,
    )
    arrays = {
        "query_lengths": as_int32("query_lengths", query_lengths),
        "layer": arguments.validate_layer(layer, cache.num_layers),
        "window": options.window,
        "sinks": options.sinks,
        "alibi_slopes": options.alibi_slopes,
    }

    def walk(operands):
        q, _, _, cache, table, arrays = operands
        return paged_attention(
            q,
            cache,
            table,
            scale=options.scale,
            soft_cap=options.soft_cap,
            return_lse=return_lse,
            implementation=implementation,
            **arrays,
        )

    operands = (q, k, v, cache, table, arrays)
    jax.eval_shape(walk, operands)  # whichever way is taken, the same mistakes are found
    is_plain = window is None and soft_cap is None and alibi_slopes is None
    way = prefill_way(q, k, v, cache, rows=table.max_rows, max_context=max_context, is_plain=is_plain)
    if implementation is not None or way == "paged" or not cudnn.is_there(table.max_rows):
        return arguments.forward_only(walk, operands)
    dense = functools.partial(_attend_densely, max_context=max_context, scale=options.scale, return_lse=return_lse)
    return arguments.forward_only(functools.partial(platform_choice.choose, {"cuda": dense}, walk), operands)


def prefill_way(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K Hv"],
    cache: PagedCache,
    *,
    rows: int,
    max_context: int,
    is_plain: bool,
) -> Literal["dense", "dense and gathered", "paged"]:
    """How `prefill_attention` attends on a CUDA device with cuDNN (for several rows a Hopper), from static shapes.

    "dense" where no row has earlier tokens; "dense and gathered" where copying those of all rows costs little beside
    attending to them; "paged" for few tokens, and for what cuDNN lacks: float32, a cache of another dtype than the
    tokens, K and V of different head_dims, a head_dim over 128 or not a multiple of 8.

    Args:
        is_plain: there is no window, soft cap or ALiBi, of which cuDNN has none; otherwise "paged".
    """
    tokens, _, head_dim = q.shape
    is_common = q.dtype == k.dtype == v.dtype == cache.k.dtype == cache.v.dtype and cache.v_head_dim == cache.head_dim
    if not (is_plain and is_common) or tokens < _MANY_TOKENS:
        return "paged"
    if q.dtype.name not in cudnn.DTYPES or head_dim > cudnn.MAX_HEAD_DIM or head_dim % 8:
        return "paged"
    if max_context == 0:
        return "dense"
    return "dense and gathered" if rows * max_context <= _MOST_CONTEXT * tokens else "paged"


def _attend_densely(operands, *, max_context: int, scale: float, return_lse: bool):
    q, k, v, cache, table, arrays = operands
    num_tokens, rows = q.shape[0], table.max_rows
    lengths = jnp.clip(arrays["query_lengths"], 0, num_tokens)
    ends = jnp.minimum(jnp.cumsum(lengths, dtype=jnp.int32), num_tokens)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    lengths = jnp.diff(starts)
    row = packed_rows(ends, num_tokens)
    offset = jnp.arange(num_tokens, dtype=jnp.int32) - starts[row]
    context = table.lengths - jnp.maximum(arrays["query_lengths"], 0)  # as it is, though tokens beyond T are no row's

    def by_token(lse):  # [B, T, N] by row and token of the row → [T, N]
        return lse.at[row, offset].get(mode="fill", fill_value=-jnp.inf)

    sinks, attend = arrays["sinks"], functools.partial(cudnn.attend, q, scale=scale)
    is_lse_wanted = return_lse or max_context > 0 or sinks is not None
    result = attend(k, v, starts, lengths, starts, lengths, is_causal=True, return_lse=is_lse_wanted)
    out, lse = (result[0], by_token(result[1])) if is_lse_wanted else (result, jnp.zeros(()))
    if max_context:
        keys, values = _gather_context(cache, table, arrays["layer"], context, max_context)
        size = keys.shape[0] // rows
        key_starts, held = jnp.arange(rows + 1, dtype=jnp.int32) * size, jnp.clip(context, 0, size)
        context_out, context_lse = attend(
            keys, values, starts, lengths, key_starts, held, is_causal=False, return_lse=True
        )
        context_lse = jnp.where(held[row, None] > 0, by_token(context_lse), -jnp.inf)  # of no keys cuDNN says nothing
        out, lse = merge_attention((out, context_out), (lse, context_lse))
    if sinks is not None:
        with_sink, lse = softmax.with_sink(out.astype(jnp.float32), lse, sinks.astype(jnp.float32)[None, :])
        out = with_sink.astype(q.dtype)
    is_token, is_promised = row < rows, (context >= 0) & (context <= max_context)
    out = token_fill(out, ~is_token | ~is_promised[row], jnp.where(is_token, jnp.nan, 0.0))
    return (out, jnp.where(is_token[:, None], lse, -jnp.inf)) if return_lse else out


def _gather_context(
    cache: PagedCache, table: BlockTable, layer: Int32[Array, ""], context: Int32[Array, " B"], max_context: int
) -> tuple[Float[Array, "S K H"], Float[Array, "S K H"]]:
    """K and V of what the rows held before, row after row in equal room; zero where a row held less."""
    blocks = -(-max_context // table.page_size)
    position = jnp.arange(blocks * table.page_size, dtype=jnp.int32)
    is_held = (position[None, :] < context[:, None]).reshape(-1, 1, 1)

    def gather(pool, axes):
        pages = layouts.take_pages(pool, axes, layer=layer, page=table.pages[:, :blocks])
        return jnp.where(is_held, pages.reshape(-1, *pages.shape[-2:]), 0)

    k_axes, v_axes = layouts.pool_axes(cache.layout)
    return gather(cache.k, k_axes), gather(cache.v, v_axes)
