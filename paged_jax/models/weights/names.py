"""Which tensor of a model file is which part of which parameter: a table for each family, in each layout of files.

A family's table holds all that its models may have; which of it one model has, its config tells.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paged_jax.models.config import ModelConfig
from paged_jax.models.weights.shapes import parameter_parts


@dataclass(frozen=True)
class Stored:
    """The parts of parameters that one tensor holds, and how it holds them."""

    parts: tuple[str, ...]  # names in `parameter_parts`
    form: Literal[
        "as it is",
        "less one",  # Gemma's norms multiply by 1 + w
        "rows",  # several parts, one below the other
        "alternating",  # several parts whose columns take turns
        "neighbours",  # Q or K, for a rotation of neighbouring pairs where ours lie half a head apart
    ] = "as it is"


def stored_tensors(config: ModelConfig, layout: str, present: Collection[str]) -> dict[str, Stored]:
    """The tensors that files of this model have, by name; `present`, the names in them, tells how those begin."""
    parts, found = parameter_parts(config), {}
    begin = next((begin for begin in _BEGINNINGS if f"{begin}embed_tokens.weight" in present), "model.")
    for name, stored in NAMES[layout][config.family].items():
        name = begin + name.removeprefix("model.") if name.startswith("model.") else name
        for i in range(config.num_layers if "{i}" in name else 1):
            names = tuple(part.replace("{i}", str(i)) for part in stored.parts)
            if parts.keys() >= set(names):  # or else this model has no such part
                found[name.replace("{i}", str(i))] = Stored(names, stored.form)
    return found


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor may be in the files without being a parameter of the decoder."""
    return bool(_IGNORED.search(name) or _IMAGES.search(name)) or (
        config.tied_embeddings and name.endswith("lm_head.weight")
    )


def tensor_notes(path: Path, tensors: Collection[str]) -> tuple[str, ...]:
    """A line that names what a multimodal model's files hold besides the decoder; none if there is nothing."""
    parts = Counter(match[2] for name in tensors if (match := _IMAGES.search(name)))
    said = ", ".join(f"{count} tensors of {part}" for part, count in sorted(parts.items()))
    return (f"{path}: without effect here: {said}",) if parts else ()


# --- The tables -------------------------------------------------------------------------------------------------------

_BEGINNINGS = ("model.", "model.language_model.", "language_model.model.", "")  # the text part of multimodal files
_IGNORED = re.compile(
    r"\.rotary_emb\.inv_freq$|^rope_freqs\.weight$"  # worked out from, or read with, the config
    r"|^blk\.\d+\.attn_rot_embd(\.|$)"  # of old GGUF files, likewise
)
_IMAGES = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")


def _table(layers: str, top: Mapping[str, str | Stored], layer: Mapping[str, str | Stored]) -> dict[str, Stored]:
    """Names → parts; those of `layer` begin with `layers` and stand for every layer {i}."""
    table = {name: _stored(part) for name, part in top.items()}
    for name, part in layer.items():
        stored = _stored(part)
        parts = tuple(f"layers.{{i}}.{part}" for part in stored.parts)
        table[f"{layers}.{{i}}.{name}"] = Stored(parts, stored.form)
    return table


def _stored(part: str | Stored) -> Stored:
    return Stored((part,)) if isinstance(part, str) else part


def _hugging_face(layer: Mapping[str, str | Stored], norm: str | Stored = "norm.scale") -> dict[str, Stored]:
    top = {"model.embed_tokens.weight": "embedding.embedding", "lm_head.weight": "head.weight"}
    return _table("model.layers", top | {"model.norm.weight": norm}, layer)


def _less_one(path: str) -> Stored:
    return Stored((path,), "less one")


