"""PartitionSpecs of caches, tables and steps; what the wrong ones are told. Runs on many devices: `examples/`."""

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from tables import release

from paged_jax import BlockTable, PagedCache, paged_attention, sharding


def new_cache(layout="NHD", dtype=jnp.float32):
    return PagedCache.create(2, 6, 4, 8, 16, dtype, layout=layout)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
@pytest.mark.parametrize("layout", pools.LAYOUTS)
def test_a_shard_of_the_cache_has_its_heads_and_pages(layout, dtype):
    """Sizes are all different, so the axes are known by them."""
    cache, mesh = new_cache(layout, dtype), AbstractMesh((2, 3), ("tp", "dp"))
    specs = sharding.cache_specs(cache, heads="tp", rows="dp")
    split = sharding.shardings(mesh, cache, specs)
    expected = PagedCache.create(2, 2, 4, 4, 16, dtype, layout=layout)
    shapes = jax.tree.map(lambda array, sharding: sharding.shard_shape(array.shape), cache, split)
    assert shapes == jax.tree.map(lambda array: array.shape, expected)


def test_without_axes_everything_is_whole():
    cache, table = new_cache(), BlockTable.create(6, 4, 2, 3)
    _, step, _ = jax.eval_shape(BlockTable.step, table, np.ones(2, np.int32))
    for specs in (sharding.cache_specs(cache), sharding.table_specs(table), sharding.step_specs(step)):
        for spec in jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, PartitionSpec)):
            assert set(spec) <= {None}


@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_one_device_is_a_mesh_too(kind):
    mesh = sharding.make_mesh(dp=1, tp=1) if kind == "automatic" else jax.make_mesh((1, 1), ("dp", "tp"))
    cache = sharding.create_cache(mesh, 2, 6, 4, 8, 16, jnp.float32, heads="tp", rows="dp")
    tables = sharding.create_table(mesh, 6, 4, 2, 3, rows="dp")
    assert tables.pages.shape == (1, 2, 3)

    def write(cache, table, kv):
        table, step, ok = table.step(jnp.ones(2, jnp.int32))
        cache = cache.write(1, kv, kv, step.slots)
        return cache, table, step, ok, paged_attention(kv, cache, step.table, layer=1)

    specs = sharding.cache_specs(cache, heads="tp", rows="dp"), sharding.table_specs(tables, rows="dp")
    by_row, by_head = PartitionSpec("dp"), PartitionSpec("dp", "tp")
    run = sharding.on_mesh(
        write,
        mesh,
        in_specs=(*specs, by_head),
        out_specs=(*specs, by_row, by_row, by_head),
        rows="dp",
    )
    kv = sharding.place(mesh, np.ones((2, 8, 16), np.float32), by_head)
    cache, tables, step, ok, out = jax.jit(run, donate_argnums=0)(cache, tables, kv)
    np.testing.assert_allclose(out, kv, rtol=1e-6)
    np.testing.assert_array_equal(ok, [True])
    sharding.check_placed(mesh, (cache, tables), specs)
    sharding.check_placed(mesh, step, sharding.step_specs(step, rows="dp"))
    table = sharding.take_shard(mesh, tables, 0, rows="dp")
    table.check()
    np.testing.assert_array_equal(table.lengths, [1, 1])
    freed = sharding.put_shard(mesh, tables, 0, release(table, np.array([True, False])), rows="dp")
    np.testing.assert_array_equal(freed.lengths, [[0, 1]])
    assert float(cache.k.sum()) == 2 * 8 * 16


# --- mistakes


def test_a_mesh_without_the_axis_is_named():
    mesh, cache, table = sharding.make_mesh(x=1), new_cache(), BlockTable.create(6, 4, 2, 3)
    calls = (
        lambda: sharding.shardings(mesh, cache, sharding.cache_specs(cache, heads="tp")),
        lambda: sharding.create_cache(mesh, 2, 6, 4, 8, 16, heads="tp"),
        lambda: sharding.create_cache(mesh, 2, 6, 4, 8, 16, rows="tp"),
        lambda: sharding.create_table(mesh, 6, 4, 2, 3, rows="tp"),
        lambda: sharding.on_mesh(len, mesh, in_specs=PartitionSpec("tp"), out_specs=PartitionSpec()),
        lambda: sharding.on_mesh(len, mesh, in_specs=PartitionSpec(), out_specs=[PartitionSpec(None, "tp")]),
        lambda: sharding.on_mesh(len, mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), rows="tp"),
        lambda: sharding.place(mesh, table, sharding.table_specs(table)) and sharding.place(mesh, cache, split),
    )
    split = sharding.cache_specs(cache, heads="tp")
    for call in calls:
        with pytest.raises(ValueError, match=r"mesh: expected an axis 'tp', got axes \('x',\)"):
            call()


def test_heads_that_do_not_divide_are_named():
    cache = new_cache()
    with pytest.raises(
        ValueError, match=r"^k: expected axis 3 to divide over the 3 devices of mesh axis 'tp', got shape"
    ):
        sharding.shardings(AbstractMesh((3,), ("tp",)), cache, sharding.cache_specs(cache, heads="tp"))


def test_kv_heads_fewer_than_devices_are_not_replicated():
    with pytest.raises(
        ValueError,
        match=r"multiple of the 16 devices.*'tp', got 8; kv heads are not replicated: .*over 8 and rows over 2",
    ):
        sharding.create_cache(AbstractMesh((16,), ("tp",)), 2, 6, 4, 8, 16, heads="tp")


def test_a_table_of_another_split_is_refused():
    mesh, table = sharding.make_mesh(dp=1), BlockTable.create(6, 4, 2, 3)
    stacked = sharding.create_table(mesh, 6, 4, 2, 3, rows="dp")
    with pytest.raises(
        ValueError, match=r"table: expected tables stacked by shards of 'dp'.* got pages of shape \(2, 3\)"
    ):
        sharding.table_specs(table, rows="dp")
    with pytest.raises(ValueError, match=r"table: expected one table, the same on every device.*got.*\(1, 2, 3\)"):
        sharding.table_specs(stacked)
    run = sharding.on_mesh(lambda table: table, mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    with pytest.raises(ValueError, match=r"table: expected one table"):
        run(stacked)


def test_fewer_devices_than_the_mesh_asks_for():
    wanted = jax.device_count() + 1
    with pytest.raises(ValueError, match=rf"mesh: expected {2 * wanted} devices for rows 2 x heads {wanted}, got"):
        sharding.make_mesh(rows=2, heads=wanted)
    with pytest.raises(ValueError, match="heads: expected a positive int, got 0"):
        sharding.make_mesh(heads=0)
