"""Token fill: some tokens' vectors → one value each, in place."""

from pallas_kernels.token_fill.triton import token_fill

__all__ = ["token_fill"]
