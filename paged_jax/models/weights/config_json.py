"""A Hugging Face `config.json` → a `ModelConfig`.

Both styles of file are read: the older one (`rope_theta`, `rope_scaling`, `sliding_window_pattern`) and the one that
transformers 5 writes (`rope_parameters`, `layer_types`). A field that a file leaves out has its family's default.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paged_jax.layers import RopeConfig, attention_factor, frequencies
from paged_jax.models.config import (
    ACTIVATIONS,
    AttentionConfig,
    ConfigError,
    ExpertsConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    is_token_id,
)
from paged_jax.models.files import naming, read_object
from paged_jax.models.keys_json import CONFIG, ROPE, not_harmless, note, unknown
from paged_jax.models.weights.families import DEFAULTS, FAMILIES, Family

CONFIG_FILE = "config.json"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_PLACES = ("rope_parameters", "rope_scaling")
_ALIASES = {"num_experts": "num_local_experts", "_sliding_window_pattern": "sliding_window_pattern"}
_LARGEST = float(np.finfo(np.float32).max)


def read_fields(folder: Path) -> dict[str, Any]:
    """What `folder`'s config.json holds. Raises as `read_config`."""
    return read_object(Path(folder) / CONFIG_FILE, ConfigError)


def read_config(folder: Path) -> ModelConfig:
    """The model that `folder`'s config.json describes.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it is no JSON object, or describes a model that the decoder lacks.
    """
    fields = read_fields(folder)
    with naming(Path(folder) / CONFIG_FILE, ConfigError):
        return model_config(fields)


def config_notes(folder: Path, given: Mapping[str, Any]) -> tuple[str, ...]:
    """A line that names the fields of a config.json which nobody here knows; none if there are none."""
    fields = {**given, **_mapping(given, "text_config")}
    strange = list(unknown(CONFIG, fields))
    for place in _ROPE_PLACES:
        kinds = _mapping(fields, place)
        nested = [kind for kind in kinds.values() if isinstance(kind, Mapping)] or [kinds]
        found = {f"{place}.{key}": kind[key] for kind in nested for key in unknown(ROPE, kind)}
        fields, strange = fields | found, strange + list(found)
    return note(folder / CONFIG_FILE, fields, strange)


def model_config(given: Mapping[str, Any]) -> ModelConfig:
    """The model that the fields of a config.json describe."""
    name, given = _text_fields(given)
    family = FAMILIES[name]
    fields = {**DEFAULTS, **family.defaults, **given}
    if quantisation := _mapping(fields, "quantization_config"):
        method = quantisation.get("quant_method", dict(quantisation))
        raise ConfigError(f"expected weights that are not quantised, got quantization_config {method!r}")
    for key, harmless in not_harmless(CONFIG, given):
        raise ConfigError(f"expected a model with {key} = {harmless[0]!r}, got {given[key]!r:.60}")
    attention = _attention(family, fields)
    rope, window_rope = _ropes(fields, attention.head_dim)
    width = _size(fields, "hidden_size")
    return ModelConfig(
        family=name,
        vocab_size=_size(fields, "vocab_size"),
        num_layers=_size(fields, "num_hidden_layers"),
        width=width,
        max_length=_max_length(name, fields, rope),
        attention=attention,
        mlp=_mlp(name, fields),
        norm=NormConfig(_real(fields, "rms_norm_eps"), family.norms_after),
        rope=rope,
        window_rope=window_rope,
        windows=_windows(family, fields),
        tied_embeddings=_flag(fields, "tie_word_embeddings"),
        embedding_scale=math.sqrt(width) if family.scales_embeddings else 1.0,
        logit_softcap=_optional(_real, fields, "final_logit_softcapping"),
        end_tokens=end_tokens(fields),
    )


def _text_fields(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The family's name and the fields of its text decoder, which a multimodal file nests."""
    given = _renamed(given)
    name = given.get("model_type")
    if name == "gemma3":
        if not isinstance(given.get("text_config"), Mapping):
            raise ConfigError(f"expected text_config to be an object, got {given.get('text_config')!r}")
        outer = {key: given[key] for key in ("eos_token_id", "tie_word_embeddings") if key in given}
        return "gemma3", outer | _renamed(given["text_config"])
    name = "gemma3" if name == "gemma3_text" else name
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(f"expected model_type to be one of {', '.join(FAMILIES)}, got {name!r}")
    return name, given


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    return {_ALIASES.get(key, key): value for key, value in given.items()}


def _attention(family: Family, fields: Mapping[str, Any]) -> AttentionConfig:
    num_heads = _size(fields, "num_attention_heads")
    num_kv_heads = _optional(_size, fields, "num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"expected num_attention_heads in whole groups per kv head, got {num_heads} heads and {num_kv_heads} kv"
        )
    head_dim = _optional(_size, fields, "head_dim")
    if head_dim is None:
        head_dim, rest = divmod(_size(fields, "hidden_size"), num_heads)
        if rest:
            raise ConfigError(
                f"expected hidden_size to be a multiple of {num_heads} heads without a head_dim, "
                f"got {fields['hidden_size']}"
            )
    has_bias = _flag(fields, "attention_bias")
    qkv_bias, out_bias = (has_bias, has_bias) if family.biases is None else family.biases
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=(_optional(_real, fields, "query_pre_attn_scalar") or head_dim) ** -0.5,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=family.qk_norm,
        # Gemma 3's files have the field too, and its attention does not look at it.
        softcap=_optional(_real, fields, "attn_logit_softcapping") if family.softcaps_attention else None,
        sinks=family.sinks,
    )


