"""How byte-level BPE cuts text into words before it merges: the rules that a GGUF file names in tokenizer.ggml.pre."""

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers


@dataclass(frozen=True)
class PreTokenizer:
    words: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False  # a word that is itself a token is taken as it is, whatever the merges would make of it
    adds_bos: bool = False  # unless the file says otherwise


def pre_tokenizer(name: Any) -> PreTokenizer:
    """The rule of that name.

    Raises:
        NotImplementedError: there is none.
    """
    found = find_pre_tokenizer(name)
    if found is None:
        raise NotImplementedError(f"expected tokenizer.ggml.pre to be one of {', '.join(_BY_NAME)}, got {name!r:.60}")
    return found


def find_pre_tokenizer(name: Any) -> PreTokenizer | None:
    return _BY_NAME.get(name) if isinstance(name, str) else None


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
_DIGITS_APART = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2_WORDS])
_LLAMA3_WORDS, _QWEN2_WORDS = (_split_then_bytes(_word_pattern(number)) for number in (r"\p{N}{1,3}", r"\p{N}"))

# The rules, each with all names under which llama.cpp's loader knows it. Encoders' names are left out.
_RULES = (
    (
        PreTokenizer(_GPT2_WORDS),
        "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
    ),
    (PreTokenizer(_DIGITS_APART), "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (
        PreTokenizer(_LLAMA3_WORDS, ignore_merges=True, adds_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (PreTokenizer(_LLAMA3_WORDS), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (PreTokenizer(_QWEN2_WORDS, normalizers.NFC()), "qwen2"),  # as Qwen's own tokenizer.json has it
    (PreTokenizer(_QWEN2_WORDS), "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
)
_BY_NAME = {name: rule for rule, names in _RULES for name in names.split()}
