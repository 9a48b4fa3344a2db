"""One function for each of some platforms and another for the rest: chosen when the caller's program is lowered.

`jax.lax.platform_dependent` chooses too, but a program exported for several platforms at once holds all branches, and
JAX lowers each of them for all platforms: a kernel that only GPUs can lower then fails for the others. A primitive
has one rule per platform, and each is lowered for its own alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

GPU_PLATFORMS = ("cuda", "rocm")


def choose(branches: Mapping[str, Callable[..., Any]], other: Callable[..., Any], operands: Any) -> Any:
    """`branches[platform](operands)` where lowered for one of its platforms, `other(operands)` for anything else.

    Args:
        branches: for some of `GPU_PLATFORMS`, functions of the operands. The first is traced at once, which gives the
            outputs' shapes; the others and `other`, whose outputs must be alike, when they are lowered.
        operands: a pytree of arrays.
    """
    leaves, structure = jax.tree.flatten(operands)
    (first, function), *rest = branches.items()
    traced, outputs = jax.make_jaxpr(function, return_shape=True)(operands)

    def flat(function):
        return lambda *leaves: jax.tree.leaves(function(structure.unflatten(leaves)))

    outs = _choice.bind(
        *leaves,
        first=first,
        traced=traced,
        rest=tuple((platform, flat(function)) for platform, function in rest),
        other=flat(other),
    )
    return jax.tree.structure(outputs).unflatten(outs)


_choice = Primitive("paged_jax_platform_choice")
_choice.multiple_results = True


def _run_on(platform: str, *leaves, first: str, traced: ClosedJaxpr, rest, other):
    if platform == first:
        return jaxpr_as_fun(traced)(*leaves)
    return dict(rest).get(platform, other)(*leaves)


@_choice.def_impl
def _run(*leaves, **choices):  # not traced: under `jax.disable_jit`
    gpu = jax.devices()[0].client.platform_version if jax.default_backend() == "gpu" else ""
    return _run_on("rocm" if "rocm" in gpu else "cuda" if gpu else "cpu", *leaves, **choices)


@_choice.def_abstract_eval
def _shapes(*leaves, traced, **choices):  # noqa: ARG001
    return traced.out_avals


def _vectorise(leaves, axes, *, first, traced, rest, other):
    outs = _choice.bind(
        *leaves,
        first=first,
        traced=jax.make_jaxpr(jax.vmap(jaxpr_as_fun(traced), axes))(*leaves),
        rest=tuple((platform, jax.vmap(function, axes)) for platform, function in rest),
        other=jax.vmap(other, axes),
    )
    return outs, [0] * len(outs)


batching.primitive_batchers[_choice] = _vectorise
for _platform in GPU_PLATFORMS:
    mlir.register_lowering(_choice, mlir.lower_fun(functools.partial(_run_on, _platform)), platform=_platform)
mlir.register_lowering(_choice, mlir.lower_fun(functools.partial(_run_on, "another")))
