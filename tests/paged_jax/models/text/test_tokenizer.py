"""The tokenizer and the chat template made from GGUF metadata, on a tiny vocabulary and on the real one."""

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_writer import gguf_bytes
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from paged_jax.models.text.chat import render_chat
from paged_jax.models.text.special_ids import SpecialIds, special_ids
from paged_jax.models.text.text import gguf_template, gguf_text
from paged_jax.models.text.tokenizer import build_tokenizer
from paged_jax.models.weights.gguf import open_gguf

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGED = ["Ġ Ġ", "4 2", "42 0", "h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ 42", "' S"]
PRES = ["gpt-2", "smollm", "llama-bpe", "qwen2"]


def tiny_metadata(**changes: Any) -> dict[str, Any]:
    """Three special tokens, all bytes, the merges above and one added token; a change to None takes a key out."""
    letters, merged = sorted(ByteLevel.alphabet()), [merge.replace(" ", "") for merge in MERGED]
    tokens = [*SPECIAL_TOKENS, *letters, *merged, "<think>"]
    metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3] * 3 + [1] * (len(tokens) - 4) + [4],
        "merges": MERGED,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": item for key, item in metadata.items() if item is not None}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text).tokens


@pytest.mark.parametrize("pre", PRES)
@given(text=st.text(max_size=60) | st.text("x 4'sS\n\t<|im_end>", max_size=60))
def test_decoding_gives_the_text_back(pre: str, text: str) -> None:
    tokenizer = build_tokenizer(tiny_metadata(pre=pre))
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "x  42", ["x", "ĠĠ", "4", "2"]),
        ("gpt-2", "x  42", ["x", "Ġ", "Ġ42"]),
        ("llama-bpe", "x  42", ["x", "Ġ", "Ġ", "42"]),
        ("qwen2", "x  42", ["x", "Ġ", "Ġ", "4", "2"]),
        ("gpt-2", "4204", ["420", "4"]),
        ("smollm", "4204", ["4", "2", "0", "4"]),
        ("llama-bpe", "0042", ["0", "0", "4", "2"]),  # three digits, then one
        ("llama-bpe", "x'S", ["x", "'S"]),  # a contraction in any case
        ("gpt-2", "x'S", ["x", "'", "S"]),
        ("smollm", " hello", ["Ġhello"]),
        ("gpt-2", "(hello", ["(", "hello"]),
        ("qwen2", " hello", ["Ġhello"]),
    ],
)
def test_each_pre_cuts_words_its_own_way(pre: str, text: str, expected: list[str]) -> None:
    tokenizer = build_tokenizer(tiny_metadata(pre=pre))
    assert pieces(tokenizer, text) == expected


def test_llama_takes_a_whole_word_token_without_merges() -> None:
    merges = [merge for merge in MERGED if merge != "hell o"]
    assert pieces(build_tokenizer(tiny_metadata(pre="llama-bpe", merges=merges)), "hello") == ["hello"]
    assert pieces(build_tokenizer(tiny_metadata(pre="qwen2", merges=merges)), "hello") == ["hell", "o"]


def test_special_and_added_tokens_are_never_cut() -> None:
    metadata = tiny_metadata()
    tokenizer = build_tokenizer(metadata)
    encoded = tokenizer.encode("hello<|im_end|><think>hello")
    assert encoded.tokens == ["hello", "<|im_end|>", "<think>", "hello"]
    assert encoded.ids[1:3] == [2, len(metadata["tokenizer.ggml.tokens"]) - 1]
    assert tokenizer.decode(encoded.ids) == "hello<think>hello"  # only special tokens are left out
    assert tokenizer.get_vocab_size() == len(metadata["tokenizer.ggml.tokens"])


