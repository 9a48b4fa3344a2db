"""Dense attention of packed rows by cuDNN, with its log-sum-exp in float32, for which JAX has no public name."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

MAX_HEAD_DIM = 128  # of its flash attention, forward, on every GPU that has it
DTYPES = ("bfloat16", "float16")


@functools.cache
def is_there(rows: int) -> bool:
    """Whether this process has cuDNN, and GPUs on which its flash attention runs for so many rows."""
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    capabilities = [str(getattr(device, "compute_capability", "")) for device in gpus]
    least = 8 if rows == 1 else 9
    if not gpus or not all(re.fullmatch(r"\d+\.\d+", one) and float(one) >= least for one in capabilities):
        return False
    q = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    try:
        jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), q, q, q)
    except RuntimeError:  # JAX's word for a cuDNN that is missing or too old
        return False
    return True


def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    query_starts: Int32[Array, " B+1"],
    query_lengths: Int32[Array, " B"],
    key_starts: Int32[Array, " B+1"],
    key_lengths: Int32[Array, " B"],
    *,
    scale: float,
    is_causal: bool,
    return_lse: bool,
) -> Any:  # out [T, N, H], or (out, lse float32[B, T, N])
    """Each row's queries over its own keys; a causal mask begins at the first query and the first key.

    Returns:
        The output, where tokens of no row hold anything; with `return_lse` also the log-sum-exp by row and token within
        the row.
    """
    # `jax.nn.dot_product_attention` would do for one row, but rounds the log-sum-exp to q's dtype, which parts of keys
    # cannot be merged by, and takes no offsets.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    lengths: dict[str, Any] = {"q_seqlen": query_lengths, "kv_seqlen": key_lengths}
    if query_lengths.size == 1:  # without offsets it gives keys past the end weight zero, and 0 · NaN is NaN
        v = jnp.where(jnp.arange(v.shape[0])[:, None, None] < key_lengths[0], v, 0)
    else:
        lengths = {name: array[None] for name, array in lengths.items()}
        lengths |= {"q_offsets": query_starts[None], "kv_offsets": key_starts[None]}
    # JAX's own functions mix ranks and dtypes, which a caller may have forbidden.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result: Any = dot_product_attention(
            q[None],
            k[None],
            v[None],
            **lengths,
            scale=scale,
            mask_type=MaskType.PADDING_CAUSAL if is_causal else MaskType.PADDING,
            return_residual=return_lse,
        )
    return (result[0][0], jnp.swapaxes(result[1], 1, 2)) if return_lse else result[0]
