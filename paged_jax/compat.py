"""JAX's deprecated GPU op, `jax.experimental.pallas.ops.gpu.paged_attention`, with its signature and meaning."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from paged_jax import attention
from paged_jax.block_table import BlockTable
from paged_jax.cache import PagedCache
from pallas_kernels.integers import as_int32
from pallas_kernels.quantisation import is_quantised

_HIGHEST_MASK_VALUE = -1e4  # below it a masked key has no weight beside any usual logit


@functools.partial(
    jax.jit,
    static_argnames=(
        "block_h",
        "pages_per_compute_block",
        "k_splits",
        "num_warps",
        "num_stages",
        "interpret",
        "debug",
        "mask_value",
        "attn_logits_soft_cap",
    ),
)
def paged_attention(
    q: Float[Array, "B N H"],
    k_pages: Shaped[Array, "K P C H"],
    v_pages: Shaped[Array, "K P C Hv"],
    block_tables: Int[Array, "B M"],
    lengths: Int[Array, " B"] | None,
    k_scales_pages: Float[Array, "K P C"] | None = None,
    v_scales_pages: Float[Array, "K P C"] | None = None,
    *,
    block_h: int = 16,  # noqa: ARG001
    pages_per_compute_block: int = 8,  # noqa: ARG001
    k_splits: int = 16,  # noqa: ARG001
    num_warps: int = 8,  # noqa: ARG001
    num_stages: int = 2,  # noqa: ARG001
    interpret: bool = False,
    debug: bool = False,  # noqa: ARG001
    mask_value: float = -0.7 * float(np.finfo(np.float32).max),
    attn_logits_soft_cap: float | None = None,
) -> Float[Array, "B N Hv"]:
    """Attention of one query token per row over the row's pages; q is not scaled.

    To move on from it: `paged_jax.paged_attention` on a `PagedCache` of layout "head_major", with `scale=1.0`.

    Beyond what JAX's op does, it runs on every platform and takes any group, head_dim, page size and table width that
    `paged_jax.paged_attention` takes. A row of length 0 gives zeros.

    Args:
        q: queries, scaled by the caller.
        k_pages, v_pages: the pools of one layer.
        block_tables: page of each block of each row; entries past a row's last block may be anything.
        lengths: keys of each row; None: every row fills its blocks.
        k_scales_pages, v_scales_pages: one scale per token and head, of pools in any dtype; a pool of one byte per
            element without them has scale 1. Each call turns the scales to [P, C, K]: that costs by the pool's
            size, though they are small beside it. A floating pool with scales is multiplied out as a whole.
        block_h, pages_per_compute_block, k_splits, num_warps, num_stages, debug: how JAX's kernel was to cut its work;
            hints that change nothing, since these kernels choose by shapes, device and lengths.
        interpret: run the Triton kernel in interpret mode, on any host.
        mask_value: keys past a row's length are left out altogether, which is what every value up to −1e4 stands for.
        attn_logits_soft_cap: scores become `cap * tanh(score / cap)`.

    Returns:
        The output in q's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit.
        NotImplementedError: a `mask_value` that would give weight to keys past a row's length.
    """
    if not mask_value <= _HIGHEST_MASK_VALUE:
        raise NotImplementedError(
            f"mask_value: keys past a row's length are left out, expected at most {_HIGHEST_MASK_VALUE}, "
            f"got {mask_value}"
        )
    if q.ndim != 3 or k_pages.ndim != 4 or v_pages.ndim != 4 or k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(
            f"paged_attention: expected q [B, N, H], k_pages [K, P, C, H] and v_pages [K, P, C, Hv], "
            f"got shapes {q.shape}, {k_pages.shape} and {v_pages.shape}"
        )
    block_tables = as_int32("block_tables", block_tables)
    if block_tables.ndim != 2 or len(block_tables) != len(q):
        raise ValueError(f"block_tables: expected one row for each of {len(q)} queries, got shape {block_tables.shape}")
    num_pages, page_size = k_pages.shape[1:3]
    rows, width = block_tables.shape
    lengths = jnp.full(rows, width * page_size) if lengths is None else lengths

    k, k_scale = _one_layer("k_scales_pages", k_pages, k_scales_pages)
    v, v_scale = _one_layer("v_scales_pages", v_pages, v_scales_pages)
    cache = PagedCache(
        k=k,
        v=v,
        k_scale=k_scale,
        v_scale=v_scale,
        layout="head_major",
        page_size=page_size,
    )
    table = dataclasses.replace(  # attention reads nothing else of it
        BlockTable.create(num_pages, page_size, rows, width),
        pages=block_tables,
        lengths=as_int32("lengths", lengths),
    )
    return attention.paged_attention(
        q,
        cache,
        table,
        scale=1.0,
        soft_cap=attn_logits_soft_cap,
        implementation="triton_interpret" if interpret else None,
    )


def _one_layer(name: str, pages: Shaped[Array, "K P C H"], scales: Float[Array, "K P C"] | None):
    """The pages as a cache of one layer, and their scales as [1, P, C, K] if they are quantised."""
    if scales is not None and scales.shape != pages.shape[:3]:
        raise ValueError(f"{name}: expected one scale per token and head, {pages.shape[:3]}, got {scales.shape}")
    if is_quantised(pages.dtype):
        scales = jnp.ones(pages.shape[:3]) if scales is None else scales
        return pages[None], jnp.moveaxis(scales.astype(jnp.float32), 0, -1)[None]
    if scales is not None:
        pages = pages.astype(jnp.float32) * scales.astype(jnp.float32)[..., None]
    return pages[None], None
