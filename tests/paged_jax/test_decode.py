"""The compiled decode loop does what a plain loop over steps does, and loses nothing when it has to stop."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from jax.tree_util import Partial
from tables import release

from paged_jax import BlockTable, OutOfPages, PagedCache, Sampler, decode, greedy, paged_attention

VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM = 23, 24, 4, 2, 16
PAGES, PAGE_SIZE, BLOCKS = 17, 4, 6
LENGTHS = (6, 1, 0, 11)  # tokens in the cache at first, of each row
ROWS = len(LENGTHS)
ALL = tuple(range(ROWS))
NEWEST = (3, 1, 4, 15)
STEPS = 6
SAMPLER = Sampler(temperature=20.0, top_k=9)  # hot enough for these logits to leave a choice


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def weights(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "position": (BLOCKS * PAGE_SIZE, WIDTH),
        "q": (WIDTH, HEADS * DIM),
        "k": (WIDTH, KV_HEADS * DIM),
        "v": (WIDTH, KV_HEADS * DIM),
        "out": (HEADS * DIM, VOCABULARY),
    }
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def attend(weights, tokens, step, cache):
    """One layer of attention over the cache, whose logits depend on every token so far and on where it stands."""
    x = weights["embedding"][tokens] + weights["position"][step.positions]
    q, k, v = ((x @ weights[name]).reshape(len(tokens), -1, DIM) for name in "qkv")
    cache = cache.write(0, k, v, step.slots)
    y = paged_attention(q, cache, step.table, query_lengths=step.query_lengths, implementation="xla")
    return y.reshape(len(tokens), -1) @ weights["out"], cache


@dataclasses.dataclass
class Traced:
    """`attend`, with a count of how often it was traced."""

    count: int = 0

    def __call__(self, weights, tokens, step, cache):
        self.count += 1
        return attend(weights, tokens, step, cache)

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return self is other


def bound(seed=0, forward=attend):
    return Partial(forward, weights(seed))


@functools.partial(jax.jit, static_argnames="size")
def one_step(weights, cache, table, tokens, num_tokens, size=None):
    table, step, ok = table.step(num_tokens, size=size)
    logits, cache = attend(weights, tokens, step, cache)
    return logits, cache, table, ok


def prompted(lengths=LENGTHS, *, pages=PAGES, prompts=ALL, seed=0):
    """A cache and a table whose row r holds the first lengths[r] tokens of prompt prompts[r]; all else is NaN."""
    cache = PagedCache.create(1, pages, PAGE_SIZE, KV_HEADS, DIM, jnp.float32)
    cache = dataclasses.replace(cache, k=jnp.full_like(cache.k, jnp.nan), v=jnp.full_like(cache.v, jnp.nan))
    table = BlockTable.create(pages, PAGE_SIZE, len(lengths), BLOCKS)
    texts = np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, BLOCKS * PAGE_SIZE))
    packed = np.concatenate([texts[prompt, :n] for prompt, n in zip(prompts, lengths, strict=False)])
    tokens = jnp.asarray(np.pad(packed, (0, 64 - packed.size)), jnp.int32)
    _, cache, table, ok = one_step(weights(seed), cache, table, tokens, jnp.array(lengths, jnp.int32), size=64)
    assert ok
    return cache, table


def ints(*values):
    return jnp.array(values, jnp.int32)


def on(*rows, of=ROWS):
    return jnp.array([row in rows for row in range(of)])


def run(cache, table, tokens=NEWEST, active=ALL, *, forward=None, max_new_tokens=STEPS, **options):
    return decode(
        bound() if forward is None else forward,
        cache,
        table,
        jnp.asarray(tokens, jnp.int32),
        on(*active, of=len(tokens)),
        max_new_tokens=max_new_tokens,
        **options,
    )


def by_hand(cache, table, tokens=NEWEST, active=ALL, *, max_new_tokens=STEPS, stop_tokens=(), seed=0):
    """Greedy decoding as plain Python: a list of tokens for each row, and the table."""
    newest, going = list(tokens), set(active)
    rows = [[] for _ in newest]
    for _ in range(max_new_tokens):
        num_tokens = ints(*(row in going for row in range(len(newest))))
        logits, cache, table, ok = one_step(weights(seed), cache, table, ints(*newest), num_tokens)
        assert ok
        for row in sorted(going):
            newest[row] = int(np.argmax(logits[row]))
            rows[row].append(newest[row])
        going -= {row for row in going if newest[row] in stop_tokens}
    return rows, table


def generated(result):
    """Each row's tokens as a list; −1 stands after a row's end and nowhere else."""
    rows = []
    for tokens, count in zip(np.asarray(result.tokens), np.asarray(result.num_tokens), strict=True):
        assert (tokens[:count] >= 0).all()
        assert (tokens[count:] == -1).all()
        rows.append(tokens[:count].tolist())
    return rows


def joined(*results):
    return [list(itertools.chain(*parts)) for parts in zip(*map(generated, results), strict=True)]


def assert_same_bits(got, expected):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# --- What it computes


@pytest.mark.parametrize("active", [ALL, (0, 3), (2,), ()])
def test_the_loop_equals_a_plain_loop(active):
    expected, table = by_hand(*prompted(), active=active)
    result = run(*prompted(), active=active)
    assert generated(result) == expected
    assert [len(row) for row in expected] == [STEPS * (row in active) for row in ALL]
    assert result.ok
    np.testing.assert_array_equal(result.active, on(*active))
    assert_same_bits(result.table, table)
    result.table.check()
    assert result.check() is result
    assert result.tokens.shape == (ROWS, STEPS)
    assert {array.dtype for array in (result.tokens, result.num_tokens)} == {jnp.dtype("int32")}


def test_the_tokens_are_not_all_alike():
    """So that the comparisons of this file mean something."""
    rows = generated(run(*prompted()))
    assert min(len(set(row)) for row in rows) >= 3
    assert len({tuple(row) for row in rows}) == ROWS
    assert rows != generated(run(*prompted(lengths=(6, 1, 0, 10))))


@pytest.mark.parametrize("row", ALL)
def test_a_row_of_a_batch_equals_the_row_alone(row):
    alone = run(*prompted((LENGTHS[row],), prompts=[row]), (NEWEST[row],), (0,))
    assert generated(alone) == [generated(run(*prompted()))[row]]


def test_inactive_rows_are_untouched():
    cache, table = prompted()
    before = [np.array(array) for array in (*cache.read(0, table), table.pages, table.lengths)]
    result = run(cache, table, active=(1, 3))
    after = [np.array(array) for array in (*result.cache.read(0, result.table), result.table.pages)]
    for row in (0, 2):
        assert (np.asarray(result.tokens[row]) == -1).all()
        for ours, theirs in zip(after, before[:3], strict=True):
            np.testing.assert_array_equal(ours[row], theirs[row])
    np.testing.assert_array_equal(result.table.lengths, before[3] + STEPS * np.array([0, 1, 0, 1]))


def test_a_row_stops_at_its_first_stop_token_and_the_others_go_on():
    free = generated(run(*prompted()))
    stop_tokens = (free[0][4], free[3][0])
    result = run(*prompted(), stop_tokens=stop_tokens)
    expected, table = by_hand(*prompted(), stop_tokens=stop_tokens)
    assert generated(result) == expected
    assert all(len(row) == STEPS or row[-1] in stop_tokens for row in expected)
    assert len({len(row) for row in expected}) >= 3  # one met none, the others stopped apart
    assert {1, STEPS} <= {len(row) for row in expected}
    np.testing.assert_array_equal(result.active, [len(row) == STEPS for row in expected])
    np.testing.assert_array_equal(result.table.lengths, np.add(LENGTHS, [len(row) for row in expected]))
    assert_same_bits(result.table, table)


def test_a_stop_token_in_the_prompt_stops_nothing():
    assert generated(run(*prompted(), stop_tokens=(NEWEST[0], 99)))[0][:1] == generated(run(*prompted()))[0][:1]


@pytest.mark.parametrize(
    ("pages", "stop_tokens", "steps"),
    [(PAGES, (), STEPS), (PAGES, range(VOCABULARY), 1), (2, (), 2)],
    ids=["to the end", "all rows stop", "a step is refused"],
)
def test_the_loop_runs_no_longer_than_it_must(pages, stop_tokens, steps):
    """The cache counts the calls of the forward; of a refused step there is one at most."""

    def forward(tokens, _step, calls):
        return jnp.zeros((tokens.size, VOCABULARY)), calls + 1

    table = BlockTable.create(pages, 1, 1, BLOCKS)
    result = run(jnp.int32(0), table, (1,), (0,), forward=forward, stop_tokens=stop_tokens)
    assert result.num_tokens.tolist() == [steps]
    assert result.cache in (steps, steps + (not result.ok))


@pytest.mark.parametrize(("max_new_tokens", "active"), [(0, ALL), (STEPS, ())])
def test_nothing_to_do_changes_nothing(max_new_tokens, active):
    result = run(*prompted(), active=active, max_new_tokens=max_new_tokens)
    assert result.tokens.shape == (ROWS, max_new_tokens)
    assert generated(result) == [[]] * ROWS
    assert result.ok
    np.testing.assert_array_equal(result.active, on(*active))
    assert_same_bits((result.cache, result.table), prompted())


@pytest.mark.parametrize("sample", [greedy, SAMPLER], ids=["greedy", "sampled"])
def test_two_calls_of_three_equal_one_of_six(sample):
    options = {"sample": sample, "key": jax.random.key(5)}
    whole = run(*prompted(), **options)
    first = run(*prompted(), max_new_tokens=3, **options)
    second = run(first.cache, first.table, first.tokens[:, -1], max_new_tokens=3, **options)
    assert joined(first, second) == generated(whole)
    assert_same_bits(second.table, whole.table)
    if sample is not greedy:
        others = [run(*prompted()), run(*prompted(), sample=sample, key=jax.random.key(6))]
        assert generated(whole) not in [generated(other) for other in others]


def test_stopped_rows_stay_stopped_over_two_calls():
    stop_tokens = (generated(run(*prompted()))[0][1], 99)
    whole = run(*prompted(), stop_tokens=stop_tokens)
    first = run(*prompted(), max_new_tokens=3, stop_tokens=stop_tokens)
    second = decode(
        bound(),
        first.cache,
        first.table,
        first.tokens[:, -1],
        first.active,
        max_new_tokens=3,
        stop_tokens=stop_tokens,
    )
    assert joined(first, second) == generated(whole)


def draw(logits, key):
    return jax.random.randint(key, logits.shape[:1], 0, 2**30)


def test_every_step_and_every_key_draws_anew():
    drawn = [np.asarray(run(*prompted(), sample=draw, key=jax.random.key(seed)).tokens) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert len(np.unique(np.concatenate([drawn[0], drawn[2]]))) == 2 * ROWS * STEPS


def test_sampling_without_a_key_is_refused():
    with pytest.raises(ValueError, match="key: sampling needs"):
        run(*prompted(), sample=SAMPLER)


# --- Running out


def exhausted(active=(0, 3), idle=1, **options):
    """Rows 0 and 3 grow until the pool is full; the idle row holds pages that could be freed.

    Rows 0, 1 and 3 take 2 + 1 + 3 of 7 pages. Row 3 fills its last after one token and takes the seventh; row 0 fills
    its last after two and finds none.
    """
    assert LENGTHS[idle] > 0
    return run(*prompted(pages=7), active=active, **options)


def test_a_refused_step_changes_nothing_and_keeps_the_tokens_so_far():
    result, before = exhausted(), exhausted(max_new_tokens=2)
    assert not result.ok
    assert before.ok
    assert generated(result) == generated(before)
    assert [len(row) for row in generated(result)] == [2, 0, 0, 2]
    assert_same_bits((result.cache, result.table, result.active), (before.cache, before.table, before.active))
    result.table.check()


def test_running_out_is_an_error_that_names_the_counts_and_keeps_the_result():
    result = exhausted()
    with pytest.raises(OutOfPages, match=r"1 rows? need.*\b0 of 7 pages are free.*\b4 generated tokens") as caught:
        result.check()
    assert caught.value.result is result


@pytest.mark.parametrize("refused", [(0,), (1,), (0, 1)])
def test_the_shard_of_rows_that_runs_out_is_named(refused):
    """On a mesh the shards' rows lie one after the other, and what a shard has one of is stacked."""
    results = [exhausted(active=(0, 3) if shard in refused else (), idle=1) for shard in range(2)]
    tokens, num_tokens, active = (
        jnp.concatenate([getattr(result, name) for result in results]) for name in ("tokens", "num_tokens", "active")
    )
    ok = jnp.stack([result.ok for result in results])
    table = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(result.table for result in results))
    stacked = dataclasses.replace(results[0], tokens=tokens, num_tokens=num_tokens, active=active, ok=ok, table=table)
    message = rf"in shard of rows {refused[0]}: 1 row needs.*\b0 of 7 pages.*\b{4 * len(refused)} generated tokens"
    with pytest.raises(OutOfPages, match=message) as caught:
        stacked.check()
    assert caught.value.result is stacked
    fine = dataclasses.replace(stacked, ok=jnp.ones(2, bool))
    assert fine.check() is fine


