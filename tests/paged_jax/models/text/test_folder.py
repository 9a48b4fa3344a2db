"""A folder's tokenizer files: special tokens, templates and end tokens, by hand and as transformers has them."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import BARE, CHATML, SPECIAL, save_files, save_tokenizer

from paged_jax.models.text.chat import render_chat
from paged_jax.models.text.folder import folder_text, tokenizer_notes

NAMES = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token", "image_token"]
HELLO = [{"role": "user", "content": "hi <turn>"}]


# --- By hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["<s>", {"content": "<s>", "lstrip": False}], ids=["text", "object"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_special_token_may_stand_in_either_file(file: str, token: Any, tmp_path: Path) -> None:
    files = {"tokenizer_config.json": {}, "chat_template.jinja": CHATML}
    folder = save_files(save_tokenizer(tmp_path), files | {file: {"bos_token": token, "eos_token": "</s>"}})
    text = folder_text(folder, {})
    assert (text.bos, text.eos) == (1, 2)
    assert text.encode("hi", is_raw=False)[:2] == [1, 3]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "a"}}, "a"),
        ({"tokenizer_config.json": {"chat_template": "a"}, "chat_template.jinja": "b"}, "b"),
        ({"tokenizer_config.json": {"chat_template": "a"}, "chat_template.json": {"chat_template": "c"}}, "a"),
        ({"chat_template.json": {"chat_template": "c"}}, "c"),
        ({"tokenizer_config.json": {"chat_template": {"default": "a", "tools": "b"}}}, "a"),
        ({"additional_chat_templates/tools.jinja": "t", "chat_template.jinja": "b"}, "b"),
        ({"additional_chat_templates/tools.jinja": "t", "tokenizer_config.json": {"chat_template": "a"}}, None),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tools", "template": "b"}]}}, None),
    ],
)
def test_which_template_is_a_chats(files: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    found = folder_text(save_files(save_tokenizer(tmp_path), files), {}).chat
    assert (None if found is None else found.source) == expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": {"bos_token": 1}}, r"tokenizer_config\.json: expected bos_token to be a token, .*1"),
        ({"special_tokens_map.json": {"bos_token": {}}}, r"tokens_map\.json: expected bos_token to be a token, .*\{\}"),
        (
            {"tokenizer_config.json": {"additional_special_tokens": "x"}},
            "additional_special_tokens to be a list .* 'x'",
        ),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": {}}}}, "added_tokens_decoder to be an object of ids"),
        ({"added_tokens.json": {"<x>": "y"}}, r"added_tokens\.json: expected an object of tokens and their ids"),
        ({"chat_template.json": {"chat_template": 1}}, r"chat_template\.json: expected chat_template to be a text"),
    ],
)
def test_a_value_that_cannot_be_right_is_named(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        folder_text(save_files(save_tokenizer(tmp_path), files), {})


def test_keys_that_have_no_effect_here_are_named(tmp_path: Path) -> None:
    known = {"model_max_length": 1e30, "add_bos_token": True, "bos_token": "<s>", "image_token": "<image>"}
    assert tokenizer_notes(save_files(tmp_path, {"tokenizer_config.json": known})) == ()
    more = {"fast_tokenizer_files": ["tokenizer.4.0.json"], "odd": 1, "odd_token": 2, "none": None}
    (said,) = tokenizer_notes(save_files(tmp_path, {"tokenizer_config.json": known | more}))
    assert said.endswith(
        "config.json: without effect here: fast_tokenizer_files = ['tokenizer.4.0.json'], odd = 1, odd_token = 2"
    )


# --- Against transformers ---------------------------------------------------------------------------------------------

TEMPLATE = CHATML + "".join(f"|{{{{ {name} is defined }}}} {{{{ {name} }}}}" for name in NAMES)
CLASSES = [None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "gpt_oss"]


def any_files(rng: random.Random) -> dict[str, Any]:
    """Special tokens in some of the places, null in some, and different ones in others."""

    def flags(content: str) -> dict[str, Any]:
        choices = {name: rng.random() < 0.5 for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        return {"content": content, **choices}

    def tokens(as_object: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in NAMES:
            text = rng.choice([*SPECIAL, *BARE, "<new>"])
            found |= {name: rng.choice([None, text, text, as_object(text)])} if rng.random() < 0.5 else {}
        return found

    def typed(text: str) -> dict[str, Any]:
        return {"__type": "AddedToken", **flags(text)}

    settings = tokens(typed)
    if rng.random() < 0.3:
        name = rng.choice(["additional_special_tokens", "extra_special_tokens"])
        settings[name] = rng.sample([*SPECIAL, *BARE, "<more>"], 2)
    elif rng.random() < 0.3:
        settings["extra_special_tokens"] = {"image_token": rng.choice(BARE)}
    if rng.random() < 0.3:
        by_id = {str(i): flags(text) for i, text in enumerate(SPECIAL + BARE)}
        settings["added_tokens_decoder"] = dict(rng.sample(sorted(by_id.items()), rng.randint(0, 7)))
    if (name := rng.choice(CLASSES)) is not None:
        settings["tokenizer_class"] = name
    files: dict[str, Any] = {"tokenizer_config.json": settings}
    if rng.random() < 0.5:
        files["special_tokens_map.json"] = tokens(flags)
        if rng.random() < 0.3:
            files["special_tokens_map.json"]["additional_special_tokens"] = rng.sample([*SPECIAL, *BARE, "<more>"], 2)
    if rng.random() < 0.2:
        files["added_tokens.json"] = {text: SPECIAL.index(text) for text in rng.sample(SPECIAL, 2)} | {"<turn>": 5}
    where = rng.choice(["settings", "named", "file", "file and settings"])
    if where != "file":
        settings["chat_template"] = TEMPLATE
    if where == "named":
        settings["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    if where.startswith("file"):
        files["chat_template.jinja"] = TEMPLATE
        settings["chat_template"] = rng.choice(["other", [{"name": "default", "template": "other"}]])
    return files


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_and_chats_equal_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    rng, config, compared = random.Random(family), {"model_type": family}, 0
    for number in range(40):
        folder = save_tokenizer(tmp_path / str(number), adds_bos=rng.random() < 0.5, pads=rng.random() < 0.3)
        files = any_files(rng)
        save_files(folder, files | {"config.json": config})
        theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), folder_text(folder, config)
        expected = theirs.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
        assert render_chat(ours.chat, HELLO) == expected, files
        assert (None if ours.eos is None else ours.tokenizer.id_to_token(ours.eos)) == theirs.eos_token, files
        if type(theirs).__name__ == "TokenizersBackend":  # the other classes take tokenizer.json apart
            compared += 1
            assert (ours.bos, ours.eos) == (theirs.bos_token_id, theirs.eos_token_id), files
            ids = theirs.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
            assert ours.encode(HELLO[0]["content"], is_raw=False) == ids, files
            for text in ("hi", "a <turn> b", "<s>hi"):  # the last has a bos of its own, and gets another
                assert ours.encode(text, is_raw=True) == theirs(text)["input_ids"], files
    assert compared or family in ("qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
