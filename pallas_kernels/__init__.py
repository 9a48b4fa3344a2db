"""Pallas kernels: arrays in, arrays out. A leaf package: it knows nothing of paged_jax."""

from pallas_kernels.cache_write import cache_write
from pallas_kernels.paged_cascade import paged_cascade
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill

__all__ = ["cache_write", "paged_cascade", "paged_decode", "paged_prefill"]