def test_two_rows_in_need_of_pages_are_counted():
    result = run(*prompted((3, 3, 0, 13), pages=7), active=(0, 1))
    with pytest.raises(OutOfPages, match=r"2 rows? need.*\b1 of 7 pages are free.*\b2 generated tokens"):
        result.check()


def test_one_can_go_on_after_making_room():
    stopped = exhausted()
    count = int(stopped.num_tokens.max())
    newest = jnp.where(stopped.num_tokens > 0, stopped.tokens[:, count - 1], ints(*NEWEST))
    table = release(stopped.table, on(1))
    rest = decode(bound(), stopped.cache, table, newest, stopped.active, max_new_tokens=3)
    assert rest.check().ok
    assert joined(stopped, rest) == [row[: count + 3] for row in generated(run(*prompted(), active=(0, 3)))]
    rest.table.check()


def test_going_on_without_making_room_is_refused_at_once():
    """Nor does a row stop because the token it still waits to feed is a stop token."""
    stopped = exhausted()
    newest = stopped.tokens[:, 1].clip(0)
    again = run(stopped.cache, stopped.table, newest, (0, 3), stop_tokens=newest.tolist())
    assert not again.ok
    assert generated(again) == [[]] * ROWS
    np.testing.assert_array_equal(again.active, on(0, 3))


