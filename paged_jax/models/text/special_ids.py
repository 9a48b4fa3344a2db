"""Which tokens of a GGUF file begin a prompt, end an answer or stand in a template: as llama.cpp's loader finds them.

An id that the metadata does not give, or gives beyond the vocabulary, is the tokenizer's own. Ends are also found by
their texts, whatever type the file gives them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged_jax.models.text.pre_tokenizers import find_pre_tokenizer
from paged_jax.models.text.vocabulary import CONTROL, UNKNOWN, flag, tokens, types


@dataclass(frozen=True)
class SpecialIds:
    bos: int | None
    eos: int | None
    add_bos: bool  # whether a prompt begins with bos; the tokenizer itself never adds it
    end: frozenset[int]  # generation stops at any of these
    unknown: int | None = None
    padding: int | None = None


def special_ids(metadata: Mapping[str, Any]) -> SpecialIds:
    known = tokens(metadata)
    ids = {name: _id(metadata, name, known) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    add_bos = flag(metadata, "tokenizer.ggml.add_bos_token", _adds_bos(metadata))
    end = _ends(metadata, known, {ids["eos"], ids["eot"], ids["eom"]})
    return SpecialIds(ids["bos"], ids["eos"], add_bos, end, ids["unknown"], ids["padding"])


def control_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Tokens that are never cut in a prompt and have no text in an answer: by their type, or by their text."""
    known = tokens(metadata)
    by_type = {index for index, kind in enumerate(types(metadata, len(known))) if kind in (CONTROL, UNKNOWN)}
    return frozenset(by_type | {index for index, token in enumerate(known) if token in _CONTROL_TEXTS})


def _ends(metadata: Mapping[str, Any], known: list[str], given: set[int | None]) -> frozenset[int]:
    by_text = {token: index for index, token in enumerate(known) if token in _CONTROL_TEXTS}
    ends = given | {by_text.get(text) for text in _END_TEXTS}
    for name, candidates in _FILL_IN_ENDS.items():
        index = _id(metadata, name, known)
        ends |= {by_text.get(text) for text in candidates} if index is None else {index}
    found = {known[index] for index in ends if index is not None}
    for others, text in _NO_ENDS:  # <|end|> ends a part of an answer where other tokens end it all
        if found >= others:
            ends.discard(by_text.get(text))
    return frozenset(index for index in ends if index is not None)


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """What a file that does not say means."""
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    rule = find_pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    return rule is not None and rule.adds_bos


def _id(metadata: Mapping[str, Any], name: str, known: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    index = metadata.get(key)
    if index is not None and (not isinstance(index, int) or isinstance(index, bool) or index < 0):
        raise ValueError(f"expected {key} to be the id of a token, got {index!r:.60}")
    if index is not None and index < len(known):
        return index
    default = _SENTENCEPIECE.get(name) if metadata.get("tokenizer.ggml.model") == "llama" else None
    return default if default is not None and default < len(known) else None


# --- The lists of llama.cpp's loader ----------------------------------------------------------------------------------

# Sentencepiece numbers its first three tokens in one way. Byte-level BPE has no such order: llama.cpp's default for its
# bos and eos is 11, which is Falcon's <|endoftext|>, and a comma in GPT-2's and Llama 3's vocabulary. It is left out.
_SENTENCEPIECE = {"unknown": 0, "bos": 1, "eos": 2}

_END_TEXTS = frozenset(
    {"</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<end_of_turn>", "<end_of_utterance>"}
    | {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"}  # noqa: RUF001
    | {"<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>"}
)
# Texts that end a gap filled in, where the metadata gives no id: padding, and what begins another repository or file.
_FILL_IN_ENDS = {
    "fim_pad": frozenset(("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    "fim_rep": frozenset(("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    "fim_sep": frozenset(("<|file_sep|>",)),
}
_FILL_IN_TEXTS = frozenset(
    f"{opening}{text}{closing}"
    for texts, opening, closing in (
        (("fim_prefix", "fim_suffix", "fim_middle", "code_prefix", "code_suffix", "code_middle"), "<|", "|>"),
        (("prefix", "suffix", "middle"), "<|", "|>"),
        (("fim-prefix", "fim_prefix", "fim-suffix", "fim_suffix", "fim-middle", "fim_middle"), "<", ">"),
        (("PRE", "SUF", "MID"), "<", ">"),
        (("PRE", "SUF", "MID"), "▁<", ">"),
        (("fim▁begin", "fim▁hole", "fim▁end"), "<｜", "｜>"),  # noqa: RUF001
    )
    for text in texts
)
_CONTROL_TEXTS = _END_TEXTS.union(_FILL_IN_TEXTS, *_FILL_IN_ENDS.values())
_NO_ENDS = (  # where there are ends of these texts, that of the last text is none
    (frozenset(("<|return|>", "<|call|>")), "<|end|>"),
    (frozenset(("<|return|>", "<|calls|>")), "<|end|>"),
    (frozenset(("<|flush|>", "<|call|>")), "<|end|>"),
    (frozenset(("<|flush|>", "<|calls|>")), "<|end|>"),
    (frozenset(("<|tool_response>",)), "</s>"),
)
