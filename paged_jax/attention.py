"""Pages → output: the public op. Validates once, dispatches once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from paged_jax import attention_xla, backends
from paged_jax.block_table import BlockTable
from paged_jax.cache import PagedCache
from paged_jax.cache_check import validate_table
from pallas_kernels import arguments, softmax
from pallas_kernels.integers import as_int32


def paged_attention(
    q: Float[Array, "T N H"],
    cache: PagedCache,
    table: BlockTable,
    *,
    layer: int | Int[Array, ""] = 0,
    query_lengths: Int[Array, " B"] | None = None,
    scale: float | None = None,
    window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    num_partitions: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:  # out, or (out, lse); a union would trouble every caller's type checker
    """Causal attention of new tokens over the pages of their rows; equals dense attention over the same keys.

    Decode: without `query_lengths`, q is [B, N, H]: one token per row, the row's last. Ragged: with `query_lengths`,
    row r's tokens are its last `query_lengths[r]` positions, packed in row order and padded to T.

    The lengths in the table already count these tokens: extend the table, write K and V, then attend. A row of length
    0, a padding token and a query that sees no key give zeros and a log-sum-exp of −inf (a row's sink, if it has one).
    What dead cells and dead table entries hold makes no difference to any bit of the output.

    Order of operations on a dot product: scale, soft cap, ALiBi, mask, softmax.

    Args:
        q: queries, float32, bfloat16 or float16; N a multiple of the cache's kv heads. Query head n uses kv head
            `n // (N // K)`.
        cache: the pool.
        table: the block table; `PagedStep.table` within a step.
        layer: which layer of the pool, int or integer scalar, traced or not.
        query_lengths: tokens of each row in q; None for decode.
        scale: multiplies q · k; `H ** -0.5` if None. Static.
        window: a query at position i sees keys j with `i - window < j <= i`; int or integer scalar, traced or not.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`. Static.
        sinks: one more logit per query head in the softmax's denominator only.
        alibi_slopes: adds `slope * (j - i)` to the score of key j and query i.
        num_partitions: in how many parts each row's keys are folded before they are merged; None chooses. Changes no
            more than rounding. Static.
        return_lse: also return the log-sum-exp.
        implementation: "xla", "triton" (a CUDA or ROCm GPU), "triton_interpret" (the Triton kernel on any host, slowly,
            for tests), or None: the best for the platform that the function is lowered for. Static.

    Returns:
        out [T, N, Hv] in q's dtype and, with `return_lse`, the natural-log log-sum-exp, float32 [T, N].

    Raises:
        ValueError: an argument does not fit; says what was expected and what was given.
        NotImplementedError: the implementation named cannot do this; or the result is differentiated.
    """
    q = jnp.asarray(q)
    query_lengths = None if query_lengths is None else as_int32("query_lengths", query_lengths)
    validate_rows(q, cache, table, query_lengths)
    backends.validate_implementation(implementation)
    options = arguments.validate_options(
        q,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        num_partitions=num_partitions,
    )
    arrays = operands(q, cache, table, layer, options) | {"query_lengths": query_lengths, "window": options.window}
    attend = functools.partial(
        _attend,
        layout=cache.layout,
        scale=options.scale,
        soft_cap=options.soft_cap,
        num_partitions=num_partitions,
        implementation=implementation,
    )
    out, lse = arguments.forward_only(attend, arrays)
    return (out, lse) if return_lse else out


def merge_attention(
    outs: Float[Array, "S ... N Hv"] | Sequence[Float[Array, "... N Hv"]],
    lses: Float32[Array, "S ... N"] | Sequence[Float32[Array, "... N"]],
) -> tuple[Float[Array, "... N Hv"], Float32[Array, "... N"]]:
    """Joins attention outputs over disjoint sets of keys into the output over all of them; exact.

    An empty part (log-sum-exp −inf) changes nothing, and only empty parts give an empty result. If there is a sink,
    give it to exactly one of the parts.

    Args:
        outs: outputs of S parts, stacked or as a sequence.
        lses: their natural-log log-sum-exps.

    Returns:
        The output in the dtype of `outs`, and its log-sum-exp in float32.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if len({jnp.shape(part) for part in parts}) > 1:
            raise ValueError(f"{name}: expected parts of one shape, got {[jnp.shape(part) for part in parts]}")
    outs, lses = jnp.asarray(outs), jnp.asarray(lses)
    for name, array in (("outs", outs), ("lses", lses)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name}: expected a floating dtype, got {array.dtype}")
    if outs.ndim < 2 or outs.shape[0] < 1 or lses.shape != outs.shape[:-1]:
        raise ValueError(
            f"merge_attention: expected outs [S, .., N, Hv] and lses [S, .., N] with S >= 1, "
            f"got shapes {outs.shape} and {lses.shape}"
        )
    out, lse = softmax.merge(outs, lses.astype(jnp.float32))
    return out.astype(outs.dtype), lse


def operands(
    q: Float[Array, "T N H"], cache: PagedCache, table: BlockTable, layer: Any, options: arguments.Options
) -> dict[str, Any]:
    """The arrays that every kind of attention over pages takes, by the names that implementations have for them."""
    return {
        "q": q,
        "k_pages": cache.k,
        "v_pages": cache.v,
        "k_scales": cache.k_scale,
        "v_scales": cache.v_scale,
        "block_tables": table.pages,
        "lengths": table.lengths,
        "layer": arguments.validate_layer(layer, cache.num_layers),
        "sinks": options.sinks,
        "alibi_slopes": options.alibi_slopes,
    }


@functools.partial(jax.jit, static_argnames=("layout", "scale", "soft_cap", "num_partitions", "implementation"))
def _attend(arrays, **static):  # jitted, so that the layers of an unrolled model share one trace
    return backends.attend(arrays, reference=attention_xla.attend, **static)


def validate_rows(q, cache: PagedCache, table: BlockTable, query_lengths) -> None:
    """Raises unless the queries fit the cache, and the rows that they are of."""
    validate_table(cache, table)
    arguments.validate_queries(q, cache.num_kv_heads, cache.head_dim)
    if query_lengths is None:
        if q.shape[0] != table.max_rows:
            raise ValueError(
                f"q: expected one token for each of the table's {table.max_rows} rows, got {q.shape[0]} "
                f"(several tokens per row need query_lengths)"
            )
        return
    if query_lengths.shape != (table.max_rows,):
        raise ValueError(
            f"query_lengths: expected one count for each of the table's {table.max_rows} rows, "
            f"got shape {query_lengths.shape}"
        )
