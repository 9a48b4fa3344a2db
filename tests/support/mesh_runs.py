"""Checks that need eight devices, run by `test_mesh.py` in one process of its own: prints what each has to say.

The devices are forced out of one CPU, which only a process that has not begun with another number of them can do.
"""

import contextlib
import dataclasses
import functools
import gc
import io
import json
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pools
from forwards import load_forward
from jax.sharding import NamedSharding, PartitionSpec
from tiny_llama import tiny_llama

from paged_jax import (
    BlockTable,
    DecodeResult,
    PagedCache,
    PrefixCache,
    Sampler,
    greedy,
    sharding,
)
from paged_jax.cli import main as command
from paged_jax.models import load, programs
from paged_jax.models.mesh import Split
from paged_jax.models.network import Network
from paged_jax.models.weights.config_gguf import gguf_config
from paged_jax.models.weights.config_json import model_config
from paged_jax.models.weights.gguf import open_gguf

DEVICES = 8
README = (Path(__file__).parents[2] / "examples" / "README.md").read_text(encoding="utf-8")
CHECKS: dict[str, Callable[[], None]] = {}
FULL: set[str] = set()  # those that run only when asked for
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
BIASED = {"attention_bias": True, "mlp_bias": True}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "model_type": "gpt_oss"}
# The second has all but the last token of the first, the last has two pages of the one before.
PROMPTS = [
    [60, 2, 9, 11, 3, 6],
    [60, 2, 9, 11, 3, 30],
    [3, 9, 4, 1, 7, 12, 44, 2, 5, 23],
    [3, 9, 4, 1, 7, 12, 44, 2, 50, 6],
]
NEWEST = np.array([prompt[-1] for prompt in PROMPTS], np.int32)
ROWS, PAGES, PAGE_SIZE, BLOCKS, NEW = 4, 800, 4, 8, 7
COLLECTIVES = re.compile(
    r"= \(?(\w+\[[\d,]*\]).* (all-\w+|reduce-scatter|collective-\w+|ragged-all-to-all)(?:-start)?\("
)
# How JAX's versions write the groups of devices that the heads' axis of a mesh of 2 x 4 makes.
ONE_OF_EACH_ROWS_SHARD = {"{{0,1,2,3},{4,5,6,7}}", "[2,4]<=[8]", "mesh['rows'=2,'heads'=4] {'heads'}"}


