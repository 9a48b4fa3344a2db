"""What a cache can be: its pools as their layout says, its table as its pools are, and on the host a write's slots."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Int

from paged_jax.integers import require_positive
from pallas_kernels import arguments
from pallas_kernels.arguments import DTYPES
from pallas_kernels.layouts import pool_axes

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
    names = ("k", "v", "k_scale", "v_scale")
    pools = (getattr(cache, name) for name in names)
    arguments.validate_pools(*pools, layout=cache.layout, owner="cache", names=names)
    cells = cache.k.shape[pool_axes(cache.layout)[0].index("C")]
    if cells != cache.page_size:
        raise ValueError(f"cache: expected pages of {cache.page_size} cells, got k {cache.k.shape} with {cells}")


def validate_table(cache: PagedCache, table: BlockTable) -> None:
    """Raises ValueError unless the table's pages are this cache's, and what `validate_pools` raises."""
    validate_pools(cache)
    pages, lengths = table.pages, table.lengths
    if pages.ndim != 2 or pages.shape[1] == 0 or lengths.shape != pages.shape[:1]:
        raise ValueError(
            f"table: expected pages [B, M] of at least one block and lengths [B], got shapes {pages.shape} and "
            f"{lengths.shape}"
        )
    if {pages.dtype, lengths.dtype} != {jnp.dtype("int32")}:
        raise ValueError(f"table: expected int32 pages and lengths, got {pages.dtype} and {lengths.dtype}")
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
