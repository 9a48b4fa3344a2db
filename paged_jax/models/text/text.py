"""Text → the token ids of a prompt: a model's tokenizer with its chat template and its special tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paged_jax.models.files import naming, read_object, read_text
from paged_jax.models.text.chat import ChatTemplate, render_chat
from paged_jax.models.text.special_ids import special_ids
from paged_jax.models.text.tokenizer import build_tokenizer
from paged_jax.models.text.vocabulary import tokens
from paged_jax.models.weights.gguf import GGUFError, GGUFFile

_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


@dataclass(frozen=True)
class Text:
    path: Path
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    begins_with_bos: bool = False  # whether plain text needs `bos` before it; a folder's tokenizer adds its own
    bos: int | None = None

    def encode(self, text: str, *, is_raw: bool) -> list[int]:
        """The prompt of one turn of a chat, or of plain text that is to be continued.

        Raises:
            ValueError: the model has no chat template, or one that fails, or no bos token though it wants one.
        """
        if not is_raw:
            chat = render_chat(self.chat, [{"role": "user", "content": text}])
            return self.tokenizer.encode(chat, add_special_tokens=False).ids
        if self.begins_with_bos and self.bos is None:
            raise ValueError(
                f"{self.path}: expected a bos token, which the model wants first, got none in its metadata"
            )
        begin = [self.bos] if self.begins_with_bos and self.bos is not None else []
        return begin + self.tokenizer.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; special ones have none."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def gguf_text(file: GGUFFile) -> Text:
    """As the file's metadata has it.

    Raises:
        GGUFError: the metadata describes no tokenizer, or one of another kind.
    """
    with naming(file.path, GGUFError):
        tokenizer, special = build_tokenizer(file.metadata), special_ids(file.metadata)
        return Text(file.path, tokenizer, gguf_template(file.metadata), special.add_bos, special.bos)


def gguf_template(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    source, special = metadata.get("tokenizer.chat_template"), special_ids(metadata)
    known, named = tokens(metadata), {"bos": special.bos, "eos": special.eos}
    named |= {"unk": special.unknown, "pad": special.padding}
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"expected tokenizer.chat_template to be a text, got {source!r:.60}")
    return ChatTemplate(source, {f"{name}_token": known[at] for name, at in named.items() if at is not None})


def folder_text(folder: Path) -> Text:
    """As the files of a Hugging Face folder have it.

    Raises:
        ValueError: there is no tokenizer.json, or a file is damaged.
    """
    path = folder / _TOKENIZER
    if not path.is_file():
        raise ValueError(f"{folder}: expected a {_TOKENIZER}, to read and write text, got none: give it token ids")
    try:
        tokenizer = Tokenizer.from_str(read_text(path))
    except Exception as problem:  # it raises no narrower kind
        raise ValueError(f"{path}: expected a tokenizer, got {problem}") from problem
    tokenizer.no_padding()  # the file may ask for both
    tokenizer.no_truncation()
    return Text(folder, tokenizer, _folder_template(folder))


def _folder_template(folder: Path) -> ChatTemplate | None:
    settings = read_settings(folder / _SETTINGS)
    is_file = (folder / _TEMPLATE).is_file()  # it goes before
    source: Any = read_text(folder / _TEMPLATE) if is_file else settings.get("chat_template")
    if isinstance(source, list) and all(map(_is_named_template, source)):
        source = {part["name"]: part["template"] for part in source}.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(
            f"{folder / _SETTINGS}: expected chat_template to be a text, or a list of objects with name and template, "
            f"got {source!r:.60}"
        )
    tokens = {name: settings.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return ChatTemplate(source, {name: text for name, text in texts.items() if text is not None})


def _is_named_template(part: Any) -> bool:
    return isinstance(part, dict) and all(isinstance(part.get(name), str) for name in ("name", "template"))


def read_settings(path: Path) -> dict[str, Any]:
    """A JSON object that a folder may have; empty if it has none.

    Raises:
        ValueError: the file is no JSON object.
    """
    return read_object(path) if path.is_file() else {}
