"""The decoder in one file writes what a dense reference does, and refuses what it cannot read."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tiny_llama import TinyLlama, tiny_llama

from examples import decoder
from paged_jax import BlockTable, PagedCache, decode, models
from paged_jax.models.text.special_ids import special_ids
from paged_jax.models.text.text import gguf_text
from paged_jax.models.weights.gguf import open_gguf

QUESTION = "What is gravity? Answer in one sentence."


def save(tiny: TinyLlama, folder: Path, **changes) -> Path:
    return tiny.save(folder / "tiny.gguf", **changes)


def generate(path: Path, prompts: list[list[int]], **options) -> list[list[int]]:
    file = open_gguf(path)
    config = decoder.read_config(file)
    return decoder.generate(decoder.load_forward(file, config), config, prompts, **options)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_batch_gets_the_tokens_of_the_dense_reference(tied, tmp_path):
    tiny = tiny_llama(tied=tied)
    prompts = [[7], list(range(20, 53)), [5, 40, 9, 33, 12]]  # nothing to prefill, more than two pages, less than one
    got = generate(save(tiny, tmp_path), prompts, max_tokens=18)
    assert got == [tiny.greedy(prompt, 18) for prompt in prompts]


def test_a_row_ends_with_its_stop_token(tmp_path):
    tiny, prompt = tiny_llama(), [5, 40, 9, 33, 12]
    expected = tiny.greedy(prompt, 12)
    stop = expected[4]
    got = generate(save(tiny, tmp_path), [prompt], max_tokens=12, stop_tokens=(stop,))
    assert got == [expected[: expected.index(stop) + 1]]


def test_the_command_prints_the_answers_in_order(tmp_path, capsys):
    tiny, questions = tiny_llama(), ["hello world", "the"]
    path = save(tiny, tmp_path)
    decoder.main([*questions, "--model", str(path), "--max-tokens", "6"])
    file = open_gguf(path)
    text, ends = gguf_text(file), special_ids(file.metadata).end
    expected = [tiny.greedy(text.encode(question, is_raw=False), 6) for question in questions]
    assert not ends & {token for tokens in expected for token in tokens}  # it writes letters only
    assert capsys.readouterr().out.splitlines() == [tiny.tokenizer.decode(tokens) for tokens in expected]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": {"general.architecture": "gemma3"}}, "expected architecture llama, got gemma3"),
        ({"metadata": {"general.architecture": None}}, "expected architecture llama, got None"),
        (
            {"metadata": {"llama.rope.scaling.type": "linear"}},
            "expected llama.rope.scaling.type none, got linear",
        ),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "expected llama.rope.dimension_count 16, got 8"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "got 'blk.1.ffn_up.weight'"),
        (
            {"tensors": {"rope_freqs.weight": ("rope_freqs.weight", (8,), "F32", bytes(32))}},
            "expected the tensors of a plain Llama, got rope_freqs.weight too",
        ),
    ],
)
def test_other_models_are_refused_in_one_line(changes, message, tmp_path):
    path = save(tiny_llama(), tmp_path, **changes)
    with pytest.raises(SystemExit) as refusal:
        decoder.main(["hello", "--model", str(path)])
    said = str(refusal.value)
    assert said.startswith(f"decoder.py: error: {path}: ")
    assert said.endswith(message)
    assert "\n" not in said


def test_the_file_is_short():
    assert decoder.__file__ is not None
    assert len(Path(decoder.__file__).read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.download
def test_smollm2_writes_what_the_product_writes(smollm2_path):
    loaded, count, page_size, num_pages = models.load(smollm2_path), 24, 16, 8
    prompt, stop_tokens = loaded.text.encode(QUESTION, is_raw=False), sorted(loaded.end_tokens)
    heads = loaded.config.attention.num_kv_heads, loaded.config.attention.head_dim
    cache = PagedCache.create(loaded.config.num_layers, num_pages, page_size, *heads, dtype=jnp.float32)
    table = BlockTable.create(num_pages, page_size, max_rows=1, max_blocks_per_row=num_pages)
    before = jnp.array(prompt[:-1])
    table, step, ok = table.step(jnp.array([before.size]), size=before.size)
    assert ok
    _, cache = jax.jit(lambda forward, *inputs: forward(*inputs))(loaded.forward, before, step, cache)
    newest, active = jnp.array(prompt[-1:]), jnp.array([True])
    options = {"max_new_tokens": count, "stop_tokens": stop_tokens}
    expected = decode(loaded.forward, cache, table, newest, active, **options).check().tokens[0].tolist()

    (got,) = generate(smollm2_path, [prompt], max_tokens=count, stop_tokens=stop_tokens)
    assert len(got) == count
    assert got == expected