_KINDS = ("weight", "bias")
_HEADS = {"q": "query", "k": "key", "v": "value"}
_OUT = {f"self_attn.o_proj.{kind}": f"attention.out.{kind}" for kind in _KINDS}
_ATTENTION = _OUT | {
    f"self_attn.{name}_proj.{kind}": f"attention.{head}.{kind}" for name, head in _HEADS.items() for kind in _KINDS
}
_MLP = {f"mlp.{name}_proj.{kind}": f"mlp.{name}.{kind}" for name in ("gate", "up", "down") for kind in _KINDS}
_NORMS = {"input_layernorm.weight": "attention_norm.scale", "post_attention_layernorm.weight": "mlp_norm.scale"}
_QK_NORMS = {"self_attn.q_norm.weight": "attention.query_ln.scale", "self_attn.k_norm.weight": "attention.key_ln.scale"}
_FUSED = {
    "self_attn.qkv_proj.weight": Stored(tuple(f"attention.{head}.weight" for head in _HEADS.values()), "rows"),
    "mlp.gate_up_proj.weight": Stored(("mlp.gate.weight", "mlp.up.weight"), "rows"),
    "mlp.down_proj.weight": "mlp.down.weight",
}
_EXPERTS = {
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "mlp.experts.gate_up_proj": Stored(("mlp.experts.gate", "mlp.experts.up"), "alternating"),
    "mlp.experts.gate_up_proj_bias": Stored(("mlp.experts.gate_bias", "mlp.experts.up_bias"), "alternating"),
    "mlp.experts.down_proj": "mlp.experts.down",
    "mlp.experts.down_proj_bias": "mlp.experts.down_bias",
}
_GEMMA_NORMS = {name: _less_one(path) for name, path in _NORMS.items()}
_FOUR_NORMS = {
    "input_layernorm.weight": _less_one("attention_norm.scale"),
    "post_attention_layernorm.weight": _less_one("attention_post_norm.scale"),
    "pre_feedforward_layernorm.weight": _less_one("mlp_norm.scale"),
    "post_feedforward_layernorm.weight": _less_one("mlp_post_norm.scale"),
}
_GEMMA_QK_NORMS = {name: _less_one(path) for name, path in _QK_NORMS.items()}

_GGUF_TOP = {
    "token_embd.weight": "embedding.embedding",
    "output_norm.weight": "norm.scale",
    "output.weight": "head.weight",
}
_GGUF_QK = {f"attn_{n}.{kind}": f"attention.{_HEADS[n]}.{kind}" for n in "qk" for kind in _KINDS}
_GGUF_REST = {
    "attn_norm.weight": "attention_norm.scale",
    "ffn_norm.weight": "mlp_norm.scale",
    **{f"attn_v.{kind}": f"attention.value.{kind}" for kind in _KINDS},
    **{f"attn_output.{kind}": f"attention.out.{kind}" for kind in _KINDS},
    **{f"ffn_{name}.{kind}": f"mlp.{name}.{kind}" for name in ("gate", "up", "down") for kind in _KINDS},
}
_GGUF_LLAMA = _GGUF_REST | {name: Stored((path,), "neighbours") for name, path in _GGUF_QK.items()}
_GGUF_GEMMA3 = (
    _GGUF_REST
    | _GGUF_QK
    | {  # its norms are stored as they multiply
        "attn_q_norm.weight": "attention.query_ln.scale",
        "attn_k_norm.weight": "attention.key_ln.scale",
        "post_attention_norm.weight": "attention_post_norm.scale",
        "post_ffw_norm.weight": "mlp_post_norm.scale",
    }
)

# Layout → family → the name of a tensor → the parts in it.
NAMES = {
    "hugging face": {
        "llama": _hugging_face(_ATTENTION | _MLP | _NORMS),
        "mistral": _hugging_face(_ATTENTION | _MLP | _NORMS),
        "qwen2": _hugging_face(_ATTENTION | _MLP | _NORMS),
        "qwen3": _hugging_face(_ATTENTION | _QK_NORMS | _MLP | _NORMS),
        "gemma": _hugging_face(_ATTENTION | _MLP | _GEMMA_NORMS, _less_one("norm.scale")),
        "gemma2": _hugging_face(_ATTENTION | _MLP | _FOUR_NORMS, _less_one("norm.scale")),
        "gemma3": _hugging_face(_ATTENTION | _GEMMA_QK_NORMS | _MLP | _FOUR_NORMS, _less_one("norm.scale")),
        "phi3": _hugging_face(_OUT | _FUSED | _NORMS),
        "gpt_oss": _hugging_face(_ATTENTION | {"self_attn.sinks": "attention.sinks"} | _EXPERTS | _NORMS),
    },
    "gguf": {
        "llama": _table("blk", _GGUF_TOP, _GGUF_LLAMA),
        "gemma3": _table("blk", _GGUF_TOP, _GGUF_GEMMA3),
    },
}
