"""Names under which `jax.export` stores the pytrees of this package: an exported step keeps its signature."""

from __future__ import annotations

import json

import jax.export

from paged_jax.block_table import BlockTable, PageCopies
from paged_jax.cache import PagedCache
from paged_jax.decode import DecodeResult
from paged_jax.step import PagedStep

for _pytree in (BlockTable, PageCopies, PagedCache, PagedStep, DecodeResult):
    jax.export.register_pytree_node_serialization(
        _pytree,
        serialized_name=f"paged_jax.{_pytree.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),  # the static fields, in their order
        deserialize_auxdata=lambda text: tuple(json.loads(text)),
    )
