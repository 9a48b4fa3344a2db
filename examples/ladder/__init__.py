"""Paged decode attention from a naive kernel to the library's: each rung is complete and adds one idea to the last.

They are lessons: one token per row, bfloat16 or float32, any group, head_dim a power of two of at least 16, pools of
one layer in NHD. Warps and pipeline stages are as the library's heuristic has them for such tiles on an H200, so that
only ideas differ.
"""
