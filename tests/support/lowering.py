"""Lowering for a CUDA device on a host that has none: interpret mode accepts what Triton refuses."""

import contextlib

import jax
from jax.sharding import AbstractMesh


def lower_for_cuda(function, *arguments) -> str:
    """The StableHLO text of `jax.jit(function)` lowered for an H200; arguments may be `jax.ShapeDtypeStruct`s."""
    with cuda_device():
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@contextlib.contextmanager
def cuda_device():
    """An H200 in scope, as later JAX wants it for lowering."""
    try:  # later JAX asks the mesh in scope for the device that a kernel is lowered for
        from jax.sharding import AbstractDevice
    except ImportError:
        yield
        return
    device = AbstractDevice("NVIDIA H200", None, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        yield
