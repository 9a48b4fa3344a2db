"""Sizes from users: positive ints, of which int32 can count what they make."""

from __future__ import annotations

import numpy as np

_INT32_MAX = 2**31 - 1


def require_positive(**sizes: int) -> None:
    """Raises ValueError, by name, for a size that is not a positive int."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"{name}: expected a positive int, got {size!r}")


def require_int32_slots(num_pages: int, page_size: int) -> None:
    """Raises ValueError for so many pages that their tokens cannot be counted in int32."""
    if int(num_pages) * int(page_size) > _INT32_MAX:
        raise ValueError(
            f"pages: slots and positions are int32, expected at most {_INT32_MAX} tokens, "
            f"got {num_pages} pages of {page_size}"
        )
