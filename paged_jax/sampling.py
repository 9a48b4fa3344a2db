"""Logits → the next token of each row: greedy, or drawn with temperature, top-k and top-p."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, PRNGKeyArray


def greedy(logits: Float[Array, "B V"], key: PRNGKeyArray | None = None) -> Int32[Array, " B"]:  # noqa: ARG001
    """The most likely token; the lowest of equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws from the softmax of `logits / temperature`, kept to the likeliest tokens.

    Equal settings compare equal, so a sampler made anew for each call does not compile anew.

    Args:
        temperature: positive; below 1 sharpens, above 1 flattens. For 0 use `greedy`.
        top_k: keep the k likeliest tokens (and those as likely as the k-th); None keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches p, in (0, 1], and those as likely as
            its last (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020); applied after top_k.

    Raises:
        ValueError: a setting is out of range or not finite.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self):
        limits = np.finfo(np.float32)  # beyond these, logits divided by it are no longer ordered
        if not float(limits.tiny) <= self.temperature <= float(limits.max):
            raise ValueError(
                f"temperature: expected a finite number of at least {limits.tiny:.1e} (or `greedy`), "
                f"got {self.temperature}"
            )
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, (int, np.integer)) or self.top_k < 1
        ):
            raise ValueError(f"top_k: expected None or a positive int, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a number in (0, 1], got {self.top_p}")

    def __call__(self, logits: Float[Array, "B V"], key: PRNGKeyArray | None) -> Int32[Array, " B"]:
        """Raises ValueError without a key."""
        if key is None:
            raise ValueError("key: sampling needs a jax.random key, got None")
        logits = logits.astype(jnp.float32)
        # The largest becomes 0: at a low temperature the others go to −inf, and none to +inf.
        logits = (logits - logits.max(axis=-1, keepdims=True)) / self.temperature
        vocabulary = logits.shape[-1]
        if self.top_k is not None and self.top_k < vocabulary:
            kth = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits < kth, -jnp.inf, logits)
        if self.top_p < 1:
            likeliest = jnp.sort(logits, axis=-1, descending=True)
            probabilities = jax.nn.softmax(likeliest, axis=-1)
            is_kept = jnp.cumsum(probabilities, axis=-1) - probabilities < self.top_p  # what stands before falls short
            is_kept = is_kept.at[..., 0].set(True)  # whatever p is
            threshold = jnp.min(jnp.where(is_kept, likeliest, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < threshold, -jnp.inf, logits)
        return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
