"""Online softmax: the state that folds keys tile by tile, and the rules that turn dot products into scores.

The arithmetic is shared by every kernel and by the plain-JAX implementation, so it uses only what all can lower:
element-wise operations, reductions over the last axis and `where`. All of it is float32.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., "FlashAttention" (2022)
for the tiled form; Dao et al., "Flash-Decoding" (2023) for merging partitions by their log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


class SoftmaxState(NamedTuple):
    """What has been folded so far, for Q queries: with no keys folded, peak is −inf and the rest is zero."""

    weighted: Any  # Σ exp(score − peak) · value, [... Q Hv]; or a tuple of such, whose dims are parts of all
    total: Float32[Array, "... Q"]  # Σ exp(score − peak)
    peak: Float32[Array, "... Q"]  # the largest score, in the scores' own unit


def init(queries: tuple[int, ...], value_dims: int | tuple[int, ...]) -> SoftmaxState:
    """The state of `queries` (a shape) before any key."""
    return SoftmaxState(
        weighted=jax.tree.map(lambda dim: jnp.zeros((*queries, dim), jnp.float32), value_dims),
        total=jnp.zeros(queries, jnp.float32),
        peak=jnp.full(queries, -jnp.inf, jnp.float32),
    )


def update(
    state: SoftmaxState,
    scores: Float32[Array, "... Q T"],
    weigh: Callable[[Float32[Array, "... Q T"]], Any],
    *,
    unit: float,
    masked: bool,
) -> SoftmaxState:
    """Folds one tile of T keys.

    Args:
        scores: one per query and key; −inf for a key that the query must not see.
        weigh: multiplies the weights with the tile's values, `weights @ values`, into what `state.weighted` is of.
        unit: what one unit of score is worth as a power of two; `LOG2_E` for scores in natural units. A constant
            positive factor of all scores can go in here: it is then applied to differences of scores, which loses
            nothing where scores are huge, and costs nothing.
        masked: whether a query may see no key of the tile. Where False the guard against −inf − (−inf) is left out.
    """
    peak = jnp.maximum(state.peak, scores.max(axis=-1))
    origin = jnp.where(peak == -jnp.inf, 0.0, peak) if masked else peak
    decay = jnp.exp2((state.peak - origin) * unit)
    weights = jnp.exp2((scores - origin[..., None]) * unit)
    return SoftmaxState(
        weighted=jax.tree.map(lambda before, new: before * decay[..., None] + new, state.weighted, weigh(weights)),
        total=state.total * decay + weights.sum(axis=-1),
        peak=peak,
    )


def finish(state: SoftmaxState, *, unit: float) -> tuple[Any, Float32[Array, "... Q"]]:
    """The normalised output and the natural-log log-sum-exp of all keys folded; zeros and −inf where there are none."""
    is_empty = state.total == 0
    total = jnp.where(is_empty, 1.0, state.total)
    out = jax.tree.map(lambda sums: jnp.where(is_empty[..., None], 0.0, sums / total[..., None]), state.weighted)
    lse = jnp.where(is_empty, -jnp.inf, state.peak * (unit * LN_2) + jnp.log(total))
    return out, lse


def with_sink(
    out: Float32[Array, "... Hv"], lse: Float32[Array, "..."], sink: Float[Array, "..."]
) -> tuple[Float32[Array, "... Hv"], Float32[Array, "..."]]:
    """Adds one more logit, `sink`, to the denominator only: a key whose value is zero."""
    peak = jnp.maximum(lse, sink)
    origin = jnp.where(peak == -jnp.inf, 0.0, peak)
    kept = jnp.exp(lse - origin)
    total = kept + jnp.exp(sink - origin)
    is_empty = total == 0
    share = kept / jnp.where(is_empty, 1.0, total)
    return out * share[..., None], jnp.where(is_empty, -jnp.inf, origin + jnp.log(jnp.where(is_empty, 1.0, total)))


def merge(
    outs: Float[Array, "S ... Hv"], lses: Float32[Array, "S ..."]
) -> tuple[Float32[Array, "... Hv"], Float32[Array, "..."]]:
    """Joins S normalised outputs over disjoint sets of keys into the output over their union; exact."""
    peak = lses.max(axis=0)
    weights = jnp.exp(lses - jnp.where(peak == -jnp.inf, 0.0, peak)[None])
    total = weights.sum(axis=0)
    is_empty = total == 0
    safe_total = jnp.where(is_empty, 1.0, total)
    # An empty part may hold anything: select it away, since 0 · NaN is NaN.
    parts = jnp.where((weights > 0)[..., None], outs.astype(jnp.float32), 0.0)
    out = (parts * weights[..., None]).sum(axis=0) / safe_total[..., None]
    return out, jnp.where(is_empty, -jnp.inf, peak + jnp.log(safe_total))
