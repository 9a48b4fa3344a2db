"""Slots → scatter → pages: the pool that holds every layer's K and V.

All layers share one stacked pool, so that `lax.scan` over layers can carry it and a kernel can reach any layer through
a traced index: slicing a layer out would copy the pool.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, Int32

from paged_jax.block_table import BlockTable, PageCopies, as_int32, require_int32_slots, require_positive

DTYPES = ("float32", "bfloat16", "float16")
_LAYOUTS_TO_COME = ("HND", "head_major", "vllm")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["k", "v", "k_scale", "v_scale"],
    meta_fields=["layout", "page_size"],
)
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """The pool of pages: L layers × P pages × C cells × K kv heads × head_dim.

    Donate it to the jitted step that writes it (`jax.jit(step, donate_argnums=...)`), and the write happens in place.
    """

    k: Float[Array, "L P C K H"]
    v: Float[Array, "L P C K Hv"]
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
            layout: order of the axes in memory; "NHD" is [L, P, C, K, H].

        Raises:
            ValueError: a size is not a positive int, or dtype or layout is unknown.
            NotImplementedError: a layout that is planned but not there yet.
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        require_positive(
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
        )
        dtype = _require_dtype(dtype)
        if layout in _LAYOUTS_TO_COME:
            raise NotImplementedError(f"layout: only 'NHD' is implemented, got {layout!r}")
        if layout != "NHD":
            raise ValueError(f"layout: expected 'NHD', got {layout!r}")
        require_int32_slots(num_pages, page_size)
        shape = (num_layers, num_pages, page_size, num_kv_heads)
        return PagedCache(
            k=jnp.zeros((*shape, head_dim), dtype),
            v=jnp.zeros((*shape, v_head_dim), dtype),
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
        """How many pages of a cache with these sizes fit in `num_bytes` bytes; 0 if not even one does.

        Raises:
            ValueError: `num_bytes` is negative, a size is not a positive int, or dtype is unknown.
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        require_positive(
            num_layers=num_layers,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
        )
        if num_bytes < 0:
            raise ValueError(f"num_bytes: expected at least 0, got {num_bytes}")
        cell_bytes = num_kv_heads * (head_dim + v_head_dim) * _require_dtype(dtype).itemsize
        return int(num_bytes // (num_layers * page_size * cell_bytes))

    @property
    def num_layers(self) -> int:
        """Layers in the pool, L."""
        return self.k.shape[0]

    @property
    def num_pages(self) -> int:
        """Pages in the pool, P."""
        return self.k.shape[1]

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
            ValueError: shapes do not fit the cache, a dtype is not floating (K, V) or integer (slots), or an int layer
                is outside [0, L).
        """
        num_kv_heads, head_dim, v_head_dim = *self.k.shape[3:], self.v.shape[4]
        validate_layout(self)
        k, v, slots = jnp.asarray(k), jnp.asarray(v), as_int32("slots", slots)
        if slots.ndim != 1:
            raise ValueError(f"slots: expected a 1-D array, got shape {slots.shape}")
        for name, array, dim in (("k", k, head_dim), ("v", v, v_head_dim)):
            expected = (slots.shape[0], num_kv_heads, dim)
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

        def scatter(pool, values):
            return pool.at[layer, page, cell].set(
                values.astype(pool.dtype), mode="drop", unique_indices=True, wrap_negative_indices=False
            )

        return dataclasses.replace(self, k=scatter(self.k, k), v=scatter(self.v, v))

    def read(
        self, layer: int | Int32[Array, ""], table: BlockTable
    ) -> tuple[Float[Array, "B MC K H"], Float[Array, "B MC K Hv"]]:
        """One layer's K and V as dense [B, M·C, ..] arrays in the cache's dtype; cells past a row's length are zero.

        Meant for tests and for a look inside: it copies B·M pages.

        Raises:
            ValueError: the table is for another pool, or an int layer is outside [0, L).
        """
        validate_table(self, table)
        layer = validate_layer(layer, self.num_layers)
        position = jnp.arange(table.max_blocks_per_row * self.page_size)
        is_live = position < table.lengths[:, None]

        def gather(pool):
            cells = pool.at[layer, table.pages].get(mode="fill", fill_value=0)  # [B, M, C, K, H]
            rows = cells.reshape(table.max_rows, position.size, *pool.shape[3:])
            return jnp.where(is_live[:, :, None, None], rows, 0)

        return gather(self.k), gather(self.v)

    def copy_pages(self, copies: PageCopies) -> PagedCache:
        """Copies whole pages, in every layer; padding entries do nothing.

        Costs by the copies that are real: nothing when there are none. In place where the cache is donated.
        """
        is_real = (copies.src < self.num_pages) & (copies.dst < self.num_pages)
        real_first = jnp.argsort(~is_real, stable=True)
        src, dst = copies.src[real_first], copies.dst[real_first]

        def copy_page(i, pools):
            return [
                lax.dynamic_update_slice_in_dim(pool, lax.dynamic_slice_in_dim(pool, src[i], 1, axis=1), dst[i], axis=1)
                for pool in pools
            ]

        k, v = lax.fori_loop(0, jnp.sum(is_real, dtype=jnp.int32), copy_page, [self.k, self.v])
        return dataclasses.replace(self, k=k, v=v)


def validate_layer(layer: ArrayLike, num_layers: int) -> Int32[Array, ""]:
    """The layer as an int32 scalar; an int outside [0, num_layers) is a ValueError (a traced one cannot be seen)."""
    if isinstance(layer, (int, np.integer)) and not 0 <= layer < num_layers:
        raise ValueError(f"layer: expected an int in [0, {num_layers}), got {layer}")
    layer = jnp.asarray(layer)
    if layer.shape != () or not jnp.issubdtype(layer.dtype, jnp.integer):
        raise ValueError(f"layer: expected an int or an integer scalar, got {layer.dtype}{list(layer.shape)}")
    return layer.astype(jnp.int32)


def validate_layout(cache: PagedCache) -> None:
    """Raises NotImplementedError for a cache that is not laid out, or not held, as this version can read."""
    if cache.layout != "NHD":
        raise NotImplementedError(f"cache: only layout 'NHD' is implemented, got {cache.layout!r}")
    if cache.k_scale is not None or cache.v_scale is not None or cache.k.dtype.name not in DTYPES:
        raise NotImplementedError(f"cache: expected dtype {', '.join(DTYPES)} without scales, got {cache.k.dtype}")


def validate_table(cache: PagedCache, table: BlockTable) -> None:
    """Raises ValueError unless the table's pages are this cache's, NotImplementedError as `validate_layout` does."""
    validate_layout(cache)
    if table.lengths.shape != (table.max_rows,):
        raise ValueError(f"table: expected lengths of shape ({table.max_rows},), got {table.lengths.shape}")
    if (table.num_pages, table.page_size) != (cache.num_pages, cache.page_size):
        raise ValueError(
            f"table: expected one for this cache's {cache.num_pages} pages of {cache.page_size} cells, "
            f"got {table.num_pages} pages of {table.page_size}"
        )


def _require_dtype(dtype) -> np.dtype:
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype.name}")
    return dtype
