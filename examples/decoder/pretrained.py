"""A model on disk, a Hugging Face folder or a GGUF file: its config and what to generate with, read at once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoder.checkpoint import Checkpoint, open_checkpoint
from decoder.config import ModelConfig
from decoder.config_gguf import gguf_config
from decoder.config_json import read_config
from decoder.gguf import GGUFFile, open_gguf
from decoder.text import Text, folder_text, gguf_text, read_settings
from decoder.tokenizer import special_ids
from paged_jax import Sampler

_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Pretrained:
    source: GGUFFile | Checkpoint
    config: ModelConfig
    end_tokens: frozenset[int]  # generation stops at any of these
    sampler: Sampler | None = None  # how its makers sample; None: greedy, or they do not say

    def text(self) -> Text:
        """Its tokenizer; token ids work without one.

        Raises:
            ValueError, NotImplementedError: there is none, or none that can be read.
        """
        return gguf_text(self.source) if isinstance(self.source, GGUFFile) else folder_text(self.source.path)


def open_pretrained(path: str | os.PathLike[str]) -> Pretrained:
    """The model in a folder or file; the weights stay on disk.

    Raises:
        OSError: it is not there.
        ValueError: `ConfigError`, `CheckpointError` and `GGUFError` among others: the message names file and reason.
    """
    path = Path(path)
    if path.is_dir():
        config, settings = read_config(path), read_settings(path / _GENERATION)
        try:
            ends, sampler = _end_tokens(settings), _sampler(settings)
        except (TypeError, ValueError) as problem:
            raise ValueError(f"{path / _GENERATION}: {problem}") from problem
        return Pretrained(open_checkpoint(path), config, ends | set(config.end_tokens), sampler)
    file = open_gguf(path)
    config = gguf_config(file)
    ends = special_ids(file.metadata).end if "tokenizer.ggml.tokens" in file.metadata else frozenset(config.end_tokens)
    return Pretrained(file, config, ends)


def _end_tokens(settings: Mapping[str, Any]) -> frozenset[int]:
    ids = settings.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(index, int) and index >= 0 for index in ids):
        raise ValueError(f"expected eos_token_id to be a token id or a list of them, got {settings['eos_token_id']!r}")
    return frozenset(ids)


def _sampler(settings: Mapping[str, Any]) -> Sampler | None:
    """What the file says; what it leaves out is left out."""
    if not settings.get("do_sample") or settings.get("temperature") == 0:
        return None
    given = {name: settings[name] for name in ("temperature", "top_k", "top_p") if settings.get(name) is not None}
    if given.get("top_k") == 0:  # transformers' way to keep all
        del given["top_k"]
    return Sampler(**given)
