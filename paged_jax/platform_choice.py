"""One function for GPUs and another for every other platform: chosen when the caller's program is lowered.

`jax.lax.platform_dependent` chooses too, but a program exported for several platforms at once holds all branches, and
JAX lowers each of them for all platforms: a kernel that only GPUs can lower then fails for the others. A primitive
has one rule per platform, and each is lowered for its own alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

GPU_PLATFORMS = ("cuda", "rocm")


def choose(gpu: Callable[..., Any], other: Callable[..., Any], operands: Any) -> Any:
    """`gpu(operands)` where lowered for cuda or rocm, `other(operands)` where lowered for anything else.

    Args:
        gpu, other: functions of the operands, with outputs of the same structure, shapes and dtypes.
        operands: a pytree of arrays.
    """
    leaves, structure = jax.tree.flatten(operands)
    traced, outputs = jax.make_jaxpr(gpu, return_shape=True)(operands)  # once: for the shapes and for the program

    def flat_other(*leaves):
        return jax.tree.leaves(other(structure.unflatten(leaves)))

    return jax.tree.structure(outputs).unflatten(_choice.bind(*leaves, gpu=traced, other=flat_other))


_choice = Primitive("paged_jax_platform_choice")
_choice.multiple_results = True


def _run_gpu(*leaves, gpu: ClosedJaxpr, other):  # noqa: ARG001
    return jaxpr_as_fun(gpu)(*leaves)


def _run_other(*leaves, gpu, other):  # noqa: ARG001
    return other(*leaves)


@_choice.def_impl
def _run(*leaves, **functions):  # not traced: under `jax.disable_jit`
    return (_run_gpu if jax.default_backend() == "gpu" else _run_other)(*leaves, **functions)


@_choice.def_abstract_eval
def _shapes(*leaves, gpu, other):  # noqa: ARG001
    return gpu.out_avals


def _vectorise(leaves, axes, *, gpu, other):
    outs = _choice.bind(
        *leaves,
        gpu=jax.make_jaxpr(jax.vmap(jaxpr_as_fun(gpu), axes))(*leaves),
        other=jax.vmap(other, axes),
    )
    return outs, [0] * len(outs)


batching.primitive_batchers[_choice] = _vectorise
for _platform in GPU_PLATFORMS:
    mlir.register_lowering(_choice, mlir.lower_fun(_run_gpu), platform=_platform)
mlir.register_lowering(_choice, mlir.lower_fun(_run_other))
