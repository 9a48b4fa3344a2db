"""What a cache can be: its pools as their layout says, its table as its pools are, and on the host a write's slots."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Int

from paged_jax import layouts
from paged_jax.integers import require_positive
from pallas_kernels.arguments import DTYPES
from pallas_kernels.quantisation import is_quantised

if TYPE_CHECKING:
    from paged_jax.block_table import BlockTable
    from paged_jax.cache import PagedCache


def validate_sizes(dtype, head_dim: int, v_head_dim: int | None, **sizes: int) -> tuple[np.dtype, int]:
    """The dtype as such and V's head_dim; ValueError for an unknown dtype and a size that is no positive int."""
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    require_positive(**sizes, head_dim=head_dim, v_head_dim=v_head_dim)
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype.name}")
    return dtype, v_head_dim


def validate_device(dtype: np.dtype) -> None:
    """Raises NotImplementedError, with the dtypes that can be, for one that the default device cannot do."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
    if device is None:
        device = jax.local_devices()[0]
    elif isinstance(device, str):  # a platform
        device = jax.local_devices(backend=device)[0]
    able = device_dtypes(device)
    if dtype.name not in able:
        raise NotImplementedError(
            f"dtype: expected one that a cache on {device.device_kind} can have, {', '.join(able)}, got {dtype.name}"
        )


def device_dtypes(device: Any) -> tuple[str, ...]:
    """The dtypes of a cache that a device can do: Triton converts float8_e4m3fn from compute capability 8.9 on."""
    capability = re.fullmatch(r"\d+\.\d+", str(getattr(device, "compute_capability", "")))  # AMD's are names
    is_older = capability is not None and float(capability[0]) < 8.9
    return tuple(name for name in DTYPES if not (is_older and name == "float8_e4m3fn"))


def validate_pools(cache: PagedCache) -> None:
    """Checks that the pools are as their layout says.

    Raises:
        ValueError: the layout or a dtype is unknown, the shapes of the pools contradict the layout, each other or the
            page size, or scales are missing, not as the pools want them, or there without need.
    """
    pools = {"k": cache.k, "v": cache.v}
    for (name, pool), axes in zip(pools.items(), layouts.pool_axes(cache.layout), strict=True):
        if pool.ndim != len(axes):
            raise ValueError(
                f"cache: expected {name} [{', '.join(axes)}] in layout {cache.layout!r}, got shape {pool.shape}"
            )
        if pool.dtype.name not in DTYPES:
            raise ValueError(f"cache: expected {name} of dtype {', '.join(DTYPES)}, got {pool.dtype}")
    sizes = layouts.pool_sizes(layouts.pool_axes(cache.layout)[0], cache.k.shape) | {"C": cache.page_size}
    expected = layouts.pool_shapes(cache.layout, cache.k.dtype, v_head_dim=cache.v_head_dim, **sizes)
    if (cache.k.shape, cache.v.shape) != expected:
        raise ValueError(
            f"cache: expected k {expected[0]} and v {expected[1]} in layout {cache.layout!r} with pages of "
            f"{cache.page_size} cells, got k {cache.k.shape} and v {cache.v.shape}"
        )
    shape = tuple(sizes[axis] for axis in layouts.SCALE_AXES)
    for (name, pool), scale in zip(pools.items(), (cache.k_scale, cache.v_scale), strict=True):
        got = None if scale is None else f"{scale.dtype}{list(scale.shape)}"
        expected = f"float32{list(shape)}" if is_quantised(pool.dtype) else None
        if got != expected:
            raise ValueError(f"cache: expected {name}_scale {expected} beside {name} of {pool.dtype}, got {got}")


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


def check_slots(cache: PagedCache, slots: Int[ArrayLike, " T"]) -> None:
    """See `PagedCache.check_slots`."""
    padding, slots = cache.num_pages * cache.page_size, np.asarray(slots)
    if slots.ndim != 1 or not np.issubdtype(slots.dtype, np.integer):
        raise ValueError(f"slots: expected a 1-D integer array, got {slots.dtype}{list(slots.shape)}")
    for token in np.flatnonzero((slots < 0) | (slots > padding)):
        raise ValueError(
            f"token {token}: expected a slot in [0, {padding}) or padding ({padding}), got slot {slots[token]} "
            f"(page {slots[token] // cache.page_size})"
        )
    first_token = {}
    for token in np.flatnonzero(slots < padding):
        slot = int(slots[token])
        if slot in first_token:
            raise ValueError(
                f"token {token}: expected a slot of its own, got slot {slot} (page {slot // cache.page_size}), "
                f"which is token {first_token[slot]}'s"
            )
        first_token[slot] = token
