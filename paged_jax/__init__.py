"""PagedAttention for JAX: a paged KV cache, a functional block table, and attention over both."""

import paged_jax.exported  # noqa: F401, importing it makes the pytrees known to jax.export
from paged_jax import compat, layouts, sharding
from paged_jax.attention import merge_attention, paged_attention
from paged_jax.block_table import BlockTable, PageCopies
from paged_jax.cache import PagedCache
from paged_jax.cascade import cascade_attention, cascade_pays, shared_blocks
from paged_jax.decode import DecodeResult, OutOfPages, decode
from paged_jax.prefill import prefill_attention, prefill_way
from paged_jax.prefix_cache import PrefixCache
from paged_jax.sampling import Sampler, greedy
from paged_jax.step import PagedStep
from paged_jax.swap import SwappedRows, swap_in, swap_out
from paged_jax.table_check import check_block_tables, check_query_lengths
from paged_jax.text_stream import TextStream, text_streams

__version__ = "0.2.0"

__all__ = [
    "BlockTable",
    "DecodeResult",
    "OutOfPages",
    "PageCopies",
    "PagedCache",
    "PagedStep",
    "PrefixCache",
    "Sampler",
    "SwappedRows",
    "TextStream",
    "cascade_attention",
    "cascade_pays",
    "check_block_tables",
    "check_query_lengths",
    "compat",
    "decode",
    "greedy",
    "layouts",
    "merge_attention",
    "paged_attention",
    "prefill_attention",
    "prefill_way",
    "sharding",
    "shared_blocks",
    "swap_in",
    "swap_out",
    "text_streams",
]
