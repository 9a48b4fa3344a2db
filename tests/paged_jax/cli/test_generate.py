"""The command line: it writes what the model says, and refuses what it cannot do before it computes anything."""

import dataclasses
import io
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from command_line import COUNT, Run, expected_text
from tiny_llama import TinyLlama

from paged_jax.cli import generate, main, pool
from paged_jax.models.pretrained import open_pretrained
from paged_jax.models.text.chat import render_chat
from paged_jax.models.text.text import gguf_template
from paged_jax.models.weights.config_gguf import gguf_config
from paged_jax.models.weights.gguf import open_gguf
from paged_jax.models.weights.shapes import parameter_shapes

PROMPTS = ["hello world", "zzz", "the 42 cats"]


pytestmark = pytest.mark.usefixtures("own_cache")


def assert_in_order(parts: list[str], text: str) -> None:
    at = 0
    for part in parts:
        assert part in text[at:], (part, text)
        at = text.index(part, at) + len(part)


# --- Answers


@pytest.mark.parametrize(
    ("prompt", "raw"),
    [
        ("hello world", False),
        ("zzz", True),
        pytest.param("hello world", True, marks=pytest.mark.full),
        pytest.param("zzz", False, marks=pytest.mark.full),
    ],
)
def test_the_answer_is_the_models_greedy_text(run: Run, tiny: TinyLlama, prompt: str, raw: bool) -> None:
    status, out, _ = run(prompt, *["--raw"] * raw)
    assert (status, out) == (0, expected_text(tiny, prompt, raw=raw) + "\n")


@pytest.mark.parametrize(  # one call, an odd one, and several
    "count", [1, *(pytest.param(count, marks=pytest.mark.full) for count in (7, 18, 34))]
)
def test_max_tokens_bounds_the_answer(run: Run, tiny: TinyLlama, count: int) -> None:
    assert run("zzz", "--raw", max_tokens=count)[:2] == (0, expected_text(tiny, "zzz", count, raw=True) + "\n")


def test_a_prompt_of_one_token_needs_no_prefill(run: Run, tiny: TinyLlama) -> None:
    assert run("x", "--raw")[:2] == (0, expected_text(tiny, "x", raw=True) + "\n")


