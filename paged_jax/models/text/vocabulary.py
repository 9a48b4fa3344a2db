"""The vocabulary in a GGUF file's metadata: tokens, their scores and types, each array checked before it is used."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Values of tokenizer.ggml.token_type.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4


def required(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ValueError(f"expected the model's metadata to have {key}, got none: it describes no tokenizer")
    return metadata[key]


def texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    found = required(metadata, key)
    if not isinstance(found, list) or not set(map(type, found)) <= {str}:
        raise ValueError(f"expected {key} to be an array of texts, got {found!r:.60}")
    return found


def numbers(metadata: Mapping[str, Any], key: str, count: int) -> Sequence[float] | np.ndarray:
    found = required(metadata, key)
    if not isinstance(found, np.ndarray) and not (isinstance(found, list) and set(map(type, found)) <= {int, float}):
        raise ValueError(f"expected {key} to be an array of numbers, got {found!r:.60}")
    if len(found) != count:
        raise ValueError(f"expected {key} to have {count} entries, got {len(found)}")
    return found


def flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    found = metadata.get(key, default)
    if not isinstance(found, bool):
        raise ValueError(f"expected {key} to be true or false, got {found!r:.60}")
    return found


def tokens(metadata: Mapping[str, Any]) -> list[str]:
    """The texts by id, all different: as llama.cpp names them, an empty one is [EMPTY_ and its id].

    Raises:
        ValueError: two ids have one text. Which of them a prompt should hold, nothing says; llama.cpp refuses it too.
    """
    key = "tokenizer.ggml.tokens"
    found = [token or f"[EMPTY_{index}]" for index, token in enumerate(texts(metadata, key))]
    if len(set(found)) != len(found):
        first: dict[str, int] = {}
        token, index = next((token, i) for i, token in enumerate(found) if first.setdefault(token, i) != i)
        raise ValueError(f"expected every text once in {key}, got {token!r} as ids {first[token]} and {index}")
    return found


def types(metadata: Mapping[str, Any], count: int) -> Sequence[float] | np.ndarray:
    """The type of each token; none says that all are normal."""
    key = "tokenizer.ggml.token_type"
    return numbers(metadata, key, count) if key in metadata else np.ones(count, np.int32)
