"""Build a BPE tokenizer, of bytes or of sentencepiece, from a GGUF file's metadata."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from paged_jax.models.text.pre_tokenizers import pre_tokenizer
from paged_jax.models.text.special_ids import control_ids, special_ids
from paged_jax.models.text.vocabulary import USER_DEFINED, flag, numbers, required, texts, tokens, types


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer the metadata describes. It adds no tokens of its own: see `special_ids` for bos."""
    model = required(metadata, "tokenizer.ggml.model")
    if not isinstance(model, str) or model not in _BUILDERS:
        raise NotImplementedError(
            f"expected tokenizer.ggml.model to be 'gpt2' (byte-level BPE) or 'llama' (sentencepiece), got {model!r:.60}"
        )
    tokenizer, known, control = _BUILDERS[model](metadata), tokens(metadata), control_ids(metadata)
    user_defined = [index for index in _user_defined(metadata, len(known)) if index not in control]
    if model == "llama":  # the merges make its runs of spaces
        user_defined = [index for index in user_defined if not _is_spaces(known[index])]
    tokenizer.add_special_tokens(
        [AddedToken(known[index], special=True, normalized=False) for index in sorted(control)]
    )
    tokenizer.add_tokens([AddedToken(known[index], special=False, normalized=False) for index in user_defined])
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    rule = pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    # A byte-level token holds no space (it is spelled Ġ), so the one in a merge parts its two sides.
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in texts(metadata, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens(metadata))}
    _check_merges(vocabulary, merges)

    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule.ignore_merges))
    if rule.normalizer is not None:
        tokenizer.normalizer = rule.normalizer
    tokenizer.pre_tokenizer = rule.words
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Spaces are written ▁, and characters that have no token as bytes. The files hold scores instead of merges.

    A token is made of any two that are its halves. Those that a file adds to its vocabulary go before all others, then
    the likelier ones, and of equals those with the longer first half.
    """
    known = tokens(metadata)
    scores, added = numbers(metadata, "tokenizer.ggml.scores", len(known)), set(_user_defined(metadata, len(known)))
    # Runs of spaces stand in Gemma's files as they are, as added tokens; as ▁ the merges reach them.
    written = set(known)
    runs = {token: run for token in known if _is_spaces(token) and (run := "▁" * len(token)) not in written}
    vocabulary = {runs.get(token, token): index for index, token in enumerate(known)}
    halves = [
        ((index not in added, -scores[index], -cut), (token[:cut], token[cut:]))
        for token, index in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    halves.sort(key=lambda half: (half[0], -len(half[1][1])))
    merges, unknown = [sides for _, sides in halves], special_ids(metadata).unknown
    unknown = None if unknown is None else known[unknown]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    has_space_first = flag(metadata, "tokenizer.ggml.add_space_prefix", True)  # Llama 2's files need not say
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_space_first else spaces
    begins = [decoders.Strip(" ", 1, 0)] if has_space_first else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *begins]
    )
    return tokenizer


def _check_merges(vocabulary: Mapping[str, int], merges: list[tuple[str, ...]]) -> None:
    for merge in merges:
        if len(merge) != 2 or not vocabulary.keys() >= {*merge, "".join(merge)}:
            raise ValueError(f"expected merges of two tokens into a third in tokenizer.ggml.merges, got {merge!r}")


def _user_defined(metadata: Mapping[str, Any], count: int) -> list[int]:
    return [index for index, kind in enumerate(types(metadata, count)) if kind == USER_DEFINED]


def _is_spaces(token: str) -> bool:
    return bool(token) and not token.strip(" ")


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}  # by tokenizer.ggml.model
