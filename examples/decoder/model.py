"""A Llama-type decoder in Flax NNX that keeps its K and V in a `PagedCache`.

The cache is an explicit argument and result, never hidden in the module: it stays a plain pytree that a jitted step can
donate and a `while_loop` can carry. Activations are [features, tokens]: matrices then stand on the left, as model files
store them, and XLA multiplies them with few tokens half again as fast on a CPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from paged_jax import (
    BlockTable,
    DecodeResult,
    PagedCache,
    PagedStep,
    decode,
    greedy,
    paged_attention,
)

Rotation = tuple[Float[Array, "T 1 H/2"], Float[Array, "T 1 H/2"]]  # cos and sin of every position's angles


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a Llama-type model."""

    vocab_size: int
    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float
    norm_eps: float
    max_length: int  # positions the model was trained for
    tied_embeddings: bool  # logits come from the embedding table, without a matrix of their own


class Linear(nnx.Module):
    """A matrix without bias, applied to features that come first."""

    def __init__(self, in_features: int, out_features: int, dtype, rngs: nnx.Rngs):
        initial = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        self.weight = nnx.Param(initial(rngs.params(), (out_features, in_features), dtype))

    def __call__(self, x: Float[Array, "in T"]) -> Float[Array, "out T"]:
        return self.weight[...] @ x


def tokens_first(product: Float[Array, "out T"]) -> Float[Array, "T out"]:
    """Transposes a matrix product behind a barrier: folded into the product, it costs XLA its fast CPU matmul."""
    return jax.lax.optimization_barrier(product).T


def rms_norm(config: DecoderConfig, dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.width,
        epsilon=config.norm_eps,
        reduction_axes=0,
        feature_axes=0,
        dtype=dtype,
        param_dtype=dtype,
        rngs=rngs,
    )


class Attention(nnx.Module):
    def __init__(self, config: DecoderConfig, dtype, rngs: nnx.Rngs):
        linear = functools.partial(Linear, dtype=dtype, rngs=rngs)
        self.head_dim = config.head_dim
        self.q = linear(config.width, config.num_heads * config.head_dim)
        self.k = linear(config.width, config.num_kv_heads * config.head_dim)
        self.v = linear(config.width, config.num_kv_heads * config.head_dim)
        self.out = linear(config.num_heads * config.head_dim, config.width)

    def __call__(
        self, x: Float[Array, "D T"], rotation: Rotation, layer: int, cache: PagedCache, step: PagedStep
    ) -> tuple[Float[Array, "D T"], PagedCache]:
        q, k, v = (
            tokens_first(project(x)).reshape(x.shape[1], -1, self.head_dim) for project in (self.q, self.k, self.v)
        )
        q, k = (rotate(heads, rotation) for heads in (q, k))
        cache = cache.write(layer, k, v, step.slots)
        y = paged_attention(q, cache, step.table, layer=layer, query_lengths=step.query_lengths)
        return self.out(y.reshape(x.shape[1], -1).T), cache


class MLP(nnx.Module):
    def __init__(self, config: DecoderConfig, dtype, rngs: nnx.Rngs):
        linear = functools.partial(Linear, dtype=dtype, rngs=rngs)
        self.gate = linear(config.width, config.mlp_width)
        self.up = linear(config.width, config.mlp_width)
        self.down = linear(config.mlp_width, config.width)

    def __call__(self, x: Float[Array, "D T"]) -> Float[Array, "D T"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, config: DecoderConfig, dtype, rngs: nnx.Rngs):
        self.attention_norm, self.attention = rms_norm(config, dtype, rngs), Attention(config, dtype, rngs)
        self.mlp_norm, self.mlp = rms_norm(config, dtype, rngs), MLP(config, dtype, rngs)

    def __call__(
        self, x: Float[Array, "D T"], rotation: Rotation, layer: int, cache: PagedCache, step: PagedStep
    ) -> tuple[Float[Array, "D T"], PagedCache]:
        y, cache = self.attention(self.attention_norm(x), rotation, layer, cache, step)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    """Tokens → hidden states, with their K and V written to the cache on the way; `logits` is the head."""

    def __init__(self, config: DecoderConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(config.vocab_size, config.width, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = rms_norm(config, dtype, rngs)
        if not config.tied_embeddings:
            self.head = Linear(config.width, config.vocab_size, dtype, rngs)

    def __call__(
        self, tokens: Int32[Array, " T"], step: PagedStep, cache: PagedCache
    ) -> tuple[Float[Array, "D T"], PagedCache]:
        x = self.embedding(tokens).T
        rotation = rotation_at(step.positions, self.config.head_dim, self.config.rope_base)
        for i, layer in enumerate(self.layers):
            x, cache = layer(x, rotation, i, cache, step)
        return self.norm(x), cache

    def logits(self, hidden: Float[Array, "D T"]) -> Float[Array, "T V"]:
        matrix = self.embedding.embedding if self.config.tied_embeddings else self.head.weight
        return tokens_first(matrix[...] @ hidden)


def rotation_at(positions: Int32[Array, " T"], head_dim: int, base: float) -> Rotation:
    """The rotary position embedding (Su et al., "RoFormer", 2021) of each position; all layers share it."""
    half = head_dim // 2
    angles = positions[:, None, None].astype(jnp.float32) * base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(heads: Float[Array, "T N H"], rotation: Rotation) -> Float[Array, "T N H"]:
    """Turns the pairs that lie half a head apart, in float32."""
    cos, sin = rotation
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(heads.dtype)


@functools.partial(jax.jit, donate_argnames=("cache", "table"))
def prefill(
    model: Decoder, cache: PagedCache, table: BlockTable, tokens: Int32[Array, " T"], num_tokens: Int32[Array, " B"]
) -> tuple[PagedCache, BlockTable, Bool[Array, ""]]:
    """Writes the rows' packed prompt tokens into their pages; nothing, with `ok` False, if they lack pages.

    No logits: the last token of a prompt is left to `generate`, whose first step gives the first new token.
    """
    table, step, ok = table.step(num_tokens, size=tokens.shape[0])
    _, cache = model(tokens, step, cache)
    return cache, table, ok


def generate(
    model: Decoder,
    cache: PagedCache,
    table: BlockTable,
    tokens: Int32[Array, " B"],
    active: Bool[Array, " B"],
    *,
    max_new_tokens: int,
    sample=greedy,
    stop_tokens=(),
    key: PRNGKeyArray | None = None,
) -> DecodeResult:
    """`paged_jax.decode` with this model; its weights are arguments of the compiled loop, not constants in it."""
    return decode(
        jax.tree_util.Partial(_next_logits, model),
        cache,
        table,
        tokens,
        active,
        max_new_tokens=max_new_tokens,
        sample=sample,
        stop_tokens=stop_tokens,
        key=key,
    )


def _next_logits(model: Decoder, tokens, step, cache):
    hidden, cache = model(tokens, step, cache)
    return model.logits(hidden), cache
