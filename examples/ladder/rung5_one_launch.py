"""Rung 5, one launch: whichever program finishes the last part of a row merges the row. This is the library's kernel.

A second launch waits for the slowest program of the first, and rows of one part pass through it for nothing. A counter
for each (row, kv head), which every part increments once its result is stored, tells the program that comes last.
What else the library adds is not speed but reach: any head_dim and layout, windows, soft caps, sinks, ALiBi. On a
device that has been tuned, tile, warps and stages are no longer those of the other rungs.
"""

from jaxtyping import Array, Float, Int32

import pallas_kernels


def paged_decode(
    q: Float[Array, "B N H"],
    k_pages: Float[Array, "P C K H"],
    v_pages: Float[Array, "P C K H"],
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    *,
    interpret: bool = False,
) -> Float[Array, "B N H"]:
    """Attention of each row's last token over the row's pages."""
    return pallas_kernels.paged_decode(q, k_pages, v_pages, block_tables, lengths, interpret=interpret)
