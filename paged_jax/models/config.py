"""`ModelConfig`: all that tells one decoder from another, in one frozen dataclass.

`config_json` reads it from a Hugging Face folder, `config_gguf` from a GGUF file's metadata.
"""

import dataclasses
from dataclasses import dataclass

from paged_jax.layers import RopeConfig

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def is_token_id(value: object) -> bool:
    """Whether it can be an id, an int32. A file may name ids beyond its model's vocabulary: such tokens never come."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


class ConfigError(ValueError):
    """The model is of a family, or has a feature, that the decoder lacks; the message names it."""


@dataclass(frozen=True)
class AttentionConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of Q and K, before they turn
    softcap: float | None = None
    sinks: bool = False  # one logit a head, in the softmax's denominator only

    @property
    def group(self) -> int:
        """Query heads of each kv head, which follow each other."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class ExpertsConfig:
    count: int
    per_token: int
    limit: float  # the gate is clipped from above, `up` from both sides
    alpha: float  # the gate is gate · sigmoid(alpha · gate)


@dataclass(frozen=True)
class MLPConfig:
    width: int
    activation: str  # one of ACTIVATIONS
    bias: bool = False
    experts: ExpertsConfig | None = None


@dataclass(frozen=True)
class NormConfig:
    """RMSNorm; scales are kept as they multiply, Gemma's too."""

    eps: float
    after: bool = False  # also on the results of attention and MLP, before they are added


@dataclass(frozen=True)
class ModelConfig:
    family: str
    vocab_size: int
    num_layers: int
    width: int
    max_length: int  # positions a row may have: those trained for, or that scaled rotations reach
    attention: AttentionConfig
    mlp: MLPConfig
    norm: NormConfig
    rope: RopeConfig
    window_rope: RopeConfig  # of the layers that have a window
    windows: tuple[int | None, ...]  # one a layer: key j is visible to query i when i - window < j <= i
    tied_embeddings: bool = False  # logits come from the embedding table, without a matrix of their own
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    end_tokens: tuple[int, ...] = ()

    def serving(self, context_length: int) -> "ModelConfig":
        """The model for rows of up to `context_length` tokens: longrope's rotations go by the longest of them."""
        ropes = {
            name: dataclasses.replace(getattr(self, name), context_length=context_length)
            for name in ("rope", "window_rope")
        }
        return dataclasses.replace(self, **ropes)
