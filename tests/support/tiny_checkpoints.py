"""Seventeen tiny configurations of nine families, as fields of transformers' config classes: data for parity tests."""

from typing import Any

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_WINDOWED_QWEN = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
_GEMMA3 = _HEADS | {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 24}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
}
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}

# Name → model_type and the fields that differ from its class's defaults.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", _SIZES),
    "llama3 rope": ("llama", _SIZES | {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama with biases": ("llama", _SIZES | {"attention_bias": True, "mlp_bias": True}),
    "llama linear rope": ("llama", _SIZES | {"rope_parameters": _LINEAR}),
    "mistral": ("mistral", _SIZES | {"sliding_window": None, "head_dim": 24}),
    "mistral with window": ("mistral", _SIZES | {"sliding_window": 8}),
    "qwen2": ("qwen2", _SIZES),
    "qwen2 with window": ("qwen2", _SIZES | _WINDOWED_QWEN | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", _SIZES | {"head_dim": 32}),
    "qwen3 yarn": ("qwen3", _SIZES | _HEADS | {"rope_parameters": _YARN}),
    "gemma": ("gemma", _SIZES | _HEADS),
    "gemma2": (
        "gemma2",
        _SIZES
        | _HEADS
        | {
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 1.0,
        },
    ),
    "gemma3": ("gemma3_text", _SIZES | _GEMMA3),
    "gemma3 linear rope": (
        "gemma3_text",
        _SIZES
        | _GEMMA3
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            }
        },
    ),
    "phi3 with window": ("phi3", _SIZES | {"sliding_window": 8}),
    "phi3 longrope": (
        "phi3",
        _SIZES | {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    ),
    "gpt-oss": (
        "gpt_oss",
        _SIZES
        | _HEADS
        | {
            "rope_parameters": _GPT_OSS_YARN,
            "sliding_window": 8,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
}
