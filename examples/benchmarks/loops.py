"""Decode loops of random models: compiled from shapes alone, then timed on values that are drawn on the devices.

Nothing is prefilled: rows begin on permuted pages of random K and V, since what those are makes no difference to time.
"""

import dataclasses
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from paged_jax import BlockTable, PagedCache, sharding
from paged_jax.models.config import ModelConfig
from paged_jax.models.mesh import Split
from paged_jax.models.network import Network
from paged_jax.models.programs import generate

PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch in the midst of decoding, and how it goes on: all of a compiled loop but the values."""

    config: ModelConfig
    lengths: tuple[int, ...]  # tokens that each row holds; 0 for one that stays empty
    num_steps: int
    scan_layers: bool
    page_size: int = PAGE_SIZE
    split: Split | None = None  # over a mesh; None for one device
    dtype: str = "bfloat16"  # of weights and cache

    @property
    def network(self) -> Network:
        return Network(self.config, self.scan_layers, self.split)

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each row after its last step."""
        return tuple(-(-(length + self.num_steps) // self.page_size) if length else 0 for length in self.lengths)

    @property
    def num_pages(self) -> int:
        """Pages of the pool: those that the rows hold after their last step."""
        return sum(self.num_blocks)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's K and V in all layers."""
        attention = self.config.attention
        vector_bytes = attention.head_dim * jnp.dtype(self.dtype).itemsize
        return 2 * self.config.num_layers * attention.num_kv_heads * vector_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a step reads, in the mean over the steps: that of the step's own tokens too."""
        held = [2 * length + self.num_steps + 1 for length in self.lengths if length]
        return sum(held) * self.token_bytes // 2

    @property
    def pool_sizes(self) -> tuple[int, int, int, int, int]:
        """What `PagedCache.create` takes."""
        config, attention = self.config, self.config.attention
        return config.num_layers, self.num_pages, self.page_size, attention.num_kv_heads, attention.head_dim

    @property
    def table_sizes(self) -> tuple[int, int, int, int]:
        """What `BlockTable.create` takes."""
        return self.num_pages, self.page_size, len(self.lengths), max(self.num_blocks)


# --- Time -------------------------------------------------------------------------------------------------------------


@functools.cache
def measure_paged(case: Case, calls: int) -> dict[str, Any]:
    """As `measure_loop`, of the decoder's own loop."""
    return measure_loop(case, *compile_paged(case), paged_cache_shapes(case), calls)


@functools.cache
def compile_paged(case: Case) -> tuple[jax.stages.Compiled, dict[str, float]]:
    """As `compile_loop`: the decoder's `generate`, on one device or on a mesh."""
    return compile_loop(case, functools.partial(generate, max_new_tokens=case.num_steps), paged_cache_shapes(case))


def compile_loop(case: Case, run: Callable, cache: Any) -> tuple[jax.stages.Compiled, dict[str, float]]:
    """`run(forward, cache, table, tokens, active)`, and the seconds that tracing it took, and compiling it."""
    table = jax.eval_shape(functools.partial(BlockTable.create, *case.table_sizes))
    tokens, active = (jax.ShapeDtypeStruct((len(case.lengths),), dtype) for dtype in (jnp.int32, jnp.bool_))
    rest = table, tokens, active
    shapes = (forward_shapes(case), cache, *_on_mesh(case.split, rest, whole(rest)))
    start = time.perf_counter()
    lowered = jax.jit(run, donate_argnums=(1, 2)).lower(*shapes)
    is_traced = time.perf_counter()
    compiled = lowered.compile()
    return compiled, {"trace": is_traced - start, "compile": time.perf_counter() - is_traced}


def measure_loop(case: Case, loop: Callable, compile_seconds: dict, cache: Any, calls: int) -> dict[str, Any]:
    """Seconds per step: of calls with all steps, less those of the same program with no row active; medians of both.

    Each call decodes other tokens from the same lengths.

    Args:
        loop, compile_seconds: from `compile_loop`.
        cache: shapes of what the loop takes.
        calls: of each kind, after one that warms up.

    Raises:
        OutOfPages, RuntimeError: the loop did not make all its tokens.
    """
    gc.collect()  # the arrays of the last loop go before those of this one come
    forward, cache = random_arrays(forward_shapes(case)), random_arrays(cache)
    table, is_row = new_table(case), np.array(case.lengths) > 0
    rng = np.random.default_rng(1)
    seconds: dict[str, list[float]] = {"steps": [], "no steps": []}
    for _ in range(calls + 1):
        for kind, active in (("steps", is_row), ("no steps", np.zeros_like(is_row))):
            tokens = rng.integers(case.config.vocab_size, size=is_row.size, dtype=np.int32)
            rest = jax.tree.map(jnp.array, (table, tokens, active))  # copies: the loop takes the table for itself
            if case.split is not None:
                rest = sharding.place(case.split.mesh, rest, whole(rest))
            jax.block_until_ready((forward, cache, rest))
            start = time.perf_counter()
            result = jax.block_until_ready(loop(forward, cache, *rest))
            seconds[kind].append(time.perf_counter() - start)
            cache = result.check().cache
            expected, got = active.sum() * case.num_steps, int(result.num_tokens.sum())
            if got != expected:
                raise RuntimeError(f"expected {expected} tokens of {active.sum()} active rows, got {got}")
    timed = {kind: samples[1:] for kind, samples in seconds.items()}
    per_step = (statistics.median(timed["steps"]) - statistics.median(timed["no steps"])) / case.num_steps
    return {"compile_seconds": compile_seconds, "seconds": timed, "seconds_per_step": per_step}


# --- Shapes -----------------------------------------------------------------------------------------------------------


def forward_shapes(case: Case) -> jax.tree_util.Partial:
    """The model's `forward` with a shape in place of each weight, and with its place on the mesh if there is one."""
    network = case.network
    shapes = network.shapes(case.dtype)
    if case.split is not None:
        shapes = _on_mesh(case.split, shapes, network.specs())
    return jax.tree_util.Partial(network, shapes)


def paged_cache_shapes(case: Case) -> PagedCache:
    """The cache likewise."""
    shapes = jax.eval_shape(functools.partial(PagedCache.create, *case.pool_sizes, jnp.dtype(case.dtype)))
    heads = None if case.split is None else case.split.heads
    return _on_mesh(case.split, shapes, sharding.cache_specs(shapes, heads=heads))


def _on_mesh(split: Split | None, shapes: Any, specs: Any) -> Any:
    if split is None:
        return shapes
    shardings = sharding.shardings(split.mesh, shapes, specs)
    return jax.tree.map(lambda leaf, its: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=its), shapes, shardings)


def whole(arrays: Any) -> Any:
    """The PartitionSpecs of arrays that every device has."""
    return jax.tree.map(lambda _: PartitionSpec(), arrays)


def weight_bytes(case: Case) -> dict[str, int]:
    """Bytes of all parameters, and of those that a step reads whole: all but the embedding table."""
    sizes = {name: shape.size * shape.dtype.itemsize for name, shape in case.network.shapes(case.dtype).items()}
    total, embedding = sum(sizes.values()), sizes["embedding.embedding"]
    return {"all": total, "read": total if case.config.tied_embeddings else total - embedding}


# --- Values -----------------------------------------------------------------------------------------------------------


def random_arrays(shapes: Any) -> Any:
    """Normal values, of a size that keeps activations near one; they are drawn where they stay."""
    number = itertools.count()

    def draw(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if "scale" in jax.tree_util.keystr(path):  # of a norm
            return jnp.ones(shape.shape, shape.dtype, device=shape.sharding)
        return _normal(shape.shape, shape.dtype, shape.sharding)(jax.random.key(next(number)))

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def _normal(shape: tuple[int, ...], dtype: Any, place: Any) -> Callable[[jax.Array], jax.Array]:
    """Draws from a key, layer by layer if they are stacked: the random bits of a whole pool take more room than it."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) > 2:
            return lax.map(lambda key: draw_one(key, shape[1:]), jax.random.split(key, shape[0]))
        return draw_one(key, shape)

    def draw_one(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape, dtype) * shape[-1] ** -0.5

    return jax.jit(lambda key: draw(key, shape), out_shardings=place)


def new_table(case: Case) -> BlockTable:
    """The rows at their lengths, on pages that lie all over the pool."""
    table = BlockTable.create(*case.table_sizes)
    pages = jnp.asarray(np.random.default_rng(2).permutation(table.num_pages), jnp.int32)
    table, ok = jax.jit(BlockTable.extend)(
        dataclasses.replace(table, free_pages=pages), jnp.asarray(case.lengths, jnp.int32)
    )
    if not ok:
        raise RuntimeError(f"expected room for {sum(case.lengths)} tokens in {table.num_pages} pages, got a refusal")
    return table
