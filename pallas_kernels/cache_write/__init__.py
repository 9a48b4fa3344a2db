"""Cache write: K and V of new tokens to their slots."""

from pallas_kernels.cache_write.triton import cache_write

__all__ = ["cache_write"]
