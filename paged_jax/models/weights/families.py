"""What the files of each family of models leave unsaid: their fields' defaults and the traits that have no field."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    defaults: Mapping[str, Any]  # of fields of config.json, over DEFAULTS
    # Which layers have a window when the file has no layer_types: those from max_window_layers on, or all but every
    # nth, n being sliding_window_pattern.
    windowed: Literal["never", "always", "upper layers", "all but every nth"] = "never"
    biases: tuple[bool, bool] | None = None  # of Q, K, V and of the output; None: both as attention_bias says
    qk_norm: bool = False
    norms_after: bool = False
    scales_embeddings: bool = False
    softcaps_attention: bool = False
    sinks: bool = False


DEFAULTS = {
    "rope_theta": 10_000.0,
    "partial_rotary_factor": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
}
_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GEMMA2 = _GEMMA | {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
}
FAMILIES = {
    "llama": Family({"max_position_embeddings": 2048, "eos_token_id": 2}),
    "mistral": Family(
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072, "eos_token_id": 2},
        windowed="always",
        biases=(False, False),
    ),
    "qwen2": Family(_QWEN, windowed="upper layers", biases=(True, False)),
    "qwen3": Family(_QWEN | {"head_dim": 128}, windowed="upper layers", qk_norm=True),
    "gemma": Family(_GEMMA | {"num_key_value_heads": 16}, scales_embeddings=True),
    "gemma2": Family(
        _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        windowed="all but every nth",
        norms_after=True,
        scales_embeddings=True,
        softcaps_attention=True,
    ),
    "gemma3": Family(
        _GEMMA2
        | {
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
        windowed="all but every nth",
        qk_norm=True,
        norms_after=True,
        scales_embeddings=True,
    ),
    "phi3": Family(
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32_000,
        },
        windowed="always",
        biases=(False, False),
    ),
    "gpt_oss": Family(
        {
            "head_dim": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
        },
        windowed="all but every nth",
        sinks=True,
    ),
}
