"""The same decoder without pages: over all tokens at once, and over a dense cache, which a paged one is compared with.

A dense cache has the same number of cells for every row, one after the other and reserved from the start.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class DenseCache:
    k: Float[Array, "L B S K H"]
    v: Float[Array, "L B S K H"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["positions"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class DenseStep:
    """As many tokens for each row, row after row."""

    positions: Int32[Array, " T"]  # S, past the last cell, for padding tokens


def attend_dense(q, k, v, cache: DenseCache, step: DenseStep, *, layer, **options):
    """Writes the tokens' K and V to the cells of their positions, and attends over all cells of their rows."""
    num_rows = cache.k.shape[1]
    row, position = jnp.arange(num_rows)[:, None], step.positions.reshape(num_rows, -1)
    k, v = (array.reshape(num_rows, -1, *array.shape[1:]) for array in (k, v))
    cache = DenseCache(
        cache.k.at[layer, row, position].set(k, mode="drop"), cache.v.at[layer, row, position].set(v, mode="drop")
    )
    return _attend(q, cache.k[layer], cache.v[layer], position, **options), cache


def attend_causally(num_rows: int, q, k, v, cache: None, step: DenseStep, *, layer, **options):  # noqa: ARG001
    """Attends over the tokens themselves, which are all of their rows."""
    k, v = (array.reshape(num_rows, -1, *array.shape[1:]) for array in (k, v))
    return _attend(q, k, v, step.positions.reshape(num_rows, -1), **options), cache


def _attend(q, k, v, position, *, scale, window, soft_cap, sinks):
    """Tokens [T, N, H], at `position` [B, T / B], over the cells [B, S, K, H] of their rows."""
    num_rows, num_cells, num_kv_heads, head_dim = k.shape
    grouped = q.reshape(num_rows, -1, num_kv_heads, q.shape[1] // num_kv_heads, head_dim)
    einsum = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    scores = einsum("bqkgh,bskh->bkgqs", grouped, k) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    distance = position[:, :, None] - jnp.arange(num_cells)
    is_visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    scores = jnp.where(is_visible[:, None, None], scores, -jnp.inf)
    if sinks is not None:  # one more logit, whose weight is thrown away
        sink = sinks.astype(jnp.float32).reshape(1, num_kv_heads, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_cells]
    return einsum("bkgqs,bskh->bqkgh", weights, v.astype(jnp.float32)).reshape(q.shape).astype(q.dtype)


def generate_dense(
    forward: jax.tree_util.Partial,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_tokens: Collection[int],
    dtype,
) -> list[list[int]]:
    """Each prompt's next tokens, greedy, up to and with a stop token: one at a time, from the host.

    Args:
        forward: a model's; its network and weights are what is used of it.
        dtype: of the cache.
    """
    config, num_rows = forward.func.config, len(prompts)
    read = np.array([len(prompt) - 1 for prompt in prompts], np.int32)  # the last token of a prompt is the first newest
    num_cells = int(read.max()) + max_new_tokens
    sizes = (config.num_layers, num_rows, num_cells, config.attention.num_kv_heads, config.attention.head_dim)
    cache = DenseCache(jnp.zeros(sizes, dtype), jnp.zeros(sizes, dtype))
    padded = np.zeros((num_rows, max(1, read.max())), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : read[row]] = prompt[:-1]
    column = np.arange(padded.shape[1], dtype=np.int32)
    _, cache = _advance(forward, cache, padded, np.where(column < read[:, None], column, num_cells))

    newest, is_active = np.array([prompt[-1] for prompt in prompts], np.int32), np.ones(num_rows, bool)
    rows: list[list[int]] = [[] for _ in prompts]
    for i in range(max_new_tokens):
        position = np.where(is_active, read + i, num_cells).astype(np.int32)
        following, cache = _advance(forward, cache, newest[:, None], position[:, None])
        newest = np.asarray(following)
        for row in np.flatnonzero(is_active):
            rows[row].append(int(newest[row]))
            is_active[row] = newest[row] not in stop_tokens
        if not is_active.any():
            break
    return rows


@functools.partial(jax.jit, donate_argnames="cache")
def _advance(
    forward: jax.tree_util.Partial, cache: DenseCache, tokens: Int[Array, "B Q"], positions: Int[Array, "B Q"]
) -> tuple[Int32[Array, " B"], DenseCache]:
    """The likeliest token after each row's last one, and the cache with K and V of all."""
    model = forward.func.decoder(*forward.args)
    hidden, cache = model(tokens.reshape(-1), DenseStep(positions.reshape(-1)), cache, attend_dense)
    last = hidden.reshape(*tokens.shape, -1)[:, -1]
    return model.logits(last).argmax(-1).astype(jnp.int32), cache
