"""The law of streamed text: joined, the pieces are what the tokenizer makes of all tokens, and none is taken back."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paged_jax import text_streams

PLAIN = ["▁a", "▁the", "b", "▁", "é", "€", "▁▁", "中", "😀"]


def sentencepiece(*end) -> Tokenizer:
    """Byte fallback, as Llama and Gemma have it."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PLAIN]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    tokenizer.decoder = decoders.Sequence(chain)
    return tokenizer


def byte_level() -> Tokenizer:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "Ġthe", "âĤ¬", "<end>", "中"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens(["中"])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def words() -> Tokenizer:
    """No bytes at all: a vocabulary of words, with marks that stand close."""
    tokens = ["[UNK]", "the", "cat", "##s", "sat", ".", ",", "n't", "do"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


TOKENIZERS = {
    "sentencepiece": sentencepiece(),
    "sentencepiece, a first space stripped": sentencepiece(decoders.Strip(" ", 1, 0)),
    "byte level": byte_level(),
    "words": words(),
}


def streamed(tokenizer: Tokenizer, tokens: list[int], step: int = 1) -> list[str]:
    stream = text_streams(tokenizer.decode)()
    pieces = [stream.push(tokens[i : i + step]) for i in range(0, len(tokens), step)]
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("count", [600, pytest.param(20_000, marks=pytest.mark.full)])
def test_the_pieces_joined_are_the_decoding_of_the_whole(tokenizer, count):
    draw, size = random.Random(0), tokenizer.get_vocab_size()
    for _ in range(count):
        bytes_share = draw.random()  # from all bytes, most of them broken, to hardly any
        tokens = [
            draw.randrange(size) if draw.random() < bytes_share else draw.randrange(max(0, size - 9), size)
            for _ in range(draw.randrange(1, 40))
        ]
        assert "".join(streamed(tokenizer, tokens, draw.randrange(1, 4))) == tokenizer.decode(tokens), tokens


@pytest.mark.parametrize("tokenizer", [TOKENIZERS["sentencepiece"], TOKENIZERS["byte level"]])
def test_text_comes_as_soon_as_it_is_certain(tokenizer):
    """A character whole at its last byte, and text of ordinary tokens at once."""
    vocabulary = tokenizer.get_vocab()
    names = ["âĤ¬", "Ġa", "Ġthe"] if "Ġa" in vocabulary else ["€", "▁a", "▁the"]
    assert streamed(tokenizer, [vocabulary[name] for name in names]) == ["€", " a", " the", ""]


def test_the_bytes_of_a_character_are_held_back_until_it_is_whole():
    vocabulary = TOKENIZERS["byte level"].get_vocab()
    assert streamed(TOKENIZERS["byte level"], [vocabulary[byte] for byte in "âĤ¬"]) == ["", "", "€", ""]
    assert streamed(TOKENIZERS["byte level"], [vocabulary[byte] for byte in "âĤ"]) == ["", "", "\ufffd"]


def test_a_run_of_fallback_bytes_is_held_back_as_one_that_does_not_fit_breaks_them_all():
    tokenizer, vocabulary = TOKENIZERS["sentencepiece"], TOKENIZERS["sentencepiece"].get_vocab()
    a, euro = vocabulary["<0x41>"], [vocabulary[f"<0x{byte:02X}>"] for byte in "€".encode()]
    assert streamed(tokenizer, [a, *euro, vocabulary["b"]]) == ["", "", "", "", "A€b", ""]
    assert streamed(tokenizer, [a, *euro, euro[0]])[-1] == "\ufffd" * 5


def test_a_token_costs_as_much_late_as_early():
    """Long sequences are decoded from near their end, not from their beginning."""
    lengths = []

    def decode(tokens):
        lengths.append(len(tokens))
        return TOKENIZERS["byte level"].decode(tokens)

    stream = text_streams(decode)()
    vocabulary = TOKENIZERS["byte level"].get_vocab()
    stream.push([vocabulary["Ġa"]] * 1000)
    assert max(lengths) <= 4


def test_a_decoder_that_refuses_ids_it_does_not_know_will_do():
    stream = text_streams(lambda tokens: "".join("abc"[token] for token in tokens))()
    assert [stream.push([0]), stream.push([2, 1]), stream.finish()] == ["a", "cb", ""]
