"""A row whose logits leave no token to choose ends by itself and is told of; the others do not notice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jax.tree_util import Partial

from paged_jax import BlockTable, PagedCache, Sampler, decode, greedy, sharding

ROWS, VOCABULARY, PAGES, PAGE_SIZE, BLOCKS = 3, 11, 12, 2, 4
SICK, HEALTHY = 1, [0, 2]  # rows
AT = 2  # the position whose logits are spoilt, of one row alone
STEPS = 5
BAD = {
    "all NaN": jnp.full(VOCABULARY, jnp.nan),
    "one NaN": jnp.zeros(VOCABULARY).at[7].set(jnp.nan),
    "NaN among -inf": jnp.full(VOCABULARY, -jnp.inf).at[7].set(jnp.nan),
    "one +inf": jnp.zeros(VOCABULARY).at[7].set(jnp.inf),
    "all -inf": jnp.full(VOCABULARY, -jnp.inf),
}
MASKED = jnp.full(VOCABULARY, -jnp.inf).at[4].set(-1e30)  # one token that can be drawn
SAMPLER = Sampler(temperature=5.0, top_k=6, top_p=0.9)
NEVER = -1  # a position
LOGITS = jnp.asarray(np.random.default_rng(0).standard_normal((37, VOCABULARY)), jnp.float32)


def forward(spoilt, at, tokens, step, total):
    """Logits go by the sum of a row's tokens, which is what the cache holds; the sick row's are spoilt once."""
    total = total.at[step.rows].add(tokens, mode="drop")
    logits = LOGITS.astype(spoilt.dtype)[total % len(LOGITS)]
    is_spoilt = (step.rows == SICK) & (step.positions == at)
    return jnp.where(is_spoilt[:, None], spoilt[None], logits), total


def run(spoilt, at=AT, *, sample=greedy, max_new_tokens=STEPS, state=None, dtype=jnp.float32):
    table = BlockTable.create(PAGES, PAGE_SIZE, ROWS, BLOCKS)
    state = state or (jnp.zeros(ROWS, jnp.int32), table, jnp.array([3, 5, 8]), jnp.ones(ROWS, bool))
    return decode(
        Partial(forward, spoilt.astype(dtype), at),
        *state,
        max_new_tokens=max_new_tokens,
        sample=sample,
        key=jax.random.key(3),
    )


def assert_same(got, expected, rows=...):
    for name in ("tokens", "num_tokens", "active", "finite", "cache"):
        np.testing.assert_array_equal(getattr(got, name)[rows], getattr(expected, name)[rows])


@pytest.mark.parametrize("sample", [greedy, SAMPLER], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", BAD)
def test_the_row_ends_without_a_token_and_the_others_go_on(kind, sample):
    result, well = run(BAD[kind], sample=sample).check(), run(BAD[kind], NEVER, sample=sample)
    np.testing.assert_array_equal(result.finite, [True, False, True])
    np.testing.assert_array_equal(result.active, [True, False, True])
    np.testing.assert_array_equal(result.num_tokens, [STEPS, AT, STEPS])
    np.testing.assert_array_equal(result.tokens[SICK], [*well.tokens[SICK, :AT], *[-1] * (STEPS - AT)])
    assert (np.asarray(well.finite) & np.asarray(well.active)).all()
    if sample is greedy:
        assert_same(result, well, np.array(HEALTHY))
    else:  # the key is folded with the tokens of the whole table, of which there are fewer from then on
        np.testing.assert_array_equal(result.tokens[:, : AT + 1][np.array(HEALTHY)], well.tokens[HEALTHY, : AT + 1])


def test_the_table_and_the_cache_hold_what_the_last_step_read():
    result, before = run(BAD["one NaN"]), run(BAD["one NaN"], max_new_tokens=AT)
    assert before.finite.all()
    np.testing.assert_array_equal(result.table.lengths, [STEPS, AT + 1, STEPS])
    assert result.cache[SICK] == before.cache[SICK] + before.tokens[SICK, -1]
    result.table.check()
    freed = result.table.release(~result.finite)
    freed.check()
    assert int(freed.num_free) > int(result.table.num_free)


def test_tokens_that_cannot_be_drawn_end_nothing():
    result = run(MASKED)
    assert result.finite.all()
    assert result.active.all()
    assert result.tokens[SICK, AT] == 4


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_logits_may_have_any_dtype(dtype):
    np.testing.assert_array_equal(run(BAD["all NaN"], dtype=dtype).finite, [True, False, True])
    assert run(jnp.full(VOCABULARY, jnp.finfo(dtype).max), dtype=dtype).finite.all()


def test_a_stop_token_and_a_row_without_one_do_not_meet():
    """A maximum over NaN may be any token, the stop token too: what ended the row is still told apart."""
    table = BlockTable.create(PAGES, PAGE_SIZE, ROWS, BLOCKS)
    result = decode(
        Partial(forward, BAD["all NaN"], 0),
        jnp.zeros(ROWS, jnp.int32),
        table,
        jnp.array([3, 5, 8]),
        jnp.ones(ROWS, bool),
        max_new_tokens=2,
        stop_tokens=range(VOCABULARY),
    )
    np.testing.assert_array_equal(result.num_tokens, [1, 0, 1])
    np.testing.assert_array_equal(result.finite, [True, False, True])
    assert not result.active.any()


def test_going_on_leaves_the_row_out():
    """`finite` tells of the call's own steps."""
    first = run(BAD["one +inf"], max_new_tokens=AT + 1)
    np.testing.assert_array_equal(first.finite, [True, False, True])
    state = (first.cache, first.table, first.tokens[:, -1], first.active)
    rest = run(BAD["one +inf"], max_new_tokens=STEPS - AT - 1, state=state)
    assert rest.finite.all()
    whole = run(BAD["one +inf"])
    np.testing.assert_array_equal(jnp.concatenate([first.tokens, rest.tokens], axis=1), whole.tokens)
    np.testing.assert_array_equal(rest.active, whole.active)
    np.testing.assert_array_equal(rest.table.lengths, whole.table.lengths)


