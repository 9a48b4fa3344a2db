"""The tokenizer files of a Hugging Face folder → a `Text`, with what transformers 5 makes of the same files.

tokenizer.json                      the tokenizer; it alone says whether plain text begins with bos
tokenizer_config.json               special tokens by name, a chat template, and `added_tokens_decoder`
special_tokens_map.json             special tokens by name, which go before; not read beside an `added_tokens_decoder`
added_tokens.json                   more tokens; not read beside an `added_tokens_decoder`
chat_template.jinja, additional_chat_templates/NAME.jinja      go before the templates of tokenizer_config.json
chat_template.json                  of a multimodal model's processor, for folders that have no other
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from paged_jax.models.files import naming, read_settings, read_text
from paged_jax.models.keys_json import TOKENIZER, not_harmless, note, unknown
from paged_jax.models.text.chat import ChatTemplate
from paged_jax.models.text.text import Text

_TOKENIZER, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_SPECIAL, _ADDED = "special_tokens_map.json", "added_tokens.json"
_TEMPLATE, _TEMPLATES, _PROCESSOR = "chat_template.jinja", "additional_chat_templates", "chat_template.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

# The names of special tokens; another that ends in _token is a model's own.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# What transformers' classes of tokenizers take for special tokens that no file mentions.
_CLASS_TOKENS = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>") | {"pad_token": None},
}
_CLASS_OF_FAMILY = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
}


def has_tokenizer(folder: Path) -> bool:
    return (folder / _TOKENIZER).is_file()


def folder_text(folder: Path, config: Mapping[str, Any]) -> Text:
    """As the folder's files have it, beside the fields of its config.json.

    Raises:
        ValueError: there is no tokenizer.json, or a file is damaged.
    """
    path = folder / _TOKENIZER
    if not has_tokenizer(folder):
        raise ValueError(f"{folder}: expected a {_TOKENIZER}, to read and write text, got none: give it token ids")
    try:
        tokenizer = Tokenizer.from_str(read_text(path))
    except Exception as problem:  # it raises no narrower kind
        raise ValueError(f"{path}: expected a tokenizer, got {problem}") from problem
    padding = tokenizer.padding
    tokenizer.no_padding()  # the file may ask for both
    tokenizer.no_truncation()
    settings = read_settings(folder / _SETTINGS)
    default = {
        "pad_token": padding and _token("pad_token", padding["pad_token"]),
        **_class_tokens(settings, config, tokenizer),
    }
    named, others = _special_tokens(folder, settings)
    named = _in_order(default | named)
    special = [*named.values(), *others]
    _complete(tokenizer, _added_tokens(folder, settings, {token.content for token in special}), special)
    tokenizer.encode_special_tokens = settings.get("split_special_tokens") is True
    texts = {name: token.content for name, token in named.items()}
    bos, eos = (tokenizer.token_to_id(texts[name]) if name in texts else None for name in ("bos_token", "eos_token"))
    return Text(folder, tokenizer, _template(folder, settings, texts), bos=bos, eos=eos)


def tokenizer_notes(folder: Path) -> tuple[str, ...]:
    """A line that names what tokenizer_config.json asks for and is not here; none if there is nothing."""
    settings = read_settings(folder / _SETTINGS)
    strange = [key for key in unknown(TOKENIZER, settings) if not _is_special(key, settings[key])]
    return note(folder / _SETTINGS, settings, [*(key for key, _ in not_harmless(TOKENIZER, settings)), *strange])


# --- Special tokens ---------------------------------------------------------------------------------------------------


def _class_tokens(
    settings: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Tokenizer
) -> dict[str, AddedToken | None]:
    """The special tokens of the class that transformers' AutoTokenizer takes for these files."""
    family, given = config.get("model_type"), settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = given.removesuffix("Fast") if isinstance(given, str) else None
    if family in ("mistral", "phi3"):  # whatever class their files name
        return {}
    if family == "qwen2" or name is None:
        name = _CLASS_OF_FAMILY.get(str(family))
    if name == "LlamaTokenizer" and "ByteLevel" in f"{tokenizer.pre_tokenizer} {tokenizer.decoder}":  # as of Llama 3
        return {}
    tokens = _CLASS_TOKENS.get(str(name), {})
    return {name: None if text is None else _token(name, text) for name, text in tokens.items()}


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> tuple[dict[str, AddedToken | None], list[AddedToken]]:
    """Those with a name, None where a file says that there is none, and those without one."""
    mapped = {} if "added_tokens_decoder" in settings else read_settings(folder / _SPECIAL)
    with naming(folder / _SETTINGS):
        first, unnamed = _named_tokens(settings), _unnamed_tokens(settings)
    with naming(folder / _SPECIAL):
        second, more = _named_tokens(mapped), _unnamed_tokens(mapped)
    # The second file goes before, except where the first names a token of the model's own as text.
    extra = settings.get("extra_special_tokens")
    own = {name for name, token in settings.items() if isinstance(token, str)} - set(_NAMED)
    own |= extra.keys() if isinstance(extra, Mapping) else set()
    return first | {name: token for name, token in second.items() if name not in own}, unnamed or more


