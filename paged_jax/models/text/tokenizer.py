"""Build a BPE tokenizer, of bytes or of sentencepiece, and name its special tokens, from a GGUF file's metadata."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_SPECIAL, _ADDED = 3, 4  # values of tokenizer.ggml.token_type

# Texts that end a turn or a document in the known vocabularies, whether or not the metadata says so.
_END_TEXTS = frozenset(
    ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")
)


@dataclass(frozen=True)
class SpecialIds:
    bos: int | None
    eos: int | None
    add_bos: bool  # whether a prompt begins with bos; the tokenizer itself never adds it
    end: frozenset[int]  # generation stops at any of these


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer the metadata describes. It adds no tokens of its own: see `special_ids` for bos."""
    model = _required(metadata, "tokenizer.ggml.model")
    if not isinstance(model, str) or model not in _BUILDERS:
        raise NotImplementedError(
            f"expected tokenizer.ggml.model to be 'gpt2' (byte-level BPE) or 'llama' (sentencepiece), got {model!r:.60}"
        )
    tokenizer = _BUILDERS[model](metadata)
    tokenizer.add_special_tokens(_added_tokens(metadata, _SPECIAL))
    tokenizer.add_tokens(_added_tokens(metadata, _ADDED))
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise NotImplementedError(
            f"expected tokenizer.ggml.pre to be one of {', '.join(_PRE_TOKENIZERS)}, got {pre!r:.60}"
        )
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    # A byte-level token holds no space (it is spelled Ġ), so the one in a merge parts its two sides.
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in _texts(metadata, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    _check_merges(vocabulary, merges)

    # Llama 3's tokenizer takes a word that is itself a token as it is, whatever the merges would make of it.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Spaces are written ▁, and characters that have no token as bytes. The files hold scores instead of merges.

    A token is made of any two that are its halves. Those that a file adds to its vocabulary go before all others, then
    the likelier ones, and of equals those with the longer first half.
    """
    tokens, scores = _texts(metadata, "tokenizer.ggml.tokens"), _numbers(metadata, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ValueError(f"expected tokenizer.ggml.scores to have {len(tokens)} entries, got {len(scores)}")
    # Runs of spaces stand in Gemma's files as they are, as added tokens; as ▁ the merges reach them.
    tokens = ["▁" * len(token) if _is_spaces(token) else token for token in tokens]
    vocabulary, added = (
        {token: index for index, token in enumerate(tokens)},
        {index for index, _ in _tokens_of_type(metadata, _ADDED)},
    )
    halves = [
        ((index not in added, -scores[index], -cut), (token[:cut], token[cut:]))
        for token, index in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    halves.sort(key=lambda half: (half[0], -len(half[1][1])))
    merges, unknown = [sides for _, sides in halves], _special_id(metadata, "unknown", len(tokens))
    unknown = None if unknown is None else tokens[unknown]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    has_space_first = _flag(metadata, "tokenizer.ggml.add_space_prefix", True)  # Llama 2's files need not say
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_space_first else spaces
    begins = [decoders.Strip(" ", 1, 0)] if has_space_first else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *begins]
    )
    return tokenizer


def special_ids(metadata: Mapping[str, Any]) -> SpecialIds:
    size = len(_texts(metadata, "tokenizer.ggml.tokens"))
    bos, eos, eot, eom = (_special_id(metadata, name, size) for name in ("bos", "eos", "eot", "eom"))
    ends = {index for index in (eos, eot, eom) if index is not None}
    ends |= {index for index, token in _tokens_of_type(metadata, _SPECIAL) if token in _END_TEXTS}
    # Files of Llama 3 may leave the flag out and mean yes; all others mean no.
    add_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", str(metadata.get("tokenizer.ggml.pre")) == "llama-bpe")
    return SpecialIds(bos, eos, add_bos, frozenset(ends))


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ValueError(f"expected the model's metadata to have {key}, got none: it describes no tokenizer")
    return metadata[key]


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    texts = _required(metadata, key)
    if not isinstance(texts, list) or not set(map(type, texts)) <= {str}:
        raise ValueError(f"expected {key} to be an array of texts, got {texts!r:.60}")
    return texts


def _numbers(metadata: Mapping[str, Any], key: str) -> Sequence[float] | np.ndarray:
    numbers = _required(metadata, key)
    if not isinstance(numbers, np.ndarray) and not (
        isinstance(numbers, list) and set(map(type, numbers)) <= {int, float}
    ):
        raise ValueError(f"expected {key} to be an array of numbers, got {numbers!r:.60}")
    return numbers


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    flag = metadata.get(key, default)
    if not isinstance(flag, bool):
        raise ValueError(f"expected {key} to be true or false, got {flag!r:.60}")
    return flag


def _special_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    index = metadata.get(key)
    if index is not None and (type(index) is not int or index not in range(size)):
        raise ValueError(f"expected {key} to be one of the {size} tokens, got {index!r:.60}")
    return index


def _check_merges(vocabulary: Mapping[str, int], merges: list[tuple[str, ...]]) -> None:
    for merge in merges:
        if len(merge) != 2 or not vocabulary.keys() >= {*merge, "".join(merge)}:
            raise ValueError(f"expected merges of two tokens into a third in tokenizer.ggml.merges, got {merge!r}")


def _added_tokens(metadata: Mapping[str, Any], kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind == _SPECIAL, normalized=False)
        for _, token in _tokens_of_type(metadata, kind)
        if not (_is_spaces(token) and metadata["tokenizer.ggml.model"] == "llama")
    ]


def _is_spaces(token: str) -> bool:
    return bool(token) and not token.strip(" ")


def _tokens_of_type(metadata: Mapping[str, Any], kind: int) -> list[tuple[int, str]]:
    if "tokenizer.ggml.token_type" not in metadata:
        return []
    tokens, types = _texts(metadata, "tokenizer.ggml.tokens"), _numbers(metadata, "tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise ValueError(f"expected tokenizer.ggml.token_type to have {len(tokens)} entries, got {len(types)}")
    return [
        (index, token) for index, (token, its_kind) in enumerate(zip(tokens, types, strict=True)) if its_kind == kind
    ]


def _split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _word_pattern(number: str) -> str:
    """How Llama 3 and Qwen 2 cut text into words; they differ in how many digits go together."""
    contraction, word = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+"
    punctuation, space = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+|\s+(?!\S)|\s+"
    return "|".join((contraction, word, number, punctuation, space))


_GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # its regex is GPT-2's

# tokenizer.ggml.pre → how text is cut before the merges.
_PRE_TOKENIZERS: dict[Any, pre_tokenizers.PreTokenizer] = {
    "gpt-2": _GPT2_WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2_WORDS]),
    "llama-bpe": _split_then_bytes(_word_pattern(r"\p{N}{1,3}")),
    "qwen2": _split_then_bytes(_word_pattern(r"\p{N}")),
}

_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}  # by tokenizer.ggml.model
