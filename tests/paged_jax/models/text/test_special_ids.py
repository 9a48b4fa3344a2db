"""Special tokens of GGUF files: what each rule of the format and of llama.cpp's loader makes of which metadata."""

from typing import Any

import numpy as np
import pytest

from paged_jax.models.text.special_ids import SpecialIds, control_ids, special_ids

# Sentencepiece numbers <unk>, <s> and </s> so; of the byte-level one no token is special by its text.
LLAMA = ["<unk>", "<s>", "</s>", "a", "b", "c"]
GPT2 = ["x", "y", "z", *"abcdefghij"]
HARMONY = [*GPT2, "<|return|>", "<|call|>", "<|end|>"]
SOLAR = [*GPT2, "<|flush|>", "<|calls|>", "<|end|>"]
GEMMA = [*LLAMA, "<|tool_response>"]


def metadata(tokens: list[str], types: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    keys = {"model": "llama" if tokens[0] == "<unk>" else "gpt2", "tokens": tokens, "token_type": types, **changes}
    return {f"tokenizer.ggml.{key}": item for key, item in keys.items() if item is not None}


def ids(bos: int | None, eos: int | None, add_bos: bool, *end: int, unknown: int | None = None) -> SpecialIds:
    return SpecialIds(bos, eos, add_bos, frozenset(end), unknown)


# The rule → metadata → what follows.
RULES = {
    # The specification of GGUF: tokenizer.ggml.{bos,eos,unknown,padding}_token_id.
    "ids are the file's": (
        metadata(LLAMA, bos_token_id=3, eos_token_id=4, unknown_token_id=5),
        ids(3, 4, True, 2, 4, unknown=5),
    ),
    "padding is nobody's end": (
        metadata(GPT2, padding_token_id=1, eos_token_id=2),
        SpecialIds(None, 2, False, frozenset({2}), padding=1),
    ),
    # llama.cpp's loader, by the kind of tokenizer.
    "sentencepiece: missing ids are 0, 1 and 2, and bos is added": (metadata(LLAMA), ids(1, 2, True, 2, unknown=0)),
    "sentencepiece: a file says that bos is not added": (
        metadata(LLAMA, add_bos_token=False),
        ids(1, 2, False, 2, unknown=0),
    ),
    "sentencepiece: a default beyond the vocabulary is none": (
        metadata(["<unk>"]),
        ids(None, None, True, unknown=0),
    ),
    "byte level: missing ids are none": (metadata(GPT2), ids(None, None, False)),  # llama.cpp's 11 is Falcon's
    "byte level: bos is not added": (metadata(GPT2, bos_token_id=0), ids(0, None, False)),
    "byte level: a file may say that bos is added": (
        metadata(GPT2, bos_token_id=0, add_bos_token=True),
        ids(0, None, True),
    ),
    "Llama 3: bos is added": (metadata(GPT2, bos_token_id=0, pre="llama-bpe"), ids(0, None, True)),
    "Llama 3 by another name: bos is added": (metadata(GPT2, bos_token_id=0, pre="falcon3"), ids(0, None, True)),
    "Llama 3: a file says that bos is not added": (
        metadata(GPT2, bos_token_id=0, pre="llama-bpe", add_bos_token=False),
        ids(0, None, False),
    ),
    "a cut that nobody knows": (metadata(GPT2, bos_token_id=0, pre="new"), ids(0, None, False)),
    # llama.cpp's loader: "bad special token ..., using default id".
    "an id beyond the vocabulary is as if it were missing": (
        metadata(LLAMA, bos_token_id=2**32 - 1, eos_token_id=6),
        ids(1, 2, True, 2, unknown=0),
    ),
    "also where there is no default": (metadata(GPT2, eos_token_id=2**32 - 1, eot_token_id=99), ids(None, None, False)),
    # llama.cpp's loader: tokens that end a generation.
    "eot and eom end": (metadata(GPT2, eos_token_id=0, eot_token_id=3, eom_token_id=4), ids(None, 0, False, 0, 3, 4)),
    "ends of a gap filled in": (
        metadata(GPT2, fim_pad_token_id=3, fim_rep_token_id=4, fim_sep_token_id=5),
        ids(None, None, False, 3, 4, 5),
    ),
    "their texts count where the file gives no id": (
        metadata([*GPT2, "<fim_pad>", "<reponame>", "<|file_sep|>"], fim_rep_token_id=4),
        ids(None, None, False, 13, 4, 15),
    ),
    "texts of ends, whatever the ids say": (
        metadata([*GPT2, "<|im_end|>", "<|eot_id|>", "<|endoftext|>"], eos_token_id=0),
        ids(None, 0, False, 0, 13, 14, 15),
    ),
    **{
        f"texts of ends, of type {kind}": (
            metadata([*LLAMA, "<|im_end|>", "<end_of_turn>"], [2, 3, 3, 1, 1, 1, kind, kind]),
            ids(1, 2, True, 2, 6, 7, unknown=0),
        )
        for kind in (1, 3, 4)
    },
    "<|end|> ends": (metadata([*GPT2, "<|end|>", "<|call|>"]), ids(None, None, False, 13, 14)),
    "<|end|> ends a part only, of gpt-oss": (metadata(HARMONY), ids(None, None, False, 13, 14)),
    "even where it is eos": (metadata(HARMONY, eos_token_id=15), ids(None, 15, False, 13, 14)),
    "<|end|> ends a part only, of Solar": (metadata(SOLAR), ids(None, None, False, 13, 14)),
    "</s> is a text of its own in Gemma 4": (metadata(GEMMA, eos_token_id=3), ids(1, 3, True, 3, 6, unknown=0)),
}


@pytest.mark.parametrize("rule", RULES)
def test_special_ids(rule: str) -> None:
    found, expected = RULES[rule]
    assert special_ids(found) == expected


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "unknown", "padding", "fim_pad", "fim_rep", "fim_sep"])
@pytest.mark.parametrize("index", [-1, 2.0, True, "</s>", [2], np.arange(2)], ids=repr)
def test_an_id_that_cannot_be_one(name: str, index: Any) -> None:
    with pytest.raises(ValueError, match=rf"tokenizer\.ggml\.{name}_token_id to be the id of a token, got "):
        special_ids(metadata(LLAMA, **{f"{name}_token_id": index}))


def test_a_flag_that_cannot_be_one() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.add_bos_token to be true or false, got 1"):
        special_ids(metadata(LLAMA, add_bos_token=1))


def test_control_tokens_are_told_by_their_type_or_their_text() -> None:
    tokens = [*LLAMA, "<|im_end|>", "<fim_prefix>", "▁<SUF>", "<｜fim▁end｜>", "<|im_start|>"]  # noqa: RUF001
    assert control_ids(metadata(tokens, [2, 3, 1, 4, 5, 6, 4, 1, 1, 1, 1])) == {0, 1, 2, 6, 7, 8, 9}
