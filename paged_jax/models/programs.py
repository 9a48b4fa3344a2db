"""The two programs of a static batch: read packed prompts, then decode. On one device, or by every device of a mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int32, PRNGKeyArray

from paged_jax import sharding
from paged_jax.block_table import BlockTable
from paged_jax.cache import PagedCache
from paged_jax.decode import DecodeResult, decode
from paged_jax.models.network import Network
from paged_jax.sampling import greedy


def prefill(
    forward: jax.tree_util.Partial,
    cache: PagedCache,
    table: BlockTable,
    tokens: Int32[Array | np.ndarray, " T"],
    num_tokens: Int32[Array | np.ndarray, " B"],
    *,
    max_context: int | None = None,
) -> tuple[PagedCache, BlockTable, Bool[Array, "*S"]]:
    """Writes the rows' next packed prompt tokens into their pages; nothing, with `ok` False, if they lack pages.

    No logits: the last token of a prompt is left to `generate`, whose first step gives the first new token. Cache and
    table are donated.

    Args:
        forward: of a `Network` and its weights.
        tokens: of a mesh whose rows are split, the shards' packed tokens one after the other, each padded to one size;
            table and `ok` are stacked then.
        max_context: how many tokens any of these rows holds already, at most: 0 for fresh prompts.

    Raises:
        ValueError: the table is not one for the network's split, or the mesh does not fit the model.
    """
    tokens, num_tokens = (_place_rows(_network(forward), array) for array in (tokens, num_tokens))
    return _prefill(forward, cache, table, tokens, num_tokens, max_context=max_context)


def lower_prefill(*arguments: Any, max_context: int | None = None) -> jax.stages.Lowered:
    """`prefill`'s program for such arguments, to compile ahead of the call."""
    return _prefill.lower(*arguments, max_context=max_context)


def generate(
    forward: jax.tree_util.Partial,
    cache: PagedCache,
    table: BlockTable,
    tokens: Int32[Array | np.ndarray, " B"],
    active: Bool[Array | np.ndarray, " B"],
    *,
    key: PRNGKeyArray | None = None,
    **options: Any,
) -> DecodeResult:
    """`paged_jax.decode` with its options; on a mesh each shard of rows goes on until its own rows have ended.

    With rows split, the result's table and `ok` are stacked, and each shard draws with a key of its own.

    Raises:
        ValueError: as `prefill`, and as `decode`.
    """
    network = _network(forward)
    if network.split is None:
        return decode(forward, cache, table, jnp.asarray(tokens), jnp.asarray(active), key=key, **options)
    tokens, active = (_place_rows(network, array) for array in (tokens, active))
    key = None if key is None else jax.device_put(key, NamedSharding(network.split.mesh, PartitionSpec()))
    options = {"sample": greedy, **options, "stop_tokens": tuple(options.get("stop_tokens", ()))}
    return _generate(forward, cache, table, tokens, active, key, **options)


def check_placed(forward: jax.tree_util.Partial, cache: PagedCache, table: BlockTable) -> None:
    """Checks on the host that nothing has to move when a step on a mesh begins.

    Raises:
        ValueError: names the first array that is split otherwise, or does not divide.
    """
    network = _network(forward)
    if network.split is None:
        raise ValueError("forward: expected that of a model on a mesh, got one for a single device")
    specs = (network.specs(), *_specs(network, cache, table))
    for arrays, spec in zip((*forward.args, cache, table), specs, strict=True):
        sharding.check_placed(network.split.mesh, arrays, spec)


@functools.partial(jax.jit, static_argnames="max_context", donate_argnames=("cache", "table"))
def _prefill(forward, cache, table, tokens, num_tokens, *, max_context):
    network = _network(forward)
    by_row = _by_row(network)

    def read(weights, cache, table, tokens, num_tokens):
        table, step, ok = table.step(num_tokens, size=tokens.shape[0])
        _, cache = network(weights, tokens, step, cache, max_context=max_context)
        return cache, table, ok

    specs = _specs(network, cache, table)
    on_mesh = _on_mesh(network, read, (*specs, by_row, by_row), (*specs, by_row))
    return on_mesh(*forward.args, cache, table, tokens, num_tokens)


@functools.partial(
    jax.jit, static_argnames=("max_new_tokens", "sample", "stop_tokens"), donate_argnames=("cache", "table")
)
def _generate(forward, cache, table, tokens, active, key, **options) -> DecodeResult:
    network = _network(forward)
    (heads, rows), by_row = _axes(network), _by_row(network)

    def run(weights, cache, table, tokens, active, key):
        if key is not None and rows is not None:
            key = jax.random.fold_in(key, lax.axis_index(rows))
        return decode(jax.tree_util.Partial(network, weights), cache, table, tokens, active, key=key, **options)

    specs = (*_specs(network, cache, table), by_row, by_row, PartitionSpec())
    results = sharding.result_specs(cache, table, heads=heads, rows=rows)
    return _on_mesh(network, run, specs, results)(*forward.args, cache, table, tokens, active, key)


def _network(forward: jax.tree_util.Partial) -> Network:
    """Whose weights are bound to it."""
    network: Any = forward.func
    return network


def _place_rows(network: Network, array: Any) -> Any:
    """One placement for the first call and those after it, so that none compiles anew."""
    return array if network.split is None else sharding.place(network.split.mesh, array, _by_row(network))


def _axes(network: Network) -> tuple[str | None, str | None]:
    """The mesh axes that split heads and rows."""
    return (None, None) if network.split is None else (network.split.heads, network.split.rows)


def _by_row(network: Network) -> PartitionSpec:
    return sharding.rows_spec(_axes(network)[1])


def _specs(network: Network, cache: PagedCache, table: BlockTable) -> tuple[PagedCache, BlockTable]:
    heads, rows = _axes(network)
    return sharding.cache_specs(cache, heads=heads, rows=rows), sharding.table_specs(table, rows=rows)


def _on_mesh(network: Network, function: Any, in_specs: Any, out_specs: Any) -> Any:
    """`function(weights, ...)` by every device of the network's mesh; as it is without one."""
    if network.split is None:
        return function
    in_specs = (network.specs(), *in_specs)
    return sharding.on_mesh(
        function, network.split.mesh, in_specs=in_specs, out_specs=out_specs, rows=network.split.rows
    )