def test_a_row_at_its_limit_stops_the_loop_and_is_named():
    lengths = (6, 1, 0, BLOCKS * PAGE_SIZE - 1)
    result = run(*prompted(lengths))
    assert generated(result) == by_hand(*prompted(lengths), max_new_tokens=1)[0]
    assert int(result.table.num_free) > 0
    with pytest.raises(OutOfPages, match=r"row 3 holds 24 tokens, all that 6 blocks of 4 tokens") as caught:
        result.check()
    assert caught.value.result is result


def test_an_inactive_row_at_its_limit_stops_nothing():
    assert run(*prompted((6, BLOCKS * PAGE_SIZE, 0, 11)), active=(0, 2)).ok


# --- What it costs


def test_lengths_pages_tokens_and_weights_do_not_recompile():
    """Another set of weights gives its own tokens without a new trace: they are arguments, not constants."""
    forward = Traced()
    for seed, lengths in enumerate([LENGTHS, (2, 9, 4, 0), (0, 0, 0, 0), (7, 7, 7, 7)]):
        cache, table = prompted(lengths, seed=seed)
        result = run(cache, table, forward=bound(seed, forward), active=ALL[seed:], stop_tokens=[99])
        if seed == 0:
            traces = forward.count
        assert generated(result) == by_hand(*prompted(lengths, seed=seed), active=ALL[seed:], seed=seed)[0]
    assert forward.count == traces > 0