def _mlp(name: str, fields: Mapping[str, Any]) -> MLPConfig:
    activation = fields.get("hidden_activation") or fields["hidden_act"]
    if name == "gemma" and activation == "gelu":  # as its first files have it; the model was trained with the other
        activation = "gelu_pytorch_tanh"
    if activation not in ACTIVATIONS:
        raise ConfigError(f"expected the activation to be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    experts = None
    if name == "gpt_oss":
        experts = ExpertsConfig(
            count=_size(fields, "num_local_experts"),
            per_token=_size(fields, "num_experts_per_tok"),
            limit=_real(fields, "swiglu_limit"),
            alpha=_real(fields, "swiglu_alpha"),
        )
        if experts.per_token > experts.count:
            raise ConfigError(f"expected num_experts_per_tok of at most {experts.count}, got {experts.per_token}")
    has_bias = name == "llama" and _flag(fields, "mlp_bias")
    return MLPConfig(_size(fields, "intermediate_size"), activation, has_bias or experts is not None, experts)


def _windows(family: Family, fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    count, types = _size(fields, "num_hidden_layers"), fields.get("layer_types")
    if types is None:
        types = [_SLIDING if _is_windowed(family, fields, layer) else _FULL for layer in range(count)]
    if not isinstance(types, list) or len(types) != count:
        raise ConfigError(f"expected layer_types to have {count} entries, got {types!r}")
    if unknown := [kind for kind in types if kind not in (_FULL, _SLIDING)]:
        raise ConfigError(f"expected layer_types of {_FULL!r} and {_SLIDING!r}, got {unknown[0]!r}")
    if _SLIDING not in types:
        return (None,) * count
    window = _size(fields, "sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in types)


def _is_windowed(family: Family, fields: Mapping[str, Any], layer: int) -> bool:
    if family.windowed == "never" or fields["sliding_window"] is None:
        return False
    if family.windowed == "upper layers":
        return _flag(fields, "use_sliding_window") and layer >= _size(fields, "max_window_layers", least=0)
    return family.windowed == "always" or (layer + 1) % _size(fields, "sliding_window_pattern") != 0


def _ropes(fields: Mapping[str, Any], head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of layers without and with a window."""
    fields = {name: value for name, value in fields.items() if name not in _ROPE_PLACES or _mapping(fields, name)}
    try:
        ropes = RopeConfig.from_hf(fields, _FULL), RopeConfig.from_hf(fields, _SLIDING)
        for rope in ropes:
            attention_factor(rope)  # says what is wrong with it, as do the frequencies of short rows and of long ones
            for length in (None, _size(fields, "max_position_embeddings")):
                frequencies(dataclasses.replace(rope, context_length=length), head_dim)
    except (NotImplementedError, ValueError) as problem:
        raise ConfigError(f"rope: {problem}") from problem
    return ropes


def _max_length(family: str, fields: Mapping[str, Any], rope: RopeConfig) -> int:
    """The positions that the model may read, which a scaled rotation can make more than max_position_embeddings.

    That field is the lengthened context in files of llama3 and longrope rotations, and in Gemma 3's linear ones. Files
    of the others may have it either way: for yarn, original_max_position_embeddings · factor positions are meant, and
    for linear max_position_embeddings · factor unless original_max_position_embeddings says what the factor is of. The
    result is never less than max_position_embeddings, so that a length is not multiplied twice. (The rule is vLLM's,
    which takes yarn's product even where it is less.)
    """
    longest = _size(fields, "max_position_embeddings")
    if rope.rope_type not in ("linear", "yarn") or rope.factor is None or family == "gemma3":
        return longest
    return min(max(longest, round((rope.original_max_position_embeddings or longest) * rope.factor)), 2**31 - 1)


def end_tokens(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Of a config.json or a generation_config.json."""
    ids = fields.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(map(is_token_id, ids)):
        raise ConfigError(f"expected eos_token_id to be a token id or a list of them, got {fields['eos_token_id']!r}")
    return tuple(ids)


def _size(fields: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"expected {name} to be a whole number of at least {least}, got {value!r}")
    if value >= 2**31:
        raise ConfigError(f"expected {name} to be a whole number below 2**31, got {value!r}")
    return value


def _real(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LARGEST:
        raise ConfigError(f"expected {name} to be a positive number, got {value!r}")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool):
        raise ConfigError(f"expected {name} to be true or false, got {value!r}")
    return value


def _mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"expected {name} to be an object or null, got {value!r}")
    return value or {}


def _optional(read: Callable[[Mapping[str, Any], str], Any], fields: Mapping[str, Any], name: str) -> Any:
    return None if fields.get(name) is None else read(fields, name)