def _in_order(tokens: Mapping[str, AddedToken | None]) -> dict[str, AddedToken]:
    """Those that there are, in the order in which new ones get their ids."""
    names = [*_NAMED, *(name for name in tokens if name not in _NAMED)]
    return {name: token for name in names if (token := tokens.get(name)) is not None}


def _named_tokens(fields: Mapping[str, Any]) -> dict[str, AddedToken | None]:
    named, extra = {key: token for key, token in fields.items() if _is_special(key, token)}, "extra_special_tokens"
    named |= fields[extra] if isinstance(fields.get(extra), Mapping) else {}  # a list there has no names
    return {name: None if token is None else _token(name, token, special=True) for name, token in named.items()}


def _is_special(name: str, token: Any) -> bool:
    return name in _NAMED or (name.endswith("_token") and isinstance(token, str | Mapping | None))


def _unnamed_tokens(fields: Mapping[str, Any]) -> list[AddedToken]:
    extra, name = fields.get("extra_special_tokens"), "additional_special_tokens"
    if extra and not isinstance(extra, Mapping):
        name = "extra_special_tokens"
    tokens = fields.get(name) or []
    if not isinstance(tokens, list):
        raise ValueError(f"expected {name} to be a list of tokens, got {tokens!r:.60}")
    return [_token(name, token, special=True) for token in tokens]


def _added_tokens(folder: Path, settings: Mapping[str, Any], special: Collection[str]) -> list[AddedToken]:
    """Tokens that the folder's files place beside those of tokenizer.json, in the order of their ids."""
    by_id = settings.get("added_tokens_decoder")
    if by_id is None:
        ids = read_settings(folder / _ADDED)
        with naming(folder / _ADDED):
            if not all(isinstance(index, int) for index in ids.values()):
                raise ValueError(f"expected an object of tokens and their ids, got {ids!r:.60}")
            return [AddedToken(text, special=text in special) for text in sorted(ids, key=lambda text: ids[text])]
    with naming(folder / _SETTINGS):
        if not isinstance(by_id, Mapping) or not all(index.isdecimal() for index in by_id):
            raise ValueError(f"expected added_tokens_decoder to be an object of ids and tokens, got {by_id!r:.60}")
        return [_token("added_tokens_decoder", by_id[index]) for index in sorted(by_id, key=int)]


def _complete(tokenizer: Tokenizer, added: list[AddedToken], special: list[AddedToken]) -> None:
    """Adds what the tokenizer lacks, and takes over how `added` says that a token is found in a text."""
    known = {repr(token): token.content for token in tokenizer.get_added_tokens_decoder().values()}
    lacking = [token for token in added if repr(token) not in known]
    texts = {*known.values(), *(token.content for token in lacking)}
    names = {token.content for token in special}
    lacking += {repr(token): token for token in special if token.content not in texts}.values()
    for token in lacking:
        token.special = token.special or token.content in names
    tokenizer.add_tokens(lacking)


def _token(place: str, token: Any, **fixed: bool) -> AddedToken:
    """Of its text, or of an object that also says how it is found."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if isinstance(token, Mapping) and isinstance(token.get("content"), str):
        flags = {name: token[name] for name in _FLAGS if isinstance(token.get(name), bool)}
        return AddedToken(token["content"], **(flags | fixed))
    raise ValueError(f"expected {place} to be a token, as text or as an object with its content, got {token!r:.60}")


# --- Templates --------------------------------------------------------------------------------------------------------


def _template(folder: Path, settings: Mapping[str, Any], tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template of a chat without tools: the only one, or of several the one named default."""
    named = {path.stem: read_text(path) for path in sorted((folder / _TEMPLATES).glob("*.jinja"))}
    if (folder / _TEMPLATE).is_file():
        named["default"] = read_text(folder / _TEMPLATE)
    if not named:
        for file, fields in ((_SETTINGS, settings), (_PROCESSOR, read_settings(folder / _PROCESSOR))):
            with naming(folder / file):
                named = named or _templates(fields.get("chat_template"))
    return ChatTemplate(named["default"], tokens) if "default" in named else None


def _templates(given: Any) -> dict[str, str]:
    """By name."""
    if given is None or isinstance(given, str):
        return {} if given is None else {"default": given}
    is_list = isinstance(given, list) and all(isinstance(part, Mapping) for part in given)
    named = {part.get("name"): part.get("template") for part in given} if is_list else given
    if not isinstance(named, Mapping) or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ValueError(
            f"expected chat_template to be a text, or a list of objects with name and template, got {given!r:.60}"
        )
    return dict(named)
