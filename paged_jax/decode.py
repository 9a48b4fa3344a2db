"""The compiled decode loop: n tokens for a whole batch in one `while_loop`, pages allocated inside."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, PRNGKeyArray

from paged_jax.block_table import BlockTable
from paged_jax.sampling import greedy
from paged_jax.step import PagedStep

Forward = Callable[[Int32[Array, " T"], PagedStep, Any], tuple[Float[Array, "T V"], Any]]
Sample = Callable[[Float[Array, "B V"], PRNGKeyArray | None], Int32[Array, " B"]]


class OutOfPages(RuntimeError):
    """A step was refused for want of pages; `result` holds the state before it and all tokens generated so far."""

    def __init__(self, message: str, result: DecodeResult):
        super().__init__(message)
        self.result = result


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "num_tokens", "active", "ok", "cache", "table", "finite"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """What a decode loop generated, and the state to go on from."""

    tokens: Int32[Array, "B n"]  # −1 after a row's end
    num_tokens: Int32[Array, " B"]  # tokens generated for each row, a stop token included
    active: Bool[Array, " B"]  # rows that have not ended
    ok: Bool[Array, "*S"]  # False: a step was refused, and the loop stopped before it; one for each shard of rows
    cache: Any
    table: BlockTable
    finite: Bool[Array, " B"]  # False: the row ended in this call because its logits left no token to choose

    def check(self) -> DecodeResult:
        """Returns the result itself if every step was carried out, on the host; a row that is not `finite` is no error.

        Raises:
            OutOfPages: a step was refused; names what ran out and, of rows split over a mesh, the first shard where it
                did. The exception's `result` is this one: nothing is lost.
        """
        ok = np.asarray(self.ok)
        if ok.all():
            return self
        table, active, place = self.table, np.asarray(self.active), ""
        if ok.ndim:
            shard = int(np.argmin(ok))  # the first that is False
            table = jax.tree.map(lambda stacked: np.asarray(stacked)[shard], table)
            active, place = np.split(active, ok.size)[shard], f" in shard of rows {shard}"
        lengths = np.asarray(table.lengths)
        at_limit = np.flatnonzero(active & (lengths >= table.max_blocks_per_row * table.page_size))
        if at_limit.size:
            cause = (
                f"row {at_limit[0]} holds {lengths[at_limit[0]]} tokens, all that {table.max_blocks_per_row} blocks of "
                f"{table.page_size} tokens take"
            )
        else:
            needed = int((active & (lengths % table.page_size == 0)).sum())
            rows = "row needs" if needed == 1 else "rows need"
            cause = f"{needed} {rows} a new page, and {int(table.num_free)} of {table.num_pages} pages are free"
        generated = int(np.asarray(self.num_tokens).sum())
        raise OutOfPages(
            f"out of pages{place}: {cause}; stopped after {generated} generated tokens, which `error.result` holds",
            self,
        )


def decode(
    forward: Forward,
    cache: Any,
    table: BlockTable,
    tokens: Int[Array, " B"],
    active: Bool[Array, " B"],
    *,
    max_new_tokens: int,
    sample: Sample = greedy,
    stop_tokens: Sequence[int] = (),
    key: PRNGKeyArray | None = None,
) -> DecodeResult:
    """Generates up to `max_new_tokens` tokens for every active row in one compiled loop.

    Each turn of the loop extends the table by one token per active row, runs `forward` on the rows' newest tokens and
    samples the next ones. A row ends at a stop token. When a step is refused (out of pages, or a row at its limit) the
    loop stops with all state as before that step and `ok` False; outside jit, `result.check()` raises it as an error.

    A row whose logits hold NaN or +inf, or no finite number, ends in that step alone: it gets no token, it is no longer
    `active`, and `finite` is False for it. (−inf marks tokens that cannot be drawn.) The table and the cache hold the
    token that the step read, as of any other step; what its row computed may not be finite there either, so release the
    row, or truncate it to where its numbers were finite. The other rows go on.

    To go on, call again with `result.cache`, `result.table`, the rows' last tokens and `result.active`. The key is
    folded with the number of tokens that the table holds, so going on with the same key gives what one longer call
    would have given; after releasing rows take a new key.

    The cache and the table are donated: use the ones in the result. Compiles once for each `forward`, `sample`,
    `stop_tokens`, `max_new_tokens` and set of shapes; lengths and pages do not matter.

    Args:
        forward: `forward(tokens int32[T], step, cache) -> (logits [T, V], cache)`, with T = B. Padding tokens of the
            step must leave no trace in the cache; a refused step is all padding. Bind weights with
            `jax.tree_util.Partial(f, weights)`, which passes them as arguments: a plain closure makes constants of
            them, and a new closure per call compiles per call.
        cache: a pytree, usually a `PagedCache`.
        table: holds the rows' tokens so far, without `tokens`.
        tokens: the newest token of each row, whose K and V are not in the cache yet.
        active: rows to generate for.
        sample: `sample(logits [B, V], key) -> int32[B]`, hashable; `greedy` or a `Sampler`.
        stop_tokens: token ids that end a row.
        key: a `jax.random` key for `sample`; None hands None to it.

    Raises:
        ValueError: shapes or dtypes of `tokens` and `active` do not fit the table, `max_new_tokens` is negative, or
            `stop_tokens` is no sequence.
    """
    tokens, active = jnp.asarray(tokens), jnp.asarray(active)
    if tokens.shape != (table.max_rows,) or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens: expected an integer array of shape ({table.max_rows},), got {tokens.dtype}{list(tokens.shape)}"
        )
    if active.shape != (table.max_rows,) or active.dtype != jnp.bool_:
        raise ValueError(
            f"active: expected a bool array of shape ({table.max_rows},), got {active.dtype}{list(active.shape)}"
        )
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, (int, np.integer)) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: expected an int of at least 0, got {max_new_tokens!r}")
    if isinstance(stop_tokens, (int, np.integer)):
        raise ValueError(f"stop_tokens: expected a sequence of token ids, got {stop_tokens!r}")
    if not isinstance(forward, jax.tree_util.Partial):
        forward = jax.tree_util.Partial(forward)
    return _decode(
        forward,
        cache,
        table,
        tokens.astype(jnp.int32),
        active,
        key,
        max_new_tokens=int(max_new_tokens),
        sample=sample,
        stop_tokens=tuple(int(token) for token in stop_tokens),
    )


@functools.partial(
    jax.jit, static_argnames=("max_new_tokens", "sample", "stop_tokens"), donate_argnames=("cache", "table")
)
def _decode(forward, cache, table, tokens, active, key, *, max_new_tokens, sample, stop_tokens) -> DecodeResult:
    def one_step(carry):
        i, newest, result = carry
        table, step, ok = result.table.step(result.active.astype(jnp.int32))
        step_key = None if key is None else jax.random.fold_in(key, jnp.sum(table.lengths))
        # A refused step is all padding: it runs like any other, writes nothing, and what it samples is dropped.
        logits, cache = forward(newest, step, result.cache)
        sampled = sample(logits, step_key).astype(jnp.int32)

        # One reduction finds all three, for an infinity stands for NaN in it: whether a maximum keeps NaN is up to XLA.
        is_finite = jnp.isfinite(jnp.where(jnp.isnan(logits), jnp.inf, logits).max(axis=-1))
        is_lost = result.active & ok & ~is_finite
        is_new = result.active & ok & is_finite
        is_stop = jnp.isin(sampled, jnp.array(stop_tokens, jnp.int32))
        result = DecodeResult(
            tokens=result.tokens.at[:, i].set(jnp.where(is_new, sampled, -1)),
            num_tokens=result.num_tokens + is_new.astype(jnp.int32),
            active=result.active & ~(is_new & is_stop) & ~is_lost,
            ok=ok,
            cache=cache,
            table=table,
            finite=result.finite & ~is_lost,
        )
        return i + 1, sampled, result

    def goes_on(carry):
        i, _, result = carry
        return (i < max_new_tokens) & result.ok & jnp.any(result.active)

    start = DecodeResult(
        tokens=jnp.full((table.max_rows, max_new_tokens), -1, jnp.int32),
        num_tokens=jnp.zeros(table.max_rows, jnp.int32),
        active=active,
        ok=jnp.bool_(True),
        cache=cache,
        table=table,
        finite=jnp.ones(table.max_rows, bool),
    )
    if max_new_tokens == 0:
        return start
    return lax.while_loop(goes_on, one_step, (jnp.int32(0), tokens, start))[2]
