"""Which mesh axis splits which axis of a cache and a table, and a function that every device runs on its own share.

Two ways to split, on axes of the caller's mesh, alone or together:

- heads: each device holds some kv heads of every page, and computes the query heads that go with them. The table is the
  same everywhere. Attention and writes exchange nothing; the model's projections do. Kv heads are not replicated: the
  axis must divide them.
- rows: each shard of rows has a pool and a table of its own, with page ids of its own, and nothing is exchanged. The
  shards' pools lie one after the other along the pages, and what a shard has one of (its table, an `ok`) is stacked
  along a new first axis.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from paged_jax import layouts
from paged_jax.block_table import BlockTable
from paged_jax.cache import PagedCache
from paged_jax.decode import DecodeResult
from paged_jax.integers import require_positive
from paged_jax.step import PagedStep


def make_mesh(**sizes: int) -> Mesh:
    """A mesh of the first devices, with these axes in this order: `make_mesh(rows=2, heads=4)`.

    Put the axis that exchanges most, heads, last: its devices are neighbours then, of one host where that has enough.

    Raises:
        ValueError: a size is not a positive int, or there are fewer devices than the mesh asks for.
    """
    require_positive(**sizes)
    wanted, found = int(np.prod(list(sizes.values()), dtype=np.int64)), jax.device_count()
    if found < wanted:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"mesh: expected {wanted} devices for {product}, got {found} ({jax.default_backend()}; on a CPU "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted} makes more)"
        )
    axis_types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types, devices=jax.devices()[:wanted])


def rows_spec(rows: str | None) -> PartitionSpec:
    """Of an array whose first axis is that of the rows, or of their packed tokens; None leaves it whole."""
    return PartitionSpec() if rows is None else PartitionSpec(rows)


def cache_specs(cache: PagedCache, *, heads: str | None = None, rows: str | None = None) -> PagedCache:
    """The cache with a PartitionSpec in place of each array, in any layout, quantised or not.

    Args:
        cache: arrays, or what `jax.eval_shape` gives.
        heads: the mesh axis that splits the kv heads.
        rows: the mesh axis along which each shard has its pages.
    """
    k_axes, v_axes = layouts.pool_axes(cache.layout)

    def spec(array, axes):
        return None if array is None else PartitionSpec(*({"P": rows, "K": heads}.get(axis) for axis in axes))

    return dataclasses.replace(
        cache,
        k=spec(cache.k, k_axes),
        v=spec(cache.v, v_axes),
        k_scale=spec(cache.k_scale, layouts.SCALE_AXES),
        v_scale=spec(cache.v_scale, layouts.SCALE_AXES),
    )


def table_specs(table: BlockTable, *, rows: str | None = None) -> BlockTable:
    """The table with a PartitionSpec in place of each array: the same on every device, or stacked by shards of rows.

    Raises:
        ValueError: `rows` is given for one table, or is not for stacked ones.
    """
    _require_table(table, rows)
    return jax.tree.map(lambda _: rows_spec(rows), table)


def step_specs(step: PagedStep, *, rows: str | None = None) -> PagedStep:
    """The step with a PartitionSpec in place of each array; the shards' tokens lie one after the other.

    Raises:
        ValueError: as `table_specs`.
    """
    _require_table(step.table, rows)
    return jax.tree.map(lambda _: rows_spec(rows), step)


def result_specs(
    cache: PagedCache, table: BlockTable, *, heads: str | None = None, rows: str | None = None
) -> DecodeResult:
    """The PartitionSpecs of what `decode` returns for this cache and table; `ok` has one entry per shard of rows."""
    by_row: Any = rows_spec(rows)
    return DecodeResult(
        tokens=by_row,
        num_tokens=by_row,
        active=by_row,
        ok=by_row,
        cache=cache_specs(cache, heads=heads, rows=rows),
        table=table_specs(table, rows=rows),
        finite=by_row,
    )


def create_cache(
    mesh: Mesh,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any = jnp.bfloat16,
    *,
    heads: str | None = None,
    rows: str | None = None,
    **options: Any,
) -> PagedCache:
    """`PagedCache.create` on a mesh: every device makes its own share, and no device ever holds the whole.

    Args:
        num_pages: pages of each shard of rows.
        heads, rows: as in `cache_specs`.

    Raises:
        ValueError: the mesh has no such axis, the kv heads do not divide over `heads`, or as `PagedCache.create`.
    """
    _require_axes(mesh, heads, rows)
    if heads is not None and num_kv_heads % (devices := mesh.shape[heads]):
        most = math.gcd(num_kv_heads, devices)
        raise ValueError(
            f"num_kv_heads: expected a multiple of the {devices} devices of mesh axis {heads!r}, got {num_kv_heads}; "
            f"kv heads are not replicated: split heads over {most} and rows over {devices // most}"
        )
    shards = 1 if rows is None else mesh.shape[rows]
    PagedCache.create(1, 1, page_size, 1, head_dim, dtype, **options)  # what is wrong is said before tracing

    def create() -> PagedCache:
        return PagedCache.create(num_layers, shards * num_pages, page_size, num_kv_heads, head_dim, dtype, **options)

    shapes = jax.eval_shape(create)
    return jax.jit(create, out_shardings=shardings(mesh, shapes, cache_specs(shapes, heads=heads, rows=rows)))()


def create_table(
    mesh: Mesh, num_pages: int, page_size: int, max_rows: int, max_blocks_per_row: int, *, rows: str | None = None
) -> BlockTable:
    """`BlockTable.create` on a mesh: one for all devices, or with `rows` one of these sizes for each shard of rows.

    Raises:
        ValueError: the mesh has no such axis, or as `BlockTable.create`.
    """
    _require_axes(mesh, rows)
    table = BlockTable.create(num_pages, page_size, max_rows, max_blocks_per_row)
    if rows is not None:
        table = jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf), (mesh.shape[rows], *leaf.shape)), table)
    return place(mesh, table, table_specs(table, rows=rows))


def shardings(mesh: Mesh, arrays: Any, specs: Any) -> Any:
    """The NamedSharding of each array, from its PartitionSpec.

    Args:
        arrays: a pytree of arrays or their shapes.
        specs: of the same structure.

    Raises:
        ValueError: the mesh lacks an axis that a spec names, or an axis of the mesh does not divide what it splits.
    """

    def sharding(path, array, spec):
        for axis, (size, name) in enumerate(zip(array.shape, spec, strict=False)):
            _require_axes(mesh, name)
            if name is not None and size % mesh.shape[name]:
                raise ValueError(
                    f"{_name(path)}: expected axis {axis} to divide over the {mesh.shape[name]} devices of mesh axis "
                    f"{name!r}, got shape {tuple(array.shape)}"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, arrays, specs)


def place(mesh: Mesh, arrays: Any, specs: Any) -> Any:
    """The arrays on the mesh, split as the specs say; in a run of several processes each takes its share of its own.

    Raises:
        ValueError: as `shardings`.
    """

    def put(array, sharding):
        if isinstance(array, jax.Array) and (sharding.is_fully_addressable or not array.is_fully_addressable):
            return jax.device_put(array, sharding)
        values = np.asarray(array)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(put, arrays, shardings(mesh, arrays, specs))


def check_placed(mesh: Mesh, arrays: Any, specs: Any) -> None:
    """Checks on the host that the arrays are split as the specs say; JAX would move them, a pool too, at every call.

    Raises:
        ValueError: names the first array that is not; or as `shardings`.
    """

    def check(path, array, sharding):
        got = array.sharding
        if not got.is_equivalent_to(sharding, array.ndim):
            raise ValueError(
                f"{_name(path)}: expected {sharding.spec} on mesh {dict(mesh.shape)}, got {getattr(got, 'spec', got)}"
            )

    jax.tree_util.tree_map_with_path(check, arrays, shardings(mesh, arrays, specs))


def on_mesh(
    function: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any, rows: str | None = None
) -> Callable[..., Any]:
    """A function as it is written for one device, run by every device of the mesh on its share of the arguments.

    It is `jax.shard_map` of the function, so that a kernel sees one device's arrays and no collective comes about that
    the function does not name. Give it to `jax.jit`, and donate the cache there.

    Args:
        function: of positional arguments. With `rows` each shard's tables (also within steps and results) reach and
            leave it without their stacked axis, and a scalar that it returns is stacked like them.
        in_specs, out_specs: as of `jax.shard_map`: PartitionSpecs, of whole subtrees too.

    Raises:
        ValueError: the mesh lacks an axis that is named; or, when called, as `table_specs`.
    """
    names = {name for spec in jax.tree.leaves((in_specs, out_specs), is_leaf=_is_spec) for name in spec or ()}
    _require_axes(mesh, rows, *sorted(names - {None}, key=str))

    def of_shard(*arguments):
        return _stacked(function(*_unstacked(arguments))) if rows is not None else function(*arguments)

    # The walk over pages has loops whose carries vary over the mesh from their second turn on only: no check of that.
    mapped = jax.shard_map(of_shard, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def call(*arguments):
        for table in jax.tree.leaves(arguments, is_leaf=_is_table):
            if _is_table(table):
                _require_table(table, rows)
        return mapped(*arguments)

    return call


@functools.partial(jax.jit, static_argnames=("mesh", "rows"))
def take_shard(mesh: Mesh, tables: BlockTable, shard: int | Int32[Array, ""], *, rows: str) -> BlockTable:
    """The table of one shard of rows, for what works on one table (a `PrefixCache`, `check`); the same on all devices.

    Raises:
        ValueError: the mesh has no such axis, or the tables are not stacked.
    """

    def take(table, shard):
        is_mine = lax.axis_index(rows) == shard
        return jax.tree.map(lambda leaf: lax.psum(jnp.where(is_mine, leaf[0], 0), rows), table)

    specs = (table_specs(tables, rows=rows), PartitionSpec())
    _require_axes(mesh, rows)
    return jax.shard_map(take, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(
        tables, jnp.int32(shard)
    )


@functools.partial(jax.jit, static_argnames=("mesh", "rows"))
def put_shard(
    mesh: Mesh, tables: BlockTable, shard: int | Int32[Array, ""], table: BlockTable, *, rows: str
) -> BlockTable:
    """The tables with that of one shard of rows replaced.

    Raises:
        ValueError: as `take_shard`.
    """

    def put(tables, shard, table):
        is_mine = lax.axis_index(rows) == shard
        return jax.tree.map(lambda old, new: jnp.where(is_mine, new[None], old), tables, table)

    specs = table_specs(tables, rows=rows)
    _require_axes(mesh, rows)
    return jax.shard_map(
        put, mesh=mesh, in_specs=(specs, PartitionSpec(), PartitionSpec()), out_specs=specs, check_vma=False
    )(tables, jnp.int32(shard), table)


def _unstacked(tree: Any) -> Any:
    """Each table without its first axis, of which a shard has one entry."""
    return jax.tree.map(
        lambda node: jax.tree.map(lambda leaf: leaf[0], node) if _is_table(node) else node, tree, is_leaf=_is_table
    )


def _stacked(tree: Any) -> Any:
    def stack(node):
        is_one_of_a_shard = _is_table(node) or jnp.ndim(node) == 0
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], node) if is_one_of_a_shard else node

    return jax.tree.map(stack, tree, is_leaf=_is_table)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path).lstrip(".") or "array"


def _is_table(node: Any) -> bool:
    return isinstance(node, BlockTable)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _require_axes(mesh: Mesh, *names: str | None) -> None:
    for name in names:
        if name is not None and name not in mesh.axis_names:
            raise ValueError(f"mesh: expected an axis {name!r}, got axes {mesh.axis_names}")


def _require_table(table: BlockTable, rows: str | None) -> None:
    expected = 2 if rows is None else 3
    if len(table.pages.shape) != expected:
        kind = "one table, the same on every device" if rows is None else f"tables stacked by shards of {rows!r}"
        raise ValueError(
            f"table: expected {kind}, with pages of {expected} axes, got pages of shape {tuple(table.pages.shape)}"
        )
