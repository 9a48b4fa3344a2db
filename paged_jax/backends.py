"""Platform and name → kernel: the only door to the kernels of `pallas_kernels`, for attention and for writes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Array

import pallas_kernels
from paged_jax import platform_choice
from pallas_kernels import pairs
from pallas_kernels.arguments import head_dim_obstacle
from pallas_kernels.layouts import LAYOUTS, offset_obstacle, pool_sizes

_MANY_TOKENS = 512  # of a write, from which on one launch is faster than XLA's two

IMPLEMENTATIONS = ("xla", "triton", "triton_interpret")

Outputs = tuple[Array, Array]  # attention output, log-sum-exp
Pools = tuple[Array, Array, Array | None, Array | None]  # K, V and their scales


def validate_implementation(name: str | None) -> None:
    """Raises ValueError for a name that no implementation has."""
    if name is not None and name not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"implementation: expected None or one of {known}, got {name!r}")


def attend(
    arrays: dict[str, Any], *, reference: Callable[..., Outputs], implementation: str | None, **static
) -> Outputs:
    """Runs paged attention with the implementation named, or with the best one for the platform lowered for.

    Args:
        arrays: the operands by name; `query_lengths` is None in decode.
        reference: the plain-JAX implementation, "xla".
        implementation: None takes the Triton kernel on cuda and rocm if it can do what is asked, and the reference
            everywhere else. The choice follows the platforms that the caller's function is lowered for.
        static: options that are not arrays.

    Raises:
        NotImplementedError: the implementation named cannot do what is asked; or, once it is lowered, cannot run on
            the platform that it is lowered for.
    """

    def xla(arrays):
        return reference(**arrays, **static)

    def triton(arrays, **where):
        arguments = arrays | static | where
        if arguments["query_lengths"] is None:
            del arguments["query_lengths"]
            return pallas_kernels.paged_decode(**arguments, return_lse=True)
        return pallas_kernels.paged_prefill(**arguments, return_lse=True)

    return _run(
        arrays, xla, triton, implementation, is_xla_better=not _is_able(arrays, static["layout"], implementation)
    )


def attend_cascade(
    arrays: dict[str, Any], *, reference: Callable[..., Outputs], implementation: str | None, **static
) -> Outputs:
    """Runs cascade attention, as `attend` does; of the operands `num_shared` takes the place of `query_lengths`."""

    def xla(arrays):
        return reference(**arrays, **static)

    def triton(arrays, **where):
        return pallas_kernels.paged_cascade(**arrays, **static, **where, return_lse=True)

    return _run(
        arrays, xla, triton, implementation, is_xla_better=not _is_able(arrays, static["layout"], implementation)
    )


def write(
    arrays: dict[str, Any], *, reference: Callable[..., Pools], layout: str, implementation: str | None = None
) -> Pools:
    """Writes K and V of a step's tokens to their slots of one layer, with the implementation named or chosen.

    The rule of choice, from static shapes: on cuda and rocm the kernel for a quantised cache, and for 512 tokens or
    more of any other; XLA's scatter for fewer, on other platforms, and for pools that the kernel cannot address. The
    kernel takes one launch where XLA takes two, or four for a quantised cache. On an H200 it takes less than half as
    long for 2048 tokens of a quantised cache and three quarters as long for those of others, of which XLA writes 64 a
    little faster (examples/benchmarks/results/write-h200.json).

    Args:
        arrays: the operands by name.
        reference: the plain-JAX implementation, "xla".
        implementation: as in `attend`.

    Raises:
        NotImplementedError: as in `attend`.
    """

    def xla(arrays):
        return reference(**arrays, layout=layout)

    def triton(arrays, *, interpret=False, **_):  # its instructions are the same for all platforms
        return pallas_kernels.cache_write(**arrays, layout=layout, interpret=interpret)

    is_kernel_faster = arrays["k_scales"] is not None or arrays["slots"].size >= _MANY_TOKENS
    is_addressable = not any(offset_obstacle(arrays[name]) for name in ("k_pages", "v_pages"))
    return _run(arrays, xla, triton, implementation, is_xla_better=not (is_kernel_faster and is_addressable))


def _run(
    arrays: dict[str, Any],
    xla: Callable,
    triton: Callable,  # (arrays, platform=) or (arrays, interpret=)
    implementation: str | None,
    *,
    is_xla_better: bool,
) -> Any:
    """Runs the implementation named; None takes the kernel on the platforms that have it, unless XLA is better."""
    if implementation == "xla" or (implementation is None and is_xla_better):
        return xla(arrays)
    if implementation == "triton_interpret":
        return triton(arrays, interpret=True)
    kernels = {name: functools.partial(triton, platform=name) for name in platform_choice.GPU_PLATFORMS}
    return platform_choice.choose(kernels, _refuse if implementation == "triton" else xla, arrays)


def _refuse(arrays):
    raise NotImplementedError(
        f"implementation 'triton' runs on {' and '.join(platform_choice.GPU_PLATFORMS)} only, and this program is "
        "lowered for another platform; use None or 'xla' there, or 'triton_interpret' to test the kernel"
    )


def _is_able(arrays: dict[str, Any], layout: str, implementation: str | None) -> bool:
    """Whether the attention kernels can do this call; raises if they cannot and one is named."""
    obstacle = _obstacle(arrays, layout)
    if obstacle and implementation not in (None, "xla"):
        raise NotImplementedError(f"implementation {implementation!r}: {obstacle}; use 'xla' or None")
    return obstacle is None


def _obstacle(arrays: dict[str, Any], layout: str) -> str | None:
    """What keeps the attention kernels from this call; None if nothing does."""
    for axes, name in zip(LAYOUTS[layout], ("k_pages", "v_pages"), strict=True):
        # Words of two values are half as many: in any pool of up to 2^32 bytes they count in 31 bits.
        if not pairs.is_viewed(axes, arrays[name]) and (obstacle := offset_obstacle(arrays[name])):
            return obstacle
    v_sizes = pool_sizes(LAYOUTS[layout][1], arrays["v_pages"].shape)
    return head_dim_obstacle(arrays["q"].shape[-1], v_sizes["H"])
