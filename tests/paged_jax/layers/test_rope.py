"""Rotary embeddings turn as their papers say: against a scalar oracle here, against transformers where installed."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rope_oracle

from paged_jax.layers import RopeConfig, Rotation, attention_factor, frequencies

HEAD_DIM = 16
FACTORS = {"short_factor": tuple(1 + 0.1 * i for i in range(6)), "long_factor": tuple(2.0 + i for i in range(6))}
LONG = {"factor": 8.0, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75, **FACTORS}
CONFIGS = {
    "default": RopeConfig(),
    "another base": RopeConfig(rope_theta=500.0),
    "partial": RopeConfig(partial_rotary_factor=0.5),
    "linear": RopeConfig("linear", factor=4.0),
    "llama3": RopeConfig(
        "llama3", 500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512
    ),
    "yarn": RopeConfig("yarn", factor=4.0, original_max_position_embeddings=2048),
    "yarn, not truncated": RopeConfig(
        "yarn", 150_000.0, factor=32.0, original_max_position_embeddings=4096, truncate=False
    ),
    "yarn, a ramp of no width": RopeConfig("yarn", factor=4.0, original_max_position_embeddings=2),
    "yarn with mscale": RopeConfig(
        "yarn", factor=4.0, original_max_position_embeddings=512, mscale=1.0, mscale_all_dim=0.5
    ),
    "yarn with its attention factor": RopeConfig(
        "yarn", factor=4.0, original_max_position_embeddings=512, attention_factor=0.75
    ),
    "longrope, short": RopeConfig("longrope", **LONG, context_length=64),
    "longrope, long": RopeConfig("longrope", **LONG, context_length=65),
    "interleaved": RopeConfig(interleaved=True),
    "interleaved and partial": RopeConfig(interleaved=True, partial_rotary_factor=0.5),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


EXPECTED_FACTORS = {
    "yarn": 0.1 * math.log(4) + 1,
    "yarn, not truncated": 0.1 * math.log(32) + 1,
    "yarn, a ramp of no width": 0.1 * math.log(4) + 1,
    "yarn with mscale": (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
    "yarn with its attention factor": 0.75,
    "longrope, short": math.sqrt(1 + math.log(8) / math.log(64)),
    "longrope, long": math.sqrt(1 + math.log(8) / math.log(64)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_and_factor_equal_the_oracle(name):
    config = CONFIGS[name]
    got = frequencies(config, HEAD_DIM)
    turned = int(HEAD_DIM * config.partial_rotary_factor)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [rope_oracle.frequency(config, i, turned) for i in range(turned // 2)], rtol=1e-7)
    assert attention_factor(config) == pytest.approx(EXPECTED_FACTORS.get(name, 1.0), rel=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_heads_turn_as_complex_numbers(name):
    config, positions = CONFIGS[name], np.asarray([0, 1, 5, 97, 700], np.int32)
    heads = np.random.default_rng(0).standard_normal((5, 3, HEAD_DIM)).astype(np.float32)
    got = jax.jit(lambda at, heads: Rotation.at(at, config, HEAD_DIM).rotate(heads))(positions, heads)
    expected = rope_oracle.rotate(heads, positions, config, EXPECTED_FACTORS.get(name, 1.0))
    np.testing.assert_allclose(got, expected, atol=2e-4)  # angles of 700 radians, in float32
    np.testing.assert_allclose(got[:3], expected[:3], atol=2e-6)


@every_config
def test_scores_depend_on_distance_alone(config):
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, HEAD_DIM)).astype(np.float32)

    def score(i, j):
        at = [Rotation.at(jnp.asarray([n]), config, HEAD_DIM) for n in (i, j)]
        return float(jnp.sum(at[0].rotate(q) * at[1].rotate(k)))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(9, 6)) > 1e-3


def test_the_rotation_keeps_the_dtype_and_turns_in_float32():
    heads = jnp.ones((2, 1, HEAD_DIM), jnp.bfloat16)
    rotation = Rotation.at(jnp.asarray([3, 1000]), RopeConfig(), HEAD_DIM)
    got = rotation.rotate(heads)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, rotation.rotate(heads.astype(jnp.float32)).astype(jnp.bfloat16))


def test_a_rotation_passes_through_jit_scan_and_where():
    """Two kinds of layers in one scan: each picks its rotation by a traced flag."""
    slow, fast = (Rotation.at(jnp.arange(4), RopeConfig(rope_theta=base), HEAD_DIM) for base in (1e6, 1e4))
    heads = jnp.ones((4, 2, HEAD_DIM))

    @jax.jit
    def run(is_fast):
        def body(heads, flag):
            rotation = jax.tree.map(lambda a, b: jnp.where(flag, a, b), fast, slow)
            return rotation.rotate(heads), None

        return jax.lax.scan(body, heads, is_fast)[0]

    np.testing.assert_allclose(run(jnp.asarray([True, False])), slow.rotate(fast.rotate(heads)), atol=1e-6)


# --- config.json, both styles


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "layer_type", "expected"),
    [
        ({}, None, RopeConfig()),
        ({"rope_theta": 5e5, "rope_scaling": None}, None, RopeConfig(rope_theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, None, RopeConfig(rope_theta=5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}, "max_position_embeddings": 131072},
            None,
            RopeConfig("llama3", 5e5, **LLAMA3),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None, RopeConfig("linear", factor=2.0)),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 4096},
            "full_attention",
            RopeConfig("yarn", factor=4.0, original_max_position_embeddings=4096),
        ),
        (
            {
                "rope_scaling": {"type": "su", "short_factor": [1, 2], "long_factor": [3, 4]},
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "partial_rotary_factor": 0.75,
            },
            None,
            RopeConfig(
                "longrope",
                factor=32.0,
                original_max_position_embeddings=4096,
                partial_rotary_factor=0.75,
                short_factor=(1, 2),
                long_factor=(3, 4),
            ),
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            "sliding_attention",
            RopeConfig(),
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            "full_attention",
            RopeConfig("linear", 1e6, factor=8.0),
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "full_attention",
            RopeConfig("linear", 1e6, factor=8.0),
        ),
    ],
)
def test_both_styles_of_config_are_read(config, layer_type, expected):
    got = RopeConfig.from_hf(config, layer_type)
    assert got == expected
    hash(got)


def test_the_context_to_serve_chooses_the_long_factors():
    config = {
        "rope_scaling": {"type": "longrope", **FACTORS},
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
    }
    long = RopeConfig.from_hf(config, context_length=512)
    np.testing.assert_array_equal(frequencies(long, HEAD_DIM), frequencies(CONFIGS["longrope, long"], HEAD_DIM))


# --- mistakes


def test_a_rope_type_that_is_not_supported_is_named():
    with pytest.raises(NotImplementedError, match=r"expected one of default, linear.* got 'dynamic'"):
        RopeConfig.from_hf({"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    with pytest.raises(NotImplementedError, match=r"expected one of default, linear.* got 'mrope'"):
        frequencies(RopeConfig("mrope"), HEAD_DIM)
    with pytest.raises(NotImplementedError, match=r"expected one of default, linear.* got \['linear'\]"):
        RopeConfig.from_hf({"rope_scaling": {"type": ["linear"], "factor": 2.0}})


def test_a_layer_type_that_the_file_lacks_is_named():
    nested = {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}
    with pytest.raises(ValueError, match="layer_type: expected one of full_attention, sliding_attention, got None"):
        RopeConfig.from_hf(nested)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RopeConfig("linear"), "linear rope: expected factor, got None"),
        (RopeConfig("llama3", factor=8.0), "expected low_freq_factor, high_freq_factor, original_max"),
        (RopeConfig("yarn", factor=8.0), "expected original_max_position_embeddings, got None"),
        (RopeConfig("longrope", original_max_position_embeddings=8), "expected short_factor, got None"),
        (dataclasses.replace(CONFIGS["longrope, long"], long_factor=(1.0,)), "long_factor: expected 6 numbers.* got 1"),
        (RopeConfig(partial_rotary_factor=0.3125), "expected an even number of elements.* got 5"),
        (RopeConfig(partial_rotary_factor=0.05), "expected an even number of elements.* got 0"),
    ],
)
def test_a_config_that_does_not_fit_its_type_or_head_says_why(config, message):
    with pytest.raises(ValueError, match=message):
        frequencies(config, HEAD_DIM)


NO_NUMBERS = ["4", True, math.nan, math.inf, -math.inf, 10**400, [2.0]]
NOT_POSITIVE = [*NO_NUMBERS, 0, -1.0]
WRONG = {
    "rope_theta": [*NOT_POSITIVE, 1, None],
    "partial_rotary_factor": [*NOT_POSITIVE, 1.5, None],
    "factor": NOT_POSITIVE,
    "original_max_position_embeddings": [*NOT_POSITIVE, 1],
    "low_freq_factor": NOT_POSITIVE,
    "high_freq_factor": NOT_POSITIVE,
    "beta_fast": [*NOT_POSITIVE, None],
    "beta_slow": [*NOT_POSITIVE, None],
    "truncate": ["no", 1, None],
    "mscale": [*NO_NUMBERS, -1],
    "mscale_all_dim": [*NO_NUMBERS, -1],
    "short_factor": [5, "12", [1.0], (), *((1.0, value) for value in NOT_POSITIVE)],
    "long_factor": [5, "12", [1.0], (), *((1.0, value) for value in NOT_POSITIVE)],
    "attention_factor": NOT_POSITIVE,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_field_that_cannot_be_right_is_refused_when_it_is_made(name):
    for value in WRONG[name]:
        with pytest.raises(ValueError, match=rf"^{name}: expected .*, got {re.escape(repr(value))}$"):
            RopeConfig(**{name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor: .* above low_freq_factor 4.0, got 4.0"),
        ({"beta_slow": 40.0}, "beta_fast: expected a number of at least beta_slow 40.0, got 32.0"),
    ],
)
def test_a_ramp_that_runs_backwards_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**fields)


def test_numpys_numbers_are_numbers():
    config = RopeConfig("linear", np.float32(500), factor=np.int64(4))
    np.testing.assert_array_equal(frequencies(config, HEAD_DIM), frequencies(RopeConfig("linear", 500, factor=4), 16))


YARN, LONGROPE = {"rope_type": "yarn"}, {"rope_type": "longrope", "short_factor": [1.0, 1.5]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": 0}, "rope_theta: expected .* got 0"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta: expected .* got 'x'"),
        ({"rope_local_base_freq": 0}, "rope_local_base_freq: expected .* got 0"),
        ({"rope_scaling": LONGROPE | {"long_factor": 5}}, "long_factor: expected .* got 5"),
        ({"rope_scaling": LONGROPE | {"long_factor": "12"}}, "long_factor: expected .* got '12'"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1, 0]}}, r"long_factor: expected .* got \(1, 0\)"),
        ({"rope_scaling": YARN, "max_position_embeddings": "x"}, "max_position_embeddings: expected .* got 'x'"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 0}, "max_position_embeddings": 64},
            "original_max_position_embeddings: expected .* got 0",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": "x", "max_position_embeddings": 64},
            "original_max_position_embeddings: expected .* got 'x'",
        ),
        ({"rope_scaling": "linear"}, "rope_parameters: expected an object, got 'linear'"),
        ({"rope_parameters": {"sliding_attention": 5, "full_attention": {}}}, "expected an object, got 5"),
    ],
)
def test_a_file_with_fields_that_cannot_be_right_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(config, "sliding_attention")


@pytest.mark.parametrize("rope_type", ["yarn", "longrope"])
def test_a_factor_that_cannot_be_derived_says_why(rope_type):
    with pytest.raises(ValueError, match=f"{rope_type} rope: expected factor, original_max_position_embeddings"):
        attention_factor(RopeConfig(rope_type))


@pytest.mark.parametrize("shape", [(3, 2, HEAD_DIM), (4, HEAD_DIM), (4, 2, HEAD_DIM - 2)])
def test_heads_that_do_not_fit_the_rotation_are_refused(shape):
    with pytest.raises(ValueError, match=r"heads: expected shape \(4, heads, head_dim\).* at least 16, got"):
        Rotation.at(jnp.arange(4), RopeConfig(), HEAD_DIM).rotate(jnp.ones(shape))


# --- against transformers


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}
FAMILIES = {
    "llama": ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama, linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama 3": ("LlamaConfig", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}),
    "llama 3, older style": ("LlamaConfig", {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}),
    "qwen 3, yarn": (
        "Qwen3Config",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
            },
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "phi 3, longrope": (
        "Phi3Config",
        {
            "pad_token_id": 0,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": list(FACTORS["short_factor"]),
                "long_factor": list(FACTORS["long_factor"]),
            },
        },
    ),
}


@pytest.mark.parity
@pytest.mark.parametrize("length", [40, 100])
@pytest.mark.parametrize("family", FAMILIES)
def test_cosine_and_sine_equal_transformers(family, length):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    name, fields = FAMILIES[family]
    config = getattr(transformers, name)(**SIZES, **fields)
    module = __import__(f"transformers.models.{config.model_type}.modeling_{config.model_type}", fromlist=["x"])
    embedding = getattr(module, name.replace("Config", "RotaryEmbedding"))(config)
    cos, sin = (x[0].numpy() for x in embedding(torch.zeros(1, length, 64), torch.arange(length)[None]))
    for read in (config.to_dict(), SIZES | {"max_position_embeddings": config.max_position_embeddings} | fields):
        rope = RopeConfig.from_hf(read, context_length=length)
        ours = Rotation.at(jnp.arange(length), rope, 16)
        pairs = ours.cos.shape[1]
        np.testing.assert_allclose(ours.cos, cos[:, :pairs], atol=1e-5)
        np.testing.assert_allclose(ours.sin, sin[:, :pairs], atol=1e-5)
        assert cos.shape[1] in (pairs, 2 * pairs)  # gpt-oss does not repeat them


@pytest.mark.parity
@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_both_rotations_of_gemma_3_equal_transformers(layer_type):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=16, num_hidden_layers=6, **older)
    positions = torch.arange(40)[None]
    cos, _ = Gemma3RotaryEmbedding(config)(torch.zeros(1, 40, 64), positions, layer_type)
    for read in (config.to_dict(), older):
        ours = Rotation.at(jnp.arange(40), RopeConfig.from_hf(read, layer_type), 16)
        np.testing.assert_allclose(ours.cos, cos[0, :, :8].numpy(), atol=1e-5)
