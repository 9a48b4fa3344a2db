"""PagedAttention for JAX: a paged KV cache, a functional block table, and attention over both."""

from paged_jax.attention import merge_attention, paged_attention
from paged_jax.block_table import BlockTable, PageCopies
from paged_jax.cache import PagedCache
from paged_jax.decode import DecodeResult, OutOfPages, decode
from paged_jax.sampling import Sampler, greedy
from paged_jax.step import PagedStep

__all__ = [
    "BlockTable",
    "DecodeResult",
    "OutOfPages",
    "PageCopies",
    "PagedCache",
    "PagedStep",
    "Sampler",
    "decode",
    "greedy",
    "merge_attention",
    "paged_attention",
]
