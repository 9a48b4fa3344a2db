"""Pallas kernels: arrays in, arrays out. A leaf package: it imports JAX only."""

from pallas_kernels.paged_decode import paged_decode

__all__ = ["paged_decode"]
