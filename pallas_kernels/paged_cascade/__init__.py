"""Paged decode attention of rows that begin with the same pages, which are read once."""

from pallas_kernels.paged_cascade.triton import paged_cascade

__all__ = ["paged_cascade"]
