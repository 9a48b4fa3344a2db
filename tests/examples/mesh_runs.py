"""Checks that need eight devices, run by `test_mesh.py` in one process of its own: prints what each has to say.

The devices are forced out of one CPU, which only a process that has not begun with another number of them can do.
"""

import contextlib
import dataclasses
import functools
import io
import json
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import generate
import jax
import jax.numpy as jnp
import numpy as np
import pools
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tiny_llama import tiny_llama

from decoder import model as single
from decoder import sharding as on_mesh
from decoder.config_gguf import gguf_config
from decoder.config_json import model_config
from decoder.gguf import open_gguf
from decoder.load import load_decoder
from decoder.sharding import Split
from paged_jax import (
    BlockTable,
    PagedCache,
    PrefixCache,
    Sampler,
    sharding,
)

DEVICES = 8
CHECKS: dict[str, Callable[[], None]] = {}
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
PROMPTS = [[3, 9, 4, 1, 7], [8, 2], [5, 5, 2], [60, 2, 9, 11, 3, 6]]
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
def new_model(scan_layers: bool = True, **changes: Any) -> single.Decoder:
    """Random, with biases and sinks that are not zero."""
    config = model_config(CONFIG | changes)
    model = nnx.eval_shape(lambda: single.Decoder(config, scan_layers=scan_layers, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(3)

    def fill(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        values = rng.standard_normal(shape.shape) * (0.2 if "bias" in name or "sinks" in name else 1.0)
        if "scale" in name:
            values = 1 + 0.1 * values
        elif "weight" in name or name.endswith(("gate.value", "up.value", "down.value")):
            values /= np.sqrt(shape.shape[-2 if "experts" in name else -1])
        return jnp.asarray(values, shape.dtype)

    return jax.tree_util.tree_map_with_path(fill, model)


def split_of(rows: int = 1, heads: int = 1) -> Split:
    return Split(sharding.make_mesh(rows=rows, heads=heads), heads="heads", rows="rows" if rows > 1 else None)


def new_pool(split: Split, dtype: Any = jnp.float32, layout: str = "NHD") -> tuple[PagedCache, BlockTable]:
    shards = split.num_rows_shards
    cache = sharding.create_cache(
        split.mesh, 2, PAGES // shards, PAGE_SIZE, 8, 8, dtype, heads=split.heads, rows=split.rows, layout=layout
    )
    table = sharding.create_table(split.mesh, PAGES // shards, PAGE_SIZE, ROWS // shards, BLOCKS, rows=split.rows)
    return cache, table


def packed(prompts: list[list[int]], shards: int = 1, size: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """All but the last token of each prompt, packed by shards of rows."""
    rows = len(prompts) // shards
    tokens = np.zeros((shards, size), np.int32)
    for shard in range(shards):
        mine = [token for prompt in prompts[shard * rows : (shard + 1) * rows] for token in prompt[:-1]]
        tokens[shard, : len(mine)] = mine
    return tokens.reshape(-1), np.array([len(prompt) - 1 for prompt in prompts], np.int32)


NEWEST = np.array([prompt[-1] for prompt in PROMPTS], np.int32)


@functools.cache
def unsharded(scan_layers: bool = True, dtype: Any = jnp.float32, **changes: Any) -> np.ndarray:
    """The next tokens of all prompts, from one device."""
    tokens = next_tokens(new_model(scan_layers, **changes), PROMPTS, dtype)
    assert len(np.unique(tokens)) > 8, f"a model that says one thing shows nothing: {tokens}"
    return tokens


def next_tokens(model: single.Decoder, prompts: list[list[int]], dtype: Any = jnp.float32) -> np.ndarray:
    cache = PagedCache.create(2, PAGES, PAGE_SIZE, 8, 8, dtype)
    table = BlockTable.create(PAGES, PAGE_SIZE, ROWS, BLOCKS)
    cache, table, ok = single.prefill(model, cache, table, *packed(prompts))
    assert ok
    newest = np.array([prompt[-1] for prompt in prompts], np.int32)
    result = single.generate(model, cache, table, newest, np.ones(ROWS, bool), max_new_tokens=NEW).check()
    return np.asarray(result.tokens)


def assert_same_tokens(split: Split, scan_layers: bool = True, dtype: Any = jnp.float32, **changes: Any) -> Any:
    """Prefills and generates on the mesh; gives what to go on with."""
    model = on_mesh.place_decoder(new_model(scan_layers, **changes), split)
    cache, table = new_pool(split, dtype, "NHD" if dtype == jnp.float32 else "head_major")
    on_mesh.check_placed(split, model, cache, table)
    cache, table, ok = on_mesh.prefill(split, model, cache, table, *packed(PROMPTS, split.num_rows_shards))
    assert np.all(ok)
    result = on_mesh.generate(split, model, cache, table, NEWEST, np.ones(ROWS, bool), max_new_tokens=NEW)
    assert np.all(result.ok)
    on_mesh.check_placed(split, model, result.cache, result.table)
    np.testing.assert_array_equal(result.tokens, unsharded(scan_layers, dtype, **changes))
    return model, result


def collectives(hlo: str) -> list[tuple[str, str]]:
    """Kind and result of each, in order of kind."""
    return sorted((kind, result) for result, kind in COLLECTIVES.findall(hlo))


def assert_no_pool_copied(hlo: str, cache: PagedCache) -> None:
    of_one_device = jax.tree.map(lambda pool: pool.addressable_shards[0].data, cache)
    copies = pools.pool_copies(hlo, of_one_device)
    assert copies == [], copies


# --- The same tokens --------------------------------------------------------------------------------------------------


@check("heads over 2, unrolled and with biases, with the collectives that a step needs, in place, compiled once")
def two_heads() -> None:
    split = split_of(heads=2)
    model, result = assert_same_tokens(split, scan_layers=False, **BIASED)
    sizes = on_mesh._prefill._cache_size(), on_mesh._generate._cache_size()
    before = [
        shard.data.unsafe_buffer_pointer()
        for pool in jax.tree.leaves(result.cache)
        for shard in pool.addressable_shards
    ]
    tokens = result.tokens[:, -1]
    for _ in range(2):
        cache, table = result.cache, result.table
        result = on_mesh.generate(split, model, cache, table, tokens, result.active, max_new_tokens=NEW)
        assert np.all(result.ok)
        tokens = result.tokens[:, -1]
    after = [
        shard.data.unsafe_buffer_pointer()
        for pool in jax.tree.leaves(result.cache)
        for shard in pool.addressable_shards
    ]
    assert after == before, "the pools were copied"
    assert (on_mesh._prefill._cache_size(), on_mesh._generate._cache_size()) == sizes, "compiled anew"

    options = {"max_new_tokens": NEW, "sample": single.greedy, "stop_tokens": ()}
    arguments = (split, model, result.cache, result.table, tokens, result.active, None)
    hlo = on_mesh._generate.lower(*arguments, **options).compile().as_text()
    # The embedding, and attention and MLP of each of two layers; the logits of all rows.
    assert collectives(hlo) == [
        ("all-gather", "f32[4,64]"),
        *[("all-reduce", "f32[32,4]")] * 4,
        ("all-reduce", "f32[4,32]"),
    ], collectives(hlo)
    assert_no_pool_copied(hlo, result.cache)
    tokens, num_tokens = (on_mesh._place_rows(split, array) for array in packed(PROMPTS))
    arguments = (split, model, result.cache, result.table, tokens, num_tokens)
    hlo = on_mesh._prefill.lower(*arguments, max_context=None).compile().as_text()
    # Nobody reads what the last layer would add: its K and V are all that is wanted.
    assert collectives(hlo) == [("all-reduce", "f32[24,32]"), *[("all-reduce", "f32[32,24]")] * 2], collectives(hlo)
    assert_no_pool_copied(hlo, result.cache)


@check("heads over 8")
def eight_heads() -> None:
    assert_same_tokens(split_of(heads=8))


@check("an int8 cache, rows over 2 and heads over 4, with nothing exchanged between rows")
def rows_and_heads() -> None:
    split = split_of(rows=2, heads=4)
    model, result = assert_same_tokens(split, dtype=jnp.int8)
    options = {"max_new_tokens": NEW, "sample": single.greedy, "stop_tokens": ()}
    tokens = on_mesh._place_rows(split, NEWEST)
    arguments = (split, model, result.cache, result.table, tokens, result.active, None)
    hlo = on_mesh._generate.lower(*arguments, **options).compile().as_text()
    groups = re.findall(r"replica_groups=(.*?), [a-z_]+=", hlo)
    assert set(groups) <= ONE_OF_EACH_ROWS_SHARD, groups
    # Embedding, attention and MLP of the scanned layer, logits.
    assert len(collectives(hlo)) == len(groups) == 4, collectives(hlo)
    assert_no_pool_copied(hlo, result.cache)


@check("a mixture of experts with biases, sinks and windows, and a vocabulary that does not divide")
def experts() -> None:
    """The last layer's K and V depend on all that the first layer does."""
    split, changes = split_of(heads=2), EXPERTS | {"vocab_size": 65}
    plain = PagedCache.create(2, PAGES, PAGE_SIZE, 8, 8, jnp.float32), BlockTable.create(PAGES, PAGE_SIZE, ROWS, BLOCKS)
    expected, *_ = single.prefill(new_model(**changes), *plain, *packed(PROMPTS))
    model = on_mesh.place_decoder(new_model(**changes), split)
    cache, *_ = on_mesh.prefill(split, model, *new_pool(split), *packed(PROMPTS))
    assert np.abs(expected.k[1]).max() > 0.1
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), cache, expected)


def forked(cache: PagedCache, table: BlockTable, parents: Any, children: Any) -> Any:
    table, copies, ok = table.fork(parents, children)
    return cache.copy_pages(copies), table, ok


@check("fork copies pages on every shard, and both go on alike")
def fork() -> None:
    """Rows 0 and 2 read a prompt each; rows 1 and 3 are forked from them and get another last token."""
    prompts, newest = [PROMPTS[0], [0], PROMPTS[3], [0]], np.array([7, 30, 6, 31], np.int32)
    split = split_of(rows=2, heads=2)
    model, (cache, table) = on_mesh.place_decoder(new_model(), split), new_pool(split)
    cache, table, _ = on_mesh.prefill(split, model, cache, table, *packed(prompts, 2))
    specs, by_row = on_mesh._specs(split, cache, table), PartitionSpec("rows")
    fork = sharding.on_mesh(
        forked, split.mesh, in_specs=(*specs, by_row, by_row), out_specs=(*specs, by_row), rows="rows"
    )
    here = np.zeros(2, np.int32)  # each shard's own row 0 → its own row 1
    cache, table, ok = jax.jit(fork, donate_argnums=(0, 1))(cache, table, here, here + 1)
    assert ok.shape == (2,)
    assert ok.all()
    result = on_mesh.generate(split, model, cache, table, newest, np.ones(ROWS, bool), max_new_tokens=NEW)
    whole = [[*PROMPTS[0][:-1], 7], [*PROMPTS[0][:-1], 30], [*PROMPTS[3][:-1], 6], [*PROMPTS[3][:-1], 31]]
    np.testing.assert_array_equal(result.tokens, next_tokens(new_model(), whole))


def adopted(table: BlockTable, row: int, prompt: list[int]) -> BlockTable:
    """The next row starts on what this one has computed."""
    prefixes = PrefixCache(PAGE_SIZE)
    table = prefixes.insert(table, row, prompt[:-1])
    table, num_cached, ok = prefixes.adopt(table, row + 1, prompt)
    assert ok
    assert num_cached == 8
    table.check()
    return table


@check("a cached prefix is adopted, by heads and in a shard of rows")
def prefix() -> None:
    """Row 2 reads a prompt; row 3 starts on its full pages and computes the rest."""
    prompt, nothing = [3, 9, 4, 1, 7, 12, 44, 2, 5, 23], [0]
    expected = next_tokens(new_model(), [prompt, nothing, nothing, nothing])[0]
    newest, active = np.array([0, 0, 23, 23], np.int32), np.array([False, False, True, True])
    for split in (split_of(heads=8), split_of(rows=2, heads=2)):
        model, (cache, table) = on_mesh.place_decoder(new_model(), split), new_pool(split)
        shards = split.num_rows_shards
        first, rest = ([nothing, nothing, prompt, nothing], [nothing, nothing, nothing, [*prompt[8:]]])
        cache, table, ok = on_mesh.prefill(split, model, cache, table, *packed(first, shards))
        assert np.all(ok)
        if split.rows is None:
            table = adopted(table, 2, prompt)
        else:
            mine = adopted(sharding.take_shard(split.mesh, table, 1, rows="rows"), 0, prompt)
            table = sharding.put_shard(split.mesh, table, 1, mine, rows="rows")
        on_mesh.check_placed(split, model, cache, table)
        cache, table, ok = on_mesh.prefill(split, model, cache, table, *packed(rest, shards))
        assert np.all(ok)
        result = on_mesh.generate(split, model, cache, table, newest, active, max_new_tokens=NEW)
        np.testing.assert_array_equal(result.tokens[2:], [expected, expected])


@check("the shards of rows draw differently, and the devices of one alike")
def sampled() -> None:
    split = split_of(rows=2, heads=2)
    model, (cache, table) = on_mesh.place_decoder(new_model(), split), new_pool(split)
    options = {"max_new_tokens": NEW, "sample": Sampler(50.0), "key": jax.random.key(0)}
    result = on_mesh.generate(split, model, cache, table, np.full(ROWS, 3), np.ones(ROWS, bool), **options)
    shards = {shard.index[0].start: np.asarray(shard.data) for shard in result.tokens.addressable_shards}
    assert (shards[0] != shards[2]).any()
    for shard in result.tokens.addressable_shards:
        np.testing.assert_array_equal(shard.data, shards[shard.index[0].start])


# --- Weights ----------------------------------------------------------------------------------------------------------


@check("a file's tensors go to their shards, stacked or not")
def loading() -> None:
    file, split = open_gguf(Path(sys.argv[1])), split_of(heads=2)
    config = gguf_config(file)
    shardings = on_mesh.parameter_shardings(config, split)
    for scan_layers in (False, True):
        whole = load_decoder(file, config, scan_layers=scan_layers)
        loaded = load_decoder(file, config, scan_layers=scan_layers, device=shardings)
        sharding.check_placed(split.mesh, loaded, on_mesh.model_specs(loaded, split))
        jax.tree.map(np.testing.assert_array_equal, loaded, whole)
        largest = max(leaf.nbytes for leaf in jax.tree.leaves(loaded))
        held = sum(shard.data.nbytes for leaf in jax.tree.leaves(loaded) for shard in leaf.addressable_shards[:1])
        assert held < 0.52 * sum(leaf.nbytes for leaf in jax.tree.leaves(loaded)) + largest * (config.vocab_size % 2)


@check("generate.py --mesh writes the answer of the dense model")
def example() -> None:
    prompt, out = [5, 200, 31, 7], io.StringIO()
    options = ["--model", sys.argv[1], "--token-ids", ",".join(map(str, prompt)), "--max-tokens", "6", "--scan-layers"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert generate.main([*options, "--mesh", "rows=1,heads=2"]) == 0
    assert out.getvalue() == ",".join(map(str, tiny_llama().greedy(prompt, 6))) + "\n", out.getvalue()


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
    model, (cache, table) = on_mesh.place_decoder(new_model(), split), new_pool(split)
    wrong = dataclasses.replace(
        table, lengths=jax.device_put(table.lengths, NamedSharding(split.mesh, PartitionSpec("heads")))
    )
    assert_refused(
        r"lengths: expected P.*\(\) on mesh .*got P.*heads", on_mesh.check_placed, split, model, cache, wrong
    )
    whole = PagedCache.create(2, PAGES, PAGE_SIZE, 8, 8, jnp.float32)
    assert_refused(r"k: expected P.*heads.*got", on_mesh.check_placed, split, model, whole, table)
    assert_refused(r"value: expected", on_mesh.check_placed, split, new_model(), cache, table)
    stacked = new_pool(split_of(rows=2, heads=2))[1]
    arguments = (*packed(PROMPTS),)
    assert_refused(
        r"table: expected one table.*got pages of shape", on_mesh.prefill, split, model, cache, stacked, *arguments
    )
    by_rows = split_of(rows=2, heads=2)
    assert_refused(r"table: expected tables stacked", on_mesh.prefill, by_rows, model, cache, table, *arguments)
    assert_refused(r"expected 16 devices for rows 4 x heads 4, got 8", sharding.make_mesh, rows=4, heads=4)
    assert_refused(
        r"array: expected axis 0 to divide over the 2 devices of mesh axis .rows., got shape ..,.",
        on_mesh.generate,
        by_rows,
        model,
        cache,
        stacked,
        NEWEST[:3],
        np.ones(3, bool),
        max_new_tokens=1,
    )


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    assert jax.device_count() == DEVICES
    said = {}
    for name, function in CHECKS.items():
        try:
            function()
            said[name] = ""
        except Exception:
            said[name] = traceback.format_exc()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
