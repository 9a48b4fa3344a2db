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
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int, Int32, Shaped

from paged_jax import backends, cache_write_xla, layouts
from paged_jax.block_table import BlockTable, PageCopies
from paged_jax.cache_check import (
    check_slots,
    validate_device,
    validate_pools,
    validate_sizes,
    validate_table,
)
from paged_jax.integers import require_int32_slots
from pallas_kernels.arguments import validate_layer
from pallas_kernels.integers import as_int32
from pallas_kernels.quantisation import is_quantised


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["k", "v", "k_scale", "v_scale"],
    meta_fields=["layout", "page_size"],
)
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """The pool of pages: L layers × P pages × C cells × K kv heads × head_dim, in the order that `layout` says.

    Donate it to the jitted step that writes it (`jax.jit(step, donate_argnums=...)`), and the write happens in place.

    Of one byte per element (int8, float8_e4m3fn, float8_e5m2) it is quantised: each token's vector of a kv head is held
    as values times one float32 scale. A write quantises, attention and `read` multiply; the scales lie in pages of
    their own, which are copied, zeroed and freed with the page.
    """

    k: Shaped[Array, "..."]  # [L, P, C, K, H] in layout "NHD"
    v: Shaped[Array, "..."]  # the same with Hv
    k_scale: Float32[Array, "L P C K"] | None  # in every layout; None: K is not quantised
    v_scale: Float32[Array, "L P C K"] | None
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
            dtype: float32, bfloat16, float16, int8, float8_e4m3fn or float8_e5m2. (On a CPU, XLA widens a whole float8
                pool at every write and attention; an int8 pool it never copies.)
            v_head_dim: size of one V vector; None means `head_dim`.
            layout: order of the axes in memory: "NHD" [L, P, C, K, H], "HND" [L, P, K, C, H], "head_major"
                [L, K, P, C, H], or "vllm" with K [L, P, K, H / x, C, x], where x elements are 16 bytes, and
                V [L, P, K, H, C].

        Raises:
            ValueError: a size is not a positive int, dtype or layout is unknown, or "vllm" cannot pack such a head_dim.
            NotImplementedError: the default device cannot do this dtype; nothing has been allocated then.
        """
        dtype, v_head_dim = validate_sizes(
            dtype,
            head_dim,
            v_head_dim,
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
        )
        require_int32_slots(num_pages, page_size)
        validate_device(dtype)
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
        scales_shape = (num_layers, num_pages, page_size, num_kv_heads)
        k_scale, v_scale = (jnp.zeros(scales_shape, jnp.float32) if is_quantised(dtype) else None for _ in "kv")
        return PagedCache(
            k=jnp.zeros(k_shape, dtype),
            v=jnp.zeros(v_shape, dtype),
            k_scale=k_scale,
            v_scale=v_scale,
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

        The scales of a quantised cache count too.

        Raises:
            ValueError: `num_bytes` is negative, a size is not a positive int, or dtype is unknown.
        """
        dtype, v_head_dim = validate_sizes(
            dtype, head_dim, v_head_dim, num_layers=num_layers, page_size=page_size, num_kv_heads=num_kv_heads
        )
        if num_bytes < 0:
            raise ValueError(f"num_bytes: expected at least 0, got {num_bytes}")
        scale_bytes = 2 * jnp.dtype(jnp.float32).itemsize if is_quantised(dtype) else 0
        cell_bytes = num_kv_heads * ((head_dim + v_head_dim) * dtype.itemsize + scale_bytes)
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
    def page_axes(self) -> dict[str, int]:
        """The arrays that hold pages, by name, and which of their axes counts the pages."""
        k_axes, v_axes = layouts.pool_axes(self.layout)
        axes = {"k": k_axes, "v": v_axes, "k_scale": layouts.SCALE_AXES, "v_scale": layouts.SCALE_AXES}
        return {name: axes.index("P") for name, axes in axes.items() if getattr(self, name) is not None}

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
        """Stores the K and V of T tokens in their slots of one layer, cast to the cache's dtype or quantised.

        A quantised cache holds, for each token and kv head, the nearest values under the scale that brings the largest
        magnitude of the vector to the dtype's; K and V have scales of their own. A vector of zeros stays exactly zero,
        and one that holds NaN or an infinity reads as NaN throughout.

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
        arrays = {"k": k, "v": v, "slots": slots, "layer": validate_layer(layer, self.num_layers)}
        arrays |= {"k_pages": self.k, "v_pages": self.v, "k_scales": self.k_scale, "v_scales": self.v_scale}
        k, v, k_scale, v_scale = backends.write(arrays, reference=cache_write_xla.write, layout=self.layout)
        return dataclasses.replace(self, k=k, v=v, k_scale=k_scale, v_scale=v_scale)

    def read(
        self, layer: int | Int32[Array, ""], table: BlockTable
    ) -> tuple[Float[Array, "B MC K H"], Float[Array, "B MC K Hv"]]:
        """One layer's K and V as dense [B, M·C, ..] arrays; cells past a row's length are zero.

        In the cache's dtype, or in float32 from a quantised cache: values times scales.

        Meant for tests and for a look inside: it copies B·M pages.

        Raises:
            ValueError: the table is for another pool, the pools are not as their layout says, or an int layer is
                outside [0, L).
        """
        validate_table(self, table)
        layer = validate_layer(layer, self.num_layers)
        position = jnp.arange(table.max_blocks_per_row * self.page_size, dtype=jnp.int32)
        is_live = position[None, :] < table.lengths[:, None]

        def gather(pool, axes, scales):
            pages = layouts.take_cells(pool, axes, scales, layer=layer, page=table.pages)  # [B, M, C, K, H]
            rows = pages.reshape(table.max_rows, position.size, *pages.shape[3:])
            return jnp.where(is_live[:, :, None, None], rows, 0)

        k_axes, v_axes = layouts.pool_axes(self.layout)
        return gather(self.k, k_axes, self.k_scale), gather(self.v, v_axes, self.v_scale)

    def copy_pages(self, copies: PageCopies) -> PagedCache:
        """Copies whole pages, scales too, in every layer; entries with a page outside [0, P) do nothing.

        Costs by the copies that are real: nothing when there are none. In place where the cache is donated.

        Raises:
            ValueError: `copies` are not two integer arrays of one size, or the pools are not as their layout says.
        """
        validate_pools(self)
        src, dst = (as_int32(f"copies.{name}", getattr(copies, name)) for name in ("src", "dst"))
        if src.ndim != 1 or src.shape != dst.shape:
            raise ValueError(f"copies: expected src [n] and dst [n], got shapes {src.shape} and {dst.shape}")

        def copy(pool, axis, entry):
            page = lax.dynamic_slice_in_dim(pool, src[entry], 1, axis)
            return lax.dynamic_update_slice_in_dim(pool, page, dst[entry], axis)

        is_real = (src >= 0) & (src < self.num_pages) & (dst >= 0) & (dst < self.num_pages)
        return self._edit_pages(is_real, copy)

    def zero_pages(self, pages: Bool[Array, " P"]) -> PagedCache:
        """Fills the marked pages, scales too, with zeros, in every layer.

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
        check_slots(self, slots)

    def _edit_pages(self, is_edited: Bool[Array, " n"], edit: Callable) -> PagedCache:
        """Applies `edit(pool, page axis, entry)` for each entry that is marked, one after another."""
        marked_first = jnp.argsort(~is_edited, stable=True)

        def edit_one(i, pools):
            return {name: edit(pool, self.page_axes[name], marked_first[i]) for name, pool in pools.items()}

        pools = {name: getattr(self, name) for name in self.page_axes}
        return dataclasses.replace(self, **lax.fori_loop(0, jnp.sum(is_edited, dtype=jnp.int32), edit_one, pools))