def test_rows_without_tokens_and_refused_steps_are_not_judged():
    """Their logits are padding: whatever they are, nothing ends."""

    def spoilt(_tokens, step, calls):
        is_padding = step.rows == ROWS
        return jnp.where(is_padding[:, None], jnp.nan, jnp.ones((ROWS, VOCABULARY))), calls + 1

    table = BlockTable.create(2, 1, ROWS, BLOCKS)
    result = decode(
        spoilt, jnp.int32(0), table, jnp.zeros(ROWS, jnp.int32), jnp.array([True, False, False]), max_new_tokens=4
    )
    assert not result.ok
    assert result.finite.all()
    np.testing.assert_array_equal(result.active, [True, False, False])


def test_the_loop_ends_with_its_last_row():
    def spoilt(tokens, _step, calls):
        return jnp.full((tokens.size, VOCABULARY), jnp.nan), calls + 1

    table = BlockTable.create(PAGES, PAGE_SIZE, ROWS, BLOCKS)
    result = decode(spoilt, jnp.int32(0), table, jnp.zeros(ROWS, jnp.int32), jnp.ones(ROWS, bool), max_new_tokens=9)
    assert result.cache == 1
    assert not result.finite.any()
    assert not result.num_tokens.any()


def test_on_a_mesh_rows_are_judged_by_their_shard():
    mesh = sharding.make_mesh(dp=1)
    tables = sharding.create_table(mesh, PAGES, PAGE_SIZE, ROWS, BLOCKS, rows="dp")
    by_row = PartitionSpec("dp")
    specs = sharding.result_specs(PagedCache.create(1, PAGES, PAGE_SIZE, 1, 16), tables, rows="dp")
    assert specs.finite == specs.active == by_row

    def of_shard(table, tokens):
        state = (jnp.zeros(ROWS, jnp.int32), table, tokens, jnp.ones(ROWS, bool))
        result = run(BAD["one NaN"], state=state)
        return result.table, result.finite, result.tokens

    run_on_mesh = sharding.on_mesh(
        of_shard, mesh, in_specs=(specs.table, by_row), out_specs=(specs.table, specs.finite, specs.tokens), rows="dp"
    )
    _, finite, tokens = jax.jit(run_on_mesh)(tables, jnp.array([3, 5, 8]))
    np.testing.assert_array_equal(finite, [True, False, True])
    np.testing.assert_array_equal(tokens, run(BAD["one NaN"]).tokens)