def test_raw_text_begins_with_bos_where_the_model_asks_for_it(run: Run, tiny: TinyLlama, tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "bos.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    assert run("zzz", "--raw", path=path)[:2] == (0, expected_text(tiny, "zzz", raw=True, bos=True) + "\n")
    assert expected_text(tiny, "zzz", raw=True, bos=True) != expected_text(tiny, "zzz", raw=True)


def test_the_answer_ends_at_an_end_token(run: Run, tiny: TinyLlama, tmp_path: Path) -> None:
    tokens = tiny.greedy(tiny.tokenizer.encode("zzz").ids, 34)
    end = tokens[3]
    path = tiny.save(tmp_path / "end.gguf", metadata={"tokenizer.ggml.eos_token_id": end})
    status, out, _ = run("zzz", "--raw", path=path, max_tokens=34)
    assert (status, out) == (0, tiny.tokenizer.decode(tokens[: tokens.index(end) + 1]) + "\n")


def test_prompts_of_a_batch_get_the_answers_they_get_alone(run: Run, tiny: TinyLlama) -> None:
    answers = [expected_text(tiny, prompt) for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert run(prompt)[1] == answer + "\n"
    status, out, _ = run(*PROMPTS)
    assert status == 0
    assert_in_order([part for pair in zip(PROMPTS, answers, strict=True) for part in pair], out)


@pytest.mark.parametrize("source", ["a file", "standard input"])
def test_prompts_from_a_file_follow_those_of_the_command_line(
    run: Run, tiny: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    text = "zzz\n\n   \nthe 42 cats"  # lines without text are no prompts
    path = tmp_path / "prompts.txt"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    status, out, _ = run("hello world", "--file", path if source == "a file" else "-")
    assert status == 0
    assert_in_order([part for prompt in PROMPTS for part in (prompt, expected_text(tiny, prompt))], out)
    assert out == run(*PROMPTS)[1]


def test_a_file_alone_will_do(run: Run, tiny: TinyLlama, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("zzz\r\n", encoding="utf-8")
    assert run("--file", tmp_path / "prompts.txt")[:2] == (0, expected_text(tiny, "zzz") + "\n")


@pytest.mark.parametrize("page_size", [5, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 16))])
def test_the_page_size_changes_no_text(run: Run, page_size: int) -> None:
    assert run(*PROMPTS, "--page-size", page_size)[:2] == run(*PROMPTS)[:2]


@pytest.mark.parametrize("num_pages", ["auto", pytest.param("40", marks=pytest.mark.full)])
def test_the_number_of_pages_changes_no_text(run: Run, num_pages: str) -> None:
    assert run(*PROMPTS, "--num-pages", num_pages)[:2] == run(*PROMPTS)[:2]


@pytest.mark.parametrize("budget", [5, pytest.param(16, marks=pytest.mark.full)])
def test_prompts_in_chunks_give_the_text_they_give_in_one_piece(
    run: Run, tiny: TinyLlama, caplog: pytest.LogCaptureFixture, budget: int
) -> None:
    with jax.log_compiles():
        status, out, err = run(*PROMPTS, "--prefill-tokens", budget)
    assert status == 0
    assert_in_order([expected_text(tiny, prompt) for prompt in PROMPTS], out)
    compiled = [message for message in caplog.messages if "Compiling" in message and "prefill" in message]
    assert len(compiled) == 2, compiled  # one program for fresh rows, one for those that are continued
    template = gguf_template(tiny.metadata)
    texts = [render_chat(template, [{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    num_tokens = sum(len(tiny.tokenizer.encode(text).ids) - 1 for text in texts)
    assert num_tokens > 2 * budget
    assert re.search(rf"prefill +{num_tokens} tokens in ", err), err


def test_progress_is_shown_in_a_terminal_where_there_are_several_chunks(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as rich takes it: standard error is a terminal
    assert "Prefilling" in run(*PROMPTS, "--prefill-tokens", 16)[2]
    assert "Prefilling" not in run(*PROMPTS)[2]
    monkeypatch.delenv("FORCE_COLOR")
    assert "Prefilling" not in run(*PROMPTS, "--prefill-tokens", 16)[2]


def test_a_seed_decides_the_sampled_text(run: Run, tiny: TinyLlama) -> None:
    options = ("zzz", "--temperature", "1.5", "--top-k", "40", "--top-p", "0.95", "--seed")
    first, again, other = (run(*options, seed)[:2] for seed in (3, 3, 4))
    assert first == again
    assert first[0] == other[0] == 0
    assert len({first[1], other[1], expected_text(tiny, "zzz") + "\n"}) == 3


def test_a_sampler_that_keeps_one_token_is_greedy(run: Run, tiny: TinyLlama) -> None:
    assert run("zzz", "--temperature", "2", "--top-k", "1")[:2] == (0, expected_text(tiny, "zzz") + "\n")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_every_dtype_answers(run: Run, tiny: TinyLlama, dtype: str) -> None:
    status, out, _ = run("zzz", "--dtype", dtype)
    assert status == 0
    assert (out == expected_text(tiny, "zzz") + "\n") or dtype != "float32"


def test_the_table_shows_every_row_and_its_pages(run: Run, tiny: TinyLlama) -> None:
    status, out, err = run(*PROMPTS, "--raw", "--page-size", 4, "--num-pages", 30, "--show-table")
    assert status == 0
    assert "■" not in out
    seen: list[int] = []
    for row, prompt in enumerate(PROMPTS):
        tokens = len(tiny.tokenizer.encode(prompt).ids) - 1 + COUNT  # the last new one is not in the cache yet
        drawn = re.search(rf"^ *{row} +{tokens} +([\d ]+)$", err, re.MULTILINE)
        assert drawn, err
        pages = [int(page) for page in drawn[1].split()]
        assert len(pages) == -(-tokens // 4)
        seen += pages
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(30))
    assert err.count("■") == len(seen)
    assert re.search(rf"\b30 pages of 4 tokens, {30 - len(seen)} free", err)


def test_speed_and_memory_go_to_standard_error(run: Run, tiny: TinyLlama) -> None:
    _, _, err = run("zzz", "--raw", "--page-size", 4)
    held = len(tiny.tokenizer.encode("zzz").ids) - 1 + COUNT
    assert re.search(rf"decode +{COUNT} tokens in .* tokens/s", err)
    assert re.search(rf"paged .*\b{held} tokens", err)


def test_what_a_models_files_ask_for_in_vain_is_said_on_standard_error(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = dataclasses.replace(open_pretrained(model), notes=("one [thing]" + " and more" * 20, "another"))
    monkeypatch.setattr(generate, "open_pretrained", lambda _: opened)
    status, _, notes = run("zzz", "--raw", max_tokens=1)
    assert status == 0
    assert notes.splitlines()[:2] == [f"note: {note}" for note in opened.notes]


def test_it_runs_as_a_script(model: Path, tiny: TinyLlama, tmp_path: Path) -> None:
    script, arguments = (
        Path(__file__).parents[3] / "examples" / "generate.py",
        ["--model", str(model), "--max-tokens", str(COUNT)],
    )
    options = {"capture_output": True, "cwd": tmp_path, "check": False, "env": {**os.environ, "NO_COLOR": "1"}}
    done = subprocess.run([sys.executable, script, *arguments, "zzz"], text=True, encoding="utf-8", **options)
    assert (done.returncode, done.stdout) == (0, expected_text(tiny, "zzz") + "\n"), done.stderr
    assert not re.search("Warning|Traceback", done.stderr)


# --- Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a prompt"),
        ([""], "prompt 1: expected some text, got ''"),
        (["hello", " \n"], "prompt 2: expected some text"),
        (["--file", "/no/such/file"], "No such file or directory: '/no/such/file'"),
        (["hello", "--temperature", "-1"], "--temperature: expected a finite number of at least 0, got '-1'"),
        (["hello", "--temperature", "nan"], "--temperature: .* got 'nan'"),
        (["hello", "--temperature", "inf"], "--temperature: .* got 'inf'"),
        (["hello", "--temperature", "warm"], "--temperature: .* got 'warm'"),
        (["hello", "--temperature", "1", "--top-p", "0"], "--top-p: .* got '0'"),
        (["hello", "--temperature", "1", "--top-p", "2"], "--top-p: .* got '2'"),
        (["hello", "--temperature", "1", "--top-p", "nan"], "--top-p: .* got 'nan'"),
        (["hello", "--temperature", "1", "--top-k", "0"], "--top-k: .* got '0'"),
        (["hello", "--temperature", "1", "--top-k", "1.5"], r"--top-k: .* got '1\.5'"),
        (["hello", "--top-k", "5"], "--top-k needs --temperature"),
        (["hello", "--top-p", "0.5"], "--top-p needs --temperature"),
        (["hello", "--seed", "1"], "--seed needs --temperature"),
        (["hello", "--temperature", "0", "--top-k", "5"], "--top-k needs --temperature"),
        (["hello", "--temperature", "1", "--seed", "x"], "--seed: "),
        (["hello", "--temperature", "1", "--seed", "1" + "0" * 30], "seed"),
        (["hello", "--max-tokens", "0"], "--max-tokens: .* got '0'"),
        (["hello", "--max-tokens", "-3"], "--max-tokens: .* got '-3'"),
        (["hello", "--prefill-tokens", "0"], "--prefill-tokens: .* got '0'"),
        (["hello", "--prefill-tokens", "-64"], "--prefill-tokens: .* got '-64'"),
        (["hello", "--prefill-tokens", "many"], "--prefill-tokens: .* got 'many'"),
        (["hello", "--page-size", "0"], "--page-size: .* got '0'"),
        (["hello", "--num-pages", "0"], "--num-pages: .* got '0'"),
        (["hello", "--num-pages", "x"], "--num-pages: .* got 'x'"),
        (["hello", "--num-pages", "100000000"], "memory"),
        (["hello", "--num-pages", "1000000000000"], "num.pages"),
        (["hello \udcff"], "prompt 1"),  # bytes of the shell's that are no UTF-8
        (["hello", "--dtype", "int8"], "--dtype: "),
        (["hello", "--cache-dtype", "int4"], "--cache-dtype: expected fp8 or one of .*, got 'int4'"),
        (["hello", "--cache-dtype", ""], "--cache-dtype: expected .* got ''"),
        (["hello", "--cache-dtype", "int8", "--compare-dense"], "--compare-dense: .* float32, .* --cache-dtype int8"),
        (["hello", "--cache-dtype", "fp8", "--compare-dense"], "--compare-dense: .* got --cache-dtype float8_e4m3fn"),
        (["hello", "--fast"], "--fast"),
        (["hello " * 300], "prompt 1: .* the model's 256 positions"),
        (["hello", "--max-tokens", "256"], "prompt 1: .* the model's 256 positions"),
        (["zzz", "hello " * 20, "--page-size", "4", "--num-pages", "3"], r"need \d+ pages of 4 tokens.* 3\b"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("nothing_computed")
def test_bad_arguments_are_refused_before_anything_is_computed(run: Run, arguments: list[str], message: str) -> None:
    status, out, err = run(*arguments, max_tokens=None if "--max-tokens" in arguments else COUNT)
    assert (status, out) == (2, "")
    assert re.search(message, err), err
    assert "Traceback" not in err


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def cut_in_the_header(content: bytes) -> bytes:
    return content[:300]


def no_magic(content: bytes) -> bytes:
    return b"GGML" + content[4:]


def absurd_count(content: bytes) -> bytes:
    return content[:8] + b"\xff" * 16 + content[24:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "truncated|expected .* bytes"),
        (cut_in_the_header, "truncated or corrupt header"),
        (no_magic, "expected a GGUF file"),
        (absurd_count, "truncated or corrupt header"),
        (lambda _: b"", "empty"),
        (lambda _: os.urandom(5000), "expected a GGUF file"),
    ],
    ids=["truncated", "truncated header", "no magic", "absurd counts", "empty", "noise"],
)
@pytest.mark.usefixtures("nothing_computed")
def test_a_damaged_model_is_refused(
    run: Run, model: Path, tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(model.read_bytes()))
    status, out, err = run("hello", path=path)
    assert (status, out) == (2, "")
    assert re.search(message, err), err
    assert "damaged.gguf" in err


@pytest.mark.usefixtures("nothing_computed")
def test_bad_sampling_is_refused_before_the_default_model_is_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--top-k", "5"]) == 2
    assert "--top-k needs --temperature" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_computed")
def test_a_file_that_is_not_utf_8_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    status, out, err = run("--file", tmp_path / "latin.txt")
    assert (status, out) == (2, "")
    assert re.search(r"--file .*latin\.txt: expected UTF-8 text, got .* byte 0xe9", err), err


@pytest.mark.usefixtures("nothing_computed")
def test_standard_input_that_is_not_utf_8_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    status, out, err = run("--file", "-")
    assert (status, out) == (2, "")
    assert "--file -: expected UTF-8 text, got" in err


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (0.5, r"the weights: expected at most the 0\.3 MB of memory that are free, got 0\.5 MB"),
        (
            1.01,
            r"need 3 pages of 16 tokens, expected at most the cache's 0, which fit 80% of the 0\.0 MB that the weights",
        ),
    ],
)
@pytest.mark.usefixtures("nothing_computed")
def test_a_model_that_does_not_fit_the_memory_is_refused(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, share: float, message: str
) -> None:
    weights = 4 * sum(map(math.prod, parameter_shapes(gguf_config(open_gguf(model))).values()))
    monkeypatch.setattr(pool, "free_bytes", lambda _: int(share * weights))
    status, out, err = run("hello world and more " * 2)
    assert (status, out) == (2, "")
    assert re.search(message, err), err


@pytest.mark.usefixtures("nothing_computed")
def test_a_model_that_is_not_there_is_refused(run: Run, tmp_path: Path) -> None:
    for path in (tmp_path / "missing.gguf", tmp_path):
        status, out, err = run("hello", path=path)
        assert (status, out) == (2, "")
        assert str(path) in err


@pytest.mark.parametrize(
    ("metadata", "arguments", "message"),
    [
        ({"general.architecture": "mamba"}, [], "architecture .* got 'mamba'"),
        ({"llama.expert_count": 8}, [], r"llama\.expert_count"),
        ({"llama.rope.scaling.type": "longrope"}, [], r"llama\.rope\.scaling\.type"),
        ({"llama.block_count": None}, [], r"llama\.block_count"),
        ({"tokenizer.ggml.model": "bert"}, [], r"other\.gguf: .* tokenizer\.ggml\.model .* got 'bert'"),
        ({"tokenizer.ggml.tokens": None}, [], r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.tokens": 7}, [], r"other\.gguf: expected tokenizer\.ggml\.tokens to be .* got 7"),
        ({"tokenizer.ggml.merges": 7}, [], r"other\.gguf: expected tokenizer\.ggml\.merges to be .* got 7"),
        ({"tokenizer.ggml.token_type": 7}, [], r"other\.gguf: expected tokenizer\.ggml\.token_type to be .* got 7"),
        ({"tokenizer.ggml.eos_token_id": "x"}, [], r"other\.gguf: expected .*eos_token_id .* got 'x'"),
        ({"tokenizer.chat_template": 7}, [], r"other\.gguf: expected tokenizer\.chat_template to be a text, got 7"),
        ({"tokenizer.chat_template": None}, [], "without a template"),
        ({"tokenizer.chat_template": "{{ raise_exception('no') }}"}, [], "got its error: no"),
        ({"tokenizer.chat_template": ""}, [], "prompt 1: .* empty"),
        ({"tokenizer.ggml.tokens": 7}, ["--token-ids"], r"other\.gguf: expected tokenizer\.ggml\.tokens .* got 7"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, ["--raw"], "bos"),
    ],
)
@pytest.mark.usefixtures("nothing_computed")
def test_a_model_that_is_not_supported_is_refused(
    run: Run, tiny: TinyLlama, tmp_path: Path, metadata: dict[str, Any], arguments: list[str], message: str
) -> None:
    path = tiny.save(tmp_path / "other.gguf", metadata=metadata)
    status, out, err = run(*arguments, "7" if arguments == ["--token-ids"] else "hello", path=path)
    assert (status, out) == (2, "")
    assert re.search(message, err), err
    assert err.count("\n") == 1


def test_a_tensor_type_that_is_not_supported_is_named(run: Run, tiny: TinyLlama, tmp_path: Path) -> None:
    name, iq2_xxs = "blk.1.ffn_up.weight", 16
    changed = {name: (name, tiny.weights[name].shape, iq2_xxs, bytes(64))}
    status, out, err = run("hello", path=tiny.save(tmp_path / "types.gguf", tensors=changed))
    assert (status, out) == (2, "")
    assert re.search(r"blk\.1\.ffn_up\.weight.* got IQ2_XXS", err), err


def test_a_model_without_a_template_still_continues_text(run: Run, tiny: TinyLlama, tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "base.gguf", metadata={"tokenizer.chat_template": None})
    assert run("zzz", "--raw", path=path)[:2] == (0, expected_text(tiny, "zzz", raw=True) + "\n")


# --- Running out


def test_running_out_of_pages_keeps_what_was_written(run: Run, tiny: TinyLlama) -> None:
    cells, prompt_tokens = 3 * 4, len(tiny.tokenizer.encode("zzz").ids)
    expected = expected_text(tiny, "zzz", cells - prompt_tokens + 1, raw=True)
    status, out, err = run("zzz", "--raw", "--page-size", 4, "--num-pages", 3, max_tokens=30)
    assert (status, out) == (1, expected + "\n")
    assert re.search(r"error: out of pages.* 0 of 3 pages", err, re.DOTALL), err
    assert "--num-pages" in err
    assert "Traceback" not in err


def test_running_out_of_pages_in_a_batch_keeps_every_row(run: Run, tiny: TinyLlama) -> None:
    """A page of one token each: the pool lasts for as many whole steps as it has pages for both rows."""
    lengths = [len(tiny.tokenizer.encode(prompt).ids) - 1 for prompt in ("zzz", "x")]
    status, out, err = run(
        "zzz", "x", "--raw", "--page-size", 1, "--num-pages", sum(lengths) + 2 * 5 + 1, max_tokens=30
    )
    assert status == 1
    assert_in_order([f"{expected_text(tiny, prompt, 5, raw=True)}\n" for prompt in ("zzz", "x")], out)
    assert "1 of 13 pages are free" in " ".join(err.split())


# --- The real model


@pytest.mark.download
def test_the_real_model_answers(run: Run, smollm2_path: Path) -> None:
    question = "What is gravity? Answer in one sentence."
    status, out, _ = run(question, "--scan-layers", path=smollm2_path, max_tokens=64)
    assert status == 0
    assert out == (
        "Gravity is a fundamental concept in physics that describes the force of gravity, which is a result of the "
        "curvature of spacetime caused by the presence of mass.\n"
    )
