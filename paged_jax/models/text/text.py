"""Text → the token ids of a prompt: a model's tokenizer with its chat template and its special tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paged_jax.models.files import naming
from paged_jax.models.text.chat import ChatTemplate, render_chat
from paged_jax.models.text.special_ids import special_ids
from paged_jax.models.text.tokenizer import build_tokenizer
from paged_jax.models.text.vocabulary import tokens
from paged_jax.models.weights.gguf import GGUFError, GGUFFile


@dataclass(frozen=True)
class Text:
    path: Path
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    begins_with_bos: bool = False  # whether plain text needs `bos` before it; a folder's tokenizer adds its own
    bos: int | None = None
    eos: int | None = None  # as the tokenizer's own files name it

    def encode(self, text: str, *, is_raw: bool) -> list[int]:
        """The prompt of one turn of a chat, or of plain text that is to be continued.

        Plain text that is written with a bos gets another if the model wants one, as in transformers and llama.cpp.

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
