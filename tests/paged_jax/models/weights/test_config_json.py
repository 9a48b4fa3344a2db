"""config.json → ModelConfig: published models, both styles of fields, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import TINY

from paged_jax.layers import RopeConfig, attention_factor, frequencies
from paged_jax.models.config import AttentionConfig, ConfigError, ExpertsConfig, MLPConfig, ModelConfig, NormConfig
from paged_jax.models.weights.config_json import model_config, read_config
from paged_jax.models.weights.families import FAMILIES


def sizes(vocab: int, width: int, mlp: int, layers: int, heads: int, kv_heads: int | None) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **({} if kv_heads is None else {"num_key_value_heads": kv_heads}),
    }


LLAMA = {"model_type": "llama", **sizes(100, 64, 96, 3, 4, 2)}


# --- Published models, their files as they were published -------------------------------------------------------------


def test_llama_2_7b() -> None:
    fields = {
        "model_type": "llama",
        **sizes(32_000, 4096, 11_008, 32, 32, 32),
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "torch_dtype": "float16",
    }
    assert model_config(fields) == ModelConfig(
        family="llama",
        vocab_size=32_000,
        num_layers=32,
        width=4096,
        max_length=4096,
        attention=AttentionConfig(32, 32, 128, 128**-0.5),
        mlp=MLPConfig(11_008, "silu"),
        norm=NormConfig(1e-5),
        rope=RopeConfig.from_hf(fields),
        window_rope=RopeConfig.from_hf(fields),
        windows=(None,) * 32,
        end_tokens=(2,),
    )


def test_llama_3_2_1b() -> None:
    fields = {
        "model_type": "llama",
        **sizes(128_256, 2048, 8192, 16, 32, 8),
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": True,
        "eos_token_id": [128_001, 128_008, 128_009],
    }
    config = model_config(fields)
    assert config.tied_embeddings
    assert config.end_tokens == (128_001, 128_008, 128_009)
    assert config.rope == RopeConfig(
        "llama3",
        500_000.0,
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def test_mistral_7b_and_nemo() -> None:
    seven = {"model_type": "mistral", **sizes(32_000, 4096, 14_336, 32, 32, 8), "sliding_window": 4096}
    assert model_config(seven).windows == (4096,) * 32
    nemo = {"model_type": "mistral", **sizes(131_072, 5120, 14_336, 40, 32, 8), "head_dim": 128, "sliding_window": None}
    config = model_config(nemo)
    assert config.windows == (None,) * 40
    assert config.attention == AttentionConfig(32, 8, 128, 128**-0.5)


def test_qwen_2_5() -> None:
    fields = {
        "model_type": "qwen2",
        **sizes(151_936, 896, 4864, 24, 14, 2),
        "max_window_layers": 21,
        "sliding_window": 32_768,
        "use_sliding_window": False,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    }
    config = model_config(fields)
    assert config.attention == AttentionConfig(14, 2, 64, 0.125, qkv_bias=True)
    assert config.windows == (None,) * 24
    assert config.rope.rope_theta == 1_000_000.0
    assert model_config(fields | {"use_sliding_window": True}).windows == (None,) * 21 + (32_768,) * 3
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert model_config(fields | {"rope_scaling": yarn}).rope.rope_type == "yarn"


def test_qwen_3() -> None:
    fields = {"model_type": "qwen3", **sizes(151_936, 1024, 3072, 28, 16, 8), "sliding_window": None}
    assert model_config(fields).attention == AttentionConfig(16, 8, 128, 128**-0.5, qk_norm=True)


def test_gemma_1_and_2() -> None:
    one = {"model_type": "gemma", **sizes(256_000, 2048, 16_384, 18, 8, 1), "hidden_act": "gelu"}
    config = model_config(one)
    assert config.attention == AttentionConfig(8, 1, 256, 1 / 16)
    assert config.mlp == MLPConfig(16_384, "gelu_pytorch_tanh")
    assert config.embedding_scale == math.sqrt(2048)
    assert config.tied_embeddings
    assert not config.norm.after

    two = {"model_type": "gemma2", **sizes(256_000, 4608, 36_864, 46, 32, 16), "head_dim": 128}
    config = model_config(two | {"query_pre_attn_scalar": 144, "sliding_window": 4096})
    assert config.attention == AttentionConfig(32, 16, 128, 1 / 12, softcap=50.0)
    assert config.logit_softcap == 30.0
    assert config.norm.after
    assert config.windows == (4096, None) * 23


GEMMA3_1B = {
    "model_type": "gemma3_text",
    **sizes(262_144, 1152, 6912, 26, 4, 1),
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10_000,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
}


def test_gemma_3_1b() -> None:
    config = model_config(GEMMA3_1B)
    assert config.family == "gemma3"
    assert config.attention == AttentionConfig(4, 1, 256, 1 / 16, qk_norm=True)
    assert config.windows == ((512,) * 5 + (None,)) * 4 + (512,) * 2
    assert config.rope.rope_theta == 1_000_000
    assert config.window_rope.rope_theta == 10_000
    assert config.logit_softcap is None
    assert config.tied_embeddings


def test_gemma_3_4b_nests_its_text_and_leaves_most_of_it_out() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = model_config({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": {}})
    assert (config.vocab_size, config.max_length, config.end_tokens) == (262_208, 131_072, (1, 106))
    assert config.attention == AttentionConfig(8, 4, 256, 1 / 16, qk_norm=True)
    assert (config.rope.rope_type, config.rope.factor, config.rope.rope_theta) == ("linear", 8.0, 1_000_000.0)
    assert (config.window_rope.rope_type, config.window_rope.rope_theta) == ("default", 10_000.0)


def test_phi_3_and_phi_4_mini() -> None:
    three = {"model_type": "phi3", **sizes(32_064, 3072, 8192, 32, 32, 32), "sliding_window": 2047}
    assert model_config(three).windows == (2047,) * 32
    longrope = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
    four = {
        "model_type": "phi3",
        **sizes(200_064, 3072, 8192, 32, 24, 8),
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": longrope,
        "sliding_window": 262_144,
        "tie_word_embeddings": True,
    }
    config = model_config(four)
    assert config.rope.long_factor == (1.5,) * 48
    assert attention_factor(config.rope) == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert frequencies(config.rope, config.attention.head_dim).size == 48


def test_gpt_oss_20b() -> None:
    scaling = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    }
    fields = {
        "model_type": "gpt_oss",
        **sizes(201_088, 2880, 2880, 24, 64, 8),
        "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_scaling": scaling,
        "rope_theta": 150_000,
        "eos_token_id": 200_002,
    }
    config = model_config(fields)
    assert config.attention == AttentionConfig(64, 8, 64, 0.125, qkv_bias=True, out_bias=True, sinks=True)
    assert config.mlp == MLPConfig(2880, "silu", True, ExpertsConfig(32, 4, 7.0, 1.702))
    assert config.windows == (128, None) * 12
    assert not config.rope.truncate
    with pytest.raises(ConfigError, match="not quantised, got quantization_config 'mxfp4'"):
        model_config(fields | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}})


def test_smollm2_135m() -> None:
    fields = {"model_type": "llama", **sizes(49_152, 576, 1536, 30, 9, 3), "rope_theta": 100_000}
    assert model_config(fields).attention == AttentionConfig(9, 3, 64, 0.125)


# --- Both styles ------------------------------------------------------------------------------------------------------

QWEN2 = {**LLAMA, "model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 8}
GEMMA = {**LLAMA, "head_dim": 16, "num_hidden_layers": 7, "sliding_window": 8}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.5] * 8,
    "original_max_position_embeddings": 64,
}
SLIDING, FULL = "sliding_attention", "full_attention"
STYLES = {
    "base": (LLAMA, {"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
    "llama3": (
        LLAMA,
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
    ),
    "linear": (
        LLAMA,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
    ),
    "partial": (
        {**LLAMA, "model_type": "phi3"},
        {"partial_rotary_factor": 0.75, "hidden_size": 128},
        {"rope_parameters": {"partial_rotary_factor": 0.75}, "hidden_size": 128},
    ),
    "upper layers": (
        QWEN2,
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": True, "layer_types": [FULL] * 3 + [SLIDING]},
    ),
    "gemma2 pattern": (
        GEMMA | {"model_type": "gemma2"},
        {},
        {"layer_types": [SLIDING, FULL] * 3 + [SLIDING]},
    ),
    "gemma3 pattern": (
        GEMMA | {"model_type": "gemma3_text"},
        {"sliding_window_pattern": 3, "rope_theta": 2e6, "rope_local_base_freq": 2e4},
        {
            "layer_types": [SLIDING, SLIDING, FULL] * 2 + [SLIDING],
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 2e6},
                SLIDING: {"rope_type": "default", "rope_theta": 2e4},
            },
        },
    ),
}


@pytest.mark.parametrize("name", STYLES)
def test_the_two_styles_say_the_same(name: str) -> None:
    common, old, new = STYLES[name]
    assert model_config(common | old) == model_config(common | new)
    if old:
        assert model_config(common | old) != model_config(common)


def yarn(original: int | None, factor: float | None = 4.0) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


@pytest.mark.parametrize(
    ("name", "longest", "scaling", "expected"),
    [
        ("llama", 4096, None, 4096),
        ("llama", 4096, {"type": "linear", "factor": 4.0}, 16_384),  # Vicuna 1.5 16k
        ("llama", 16_384, {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16_384),
        ("llama", 131_072, {"rope_type": "llama3", **LLAMA3, "factor": 32.0}, 131_072),
        ("qwen2", 32_768, yarn(32_768), 131_072),  # as Qwen 2.5's page says to write it
        ("qwen3", 40_960, yarn(32_768), 131_072),  # as Qwen 3's
        ("qwen2", 131_072, yarn(32_768), 131_072),  # the lengthened context already
        ("qwen2", 32_768, yarn(None), 131_072),
        ("qwen2", 131_072, yarn(32_768, None), 131_072),
        ("gpt_oss", 131_072, yarn(4096, 32.0), 131_072),
        ("phi3", 131_072, LONGROPE | {"original_max_position_embeddings": 4096}, 131_072),
        ("gemma3_text", 131_072, {"rope_type": "linear", "factor": 8.0}, 131_072),
    ],
)
def test_a_scaled_rotation_lengthens_what_may_be_read_once(
    name: str, longest: int, scaling: dict[str, Any] | None, expected: int
) -> None:
    for style in ("rope_scaling", "rope_parameters"):
        fields = LLAMA | {"model_type": name, "max_position_embeddings": longest, "sliding_window": 8, style: scaling}
        assert model_config(fields | {"head_dim": 16}).max_length == expected


@pytest.mark.parametrize("name", ["num_experts", "_sliding_window_pattern"])
def test_other_names_of_a_field(name: str) -> None:
    fields = LLAMA | {"model_type": "gpt_oss", "num_hidden_layers": 6}
    names = {"num_experts": "num_local_experts", "_sliding_window_pattern": "sliding_window_pattern"}
    assert model_config(fields | {name: 5}) == model_config(fields | {names[name]: 5}) != model_config(fields)


def test_a_config_is_hashable() -> None:
    assert len({model_config(LLAMA), model_config(LLAMA), model_config(LLAMA | {"head_dim": 32})}) == 2


# --- Refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "family": ({"model_type": "falcon"}, f"model_type to be one of {', '.join(FAMILIES)}, got 'falcon'"),
    "no family": ({"model_type": None}, "model_type to be one of .*, got None"),
    "families": ({"model_type": ["llama"]}, r"model_type to be one of .*, got \['llama'\]"),
    "no text": ({"model_type": "gemma3"}, "text_config to be an object, got None"),
    "rope type": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: expected one of .*'dynamic'"),
    "rope parameters": ({"rope_parameters": "linear"}, "rope_parameters to be an object or null, got 'linear'"),
    "rope object": ({"rope_parameters": {FULL: {}, SLIDING: 5}}, "rope: .*expected an object, got 5"),
    "rope base of 0": ({"rope_theta": 0}, "rope: rope_theta: expected .* got 0"),
    "rope base of text": ({"rope_theta": "x"}, "rope: rope_theta: expected .* got 'x'"),
    "rope base that is endless": ({"rope_theta": math.inf}, "rope: rope_theta: expected .* got inf"),
    "rope base that is none": ({"rope_theta": math.nan}, "rope: rope_theta: expected .* got nan"),
    "rope base of 400 digits": ({"rope_theta": 10**400}, "rope: rope_theta: expected .* got 10{400}"),
    "rope share": ({"partial_rotary_factor": 1.5}, r"rope: partial_rotary_factor: expected .* got 1\.5"),
    "rope factor": ({"rope_scaling": {"type": "linear", "factor": -2}}, "rope: factor: expected .* got -2"),
    "rope factor of text": ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "rope: factor: expected .* got '4'"),
    "rope original": (
        {"rope_scaling": LLAMA3 | {"rope_type": "llama3", "original_max_position_embeddings": 0}},
        "rope: original_max_position_embeddings: expected .* got 0",
    ),
    "rope ramp": (
        {"rope_scaling": LLAMA3 | {"rope_type": "llama3", "low_freq_factor": 4.0}},
        "rope: high_freq_factor: expected a number above low_freq_factor 4.0, got 4.0",
    ),
    "no long factors": (
        {"rope_scaling": LONGROPE | {"long_factor": None}},
        "rope: longrope rope: expected long_factor, got None",
    ),
    "few long factors": ({"rope_scaling": LONGROPE | {"long_factor": [1.0]}}, "rope: long_factor: expected 8 .* got 1"),
    "rope field": ({"rope_scaling": {"type": "linear"}}, "rope: .*factor"),
    "rope size": ({"partial_rotary_factor": 0.2}, "rope: expected an even number .* got 3"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "not quantised, got quantization_config 'gptq'"),
    "activation": ({"hidden_act": "relu"}, "activation to be one of silu, gelu_pytorch_tanh, got 'relu'"),
    "bidirectional": (
        {"use_bidirectional_attention": True},
        "expected a model with use_bidirectional_attention = False, got True",
    ),
    "missing": ({"hidden_size": None}, "hidden_size to be a whole number of at least 1, got None"),
    "size": ({"num_hidden_layers": "3"}, "num_hidden_layers to be a whole number of at least 1, got '3'"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers to be a whole number of at least 1, got 0"),
    "size of 40 bits": ({"vocab_size": 2**40}, r"vocab_size to be a whole number below 2\*\*31, got 1099511627776"),
    "flag": ({"tie_word_embeddings": 1}, "tie_word_embeddings to be true or false, got 1"),
    "number": ({"rms_norm_eps": "tiny"}, "rms_norm_eps to be a positive number, got 'tiny'"),
    "number of 400 digits": ({"rms_norm_eps": 10**400}, "rms_norm_eps to be a positive number, got 10{400}"),
    "groups": ({"num_key_value_heads": 3}, "whole groups per kv head, got 4 heads and 3 kv"),
    "heads": ({"hidden_size": 66}, "hidden_size to be a multiple of 4 heads .* got 66"),
    "layer count": ({"layer_types": [FULL]}, "layer_types to have 3 entries"),
    "layer type": ({"layer_types": [FULL, FULL, "chunked_attention"]}, "layer_types of .* got 'chunked_attention'"),
    "no window": ({"layer_types": [SLIDING] * 3}, "sliding_window to be a whole number of at least 1, got None"),
    "end": ({"eos_token_id": "</s>"}, "eos_token_id to be a token id or a list of them, got '</s>'"),
    "end below 0": ({"eos_token_id": -1}, "eos_token_id to be a token id or a list of them, got -1"),
    "end of 32 bits": ({"eos_token_id": [2, 2**31]}, r"a token id or a list of them, got \[2, 2147483648\]"),
    "end of a flag": ({"eos_token_id": True}, "eos_token_id to be a token id or a list of them, got True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_the_decoder_lacks_is_named(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(tmp_path)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "config.json: expected JSON, got Expecting"),
        (b"[1]", r"config.json: expected a JSON object, got \[1\]"),
        (b'{"a":' * 200_000, "config.json: expected JSON, got .* while decoding a JSON"),
        (b'{"\xff": 1}', "config.json: expected UTF-8 text, got .* byte 0xff"),
    ],
    ids=["cut off", "no object", "too deep", "no UTF-8"],
)
def test_a_file_that_is_no_config(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_an_end_token_beyond_the_vocabulary_never_comes_and_is_no_mistake() -> None:
    assert model_config(LLAMA | {"eos_token_id": [2, 2**31 - 1]}).end_tokens == (2, 2**31 - 1)


def test_more_experts_a_token_than_there_are() -> None:
    fields = LLAMA | {"model_type": "gpt_oss", "num_local_experts": 3}
    with pytest.raises(ConfigError, match="num_experts_per_tok of at most 3, got 4"):
        model_config(fields)


# --- Against transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("name", [*FAMILIES, "gemma3_text"])
def test_end_tokens_that_a_file_leaves_out_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(name).get_text_config().eos_token_id
    fields = LLAMA | {"model_type": name} | ({"text_config": LLAMA} if name == "gemma3" else {})
    assert model_config(fields).end_tokens == (() if theirs is None else (theirs,))
    assert model_config(fields | {"eos_token_id": None}).end_tokens == ()


@pytest.mark.parity
@pytest.mark.parametrize("name", TINY)
def test_layers_and_rotations_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model_type, fields = TINY[name]
    theirs = transformers.AutoConfig.for_model(model_type, **fields)
    theirs.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    layer_types = getattr(theirs, "layer_types", None)
    if layer_types is not None:
        assert config.windows == tuple(theirs.sliding_window if kind == SLIDING else None for kind in layer_types)
    assert config.tied_embeddings == theirs.tie_word_embeddings
    model = transformers.AutoModelForCausalLM.from_config(theirs).model
    if hasattr(model.layers[0].self_attn, "scaling"):
        assert config.attention.scale == pytest.approx(model.layers[0].self_attn.scaling)
    rotary = model.rotary_emb
    for rope, begin in ((config.rope, "full_attention_"), (config.window_rope, "sliding_attention_")):
        begin = begin if hasattr(rotary, f"{begin}inv_freq") else ""
        expected = getattr(rotary, f"{begin}inv_freq").numpy()
        np.testing.assert_allclose(frequencies(rope, config.attention.head_dim), expected, rtol=2e-6)
        scaling = getattr(rotary, f"{begin}attention_scaling")
        assert attention_factor(rope) == pytest.approx(scaling)