def test_an_equal_sampler_does_not_recompile():
    forward = Traced()
    counts = []
    for seed in range(3):
        run(*prompted(), forward=bound(0, forward), sample=Sampler(0.5, 3, 0.9), key=jax.random.key(seed))
        counts.append(forward.count)
    assert counts[0] == counts[-1]


def test_cache_and_table_are_donated_and_reused():
    cache, table = prompted()
    cache_pointers = [array.unsafe_buffer_pointer() for array in (cache.k, cache.v)]
    table_pointers = {array.unsafe_buffer_pointer() for array in jax.tree.leaves(table)}
    result = run(cache, table)
    assert all(array.is_deleted() for array in jax.tree.leaves((cache, table)))
    assert [array.unsafe_buffer_pointer() for array in (result.cache.k, result.cache.v)] == cache_pointers
    assert {array.unsafe_buffer_pointer() for array in jax.tree.leaves(result)} >= table_pointers
    assert not any(array.is_deleted() for array in weights().values())


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.full), jnp.int8])
def test_the_compiled_loop_holds_no_copy_of_the_pool(dtype):
    cache, table = prompted(pages=1024)
    cache = PagedCache.create(1, 1024, PAGE_SIZE, KV_HEADS, DIM, dtype)
    compiled = (
        jax.jit(lambda cache, table: run(cache, table), donate_argnums=(0, 1)).trace(cache, table).lower().compile()
    )
    assert pools.pool_copies(compiled.as_text(), cache) == []
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * cache.k.size


