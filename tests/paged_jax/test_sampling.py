"""Choosing the next token: greedy by rule, sampled by the distribution that the settings describe."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import Sampler, greedy

VOCABULARY, ROWS, DRAWS = 13, 3, 4096
LOGITS = np.random.default_rng(0).normal(scale=1.5, size=(ROWS, VOCABULARY)).astype(np.float32)

# (temperature, top_k, top_p); the hotter, the flatter: every kept token comes, and a missing one shows
SETTINGS = [
    (1.0, None, 1.0),
    (0.7, None, 1.0),
    (2.5, VOCABULARY, 1.0),
    (2.5, 10**6, 1.0),
    (4.0, 4, 1.0),
    (4.0, None, 0.8),
    (2.5, None, 0.3),
    (4.0, 6, 0.7),
    (4.0, 5, 0.999),
]


def distribution(logits, temperature=1.0, top_k=None, top_p=1.0):
    """The probabilities of one row's tokens, in float64, for logits without ties."""
    scaled = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-scaled)[:top_k]
    probabilities = np.exp(scaled[order] - scaled.max())
    probabilities /= probabilities.sum()
    kept = 1
    while probabilities[:kept].sum() < top_p and kept < len(order):
        kept += 1
    result = np.zeros(len(scaled))
    result[order[:kept]] = probabilities[:kept] / probabilities[:kept].sum()
    return result


@functools.partial(jax.jit, static_argnames=("sampler", "draws"))
def draw(sampler, logits, seed=0, draws=DRAWS):
    """[draws, rows] tokens, each of a key of its own."""
    return jax.vmap(functools.partial(sampler, logits))(jax.random.split(jax.random.key(seed), draws))


# --- Greedy


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_greedy_takes_the_lowest_of_the_likeliest(dtype):
    logits = jnp.array([[0, 3, 3, 1], [-1, -1, -1, -1], [1, 2, 3, 4], [-jnp.inf, -jnp.inf, -5, -jnp.inf]], dtype)
    tokens = greedy(logits)
    assert tokens.tolist() == [1, 0, 3, 2]
    assert tokens.dtype == jnp.int32


def test_greedy_needs_no_key_and_ignores_one():
    np.testing.assert_array_equal(greedy(LOGITS), LOGITS.argmax(-1))
    np.testing.assert_array_equal(greedy(LOGITS, jax.random.key(0)), LOGITS.argmax(-1))


# --- The distribution


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_tokens_come_as_often_as_the_distribution_says(temperature, top_k, top_p):
    """Tokens outside the kept set never come; the others within 5 standard deviations of a binomial count."""
    tokens = np.asarray(draw(Sampler(temperature, top_k, top_p), LOGITS))
    for row in range(ROWS):
        expected = distribution(LOGITS[row], temperature, top_k, top_p)
        frequency = np.bincount(tokens[:, row], minlength=VOCABULARY) / DRAWS
        assert (frequency[expected == 0] == 0).all()
        assert (frequency[expected > 0.01] > 0).all()
        bound = 5 * np.sqrt(expected * (1 - expected) / DRAWS) + 1e-12
        np.testing.assert_array_less(np.abs(frequency - expected), bound)


def test_top_p_keeps_the_token_that_reaches_p_and_no_more():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))  # exact in binary
    for top_p, kept in ((0.49, {0}), (0.51, {0, 1}), (0.8, {0, 1, 2, 3})):  # the last two are equally likely
        assert set(np.asarray(draw(Sampler(top_p=top_p), logits)).flat) == kept, top_p


def test_tokens_as_likely_as_the_last_kept_are_kept_too():
    logits = jnp.array([[2.0, 1.0, 1.0, 0.0, 1.0]])
    assert set(np.asarray(draw(Sampler(top_k=2), logits)).flat) == {0, 1, 2, 4}


def test_tokens_ruled_out_by_the_model_never_come():
    logits = jnp.array([[0.0, -jnp.inf, 0.0, -jnp.inf]])
    for sampler in (Sampler(), Sampler(3.0, 3, 0.99)):
        assert set(np.asarray(draw(sampler, logits)).flat) == {0, 2}


def test_a_row_is_drawn_for_by_its_own_logits():
    """A row as good as certain beside rows that are wide open: neither changes the other's limits."""
    logits = np.zeros((ROWS, VOCABULARY), np.float32)
    logits[1, 7] = 100
    tokens = np.asarray(draw(Sampler(top_p=0.9), logits))
    assert set(tokens[:, 1]) == {7}
    assert all(len(set(tokens[:, row])) == VOCABULARY for row in (0, 2))


# --- Greedy as a limit


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(5.0, top_k=1),
        Sampler(top_p=1e-9),
        Sampler(1e-3),
        Sampler(1e-6, 5, 0.9),
        Sampler(1e-30),
        Sampler(1e-37),
        Sampler(top_p=1e-320),
    ],
    ids=repr,
)
def test_one_kept_token_or_a_cold_sampler_is_greedy(sampler):
    logits = np.random.default_rng(1).permutation(60 * VOCABULARY).reshape(60, VOCABULARY).astype(np.float32)
    np.testing.assert_array_equal(draw(sampler, logits, draws=20), np.tile(logits.argmax(-1), (20, 1)))


# --- Keys and settings


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7, 8, 0.9)], ids=repr)
def test_a_key_decides_the_tokens(sampler):
    logits = np.tile(LOGITS, (50, 1))
    tokens = [np.asarray(sampler(logits, jax.random.key(seed))) for seed in (3, 3, 4)]
    np.testing.assert_array_equal(tokens[0], tokens[1])
    assert (tokens[0] != tokens[2]).any()
    assert tokens[0].dtype == np.int32
    assert tokens[0].shape == (150,)


def test_rows_with_equal_logits_draw_apart():
    assert len(np.unique(Sampler()(jnp.zeros((200, VOCABULARY)), jax.random.key(0)))) == VOCABULARY


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7, 5), Sampler(1.0, None, 0.8)], ids=repr)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_logits_are_computed_in_float32(sampler, dtype):
    logits = jnp.asarray(LOGITS, dtype)
    np.testing.assert_array_equal(draw(sampler, logits), draw(sampler, logits.astype(jnp.float32)))


def test_samplers_with_equal_settings_are_one():
    assert Sampler(0.5, 3, 0.9) == Sampler(temperature=0.5, top_k=3, top_p=0.9)
    assert hash(Sampler(0.5, 3, 0.9)) == hash(Sampler(0.5, 3, 0.9))
    assert len({Sampler(), Sampler(0.5), Sampler(top_k=3), Sampler(top_p=0.9), Sampler(1.0)}) == 4
    traces = []

    @functools.partial(jax.jit, static_argnames="sampler")
    def traced(logits, key, sampler):
        traces.append(sampler)
        return sampler(logits, key)

    for seed in range(3):
        traced(LOGITS, jax.random.key(seed), Sampler(0.5, 3, 0.9))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (0, 0.0, -1.0, math.nan, math.inf, -math.inf)),
        *(("temperature", value) for value in (5e-324, 1e-44, 1e39)),  # zero, subnormal, infinite in float32
        *(("top_k", value) for value in (0, -1, True, 2.5, 2.0, math.nan, math.inf, "x")),
        *(("top_p", value) for value in (0, -0.1, 1.1, 2, math.nan, math.inf)),
    ],
)
def test_a_setting_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        Sampler(**{name: value})


def test_sampling_without_a_key_is_refused():
    with pytest.raises(ValueError, match=r"key: sampling needs a jax\.random key"):
        Sampler()(LOGITS, None)
