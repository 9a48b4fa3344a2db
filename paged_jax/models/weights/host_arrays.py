"""Arrays on the host that JAX on a CPU takes over as they are, so that a weight never lies in memory twice."""

import math
from typing import Any

import numpy as np

_ALIGNMENT = 64  # bytes; XLA copies a buffer that begins elsewhere


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)