def test_no_token_is_added_to_a_text() -> None:
    assert build_tokenizer(tiny_metadata(add_bos_token=True)).encode("").ids == []


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "bert"}, NotImplementedError, r"tokenizer\.ggml\.model to be 'gpt2' .* or 'llama' .* got 'bert'"),
        ({"model": "llama"}, ValueError, r"to have tokenizer\.ggml\.scores, got none"),
        ({"model": "llama", "scores": [0.0]}, ValueError, r"scores to have \d+ entries, got 1"),
        ({"pre": "tekken"}, NotImplementedError, r"tokenizer\.ggml\.pre to be one of gpt-2, .*smollm, .* got 'tekken'"),
        ({"pre": None}, NotImplementedError, r"tokenizer\.ggml\.pre to be one of .* got None"),
        ({"model": None}, ValueError, r"to have tokenizer\.ggml\.model, got none"),
        ({"tokens": None}, ValueError, r"to have tokenizer\.ggml\.tokens, got none"),
        ({"merges": None}, ValueError, r"to have tokenizer\.ggml\.merges, got none"),
        ({"merges": ["he"]}, ValueError, r"expected merges of two tokens .* got \('he',\)"),
        ({"merges": ["q q"]}, ValueError, r"expected merges of two tokens .* got \('q', 'q'\)"),
        ({"token_type": [1]}, ValueError, r"token_type to have \d+ entries, got 1"),
        ({"model": ["gpt2"]}, NotImplementedError, r"tokenizer\.ggml\.model to be .* got \['gpt2'\]"),
        ({"pre": ["smollm"]}, NotImplementedError, r"tokenizer\.ggml\.pre to be one of .* got \['smollm'\]"),
        ({"tokens": 7}, ValueError, r"tokenizer\.ggml\.tokens to be an array of texts, got 7"),
        ({"tokens": [["x"]]}, ValueError, r"tokenizer\.ggml\.tokens to be an array of texts, got \[\['x'\]\]"),
        ({"merges": 7}, ValueError, r"tokenizer\.ggml\.merges to be an array of texts, got 7"),
        ({"merges": np.arange(2)}, ValueError, r"tokenizer\.ggml\.merges to be an array of texts, got array"),
        ({"token_type": 7}, ValueError, r"tokenizer\.ggml\.token_type to be an array of numbers, got 7"),
        ({"token_type": ["x"]}, ValueError, r"tokenizer\.ggml\.token_type to be an array of numbers, got \['x'\]"),
        ({"model": "llama", "scores": 7}, ValueError, r"scores to be an array of numbers, got 7"),
    ],
)
def test_metadata_that_cannot_be_used(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_tokenizer(tiny_metadata(**changes))


@pytest.mark.parametrize(
    ("names", "like"),
    [
        (("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), "llama-bpe"),
        (("phi-2", "exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"), "gpt-2"),
        (("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "smollm"),
    ],
)
def test_other_names_of_a_pre_tokenizer(names: tuple[str, ...], like: str) -> None:
    merges, text = [merge for merge in MERGED if merge != "hell o"], "hello  0042 x'S (hello)"
    expected = pieces(build_tokenizer(tiny_metadata(pre=like, merges=merges)), text)
    for name in names:
        assert pieces(build_tokenizer(tiny_metadata(pre=name, merges=merges)), text) == expected, name


def test_names_of_llama_3s_cut_without_its_other_rules() -> None:
    merges = [merge for merge in MERGED if merge != "hell o"]
    assert pieces(build_tokenizer(tiny_metadata(pre="smaug-bpe", merges=merges)), "hello") == ["hell", "o"]
    assert not special_ids(tiny_metadata(pre="smaug-bpe")).add_bos
    assert pieces(build_tokenizer(tiny_metadata(pre="stablelm2")), "e\u0301") != pieces(  # no normal form
        build_tokenizer(tiny_metadata(pre="qwen2")), "e\u0301"
    )


@pytest.mark.parametrize("build", [build_tokenizer, special_ids])
def test_a_text_under_two_ids_is_refused(build: Any) -> None:
    tokens = [*tiny_metadata()["tokenizer.ggml.tokens"], "hello"]
    with pytest.raises(ValueError, match=r"every text once in tokenizer\.ggml\.tokens, got 'hello' as ids 265 and 270"):
        build(tiny_metadata(tokens=tokens, token_type=None))


def test_tokens_without_a_text_are_told_apart() -> None:
    tokens = [*tiny_metadata()["tokenizer.ggml.tokens"], "", ""]
    tokenizer = build_tokenizer(tiny_metadata(tokens=tokens, token_type=None))
    assert tokenizer.get_vocab_size() == len(tokens)
    assert tokenizer.id_to_token(len(tokens) - 1) == f"[EMPTY_{len(tokens) - 1}]"  # llama.cpp's name


# --- Sentencepiece ----------------------------------------------------------------------------------------------------

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = {"▁he": -1.0, "ll": -2.0, "he": -3.0, "llo": -4.0, "▁hello": -5.0, "lo": -6.0}
PIECES = ["<unk>", "<bos>", "<eos>", *BYTES, "  ", "   ", "\n\n", *WORDS, *"▁helo"]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Bytes, added runs of spaces and of lines, some words with scores, and letters."""
    scores = {piece: -100.0 - i for i, piece in enumerate(PIECES)} | WORDS
    types = {"<unk>": 2, "<bos>": 3, "<eos>": 3} | dict.fromkeys(BYTES, 6) | dict.fromkeys(("  ", "   ", "\n\n"), 4)
    metadata = {
        "model": "llama",
        "tokens": PIECES,
        "scores": [scores[piece] for piece in PIECES],
        "token_type": [types.get(piece, 1) for piece in PIECES],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": True,
        "add_space_prefix": False,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": item for key, item in metadata.items() if item is not None}


@given(text=st.text(max_size=40) | st.text("helo \n", max_size=40))
@pytest.mark.parametrize("prefix", [True, False, None])
def test_sentencepiece_decoding_gives_the_text_back(prefix: bool | None, text: str) -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata(add_space_prefix=prefix))
    text = text.replace("▁", "_")  # stands for a space
    if prefix is not False:  # after an added token too there is a space more, as in llama.cpp
        text = text.replace("\n", "_").replace("  ", "_")
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", ["he", "llo"]),  # ll before he before llo
        (" hello", ["▁hello"]),
        ("lo", ["lo"]),
        ("é", ["<0xC3>", "<0xA9>"]),  # no such letter
        ("lo  hello", ["lo", "▁▁", "he", "llo"]),  # a run of spaces goes before ▁he
        ("lo     o", ["lo", "▁▁", "▁▁▁", "o"]),
        ("h\n\no", ["h", "\n\n", "o"]),
        ("<eos>lo", ["<eos>", "lo"]),
    ],
)
def test_sentencepiece_merges_by_score(text: str, expected: list[str]) -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata())
    assert pieces(tokenizer, text) == expected
    assert all(tokenizer.token_to_id(piece) < len(PIECES) for piece in expected)


def test_a_sentencepiece_file_that_does_not_mention_bos_has_it_first(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    metadata = sentencepiece_metadata(bos_token_id=None, eos_token_id=None, add_bos_token=None, add_space_prefix=None)
    path.write_bytes(gguf_bytes(metadata))
    assert gguf_text(open_gguf(path)).encode("hello", is_raw=True) == [1, PIECES.index("▁hello")]


def test_llama_2_puts_a_space_before_a_text() -> None:
    assert pieces(build_tokenizer(sentencepiece_metadata(add_space_prefix=None)), "hello") == ["▁hello"]


def test_a_run_of_spaces_that_is_there_twice_keeps_both_ids() -> None:
    tokens = [*PIECES, "▁▁"]
    changes = {name: [*sentencepiece_metadata()[f"tokenizer.ggml.{name}"], 1] for name in ("scores", "token_type")}
    tokenizer = build_tokenizer(sentencepiece_metadata(tokens=tokens, **changes))
    assert tokenizer.get_vocab_size() == len(tokens)
    assert tokenizer.encode("lo  lo").ids[1] == len(tokens) - 1
    assert tokenizer.decode([PIECES.index("  ")]) == "  "


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_ends_of_any_type_are_never_cut_and_have_no_text(kind: int) -> None:
    tokens = [*PIECES, "<end_of_turn>"]
    types = [*sentencepiece_metadata()["tokenizer.ggml.token_type"], kind]
    scores = [*sentencepiece_metadata()["tokenizer.ggml.scores"], -1.0]
    tokenizer = build_tokenizer(sentencepiece_metadata(tokens=tokens, token_type=types, scores=scores))
    ids = tokenizer.encode("lo<end_of_turn>lo<unk>").ids
    assert ids == [PIECES.index("lo"), len(PIECES), PIECES.index("lo"), 0]
    assert tokenizer.decode(ids) == "lolo"


# --- Chat -------------------------------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "hello <&> ü"}]


def rendered(template: str, messages: Any = HELLO, **options: Any) -> str:
    return render_chat(
        gguf_template(tiny_metadata(padding_token_id=0) | {"tokenizer.chat_template": template}), messages, **options
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content }}", "hello <&> ü"),
        ("{{ messages[0].content | tojson }}", '"hello <&> ü"'),
        ("{{ bos_token }}|{{ eos_token }}|{{ unk_token }}{{ pad_token }}", "<|im_start|>|<|im_end|>|<|endoftext|>"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("a\n    {% if true %}\nb\n    {% endif %}\nc", "a\nb\nc"),  # blocks leave no space and no line behind
        ("{% for m in messages %}{{ m['role'] }}{% break %}{% endfor %}", "user"),
        ("{% if tools is not none or documents is not none %}no{% endif %}", ""),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_a_template_renders_as_transformers_would(template: str, expected: str) -> None:
    assert rendered(template) == expected


def test_the_generation_prompt_can_be_left_out() -> None:
    template = "{% if add_generation_prompt %}go{% else %}stop{% endif %}"
    assert rendered(template, add_generation_prompt=False) == "stop"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "template accepts, got its error: roles must alternate"),
        ("{% if %}", "got its error: Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "got its error: access to attribute '__class__' .* is unsafe"),
        ("{{ messages.append(1) }}", "got its error: .*append.* is (not safely callable|unsafe)"),
    ],
)
def test_a_template_that_fails_or_reaches_out(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rendered(template)


def test_a_model_without_a_template() -> None:
    with pytest.raises(ValueError, match="comes with a chat template, got a model without a template"):
        render_chat(gguf_template(tiny_metadata()), HELLO)


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}, {"content": "hello"}])
def test_a_message_without_its_parts(message: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="every message to have a 'role' and a 'content' that are strings, got"):
        rendered("", [message])


# --- The real model ---------------------------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "What is gravity? Answer in one sentence."}]
CHATML = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is gravity? Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n"
)
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    CHATML,
    "It's 3:45pm; they'll've paid $1,234.56 (not £7) on 2026-11-29.",
    "Smörgåsbord, naïve café, Ελληνικά, русский, עברית, العربية, हिन्दी, 日本語, 한국어, 中文",
    "🙂👩‍👩‍👧‍👦 e\u0301 vs é",
    "\t tabs\r\n\r\nand   runs of    spaces \n\n\n at the end   ",
    "<|im_end|><repo_name>x<|endoftext|><|not_special|>",
    "\x00\x7f control",
    "",
]
SPACES_BEFORE_NUMBERS = ["x =  42", "a ½ Ⅷ"]  # where smollm's rule shows


@pytest.fixture(scope="module")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    return open_gguf(smollm2_path).metadata


@pytest.mark.download
def test_the_real_tokenizer_round_trips(metadata: dict[str, Any]) -> None:
    tokenizer = build_tokenizer(metadata)
    assert tokenizer.get_vocab_size() == 49152
    for text in TEXTS + SPACES_BEFORE_NUMBERS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert pieces(tokenizer, "x =  42") == ["x", "Ġ=", "ĠĠ", "4", "2"]
    # As llama.cpp says on loading it: 4 is <reponame>.
    assert special_ids(metadata) == SpecialIds(1, 2, False, frozenset({0, 2, 4}), unknown=0, padding=2)


@pytest.mark.download
def test_the_real_chat_template(metadata: dict[str, Any]) -> None:
    assert render_chat(gguf_template(metadata), QUESTION) == CHATML
    assert build_tokenizer(metadata).encode(CHATML).ids[:2] == [1, 9690]  # <|im_start|>, "system"


@pytest.fixture(scope="module")
def hf_tokenizer(smollm2_path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")  # transformers reads GGUF files with it
    return transformers.AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)


@pytest.mark.parity
@pytest.mark.download
def test_ids_equal_transformers(metadata: dict[str, Any], hf_tokenizer: Any) -> None:
    """transformers knows no rule for smollm and uses GPT-2's; the two differ only at spaces before a number."""
    smollm, gpt2 = build_tokenizer(metadata), build_tokenizer(metadata | {"tokenizer.ggml.pre": "gpt-2"})
    for text in TEXTS:
        expected = hf_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert gpt2.encode(text).ids == expected
        assert smollm.encode(text).ids == expected
    for text in SPACES_BEFORE_NUMBERS:
        expected = hf_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert gpt2.encode(text).ids == expected
        assert smollm.encode(text).ids != expected


@pytest.mark.parity
@pytest.mark.download
@pytest.mark.parametrize("go", [True, False])
def test_the_chat_prompt_equals_transformers(metadata: dict[str, Any], hf_tokenizer: Any, go: bool) -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": "It pulls."},
        *QUESTION,
    ]
    for messages in (QUESTION, talk):
        expected = hf_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=go)
        assert render_chat(gguf_template(metadata), messages, add_generation_prompt=go) == expected
