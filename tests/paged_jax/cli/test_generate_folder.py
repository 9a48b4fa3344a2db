"""The command line with Hugging Face folders and with token ids, the comparison with a dense cache, and refusals."""

import codecs
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import COUNT, Run, run_command
from safetensors.numpy import load_file, save_file
from tiny_llama import NAMES, TEMPLATE, TinyLlama

from paged_jax.cli import generate
from paged_jax.models import load
from paged_jax.models.text.chat import ChatTemplate, render_chat

INDEX, SHARD = "model.safetensors.index.json", "model-00002-of-00002.safetensors"


def save_folder(tiny: TinyLlama, folder: Path) -> Path:
    """The model as transformers writes one, in two shards, with a tokenizer and a chat template."""
    folder.mkdir()
    fields = {
        "model_type": "llama",
        "vocab_size": len(tiny.weights["output.weight"]),
        "hidden_size": tiny.width,
        "intermediate_size": tiny.mlp_width,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "head_dim": tiny.head_dim,
        "max_position_embeddings": tiny.max_length,
        "rms_norm_eps": tiny.norm_eps,
        "rope_theta": tiny.rope_base,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {}
    for name, weight in tiny.weights.items():
        *layer, part, _ = name.split(".")
        prefix = f"model.layers.{layer[1]}." if layer else ""
        tensors[f"{prefix}{NAMES[part]}.weight"] = np.ascontiguousarray(weight)
    weight_map = {}
    for shard in range(2):
        file, part = f"model-{shard + 1:05}-of-00002.safetensors", dict(list(tensors.items())[shard::2])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tiny.tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def folder(tiny: TinyLlama, tmp_path: Path) -> Path:
    return save_folder(tiny, tmp_path / "model")


@pytest.fixture
def run(folder: Path, own_cache: None, capsys: pytest.CaptureFixture[str]) -> Run:  # noqa: ARG001
    """Runs the command with the folder: (exit status, standard output, standard error)."""

    def run(*arguments: Any, model: Path = folder) -> tuple[int, str, str]:
        return run_command(capsys, "--model", model, "--scan-layers", "--max-tokens", COUNT, *arguments)

    return run


def change(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({name: value for name, value in (content | fields).items() if value is not None}))


def expected_text(tiny: TinyLlama, text: str, template: str | None = TEMPLATE) -> str:
    """Of a chat, or without a template of raw text."""
    if template is not None:
        tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        text = render_chat(ChatTemplate(template, tokens), [{"role": "user", "content": text}])
    return tiny.tokenizer.decode(tiny.greedy(tiny.tokenizer.encode(text).ids, COUNT)) + "\n"


def ids(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


# --- Folders


def test_a_folder_answers_as_the_same_model_in_numpy(run: Run, tiny: TinyLlama) -> None:
    assert run("zzz")[:2] == (0, expected_text(tiny, "zzz"))
    assert run("zzz", "--raw")[:2] == (0, expected_text(tiny, "zzz", None))


def test_where_a_chat_template_may_stand(run: Run, tiny: TinyLlama, folder: Path) -> None:
    named, file = "{{ messages[0].content }} x {{ eos_token }}", "{{ bos_token }}{{ messages[0].content }} world"
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": named}]
    change(folder / "tokenizer_config.json", chat_template=templates)
    assert run("zzz")[:2] == (0, expected_text(tiny, "zzz", named))
    (folder / "chat_template.jinja").write_text(file)  # goes before
    assert run("zzz")[:2] == (0, expected_text(tiny, "zzz", file))


def test_files_that_begin_with_a_byte_order_mark_and_end_lines_in_two_characters(
    run: Run, tiny: TinyLlama, folder: Path
) -> None:
    (folder / "chat_template.jinja").write_text("{% if true %}\n{{ messages[0].content }} world{% endif %}\n")
    for path in [*folder.glob("*.json"), folder / "chat_template.jinja"]:
        text = json.dumps(json.loads(path.read_text()), indent=1) if path.suffix == ".json" else path.read_text()
        path.write_bytes(codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode())
    assert run("zzz")[:2] == (0, expected_text(tiny, "zzz", "{{ messages[0].content }} world"))


def test_a_folders_tokenizer_adds_its_bos_to_plain_text_alone(run: Run, tiny: TinyLlama, folder: Path) -> None:
    post = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    post["special_tokens"] = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    post["single"] = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    change(folder / "tokenizer.json", post_processor=post, padding=padding)  # the padding is not for us
    assert run("zzz", "--raw")[:2] == (0, expected_text(tiny, "<|im_start|>zzz", None))
    assert run("zzz")[:2] == (0, expected_text(tiny, "zzz"))


@pytest.mark.parametrize("as_list", [False, True])
def test_generation_config_names_more_end_tokens(run: Run, tiny: TinyLlama, folder: Path, as_list: bool) -> None:
    tokens = tiny.greedy(tiny.tokenizer.encode("zzz").ids, COUNT)
    end = tokens[3]
    change(folder / "generation_config.json", eos_token_id=[end, 0] if as_list else end)
    expected = tiny.tokenizer.decode(tokens[: tokens.index(end) + 1]) + "\n"
    assert run("zzz", "--raw")[:2] == (0, expected)


def test_generation_config_says_how_to_sample_and_arguments_say_it_again(
    run: Run, tiny: TinyLlama, folder: Path
) -> None:
    change(folder / "generation_config.json", do_sample=True, temperature=3.0, top_k=0, top_p=0.99)
    greedy = expected_text(tiny, "zzz")
    first, again, other = (run("zzz", "--seed", seed)[:2] for seed in (3, 3, 4))
    assert first == again
    assert first[0] == 0
    assert len({first[1], other[1], greedy}) == 3
    assert run("zzz", "--temperature", "0")[:2] == (0, greedy)
    assert run("zzz", "--top-k", "1")[:2] == (0, greedy)
    change(folder / "generation_config.json", do_sample=False)
    assert run("zzz")[:2] == (0, greedy)


def test_settings_that_have_no_effect_here_are_named(run: Run, tiny: TinyLlama, folder: Path) -> None:
    change(folder / "generation_config.json", repetition_penalty=1.1, top_k=50.0)
    status, out, err = run("zzz")
    assert (status, out) == (0, expected_text(tiny, "zzz"))
    assert "generation_config.json: without effect here: repetition_penalty = 1.1" in err
    with pytest.warns(UserWarning, match="without effect here: repetition_penalty = 1.1"):
        assert load(folder).sampling is None


def test_a_scaled_rotation_makes_room_for_longer_prompts(run: Run, folder: Path) -> None:
    arguments = ("--token-ids", ids([7] * 250))
    assert run(*arguments)[0] == 2
    change(folder / "config.json", rope_scaling={"type": "linear", "factor": 2.0})
    assert run(*arguments)[0] == 0


# --- Token ids


def test_token_ids_need_no_tokenizer(run: Run, tiny: TinyLlama, folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    prompts = [[5, 200, 31, 7], [7]]
    answers = [ids(tiny.greedy(prompt, COUNT)) for prompt in prompts]
    assert run("--token-ids", ids(prompts[0]))[:2] == (0, f"{answers[0]}\n")
    both = (argument for prompt in prompts for argument in ("--token-ids", ids(prompt)))
    expected = f"[1/2] {ids(prompts[0])}\n{answers[0]}\n[2/2] {ids(prompts[1])}\n{answers[1]}\n"
    assert run(*both)[:2] == (0, expected)
    keys = {f"tokenizer.ggml.{key}": None for key in ("model", "pre", "tokens", "merges", "token_type")}
    bare = tiny.save(tmp_path / "bare.gguf", metadata=keys)
    assert run("--token-ids", "5 200 31 7", model=bare)[:2] == (0, f"{answers[0]}\n")


# --- A dense cache


def test_a_dense_cache_gives_the_same_tokens(run: Run, tiny: TinyLlama) -> None:
    status, out, err = run("zzz", "hello world", "--compare-dense", "--page-size", 5)
    assert status == 0
    assert expected_text(tiny, "zzz") in out
    assert f"the same {2 * COUNT} tokens" in err


def test_a_token_that_differs_is_named(run: Run, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tiny.greedy([7], COUNT)
    for wrong, place in (([*tokens[:4], 9999, *tokens[5:]], 5), (tokens[:-1], COUNT)):
        monkeypatch.setattr(generate, "generate_dense", lambda *_, wrong=wrong: [wrong])
        status, out, err = run("--token-ids", "7", "--compare-dense")
        assert (status, out) == (1, f"{ids(tokens)}\n")
        other = 9999 if place == 5 else "no more"
        assert f"prompt 1, new token {place}: expected {other}, as from a dense cache, got {tokens[place - 1]}" in err


# --- Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--token-ids", "1,x"], "--token-ids: expected token ids between commas, got '1,x'"),
        (["--token-ids", ""], "--token-ids: expected token ids between commas, got ''"),
        (["--token-ids", "-1"], "--token-ids: expected"),
        (["--token-ids", "7", "--token-ids", "3,999999"], "prompt 2: expected token ids below 269, .* got 999999"),
        (["--token-ids", "7", "hello"], "--token-ids stands instead of prompts of text"),
        (["--token-ids", "7", "--raw"], "--token-ids stands instead of prompts of text"),
        (["--token-ids", ids([7] * 250)], "prompt 1: .* the model's 256 positions, got 250 \\+ 12 tokens"),
        (["hello " * 300], "prompt 1: .* the model's 256 positions"),
        (["hello", "--compare-dense", "--temperature", "1"], "expected --temperature 0, got 1.0"),
        (["hello", "--seed", "1"], "--seed needs --temperature"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_bad_arguments_are_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(generate, "load_weights", None)
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert re.search(message, err), err


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def without_template(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template=None)


def truncated_shard(folder: Path) -> None:
    path = folder / SHARD
    path.write_bytes(path.read_bytes()[:-100])


def index_to_nowhere(folder: Path) -> None:
    (folder / SHARD).unlink()


def changed_shard(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The shard with other tensors, and an index that knows them."""
    tensors = load_file(folder / SHARD)
    change(tensors)
    save_file(tensors, folder / SHARD)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    index = {name: file for name, file in index.items() if file != SHARD} | dict.fromkeys(tensors, SHARD)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


def missing_tensor(folder: Path) -> None:
    changed_shard(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def extra_tensor(folder: Path) -> None:
    changed_shard(folder, lambda tensors: tensors.update(lora=np.ones(1, np.float32)))


def other_family(folder: Path) -> None:
    change(folder / "config.json", model_type="falcon")


def other_rope(folder: Path) -> None:
    change(folder / "config.json", rope_scaling={"rope_type": "dynamic", "factor": 2.0})


def quantised(folder: Path) -> None:
    change(folder / "config.json", quantization_config={"quant_method": "gptq"})


def other_sizes(folder: Path) -> None:
    change(folder / "config.json", intermediate_size=97)


def small_vocabulary(folder: Path) -> None:
    change(folder / "config.json", vocab_size=100)


def bad_sampling(folder: Path) -> None:
    change(folder / "generation_config.json", do_sample=True, temperature=1.0, top_p=2.0)


def bad_end(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id="</s>")


def text_as_temperature(folder: Path) -> None:
    change(folder / "generation_config.json", do_sample=True, temperature="a")


def flag_as_top_p(folder: Path) -> None:
    change(folder / "generation_config.json", do_sample=True, top_p=True)


def end_of_64_bits(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[2, 2**40])


def end_of_32_bits(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=2**31)


def families(folder: Path) -> None:
    change(folder / "config.json", model_type=["llama"])


def no_rope_base(folder: Path) -> None:
    change(folder / "config.json", rope_theta=0)


def no_long_factors(folder: Path) -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 8, "original_max_position_embeddings": 16}
    change(folder / "config.json", rope_scaling=scaling)


def deep_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 200_000)


def deep_settings(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[" * 200_000)


def deep_index(folder: Path) -> None:
    (folder / INDEX).write_text("[" * 200_000)


def nameless_template(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template=["x"])


def template_without_text(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template=[{"name": "default"}])


def latin_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes("café".encode("latin-1"))


def wide_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("x", encoding="utf-16")


def bad_json(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_tokenizer, r"expected a tokenizer\.json, .* got none: give it token ids"),
        (broken_tokenizer, r"tokenizer\.json: expected a tokenizer, got"),
        (without_template, "a chat template, got a model without a template"),
        (truncated_shard, rf"{SHARD}: expected a whole safetensors file, got one of \d+ bytes"),
        (index_to_nowhere, rf"index\.json: expected a file {SHARD} beside it, got none"),
        (missing_tensor, r"expected a tensor 'model\.layers\.1\.mlp\.up_proj\.weight', got none"),
        (extra_tensor, "expected the tensors of a llama model, got 'lora' too"),
        (other_family, r"config\.json: expected model_type to be one of llama, .* got 'falcon'"),
        (other_rope, "rope_type: expected one of .* got 'dynamic'"),
        (quantised, "expected weights that are not quantised, got quantization_config 'gptq'"),
        (other_sizes, r"mlp\.\w+_proj\.weight': expected shape \(.*97.*\), got \(.*96.*\)"),
        (small_vocabulary, r"prompt 1: expected token ids below 100, .* embeddings, got \d+"),
        (bad_sampling, r"generation_config\.json: top_p: expected a number in \(0, 1\], got 2\.0"),
        (bad_end, r"generation_config\.json: expected eos_token_id to be a token id .* got '</s>'"),
        (text_as_temperature, r"generation_config\.json: expected temperature to be a number, got 'a'"),
        (flag_as_top_p, r"generation_config\.json: expected top_p to be a number, got True"),
        (end_of_64_bits, r"generation_config\.json: expected eos_token_id to be .* got \[2, 1099511627776\]"),
        (end_of_32_bits, r"config\.json: expected eos_token_id to be .* got 2147483648"),
        (families, r"config\.json: expected model_type to be one of .* got \['llama'\]"),
        (no_rope_base, r"config\.json: rope: rope_theta: expected .* got 0"),
        (no_long_factors, r"config\.json: rope: longrope rope: expected long_factor, got None"),
        (deep_config, r"config\.json: expected JSON, got .* while decoding a JSON"),
        (deep_settings, r"tokenizer_config\.json: expected JSON, got .* while decoding a JSON"),
        (deep_index, r"index\.json: expected JSON, got .* while decoding a JSON"),
        (nameless_template, r"tokenizer_config\.json: expected chat_template to be .* got \['x'\]"),
        (template_without_text, r"tokenizer_config\.json: expected chat_template to be .* got \[{'name': 'default'}\]"),
        (latin_template, r"chat_template\.jinja: expected UTF-8 text, got .* byte 0xe9"),
        (wide_template, r"chat_template\.jinja: expected UTF-8 text, got UTF-16, by its byte order mark"),
        (bad_json, r"generation_config\.json: expected JSON, got"),
        (no_config, r"No such file or directory: '.*config\.json'"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(
    run: Run, folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    status, out, err = run("hello")
    assert (status, out) == (2, "")
    assert re.search(message, err), err
    assert err.count("\n") == 1