def check(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def keep(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[name] = function
        return function

    return keep


@functools.cache
def new_model(scan_layers: bool = True, **changes: Any) -> jax.tree_util.Partial:
    """Random, with biases and sinks that are not zero."""
    config = model_config(CONFIG | changes)
    network, rng = Network(config, scan_layers), np.random.default_rng(3)

    def fill(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.standard_normal(shape.shape) * (0.2 if "bias" in name or "sinks" in name else 1.0)
        if "scale" in name:
            values = 1 + 0.1 * values
        elif name.endswith((".weight", ".gate", ".up", ".down")):
            values /= np.sqrt(shape.shape[-2 if "experts" in name else -1])
        return jnp.asarray(values, shape.dtype)

    weights = {name: fill(name, shape) for name, shape in network.shapes(jnp.float32).items()}
    return jax.tree_util.Partial(network, weights)


def placed(model: jax.tree_util.Partial, split: Split) -> jax.tree_util.Partial:
    """The same on a mesh."""
    network = dataclasses.replace(model.func, split=split)
    return jax.tree_util.Partial(network, sharding.place(split.mesh, *model.args, network.specs()))


def split_of(rows: int = 1, heads: int = 1) -> Split:
    return Split(sharding.make_mesh(rows=rows, heads=heads), heads="heads", rows="rows" if rows > 1 else None)


def new_pool(split: Split, dtype: Any = jnp.float32) -> tuple[PagedCache, BlockTable]:
    shards, layout = split.num_rows_shards, "NHD" if dtype == jnp.float32 else "head_major"
    cache = sharding.create_cache(
        split.mesh, 2, PAGES // shards, PAGE_SIZE, 8, 8, dtype, heads=split.heads, rows=split.rows, layout=layout
    )
    table = sharding.create_table(split.mesh, PAGES // shards, PAGE_SIZE, ROWS // shards, BLOCKS, rows=split.rows)
    return cache, table


def packed(prompts: list[list[int]], shards: int = 1, size: int = 28) -> tuple[np.ndarray, np.ndarray]:
    """All but the last token of each prompt, packed by shards of rows."""
    rows = len(prompts) // shards
    tokens = np.zeros((shards, size), np.int32)
    for shard in range(shards):
        mine = [token for prompt in prompts[shard * rows : (shard + 1) * rows] for token in prompt[:-1]]
        tokens[shard, : len(mine)] = mine
    return tokens.reshape(-1), np.array([len(prompt) - 1 for prompt in prompts], np.int32)


@functools.cache
def unsharded(model: jax.tree_util.Partial, dtype: Any = jnp.float32) -> np.ndarray:
    """What follows each prompt, from one device and rows that each read all of their own."""
    cache = PagedCache.create(2, PAGES, PAGE_SIZE, 8, 8, dtype)
    table = BlockTable.create(PAGES, PAGE_SIZE, ROWS, BLOCKS)
    cache, table, ok = programs.prefill(model, cache, table, *packed(PROMPTS))
    assert ok
    result = programs.generate(model, cache, table, NEWEST, np.ones(ROWS, bool), max_new_tokens=NEW).check()
    tokens = np.asarray(result.tokens)
    assert len(np.unique(tokens)) > 8, f"a model that says one thing shows nothing: {tokens}"
    return tokens


def generate_hlo(model: jax.tree_util.Partial, result: DecodeResult) -> str:
    """The program of the decode loop whose result this is."""
    options = {"max_new_tokens": NEW, "sample": greedy, "stop_tokens": ()}
    tokens = programs._place_rows(model.func, result.tokens[:, -1])
    arguments = (model, result.cache, result.table, tokens, result.active, None)
    return programs._generate.lower(*arguments, **options).compile().as_text()


def collectives(hlo: str) -> list[tuple[str, str]]:
    """Kind and result of each, in order of kind."""
    return sorted((kind, result) for result, kind in COLLECTIVES.findall(hlo))


def assert_no_pool_copied(hlo: str, cache: PagedCache) -> None:
    of_one_device = jax.tree.map(lambda pool: pool.addressable_shards[0].data, cache)
    copies = pools.pool_copies(hlo, of_one_device)
    assert copies == [], copies


# --- The same tokens --------------------------------------------------------------------------------------------------


def forked(cache: PagedCache, table: BlockTable, parents: Any, children: Any) -> Any:
    table, copies, ok = table.fork(parents, children)
    return cache.copy_pages(copies), table, ok


def adopted(table: BlockTable, row: int) -> BlockTable:
    """The next row starts on what this one has computed."""
    prefixes = PrefixCache(PAGE_SIZE)
    table = prefixes.insert(table, row, PROMPTS[2][:-1])
    table, num_cached, ok = prefixes.adopt(table, row + 1, PROMPTS[3])
    assert ok
    assert num_cached == 8
    table.check()
    return table


@functools.cache
def assert_same_tokens(rows: int, heads: int, dtype: Any) -> tuple[jax.tree_util.Partial, DecodeResult]:
    """Rows 0 and 2 read their prompts, row 1 is forked from row 0, and row 3 adopts pages of row 2; then all go on."""
    split = split_of(rows, heads)
    model, (cache, table) = placed(new_model(), split), new_pool(split, dtype)
    programs.check_placed(model, cache, table)
    cache, table, ok = programs.prefill(model, cache, table, *packed([PROMPTS[0], [0], PROMPTS[2], [0]], rows))
    assert np.all(ok)

    specs, by_row = programs._specs(model.func, cache, table), sharding.rows_spec(split.rows)
    fork = sharding.on_mesh(
        forked, split.mesh, in_specs=(*specs, by_row, by_row), out_specs=(*specs, by_row), rows=split.rows
    )
    parents = np.array([0, ROWS][:rows], np.int32)  # the first shard's row 0, and nothing in the second
    cache, table, ok = jax.jit(fork, donate_argnums=(0, 1))(cache, table, parents, parents + 1)
    assert np.all(ok)

    if split.rows is None:
        table = adopted(table, 2)
    else:
        mine = adopted(sharding.take_shard(split.mesh, table, 1, rows=split.rows), 0)
        table = sharding.put_shard(split.mesh, table, 1, mine, rows=split.rows)
    programs.check_placed(model, cache, table)
    cache, table, ok = programs.prefill(model, cache, table, *packed([[0], [0], [0], PROMPTS[3][8:]], rows))
    assert np.all(ok)
    result = programs.generate(model, cache, table, NEWEST, np.ones(ROWS, bool), max_new_tokens=NEW).check()
    programs.check_placed(model, result.cache, result.table)
    np.testing.assert_array_equal(result.tokens, unsharded(new_model(), dtype))
    return model, result


for sizes in (
    (1, 1, jnp.int8),
    (2, 1, jnp.int8),
    (2, 2, jnp.float32),
    (1, 4, jnp.int8),
    (1, 8, jnp.float32),
    (2, 4, jnp.int8),
):
    name = "rows over {}, heads over {}: prefill, fork, adoption and the loop, with a cache of {.__name__}"
    check(name.format(*sizes))(functools.partial(assert_same_tokens, *sizes))
    if sizes[:2] in ((1, 1), (2, 2), (1, 4)):
        FULL.add(name.format(*sizes))


@check("rows over 2 exchange nothing, and rows over 2 and heads over 4 nothing between rows; int8 caches stay in place")
def exchanged() -> None:
    for heads, count in ((1, 0), (4, 4)):  # embedding, attention and MLP of the scanned layer, logits
        model, result = assert_same_tokens(2, heads, jnp.int8)
        hlo = generate_hlo(model, result)
        groups = re.findall(r"replica_groups=(.*?), [a-z_]+=", hlo)
        assert set(groups) <= ONE_OF_EACH_ROWS_SHARD, groups
        assert len(collectives(hlo)) == len(groups) == count, collectives(hlo)
        assert_no_pool_copied(hlo, result.cache)


@check("heads over 2, unrolled and with biases, with the collectives that a step needs, in place, compiled once")
def two_heads() -> None:
    split = split_of(heads=2)
    whole = new_model(scan_layers=False, **BIASED)
    model, (cache, table) = placed(whole, split), new_pool(split)
    cache, table, ok = programs.prefill(model, cache, table, *packed(PROMPTS))
    assert ok
    result = programs.generate(model, cache, table, NEWEST, np.ones(ROWS, bool), max_new_tokens=NEW).check()
    np.testing.assert_array_equal(result.tokens, unsharded(whole))
    sizes = programs._prefill._cache_size(), programs._generate._cache_size()
    before = [
        shard.data.unsafe_buffer_pointer()
        for pool in jax.tree.leaves(result.cache)
        for shard in pool.addressable_shards
    ]
    tokens = result.tokens[:, -1]
    for _ in range(2):
        cache, table = result.cache, result.table
        result = programs.generate(model, cache, table, tokens, result.active, max_new_tokens=NEW)
        assert np.all(result.ok)
        tokens = result.tokens[:, -1]
    after = [
        shard.data.unsafe_buffer_pointer()
        for pool in jax.tree.leaves(result.cache)
        for shard in pool.addressable_shards
    ]
    assert after == before, "the pools were copied"
    assert (programs._prefill._cache_size(), programs._generate._cache_size()) == sizes, "compiled anew"

    hlo = generate_hlo(model, result)
    # The embedding, and attention and MLP of each of two layers; the logits of all rows.
    assert collectives(hlo) == [
        ("all-gather", "f32[4,64]"),
        *[("all-reduce", "f32[4,32]")] * 5,
    ], collectives(hlo)
    assert_no_pool_copied(hlo, result.cache)
    tokens, num_tokens = (programs._place_rows(model.func, array) for array in packed(PROMPTS))
    arguments = (model, result.cache, result.table, tokens, num_tokens)
    hlo = programs._prefill.lower(*arguments, max_context=None).compile().as_text()
    # Nobody reads what the last layer would add: its K and V are all that is wanted.
    assert collectives(hlo) == [("all-reduce", "f32[28,32]")] * 3, collectives(hlo)
    assert_no_pool_copied(hlo, result.cache)


@check("a mixture of experts with biases, sinks and windows, and a vocabulary that does not divide")
def experts() -> None:
    """The last layer's K and V depend on all that the first layer does."""
    split, changes = split_of(heads=2), EXPERTS | {"vocab_size": 65}
    plain = PagedCache.create(2, PAGES, PAGE_SIZE, 8, 8, jnp.float32), BlockTable.create(PAGES, PAGE_SIZE, ROWS, BLOCKS)
    expected, *_ = programs.prefill(new_model(**changes), *plain, *packed(PROMPTS))
    model = placed(new_model(**changes), split)
    cache, *_ = programs.prefill(model, *new_pool(split), *packed(PROMPTS))
    assert np.abs(expected.k[1]).max() > 0.1
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), cache, expected)


@check("the shards of rows draw differently, and the devices of one alike")
def sampled() -> None:
    split = split_of(rows=2, heads=2)
    model, (cache, table) = placed(new_model(), split), new_pool(split)
    options = {"max_new_tokens": NEW, "sample": Sampler(50.0), "key": jax.random.key(0)}
    result = programs.generate(model, cache, table, np.full(ROWS, 3), np.ones(ROWS, bool), **options)
    shards = {shard.index[0].start: np.asarray(shard.data) for shard in result.tokens.addressable_shards}
    assert (shards[0] != shards[2]).any()
    for shard in result.tokens.addressable_shards:
        np.testing.assert_array_equal(shard.data, shards[shard.index[0].start])


# --- Weights ----------------------------------------------------------------------------------------------------------


def rows_of(kv_head: int) -> np.ndarray:
    """What the matrix of Q, K and V of the second layer has of a kv head: two query heads, a key, a value."""
    q, k, v = (tiny_llama().weights[f"blk.1.attn_{name}.weight"].reshape(-1, 16, 64) for name in "qkv")
    return np.concatenate([*q[2 * kv_head : 2 * kv_head + 2], k[kv_head], v[kv_head]])


@check("a file's tensors go to their shards, stacked or not, and whole kv heads to each device")
def loading() -> None:
    file, split = open_gguf(Path(sys.argv[1])), split_of(heads=2)
    config = gguf_config(file)
    for scan_layers in (False, True):
        (whole,) = load_forward(file, config, scan_layers=scan_layers).args
        forward = load_forward(file, config, scan_layers=scan_layers, split=split)
        (loaded,) = forward.args
        through_the_door = load(sys.argv[1], mesh=split.mesh, heads="heads", scan_layers=scan_layers)
        assert {name: weight.sharding.spec for name, weight in through_the_door.weights.items()} == forward.func.specs()
        assert jax.tree.structure(through_the_door.forward) == jax.tree.structure(forward)
        sharding.check_placed(split.mesh, loaded, forward.func.specs())
        jax.tree.map(np.testing.assert_array_equal, loaded, whole)
        largest = max(leaf.nbytes for leaf in jax.tree.leaves(loaded))
        held = sum(shard.data.nbytes for leaf in jax.tree.leaves(loaded) for shard in leaf.addressable_shards[:1])
        qkv = loaded["layers.attention.qkv.weight" if scan_layers else "layers.1.attention.qkv.weight"]
        for shard in qkv.addressable_shards:
            (kv_head,) = range(2)[shard.index[scan_layers]]
            mine = shard.data[1] if scan_layers else shard.data
            np.testing.assert_array_equal(mine.reshape(-1, 64), rows_of(kv_head))
        assert held < 0.52 * sum(leaf.nbytes for leaf in jax.tree.leaves(loaded)) + largest * (config.vocab_size % 2)


# --- The command line -------------------------------------------------------------------------------------------------

UNEQUAL = [[5, 200, 31, 7, 9, 77, 12, 3], [7], [40, *range(100, 112)], [31, 8, 8], [200]]  # an odd number


def answered(prompts: list[list[int]], *options: Any) -> tuple[int, str, str]:
    """Exit status, standard output, and standard error with its lines joined."""
    arguments = ["--model", sys.argv[1], "--scan-layers", "--max-tokens", NEW, *options]
    for prompt in prompts:
        arguments += ["--token-ids", ids(prompt)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = command(["generate", *map(str, arguments)])
    return status, out.getvalue(), " ".join(err.getvalue().split())


def ids(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def written(prompts: list[list[int]], counts: list[int]) -> str:
    """What the dense model in numpy says to several prompts, of each so many tokens."""
    answers = [tiny_llama().greedy(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    pairs = enumerate(zip(prompts, answers, strict=True), 1)
    return "".join(f"[{i}/{len(prompts)}] {ids(prompt)}\n{ids(answer)}\n" for i, (prompt, answer) in pairs)


@check("the README's command writes the answer of the dense model")
def readme_command() -> None:
    (mesh,) = re.findall(r"`paged-jax generate --mesh\s+(\S+)`", README)
    status, out, err = answered(UNEQUAL[:1], "--mesh", mesh)
    assert mesh == "rows=1,heads=2"
    assert (status, out) == (0, ids(tiny_llama().greedy(UNEQUAL[0], NEW)) + "\n"), (out, err)


@check("the README's step runs on eight devices")
def readme_step() -> None:
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "make_mesh" in code)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code.replace("rows=1, heads=1", "rows=2, heads=4"), names)
    assert names["ok"].shape == (2,)
    assert names["ok"].all()
    np.testing.assert_array_equal(names["out"], np.ones((16, 8, 64)))  # as all of V


@check("generate.py deals prompts to shards of rows, which read them in chunks and show tables of their own")
def dealt() -> None:
    """The first shard reads 19 tokens in four chunks, the second 2 tokens in one, and it has a row to spare."""
    options = ("--mesh", "rows=2,heads=2", "--prefill-tokens", 5, "--show-table", "--compare-dense")
    status, out, err = answered(UNEQUAL, *options)
    assert (status, out) == (0, written(UNEQUAL, [NEW] * 5)), (out, err)
    held = [len(prompt) - 1 + NEW for prompt in UNEQUAL]
    assert f"prefill {sum(held) - 5 * NEW} tokens" in err, err
    assert f"decode {5 * NEW} tokens" in err, err
    assert f"paged 6 of 8 pages used for {sum(held)} tokens" in err, err  # 1 + 1 + 2 and 1 + 1, of two times 1 + 1 + 2
    assert f"the same {5 * NEW} tokens" in err, err
    first, second = err.split("shard of rows 1, of which row 0 is prompt 4")
    assert re.search(rf"shard of rows 0, of which row 0 is prompt 1 .* 0 {held[0]} . 1 {held[1]} . 2 {held[2]}", first)
    assert re.search(rf" 0 {held[3]} \d 1 {held[4]} \d 2 0 pool: 4 pages of 16 tokens, 2 free", second), second


@check("generate.py names the shard of rows that runs out of pages, and writes what all have said")
def out_of_pages() -> None:
    """Sizes as in the check before, whose programs serve: the second shard's three rows have one page to grow by."""
    prompts = [[7], [31, 8], [5], *([first, *range(100, 112)] for first in (40, 41, 42))]
    options = ("--mesh", "rows=2,heads=2", "--prefill-tokens", 5, "--num-pages")
    status, out, err = answered(prompts, *options, 4)
    assert (status, out) == (1, written(prompts, [NEW] * 3 + [4] * 3)), (out, err)
    assert "out of pages in shard of rows 1: 3 rows need a new page, and 1 of 4 pages are free" in err, err
    status, out, err = answered(prompts, *options, 2)
    assert (status, out) == (2, ""), out
    assert "the prompts of a shard of rows need 3 pages of 16 tokens, expected at most the cache's 2" in err, err


@check("generate.py refuses a mesh that does not fit the model or the machine")
def refused() -> None:
    for mesh, message in {
        "heads=4": "expected a divisor of the model's 2 kv heads, got 4 devices; kv heads are not replicated: split "
        "heads over 2 and rows over 2",
        "rows=4,heads=4": "mesh: expected 16 devices for rows 4 x heads 4, got 8",
    }.items():
        status, out, err = answered(UNEQUAL, "--mesh", mesh)
        assert (status, out) == (2, ""), out
        assert message in err, err


# --- Mistakes ---------------------------------------------------------------------------------------------------------


def assert_refused(pattern: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    try:
        function(*arguments, **options)
    except ValueError as problem:
        message = str(problem)
    else:
        message = "nothing was refused"
    assert re.search(pattern, message), message


@check("arrays that are split otherwise are named")
def mistakes() -> None:
    split = split_of(heads=2)
    model, (cache, table) = placed(new_model(), split), new_pool(split)
    wrong = dataclasses.replace(
        table, lengths=jax.device_put(table.lengths, NamedSharding(split.mesh, PartitionSpec("heads")))
    )
    assert_refused(r"lengths: expected P.*\(\) on mesh .*got P.*heads", programs.check_placed, model, cache, wrong)
    whole = PagedCache.create(2, PAGES, PAGE_SIZE, 8, 8, jnp.float32)
    assert_refused(r"k: expected P.*heads.*got", programs.check_placed, model, whole, table)
    elsewhere = jax.tree_util.Partial(model.func, *new_model().args)
    assert_refused(r"embedding.*: expected", programs.check_placed, elsewhere, cache, table)
    stacked = new_pool(split_of(rows=2, heads=2))[1]
    arguments = (*packed(PROMPTS),)
    assert_refused(
        r"table: expected one table.*got pages of shape", programs.prefill, model, cache, stacked, *arguments
    )
    by_rows = placed(new_model(), split_of(rows=2, heads=2))
    assert_refused(r"table: expected tables stacked", programs.prefill, by_rows, cache, table, *arguments)
    assert_refused(r"expected 16 devices for rows 4 x heads 4, got 8", sharding.make_mesh, rows=4, heads=4)
    assert_refused(
        r"array: expected axis 0 to divide over the 2 devices of mesh axis .rows., got shape ..,.",
        programs.generate,
        by_rows,
        cache,
        stacked,
        NEWEST[:3],
        np.ones(3, bool),
        max_new_tokens=1,
    )


def main() -> None:
    gc.set_threshold(100_000)  # as in conftest.py
    jax.config.update("jax_default_matmul_precision", "highest")
    assert jax.device_count() == DEVICES
    said = {}
    is_full = sys.argv[2] == "full"
    for name, function in CHECKS.items():
        if (name in FULL) != is_full:
            continue
        try:
            function()
            said[name] = ""
        except Exception:
            said[name] = traceback.format_exc()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
