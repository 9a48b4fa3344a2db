"""Paged attention of several query tokens per row: prompts, chunks of prompts, drafts, and mixed batches."""

from pallas_kernels.paged_prefill.triton import paged_prefill

__all__ = ["paged_prefill"]
