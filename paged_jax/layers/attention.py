"""Hidden states → hidden states: an attention layer whose keys and values live in a `PagedCache`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from paged_jax.attention import paged_attention
from paged_jax.cache import PagedCache
from paged_jax.integers import require_positive
from paged_jax.layers.rope import RopeConfig, Rotation, frequencies
from paged_jax.prefill import prefill_attention
from paged_jax.step import PagedStep


class PagedAttention(nnx.Module):
    """Causal self-attention over pages: projections, norm of q and k, rotation, write, attention, projection.

    The cache is an argument and a result, never a part of the module, so that a jitted step can donate it and a loop or
    `lax.scan` over layers can carry it. For inference: attention cannot be differentiated.

    Parameters are called and shaped as in `nnx.MultiHeadAttention` and Linen's `MultiHeadDotProductAttention`, so that
    a state tree of either fits: `query.kernel` [D, N, H], `key.kernel` [D, K, H], `value.kernel` [D, K, Hv],
    `out.kernel` [N, Hv, D], biases [N, H], [K, H], [K, Hv], [D]; with `qk_norm` also `query_ln` and `key_ln`, and with
    `has_sinks` also `sinks` [N].
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        v_head_dim: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: Callable[..., Any] | None = None,
        rope: RopeConfig | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        has_sinks: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the layer with new weights.

        Args:
            features: size of a token's hidden state, D.
            num_heads, head_dim: query heads, N, and size of one q or k vector, H.
            num_kv_heads: K, a divisor of N; None means N. Query head n uses kv head `n // (N // K)`.
            v_head_dim: size of one V vector, Hv; None means `head_dim`.
            qkv_bias, out_bias: whether the projections have biases.
            qk_norm: makes the two norms, over one head's elements and before the rotation; called with `head_dim` and
                the keywords `dtype`, `param_dtype` and `rngs`. `nnx.RMSNorm` or `functools.partial(nnx.RMSNorm,
                epsilon=1e-5)`, for example; where weights are stored as w − 1 (Gemma), load them as w.
            rope: how q and k are turned; None means not at all, unless the call brings a rotation.
            scale: multiplies q · k; `head_dim ** -0.5` if None (Gemma 2: `query_pre_attn_scalar ** -0.5`).
            soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
            has_sinks: whether each query head learns one more logit in its softmax's denominator (gpt-oss).
            dtype: of the computation; None follows the input and the weights.
            param_dtype: of the weights.
            implementation: as in `paged_jax.paged_attention`.

        Raises:
            ValueError: a size is not a positive int, `num_kv_heads` does not divide `num_heads`, or `rope` does not fit
                `head_dim`.
            NotImplementedError: the rope type is unknown.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        require_positive(
            features=features,
            num_heads=num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            v_head_dim=v_head_dim,
        )
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of {num_heads} heads, got {num_kv_heads}")
        if rope is not None:
            frequencies(rope, head_dim)  # says at once what is wrong with it

        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        project = functools.partial(nnx.LinearGeneral, features, use_bias=qkv_bias, **types)
        self.query = project((num_heads, head_dim))
        self.key = project((num_kv_heads, head_dim))
        self.value = project((num_kv_heads, v_head_dim))
        self.out = nnx.LinearGeneral((num_heads, v_head_dim), features, axis=(-2, -1), use_bias=out_bias, **types)
        self.query_ln = None if qk_norm is None else qk_norm(head_dim, **types)
        self.key_ln = None if qk_norm is None else qk_norm(head_dim, **types)
        self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype)) if has_sinks else None
        self.features, self.head_dim = features, head_dim
        self.rope, self.scale, self.soft_cap, self.implementation = rope, scale, soft_cap, implementation

    @classmethod
    def from_dense(cls, dense: nnx.MultiHeadAttention) -> PagedAttention:
        """A paged layer with the very weights of a dense one: what it computes under a causal mask.

        The two share their parameters, and nothing is copied. Dropout does not apply.

        Raises:
            NotImplementedError: `dense` attends to other inputs than its own (`in_kv_features`), returns another size
                than it takes, or has an `attention_fn` of its own, whose meaning cannot be seen: make the layer with
                the options that it stands for, and `nnx.update(layer, nnx.state(dense, nnx.Param))`.
        """
        if not dense.in_features == dense.in_kv_features == dense.out_features:
            raise NotImplementedError(
                f"from_dense: expected one size for in_features, in_kv_features and out_features, "
                f"got {dense.in_features}, {dense.in_kv_features} and {dense.out_features}"
            )
        if dense.attention_fn is not nnx.dot_product_attention:
            raise NotImplementedError(
                f"from_dense: expected attention_fn nnx.dot_product_attention, got {dense.attention_fn}"
            )
        layer = nnx.eval_shape(  # the structure alone: its parts are replaced
            lambda: cls(
                dense.in_features,
                dense.num_heads,
                dense.head_dim,
                num_kv_heads=dense.num_kv_heads,
                qk_norm=nnx.LayerNorm if dense.normalize_qk else None,
                rngs=nnx.Rngs(0),
            )
        )
        for name in ("query", "key", "value", "out") + ("query_ln", "key_ln") * dense.normalize_qk:
            setattr(layer, name, getattr(dense, name))
        return layer

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: PagedCache,
        step: PagedStep,
        *,
        layer: int | Int[Array, ""],
        window: int | Int[Array, ""] | None = None,
        rotation: Rotation | None = None,
        max_context: int | None = None,
    ) -> tuple[Float[Array, "T D"], PagedCache]:
        """Writes the K and V of the step's tokens, and attends from them over their rows' pages.

        Args:
            x: hidden states of the step's tokens, packed: one axis of tokens, no axis of rows.
            cache: the pool, of this layer's kv heads and head_dims, in any layout and dtype.
            step: what `table.step` returned; one step serves all layers.
            layer: this layer's place in the pool; int or integer scalar, traced or not.
            window: a token at position i sees keys j with `i - window < j <= i`; int or integer scalar, traced or not.
                In a scan whose other layers have windows, `2**31 - 1` is none.
            rotation: turns q and k in place of `rope`. For models whose layers share it, to compute it once; for scans
                over layers that differ in it.
            max_context: of a step with several tokens per row, how many tokens any row of it held before, at most; as
                in `prefill_attention`, 0 for fresh prompts. Decode steps have no use for it and refuse it.

        Returns:
            y [T, D], zeros (plus `out.bias`) for padding tokens, and the cache after the write.

        Raises:
            ValueError: a shape does not fit the layer, the step or the cache; `max_context` in a decode step; or as
                `cache.write` and `paged_attention` say.
        """
        expected = (step.slots.shape[0], self.features)
        if x.shape != expected:
            raise ValueError(f"x: expected shape {expected} (the step's tokens, features), got {x.shape}")
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.query_ln is not None and self.key_ln is not None:
            q, k = self.query_ln(q), self.key_ln(k)
        if rotation is None and self.rope is not None:
            rotation = Rotation.at(step.positions, self.rope, self.head_dim)
        if rotation is not None:
            q, k = rotation.rotate(q), rotation.rotate(k)
        cache = cache.write(layer, k, v, step.slots)
        options = {"layer": layer, "scale": self.scale, "window": window, "soft_cap": self.soft_cap}
        options |= {"sinks": None if self.sinks is None else self.sinks[...], "implementation": self.implementation}
        if step.query_lengths is not None:
            options |= {"query_lengths": step.query_lengths, "max_context": max_context}
            heads = prefill_attention(q, k, v, cache, step.table, **options)
        elif max_context is None:
            heads = paged_attention(q, cache, step.table, **options)
        else:
            raise ValueError(f"max_context: expected None in a decode step, got {max_context!r}")
        return self.out(heads), cache
