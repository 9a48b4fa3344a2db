"""The decoder: a Flax NNX model of any family that a `ModelConfig` describes, with its K and V in a `PagedCache`.

The cache is an explicit argument and result, never hidden in the module: it stays a plain pytree that a jitted step can
donate and a `while_loop` can carry. Matrices that take the same in are one: a step of few rows spends its time reading
weights, and a large matrix is read faster than its parts.

What the layers add to, the residual stream, grows over them: Gemma 3's passes 65504, the largest number of float16. A
model of float16 multiplies in it, and keeps in float32 what it adds up and the logits.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from paged_jax.attention import paged_attention
from paged_jax.cache import PagedCache
from paged_jax.layers import Rotation
from paged_jax.models.config import ExpertsConfig, ModelConfig
from paged_jax.prefill import prefill_attention
from paged_jax.step import PagedStep


class Step(Protocol):
    """What the layers themselves ask of a step."""

    @property
    def positions(self) -> Int32[Array, " T"]: ...


# attend(q, k, v, cache, step, layer=, scale=, window=, soft_cap=, sinks=) -> (heads like q, cache)
Attend = Callable[..., tuple[Float[Array, "T N H"], Any]]

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True)}
_NO_WINDOW = 2**31 - 1  # of a layer in a scan whose other layers have windows


def wide(dtype: Any) -> np.dtype:
    """The dtype of the residual stream, of all that is added to it and of the logits, for weights of `dtype`."""
    return jnp.dtype(jnp.float32 if dtype == jnp.float16 else dtype)


def attend_paged(
    q, k, v, cache: PagedCache, step: PagedStep, *, layer, max_context: int | None = None, **options
) -> tuple[Float[Array, "T N H"], PagedCache]:
    """Writes the tokens' K and V to their slots, and attends over the pages of their rows.

    `max_context` is `prefill_attention`'s; decode steps have no use for it.
    """
    cache = cache.write(layer, k, v, step.slots)
    options["layer"] = layer
    if step.query_lengths is None:
        return paged_attention(q, cache, step.table, **options), cache
    options |= {"query_lengths": step.query_lengths, "max_context": max_context}
    return prefill_attention(q, k, v, cache, step.table, **options), cache


class Decoder(nnx.Module):
    """Tokens → hidden states, with their K and V written to the cache on the way; `logits` is the head."""

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, scan_layers: bool = False, rngs: nnx.Rngs):
        """Makes the model with new weights; a `Network` fills one with given ones instead.

        Args:
            config: which model.
            dtype: of weights and activations; the scales of norms are float32, and so are sums that float16 is too
                narrow for.
            scan_layers: keep the layers' parameters stacked, [layers, ...], and run one compiled layer in `lax.scan`:
                compiled in a fraction of the time. Unrolled layers run faster on a CPU, which copies each slice.
            rngs: for the new weights.
        """
        self.config, self.scan_layers = config, scan_layers
        self.embedding = nnx.Embed(config.vocab_size, config.width, dtype=dtype, param_dtype=dtype, rngs=rngs)
        make = functools.partial(Layer, config, dtype)
        split_rngs = nnx.split_rngs(splits=config.num_layers)
        self.layers: Any = (
            split_rngs(nnx.vmap(make))(rngs)
            if scan_layers
            else nnx.List([make(rngs) for _ in range(config.num_layers)])
        )
        self.norm = RMSNorm(config.width, config.norm.eps, dtype)
        if not config.tied_embeddings:
            self.head = Linear(config.width, (config.vocab_size,), dtype, rngs)

    def __call__(
        self, tokens: Int32[Array, " T"], step: Step, cache: Any, attend: Attend = attend_paged
    ) -> tuple[Float[Array, "T D"], Any]:
        """The tokens' last hidden states, and the cache after the write.

        Args:
            tokens: of the step, packed.
            step: what `table.step` returned.
            cache: a `PagedCache` of the config's layers, kv heads and head_dim; or what `attend` takes for one.
            attend: how tokens meet the keys and values before them.
        """
        config = self.config
        x = self.embedding(tokens)
        x = x.astype(wide(x.dtype))
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
        ropes = (config.rope, config.window_rope)
        rotations = [Rotation.at(step.positions, rope, config.attention.head_dim) for rope in ropes]
        if self.scan_layers:
            x, cache = self._scan(x, rotations, step, cache, attend)
        else:
            for i, (layer, window) in enumerate(zip(self.layers, config.windows, strict=True)):
                x, cache = layer(x, rotations[window is not None], step, cache, attend, i, window)
        return self.norm(x), cache

    def _scan(self, x, rotations: list[Rotation], step: Step, cache: Any, attend: Attend):
        """Layers that differ in window and rotation are one program: both are traced, and rotations are chosen from."""
        config = self.config
        graph, weights = nnx.split(self.layers)
        both = jax.tree.map(lambda *kinds: jnp.stack(kinds), *rotations)
        is_windowed = jnp.array([window is not None for window in config.windows], jnp.int32)
        windows = None
        if any(config.windows):
            windows = jnp.array([window or _NO_WINDOW for window in config.windows], jnp.int32)

        def run_layer(carry, inputs):
            x, cache = carry
            weights, i, kind, window = inputs
            rotation = jax.tree.map(lambda leaf: leaf[kind], both)
            return nnx.merge(graph, weights)(x, rotation, step, cache, attend, i, window), None

        inputs = (weights, jnp.arange(config.num_layers, dtype=jnp.int32), is_windowed, windows)
        return lax.scan(run_layer, (x, cache), inputs)[0]

    def logits(self, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
        matrix = self.embedding.embedding if self.config.tied_embeddings else self.head.weight
        logits, cap = _multiply(hidden, matrix[...], wide(hidden.dtype)), self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class Layer(nnx.Module):
    def __init__(self, config: ModelConfig, dtype, rngs: nnx.Rngs):
        self.attention = Attention(config, dtype, rngs)
        experts = config.mlp.experts
        self.mlp = MLP(config, dtype, rngs) if experts is None else Mixture(config, experts, dtype, rngs)
        norm = functools.partial(RMSNorm, config.width, config.norm.eps)
        self.attention_norm, self.mlp_norm = norm(dtype), norm(dtype)
        if config.norm.after:
            self.attention_post_norm, self.mlp_post_norm = norm(wide(dtype)), norm(wide(dtype))
        self.norms_after = config.norm.after

    def __call__(
        self,
        x: Float[Array, "T D"],
        rotation: Rotation,
        step: Step,
        cache: Any,
        attend: Attend,
        layer: int | Int[Array, ""],
        window: int | Int[Array, ""] | None,
    ) -> tuple[Float[Array, "T D"], Any]:
        y, cache = self.attention(self.attention_norm(x), rotation, step, cache, attend, layer, window)
        x = _add(x, self.attention_post_norm(y) if self.norms_after else y)
        y = self.mlp(self.mlp_norm(x))
        return _add(x, self.mlp_post_norm(y) if self.norms_after else y), cache


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, dtype, rngs: nnx.Rngs):
        self.config = attention = config.attention
        # For each kv head its query heads, its key and its value, so that a mesh can split the matrix by kv heads.
        heads = (attention.num_kv_heads, attention.group + 2, attention.head_dim)
        self.qkv = Linear(config.width, heads, dtype, rngs, attention.qkv_bias)
        width = attention.num_heads * attention.head_dim
        self.out = Linear(width, (config.width,), dtype, rngs, attention.out_bias, wide(dtype))
        if attention.qk_norm:
            self.query_ln, self.key_ln = (RMSNorm(attention.head_dim, config.norm.eps, dtype) for _ in range(2))
        self.sinks = nnx.Param(jnp.zeros(attention.num_heads, dtype)) if attention.sinks else None

    def __call__(
        self, x: Float[Array, "T D"], rotation: Rotation, step: Step, cache: Any, attend: Attend, layer, window
    ) -> tuple[Float[Array, "T D"], Any]:
        num_tokens, group = x.shape[0], self.config.group
        parts = jnp.split(self.qkv(x), (group, group + 1), axis=2)
        q, k, v = (part.reshape(num_tokens, -1, self.config.head_dim) for part in parts)
        if self.config.qk_norm:
            q, k = self.query_ln(q), self.key_ln(k)
        heads, cache = attend(
            rotation.rotate(q),
            rotation.rotate(k),
            v,
            cache,
            step,
            layer=layer,
            scale=self.config.scale,
            window=window,
            soft_cap=self.config.softcap,
            sinks=None if self.sinks is None else self.sinks[...],
        )
        return self.out(heads.reshape(num_tokens, -1)), cache


class MLP(nnx.Module):
    def __init__(self, config: ModelConfig, dtype, rngs: nnx.Rngs):
        mlp = config.mlp
        self.activate = _ACTIVATIONS[mlp.activation]
        self.gate_up = Linear(config.width, (2, mlp.width), dtype, rngs, mlp.bias)
        self.down = Linear(mlp.width, (config.width,), dtype, rngs, mlp.bias, wide(dtype))

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate_up = self.gate_up(x)
        return self.down(self.activate(gate_up[:, 0]) * gate_up[:, 1])


class Mixture(nnx.Module):
    """A mixture of experts: each token goes to the few that its router likes best, and their results are weighed."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, dtype, rngs: nnx.Rngs):
        self.per_token = experts.per_token
        self.router = Linear(config.width, (experts.count,), dtype, rngs, has_bias=True)
        self.experts = Experts(config, experts, dtype, rngs)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        scores, chosen = lax.top_k(self.router(x), self.per_token)  # [T, k]
        weights, expert = jax.nn.softmax(scores, axis=-1).reshape(-1, 1), chosen.reshape(-1)
        order = jnp.argsort(expert)  # the tokens of one expert lie side by side
        token = order // self.per_token
        y = self.experts(x[token], expert[order])
        y = y * weights[order].astype(y.dtype)
        return jnp.zeros_like(x, y.dtype).at[token].add(y)


