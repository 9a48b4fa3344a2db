"""A model on disk, a Hugging Face folder or a GGUF file: its config and what to generate with, read at once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_jax.models.config import ModelConfig
from paged_jax.models.files import naming
from paged_jax.models.generation import read_generation, sampler_of
from paged_jax.models.text.folder import folder_text, has_tokenizer, tokenizer_notes
from paged_jax.models.text.special_ids import special_ids
from paged_jax.models.text.text import Text, gguf_text
from paged_jax.models.weights.checkpoint import Checkpoint, open_checkpoint
from paged_jax.models.weights.config_gguf import gguf_config
from paged_jax.models.weights.config_json import config_notes, read_config, read_fields
from paged_jax.models.weights.gguf import GGUFError, GGUFFile, open_gguf
from paged_jax.models.weights.keys_gguf import key_notes
from paged_jax.models.weights.names import tensor_notes
from paged_jax.sampling import Sampler


@dataclass(frozen=True)
class Pretrained:
    source: GGUFFile | Checkpoint
    config: ModelConfig
    end_tokens: frozenset[int]  # generation stops at any of these
    sampler: Sampler | None = None  # how its makers sample; None: greedy, or they do not say
    notes: tuple[str, ...] = ()  # what of the files has no effect here though it has elsewhere: a line for each
    opened_text: Text | None = None  # of a folder with a tokenizer, which names an end token and so is read first

    def text(self) -> Text:
        """Its tokenizer; token ids work without one.

        Raises:
            ValueError: there is none, or none that can be read.
        """
        if self.opened_text is not None:
            return self.opened_text
        return gguf_text(self.source) if isinstance(self.source, GGUFFile) else folder_text(self.source.path, {})


def open_pretrained(path: str | os.PathLike[str]) -> Pretrained:
    """The model in a folder or file; the weights stay on disk.

    Raises:
        OSError: it is not there.
        ValueError: `ConfigError`, `CheckpointError` and `GGUFError` among others: the message names file and reason.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    file = open_gguf(path)
    config = gguf_config(file)
    with naming(path, GGUFError):
        has_tokens = "tokenizer.ggml.tokens" in file.metadata
        ends = special_ids(file.metadata).end if has_tokens else frozenset(config.end_tokens)
        return Pretrained(file, config, ends, _gguf_sampler(file.metadata), key_notes(file, config.family))


def _gguf_sampler(metadata: Mapping[str, Any]) -> Sampler | None:
    names = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p"}
    given = {name: metadata.get(f"general.sampling.{key}") for name, key in names.items()}
    return sampler_of(given | {"do_sample": any(value is not None for value in given.values())})


def _open_folder(path: Path) -> Pretrained:
    """Generation stops where generation_config.json says, or else config.json, and at the tokenizer's own eos."""
    fields, config = read_fields(path), read_config(path)
    generation = read_generation(path, fields)
    source = open_checkpoint(path)
    text = folder_text(path, fields) if has_tokenizer(path) else None
    ends = {*(generation.end_tokens or config.end_tokens), *([] if text is None or text.eos is None else [text.eos])}
    notes = config_notes(path, fields) + generation.notes + tensor_notes(path, source.tensors) + tokenizer_notes(path)
    return Pretrained(source, config, frozenset(ends), generation.sampler, notes, text)
