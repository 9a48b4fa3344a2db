"""Slots → scatter → pages: the pool that holds every layer's K and V.

All layers share one stacked pool, so that `lax.scan` over layers can carry it and a kernel can reach any layer through
a traced index: slicing a layer out would copy the pool.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Int32

from paged_jax import layouts
from paged_jax.block_table import BlockTable, PageCopies
from paged_jax.integers import as_int32, require_int32_slots, require_positive

DTYPES = ("float32", "bfloat16", "float16")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["k", "v", "k_scale", "v_scale"],
    meta_fields=["layout", "page_size"],
)
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """The pool of pages: L layers × P pages × C cells × K kv heads × head_dim, in the order that `layout` says.

    Donate it to the jitted step that writes it (`jax.jit(step, donate_argnums=...)`), and the write happens in place.
    """

    k: Float[Array, "..."]  # [L, P, C, K, H] in layout "NHD"
    v: Float[Array, "..."]  # the same with Hv
    k_scale: Float[Array, "L P C K"] | None  # None: K and V are not quantised
    v_scale: Float[Array, "L P C K"] | None
    layout: str
    page_size: int

    @staticmethod
    def create(
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype=jnp.bfloat16,
        *,
        v_head_dim: int | None = None,
        layout: str = "NHD",
    ) -> PagedCache:
        """A pool of zeros.

        Args:
            num_layers, num_pages, page_size, num_kv_heads: sizes of the pool; `num_pages` and `page_size` must be the
                block table's.
            head_dim: size of one K vector.
            dtype: float32, bfloat16 or float16.
            v_head_dim: size of one V vector; None means `head_dim`.
            layout: order of the axes in memory: "NHD" [L, P, C, K, H], "HND" [L, P, K, C, H], "head_major"
                [L, K, P, C, H], or "vllm" with K [L, P, K, H / x, C, x], where x elements are 16 bytes, and
                V [L, P, K, H, C].

        Raises:
            ValueError: a size is not a positive int, dtype or layout is unknown, or "vllm" cannot pack such a head_dim.
        """
        dtype, v_head_dim = _validate_sizes(
            dtype,
            head_dim,
            v_head_dim,
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
        )
        require_int32_slots(num_pages, page_size)
        k_shape, v_shape = layouts.pool_shapes(
            layout,
            dtype,
            L=num_layers,
            P=num_pages,
            C=page_size,
            K=num_kv_heads,
            H=head_dim,
            v_head_dim=v_head_dim,
        )
        return PagedCache(
            k=jnp.zeros(k_shape, dtype),
            v=jnp.zeros(v_shape, dtype),
            k_scale=None,
            v_scale=None,
            layout=layout,
            page_size=int(page_size),
        )

    @staticmethod
    def pages_for(
        num_bytes: int,
        num_layers: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype=jnp.bfloat16,
        *,
        v_head_dim: int | None = None,
    ) -> int:
        """How many pages of a cache with these sizes fit in `num_bytes` bytes, in any layout; 0 if not even one does.

        Raises:
            ValueError: `num_bytes` is negative, a size is not a positive int, or dtype is unknown.
        """
        dtype, v_head_dim = _validate_sizes(
            dtype, head_dim, v_head_dim, num_layers=num_layers, page_size=page_size, num_kv_heads=num_kv_heads
        )
        if num_bytes < 0:
            raise ValueError(f"num_bytes: expected at least 0, got {num_bytes}")
        cell_bytes = num_kv_heads * (head_dim + v_head_dim) * dtype.itemsize
        return int(num_bytes // (num_layers * page_size * cell_bytes))

    @property
    def num_layers(self) -> int:
        """Layers in the pool, L."""
        return self._sizes["L"]

    @property
    def num_pages(self) -> int:
        """Pages in the pool, P."""
        return self._sizes["P"]

    @property
    def num_kv_heads(self) -> int:
        """KV heads, K."""
        return self._sizes["K"]

    @property
    def head_dim(self) -> int:
        """Size of one K vector, H."""
        return self._sizes["H"]

    @property
    def v_head_dim(self) -> int:
        """Size of one V vector, Hv."""
        return layouts.pool_sizes(layouts.pool_axes(self.layout)[1], self.v.shape)["H"]

    @property
    def _sizes(self) -> layouts.Sizes:
        return layouts.pool_sizes(layouts.pool_axes(self.layout)[0], self.k.shape)

    def write(
        self,
        layer: int | Int32[Array, ""],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K Hv"],
        slots: Int[Array, " T"],
    ) -> PagedCache:
        """Stores the K and V of T tokens in their slots of one layer, cast to the cache's dtype.

        Slots outside [0, P·C), padding among them, write nowhere. When two tokens have the same slot it is unspecified
        which of them stays. In place where the cache is donated; O(T) whatever the pool's size.

        Args:
            layer: int or int32 scalar, traced or not.

        Raises:
            ValueError: shapes do not fit the cache, a dtype is not floating (K, V) or integer (slots), the pools are
                not as their layout says, or an int layer is outside [0, L).
        """
        validate_pools(self)
        k, v, slots = jnp.asarray(k), jnp.asarray(v), as_int32("slots", slots)
        if slots.ndim != 1:
            raise ValueError(f"slots: expected a 1-D array, got shape {slots.shape}")
        for name, array, dim in (("k", k, self.head_dim), ("v", v, self.v_head_dim)):
            expected = (slots.shape[0], self.num_kv_heads, dim)
            if array.shape != expected:
                raise ValueError(f"{name}: expected shape {expected} (tokens, kv heads, dim), got {array.shape}")
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise ValueError(f"{name}: expected a floating dtype, got {array.dtype}")
        layer = validate_layer(layer, self.num_layers)

        # Slots that write nowhere become distinct pages past the end, so that all indices are unique: XLA then scatters
        # without atomics.
        page_size = jnp.int32(self.page_size)
        token = jnp.arange(slots.shape[0], dtype=jnp.int32)
        is_live = (slots >= 0) & (slots < self.num_pages * self.page_size)
        page = jnp.where(is_live, lax.div(slots, page_size), self.num_pages + token)
        cell = jnp.where(is_live, lax.rem(slots, page_size), 0)

        k_axes, v_axes = layouts.pool_axes(self.layout)
        put = functools.partial(layouts.put_tokens, layer=layer, page=page, cell=cell)
        return dataclasses.replace(self, k=put(self.k, k_axes, k), v=put(self.v, v_axes, v))

    def read(
        self, layer: int | Int32[Array, ""], table: BlockTable
    ) -> tuple[Float[Array, "B MC K H"], Float[Array, "B MC K Hv"]]:
        """One layer's K and V as dense [B, M·C, ..] arrays in the cache's dtype; cells past a row's length are zero.

        Meant for tests and for a look inside: it copies B·M pages.

        Raises:
            ValueError: the table is for another pool, the pools are not as their layout says, or an int layer is
                outside [0, L).
        """
        validate_table(self, table)
        layer = validate_layer(layer, self.num_layers)
        position = jnp.arange(table.max_blocks_per_row * self.page_size, dtype=jnp.int32)
        is_live = position[None, :] < table.lengths[:, None]

        def gather(pool, axes):
            pages = layouts.take_pages(pool, axes, layer=layer, page=table.pages)  # [B, M, C, K, H]
            rows = pages.reshape(table.max_rows, position.size, *pages.shape[3:])
            return jnp.where(is_live[:, :, None, None], rows, 0)

        k_axes, v_axes = layouts.pool_axes(self.layout)
        return gather(self.k, k_axes), gather(self.v, v_axes)

    def copy_pages(self, copies: PageCopies) -> PagedCache:
        """Copies whole pages, in every layer; padding entries do nothing.

        Costs by the copies that are real: nothing when there are none. In place where the cache is donated.

        Raises:
            ValueError: the pools are not as their layout says.
        """
        validate_pools(self)

        def copy(pool, axis, entry):
            page = lax.dynamic_slice_in_dim(pool, copies.src[entry], 1, axis)
            return lax.dynamic_update_slice_in_dim(pool, page, copies.dst[entry], axis)

        is_real = (copies.src < self.num_pages) & (copies.dst < self.num_pages)
        return self._edit_pages(is_real, copy)

    def zero_pages(self, pages: Bool[Array, " P"]) -> PagedCache:
        """Fills the marked pages with zeros, in every layer.

        Hygiene, for a pool whose dead cells must not keep what they held: attention never reads them. Of the pages that
        a step took, `cache.zero_pages(table.taken_since(before))`. Costs by the pages that are marked: nothing when
        there are none. In place where the cache is donated.

        Raises:
            ValueError: `pages` is not a bool array with one entry per page, or the pools are not as their layout says.
        """
        validate_pools(self)
        pages = jnp.asarray(pages)
        if pages.shape != (self.num_pages,) or pages.dtype != jnp.bool_:
            raise ValueError(f"pages: expected bool[{self.num_pages}], got {pages.dtype}{list(pages.shape)}")

        def zero(pool, axis, page):
            nothing = jnp.zeros((*pool.shape[:axis], 1, *pool.shape[axis + 1 :]), pool.dtype)
            return lax.dynamic_update_slice_in_dim(pool, nothing, page, axis)

        return self._edit_pages(pages, zero)

    def check_slots(self, slots: Int[ArrayLike, " T"]) -> None:
        """Checks the slots of one write on the host, for concrete arrays: what `write` would drop or leave unspecified.

        Raises:
            ValueError: names the first token whose slot is outside the pool and no padding, or is an earlier token's
                too; or the slots are no 1-D integer array.
        """
        padding, slots = self.num_pages * self.page_size, np.asarray(slots)
        if slots.ndim != 1 or not np.issubdtype(slots.dtype, np.integer):
            raise ValueError(f"slots: expected a 1-D integer array, got {slots.dtype}{list(slots.shape)}")
        for token in np.flatnonzero((slots < 0) | (slots > padding)):
            raise ValueError(
                f"token {token}: expected a slot in [0, {padding}) or padding ({padding}), got slot {slots[token]} "
                f"(page {slots[token] // self.page_size})"
            )
        first_token = {}
        for token in np.flatnonzero(slots < padding):
            slot = int(slots[token])
            if slot in first_token:
                raise ValueError(
                    f"token {token}: expected a slot of its own, got slot {slot} (page {slot // self.page_size}), "
                    f"which is token {first_token[slot]}'s"
                )
            first_token[slot] = token

    def _edit_pages(self, is_edited: Bool[Array, " n"], edit: Callable) -> PagedCache:
        """Applies `edit(pool, page axis, entry)` for each entry that is marked, one after another."""
        marked_first = jnp.argsort(~is_edited, stable=True)
        page_axes = [axes.index("P") for axes in layouts.pool_axes(self.layout)]

        def edit_one(i, pools):
            return [edit(pool, axis, marked_first[i]) for pool, axis in zip(pools, page_axes, strict=True)]

        k, v = lax.fori_loop(0, jnp.sum(is_edited, dtype=jnp.int32), edit_one, [self.k, self.v])
        return dataclasses.replace(self, k=k, v=v)


def validate_layer(layer: ArrayLike, num_layers: int) -> Int32[Array, ""]:
    """The layer as an int32 scalar; an int outside [0, num_layers) is a ValueError (a traced one cannot be seen)."""
    if isinstance(layer, (int, np.integer)) and not 0 <= layer < num_layers:
        raise ValueError(f"layer: expected an int in [0, {num_layers}), got {layer}")
    layer = jnp.asarray(layer)
    if layer.shape != () or not jnp.issubdtype(layer.dtype, jnp.integer):
        raise ValueError(f"layer: expected an int or an integer scalar, got {layer.dtype}{list(layer.shape)}")
    return layer.astype(jnp.int32)


def validate_pools(cache: PagedCache) -> None:
    """Checks that the pools are as their layout says.

    Raises:
        ValueError: the layout is unknown, or the shapes of the pools contradict it, each other or the page size.
        NotImplementedError: the cache is of a dtype that this version cannot read.
    """
    pools = {"k": cache.k, "v": cache.v}
    for (name, pool), axes in zip(pools.items(), layouts.pool_axes(cache.layout), strict=True):
        if pool.ndim != len(axes):
            raise ValueError(
                f"cache: expected {name} [{', '.join(axes)}] in layout {cache.layout!r}, got shape {pool.shape}"
            )
    sizes = cache._sizes | {"C": cache.page_size}
    expected = layouts.pool_shapes(cache.layout, cache.k.dtype, v_head_dim=cache.v_head_dim, **sizes)
    if (cache.k.shape, cache.v.shape) != expected:
        raise ValueError(
            f"cache: expected k {expected[0]} and v {expected[1]} in layout {cache.layout!r} with pages of "
            f"{cache.page_size} cells, got k {cache.k.shape} and v {cache.v.shape}"
        )
    scales = cache.k_scale, cache.v_scale
    if scales != (None, None) or any(pool.dtype.name not in DTYPES for pool in pools.values()):
        raise NotImplementedError(
            f"cache: expected dtype {', '.join(DTYPES)} without scales, got {cache.k.dtype} and {cache.v.dtype} with "
            f"{sum(scale is not None for scale in scales)} arrays of scales"
        )


def validate_table(cache: PagedCache, table: BlockTable) -> None:
    """Raises ValueError unless the table's pages are this cache's, and what `validate_pools` raises."""
    validate_pools(cache)
    pages, lengths = table.pages, table.lengths
    if pages.ndim != 2 or lengths.shape != pages.shape[:1]:
        raise ValueError(f"table: expected pages [B, M] and lengths [B], got shapes {pages.shape} and {lengths.shape}")
    if not all(jnp.issubdtype(array.dtype, jnp.integer) for array in (pages, lengths)):
        raise ValueError(f"table: expected integer pages and lengths, got {pages.dtype} and {lengths.dtype}")
    if (table.num_pages, table.page_size) != (cache.num_pages, cache.page_size):
        raise ValueError(
            f"table: expected one for this cache's {cache.num_pages} pages of {cache.page_size} cells, "
            f"got {table.num_pages} pages of {table.page_size}"
        )


def _validate_sizes(dtype, head_dim: int, v_head_dim: int | None, **sizes: int) -> tuple[np.dtype, int]:
    """The dtype as such and V's head_dim; ValueError for an unknown dtype and a size that is no positive int."""
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    require_positive(**sizes, head_dim=head_dim, v_head_dim=v_head_dim)
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype.name}")
    return dtype, v_head_dim
