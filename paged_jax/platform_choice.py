"""One function for some platforms and another for the rest: chosen when the caller's program is lowered.

`jax.lax.platform_dependent` chooses too, but a program exported for several platforms at once holds all branches, and
JAX lowers each of them for all platforms: a kernel that only GPUs can lower then fails for the others. A primitive
has one rule per platform, and each is lowered for its own alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

GPU_PLATFORMS = ("cuda", "rocm")


def choose(
    special: Callable[..., Any],
    other: Callable[..., Any],
    operands: Any,
    platforms: tuple[str, ...] = GPU_PLATFORMS,
) -> Any:
    """`special(operands)` where lowered for one of the platforms, `other(operands)` where lowered for anything else.

    Args:
        special, other: functions of the operands, with outputs of the same structure, shapes and dtypes.
        operands: a pytree of arrays.
        platforms: some of `GPU_PLATFORMS`.
    """
    leaves, structure = jax.tree.flatten(operands)
    traced, outputs = jax.make_jaxpr(special, return_shape=True)(operands)  # once: for the shapes and for the program

    def flat_other(*leaves):
        return jax.tree.leaves(other(structure.unflatten(leaves)))

    return jax.tree.structure(outputs).unflatten(
        _choice.bind(*leaves, special=traced, other=flat_other, platforms=platforms)
    )


_choice = Primitive("paged_jax_platform_choice")
_choice.multiple_results = True


def _run_on(platform: str, *leaves, special: ClosedJaxpr, other, platforms):
    return jaxpr_as_fun(special)(*leaves) if platform in platforms else other(*leaves)


@_choice.def_impl
def _run(*leaves, **choices):  # not traced: under `jax.disable_jit`
    gpu = jax.devices()[0].client.platform_version if jax.default_backend() == "gpu" else ""
    return _run_on("rocm" if "rocm" in gpu else "cuda" if gpu else "cpu", *leaves, **choices)


@_choice.def_abstract_eval
def _shapes(*leaves, special, **choices):  # noqa: ARG001
    return special.out_avals


def _vectorise(leaves, axes, *, special, other, platforms):
    outs = _choice.bind(
        *leaves,
        special=jax.make_jaxpr(jax.vmap(jaxpr_as_fun(special), axes))(*leaves),
        other=jax.vmap(other, axes),
        platforms=platforms,
    )
    return outs, [0] * len(outs)


batching.primitive_batchers[_choice] = _vectorise
for _platform in GPU_PLATFORMS:
    mlir.register_lowering(_choice, mlir.lower_fun(functools.partial(_run_on, _platform)), platform=_platform)
mlir.register_lowering(_choice, mlir.lower_fun(functools.partial(_run_on, "another")))
