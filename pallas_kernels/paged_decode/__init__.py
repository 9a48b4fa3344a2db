"""Paged decode attention: one query token per row."""

from pallas_kernels.paged_decode.triton import paged_decode

__all__ = ["paged_decode"]