class Experts(nnx.Module):
    """All experts' matrices, [expert, in, out] as files store them."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, dtype, rngs: nnx.Rngs):
        self.config = experts
        initial = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        for name, inner, outer in (
            ("gate", config.width, config.mlp.width),
            ("up", config.width, config.mlp.width),
            ("down", config.mlp.width, config.width),
        ):
            setattr(self, name, nnx.Param(initial(rngs.params(), (experts.count, inner, outer), dtype)))
            setattr(self, f"{name}_bias", nnx.Param(jnp.zeros((experts.count, outer), dtype)))

    def __call__(self, x: Float[Array, "n D"], expert: Int32[Array, " n"]) -> Float[Array, "n D"]:
        """Each token through its expert; `expert` is in ascending order."""
        sizes = jnp.bincount(expert, length=self.config.count)

        def project(name: str, x, out_dtype=x.dtype):
            matrices, biases = getattr(self, name)[...], getattr(self, f"{name}_bias")[...]
            y = lax.ragged_dot(x, matrices, sizes, preferred_element_type=out_dtype)
            return y + biases[expert].astype(out_dtype)

        limit = self.config.limit
        gate, up = jnp.minimum(project("gate", x), limit), jnp.clip(project("up", x), -limit, limit)
        return project("down", gate * jax.nn.sigmoid(self.config.alpha * gate) * (up + 1), wide(x.dtype))


class Linear(nnx.Module):
    """A matrix, [*out, in], and maybe a bias. What it gives has their dtype, or that of the sum it is for."""

    def __init__(
        self,
        in_features: int,
        out_shape: tuple[int, ...],
        dtype,
        rngs: nnx.Rngs,
        has_bias: bool = False,
        out_dtype: np.dtype | None = None,
    ):
        initial = nnx.initializers.lecun_normal(in_axis=-1, out_axis=range(len(out_shape)))
        self.weight = nnx.Param(initial(rngs.params(), (*out_shape, in_features), dtype))
        self.bias = nnx.Param(jnp.zeros(out_shape, dtype)) if has_bias else None
        self.out_dtype = jnp.dtype(out_dtype or dtype)

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T *out"]:
        weight = self.weight[...]
        y = _multiply(x, weight.reshape(-1, x.shape[1]), self.out_dtype).reshape(-1, *weight.shape[:-1])
        return y if self.bias is None else y + self.bias[...].astype(self.out_dtype)


class RMSNorm(nnx.Module):
    """`nnx.RMSNorm` in another order: it normalises, then scales, where Flax scales the factor that normalises. For a
    batch on a GPU, XLA makes one kernel of this and two of that."""

    def __init__(self, size: int, eps: float, dtype):
        self.scale = nnx.Param(jnp.ones(size))
        self.eps, self.dtype = eps, dtype

    def __call__(self, x: Float[Array, "*T H"]) -> Float[Array, "*T H"]:
        x = x.astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (x * self.scale[...]).astype(self.dtype)


def _add(x: Float[Array, "T D"], y: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """`x + y`, apart from the norm that follows: a product may come in parts on a GPU, and XLA would add them up
    in the norm's kernel, which has but one program for each token. One token's product comes whole."""
    return x + y if x.shape[0] == 1 else lax.optimization_barrier(x + y)


def _multiply(x: Float[Array, "T in"], matrix: Float[Array, "out in"], dtype: np.dtype) -> Float[Array, "T out"]:
    """`x @ matrix.T` as numbers of `dtype`, as XLA does it best.

    On a CPU the matrix stands on the left: XLA multiplies it with few tokens half again as fast so, unless the turning
    of the product is folded into the product, which a barrier prevents. On a GPU one token's product is a plain sum:
    XLA reads the matrix faster for it than for the matrix units, and what follows joins the same kernel.
    """
    multiply = functools.partial(jnp.matmul, preferred_element_type=dtype)
    ways = {"cpu": lambda x, matrix: lax.optimization_barrier(multiply(matrix, x.T)).T}
    if x.shape[0] == 1:
        ways |= dict.fromkeys(("cuda", "rocm"), functools.partial(_sum_of_products, dtype=dtype))
    return lax.platform_dependent(x, matrix, default=lambda x, matrix: multiply(x, matrix.T), **ways)


def _sum_of_products(x: Float[Array, "1 in"], matrix: Float[Array, "out in"], dtype: np.dtype) -> Float[Array, "1 out"]:
    return jnp.sum(matrix.astype(jnp.float32) * x.astype(jnp.float32), axis=1).astype(dtype)[None]
