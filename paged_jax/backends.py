"""Platform and name → kernel: the only door to the kernels of `pallas_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax
from jaxtyping import Array

import pallas_kernels

IMPLEMENTATIONS = ("xla", "triton", "triton_interpret")

Outputs = tuple[Array, Array]  # attention output, log-sum-exp


def attend(
    arrays: dict[str, Any], *, reference: Callable[..., Outputs], implementation: str | None, **static
) -> Outputs:
    """Runs paged attention with the implementation named, or with the best one for the platform lowered for.

    Args:
        arrays: the operands by name; `query_lengths` is None in decode.
        reference: the plain-JAX implementation, "xla".
        implementation: None takes the Triton kernel on cuda and rocm if it can do what is asked, and the reference
            everywhere else. The choice follows the platform that the caller's function is lowered for, not the host;
            one platform per export.
        static: options that are not arrays.

    Raises:
        NotImplementedError: the implementation named cannot do what is asked.
    """

    def xla(arrays):
        return reference(**arrays, **static)

    def triton(arrays, interpret=False):
        decode_arrays = {name: array for name, array in arrays.items() if name != "query_lengths"}
        return pallas_kernels.paged_decode(**decode_arrays, **static, return_lse=True, interpret=interpret)

    obstacle = _obstacle(arrays)
    if implementation == "xla" or (implementation is None and obstacle):
        return xla(arrays)
    if obstacle:
        raise NotImplementedError(f"implementation {implementation!r}: {obstacle}; use 'xla' or None")
    if implementation == "triton_interpret":
        return triton(arrays, interpret=True)
    if implementation == "triton":
        return triton(arrays)  # Pallas raises when this is lowered for a platform that has no Triton
    return lax.platform_dependent(arrays, cuda=triton, rocm=triton, default=xla)


def _obstacle(arrays: dict[str, Any]) -> str | None:
    """What keeps the Triton kernel from this call; None if nothing does."""
    if arrays["query_lengths"] is not None:
        return "takes one query token per row, not query_lengths"
    for name, dim in (("head_dim", arrays["q"].shape[-1]), ("v_head_dim", arrays["v_pages"].shape[-1])):
        if not (16 <= dim <= 256 and dim % 8 == 0):
            return f"takes a {name} that is a multiple of 8 from 16 to 256, not {dim}"
    return None
