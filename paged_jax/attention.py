"""Pages → output: the public op. Validates once, dispatches once."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from paged_jax import attention_xla, backends
from paged_jax.block_table import BlockTable
from paged_jax.cache import PagedCache
from paged_jax.cache_check import FLOATS, validate_layer, validate_table
from paged_jax.integers import as_int32
from pallas_kernels import softmax


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
    _validate_queries(q, cache, table, query_lengths)
    num_heads, head_dim = q.shape[1:]
    if implementation is not None and implementation not in backends.IMPLEMENTATIONS:
        known = ", ".join(map(repr, backends.IMPLEMENTATIONS))
        raise ValueError(f"implementation: expected None or one of {known}, got {implementation!r}")
    if num_partitions is not None and (not _is_int(num_partitions) or num_partitions < 1):
        raise ValueError(f"num_partitions: expected None or a positive int, got {num_partitions!r}")
    scale = head_dim**-0.5 if scale is None else _validate_number("scale", scale)
    if soft_cap is not None and (soft_cap := _validate_number("soft_cap", soft_cap)) <= 0:
        raise ValueError(f"soft_cap: expected a positive number, got {soft_cap}")

    arrays = {
        "q": q,
        "k_pages": cache.k,
        "v_pages": cache.v,
        "k_scales": cache.k_scale,
        "v_scales": cache.v_scale,
        "block_tables": table.pages,
        "lengths": table.lengths,
        "query_lengths": query_lengths,
        "layer": validate_layer(layer, cache.num_layers),
        "window": None if window is None else _validate_window(window),
        "sinks": None if sinks is None else _validate_per_head("sinks", sinks, num_heads),
        "alibi_slopes": None if alibi_slopes is None else _validate_per_head("alibi_slopes", alibi_slopes, num_heads),
    }
    attend = functools.partial(
        _attend,
        layout=cache.layout,
        scale=scale,
        soft_cap=soft_cap,
        num_partitions=num_partitions,
        implementation=implementation,
    )
    out, lse = forward_only(attend, arrays)
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
    if not jnp.issubdtype(outs.dtype, jnp.floating):
        raise ValueError(f"outs: expected a floating dtype, got {outs.dtype}")
    if outs.ndim < 2 or outs.shape[0] < 1 or lses.shape != outs.shape[:-1]:
        raise ValueError(
            f"merge_attention: expected outs [S, .., N, Hv] and lses [S, .., N] with S >= 1, "
            f"got shapes {outs.shape} and {lses.shape}"
        )
    out, lse = softmax.merge(outs, lses.astype(jnp.float32))
    return out.astype(outs.dtype), lse


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward_only(attend, arrays):
    """`attend(arrays)`, which says so when it is differentiated."""
    return attend(arrays)


@forward_only.defjvp
def _refuse_to_differentiate(attend, primals, tangents):
    raise NotImplementedError(
        "paged_attention is forward only: it cannot be differentiated. Train with dense attention, or stop the "
        "gradient (jax.lax.stop_gradient) before q, the cache, sinks and slopes."
    )


@functools.partial(jax.jit, static_argnames=("layout", "scale", "soft_cap", "num_partitions", "implementation"))
def _attend(arrays, **static):  # jitted, so that the layers of an unrolled model share one trace
    return backends.attend(arrays, reference=attention_xla.attend, **static)


def _validate_queries(q, cache: PagedCache, table: BlockTable, query_lengths) -> None:
    validate_table(cache, table)
    num_kv_heads, head_dim = cache.num_kv_heads, cache.head_dim
    if q.ndim != 3 or q.shape[2] != head_dim or q.shape[1] < 1 or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q: expected shape [tokens, heads, head_dim] with head_dim {head_dim} and heads a multiple of the cache's "
            f"{num_kv_heads} kv heads, got {q.shape}"
        )
    if q.dtype.name not in FLOATS:
        raise ValueError(f"q: expected dtype {', '.join(FLOATS)}, got {q.dtype}")
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


def _validate_window(window):
    if _is_int(window) and window < 1:
        raise ValueError(f"window: expected an int of at least 1, got {window}")
    array = as_int32("window", window)
    if array.shape != ():
        raise ValueError(f"window: expected an int or an integer scalar, got shape {array.shape}")
    return array


def _validate_per_head(name: str, array, num_heads: int):
    array = jnp.asarray(array)
    if array.shape != (num_heads,) or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"{name}: expected a floating array with one entry for each of {num_heads} query heads, "
            f"got {array.dtype}{list(array.shape)}"
        )
    return array


def _validate_number(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite Python number (it is static), got {value!r}")
    return float(value)


def _is_int(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