# --- How it is called


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ints(1, 2, 3)}, r"tokens: expected .*\(4,\), got int32\[3\]"),
        ({"tokens": ints(*NEWEST)[:, None]}, r"tokens: expected .*\(4,\), got int32\[4, 1\]"),
        ({"tokens": jnp.zeros(ROWS)}, r"tokens: expected an integer array .* got float32"),
        ({"tokens": jnp.zeros(ROWS, bool)}, r"tokens: expected an integer array .* got bool"),
        ({"active": on(0, of=3)}, r"active: expected .*\(4,\), got bool\[3\]"),
        ({"active": jnp.ones(ROWS, jnp.int32)}, r"active: expected a bool array .* got int32"),
        ({"max_new_tokens": -1}, r"max_new_tokens: expected an int of at least 0, got -1"),
        ({"max_new_tokens": 2.0}, r"max_new_tokens: .* got 2\.0"),
        ({"max_new_tokens": True}, r"max_new_tokens: .* got True"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_donated(changes, message):
    cache, table = prompted()
    options = {"tokens": ints(*NEWEST), "active": on(*ALL), "max_new_tokens": 2, **changes}
    with pytest.raises(ValueError, match=message):
        decode(bound(), cache, table, **options)
    assert not any(array.is_deleted() for array in jax.tree.leaves((cache, table)))


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16])
def test_tokens_of_any_integer_dtype_and_numpy_arrays_will_do(dtype):
    cache, table = prompted()
    with jax.enable_x64(dtype == np.int64):
        result = decode(bound(), cache, table, np.array(NEWEST, dtype), np.ones(ROWS, bool), max_new_tokens=np.int32(3))
    assert generated(result) == [row[:3] for row in generated(run(*prompted()))]


def test_a_plain_function_will_do():
    def forward(tokens, step, cache):
        return attend(weights(), tokens, step, cache)

    assert generated(run(*prompted(), forward=forward)) == generated(run(*prompted()))


def test_any_pytree_can_be_the_cache():
    """The loop knows only the forward's word for it: here a plain array that sums the tokens up."""

    def forward(tokens, step, total):
        total = total.at[step.rows].add(tokens, mode="drop")
        return jax.nn.one_hot(total + 1, 1000), total

    table = BlockTable.create(PAGES, PAGE_SIZE, 2, BLOCKS)
    result = decode(forward, ints(0, 10), table, ints(1, 2), on(0, 1, of=2), max_new_tokens=4)
    assert generated(result) == [[2, 4, 8, 16], [13, 26, 52, 104]]
    np.testing.assert_array_equal(result.cache, [15, 103])


def test_it_works_inside_an_outer_jit():
    outer = jax.jit(lambda cache, table, tokens: run(cache, table, tokens, stop_tokens=(2, 7)))
    cache, table = prompted()
    result = outer(cache, table, ints(*NEWEST))
    assert not cache.k.is_deleted()
    assert generated(result) == generated(run(*prompted(), stop_tokens=(2, 7)))


@pytest.mark.parametrize(
    "sample", [pytest.param(greedy, id="greedy"), pytest.param(SAMPLER, id="sampled", marks=pytest.mark.full)]
)
def test_it_works_where_64_bit_types_are_enabled(sample):
    options = {"sample": sample, "key": jax.random.key(5), "stop_tokens": (2,)}
    expected = generated(run(*prompted(), **options))
    with jax.enable_x64(True):
        result = run(*prompted(), **options)
        result.check()
    if sample is greedy:
        assert generated(result) == expected
    assert {array.dtype.name for array in jax.tree.leaves(result)} == {"int32", "bool", "float32"}
