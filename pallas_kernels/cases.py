"""Named decode shapes from real models and from published comparisons: one list for tests, benchmarks and tuning."""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """One decode step: a token for each row, over what the row holds."""

    name: str
    lengths: tuple[int, ...]  # tokens held by each row
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    layout: str = "NHD"
    spare_blocks: int = 0  # columns of the block table past the longest row's last block
    spare_pages: int = 0  # pages of the pool that no row holds
    dtype: str = "bfloat16"  # of q and out
    kv_dtype: str | None = None  # of the pools, where it is another; of one byte, with a factor for each vector
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    tags: frozenset[str] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether it is attention without options."""
        return self.window is None and self.soft_cap is None and not self.sinks

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each row."""
        return tuple(-(-length // self.page_size) for length in self.lengths)

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return sum(self.num_blocks) + self.spare_pages

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one step must read: each visible token's once."""
        seen = (min(length, self.window or length) for length in self.lengths)
        vector_bytes = self.head_dim * (4 if self.dtype == "float32" else 2)
        if self.kv_dtype is not None:
            vector_bytes = self.head_dim + 4
        return sum(seen) * self.num_kv_heads * 2 * vector_bytes


def log_uniform(rows: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Random lengths between the two, evenly spread on a logarithmic scale; the same at every call."""
    spread = np.random.default_rng(0).uniform(math.log(shortest), math.log(longest), rows)
    return tuple(int(length) for length in np.exp(spread))


def _equal(name: str, rows: int, length: int, heads: tuple[int, int], head_dim: int, tag: str, **options) -> DecodeCase:
    return DecodeCase(name, (length,) * rows, *heads, head_dim, tags=frozenset({tag}), **options)


def _model(name: str, heads: tuple[int, int], head_dim: int, **options) -> DecodeCase:
    return _equal(name, 32, 4096, heads, head_dim, "model", **options)


def _single(name: str, heads: tuple[int, int], head_dim: int, **options) -> DecodeCase:
    return _equal(f"1 x 4096, {name}", 1, 4096, heads, head_dim, "single", **options)


def _shape(name: str, rows: int, heads: tuple[int, int], head_dim: int, **options) -> DecodeCase:
    return _equal(f"{rows} x 4096, {name}", rows, 4096, heads, head_dim, "shape", **options)


def _scaling(rows: int, length: int, name: str = "", **options) -> DecodeCase:
    return _equal(f"{rows} x {length}{name}", rows, length, (32, 8), 128, "scaling", **options)


_HEADLINE = frozenset({"headline"})
_ONE_BYTE = ("int8", "float8_e4m3fn", "float8_e5m2")

DECODE_CASES = (
    DecodeCase("64 x 4096", (4096,) * 64, 32, 8, 128, tags=_HEADLINE),
    DecodeCase("1 x 32768", (32768,), 32, 8, 128, tags=_HEADLINE),
    DecodeCase("16 x 1024", (1024,) * 16, 32, 8, 128, tags=_HEADLINE),
    DecodeCase("8 x 8192", (8192,) * 8, 32, 8, 128, tags=_HEADLINE),
    DecodeCase("128 x log-uniform", log_uniform(128, 128, 16384), 32, 8, 128, tags=_HEADLINE),
    DecodeCase("32 x 8192, 64/8 heads", (8192,) * 32, 64, 8, 128, tags=_HEADLINE),
    DecodeCase("32 x 2048, 32/32 heads", (2048,) * 32, 32, 32, 128, tags=_HEADLINE),
    DecodeCase("256 x 512", (512,) * 256, 32, 8, 128, tags=_HEADLINE),
    DecodeCase("1 x 1024", (1024,), 32, 8, 128, tags=_HEADLINE),
    _model("Llama 3 8B", (32, 8), 128),
    _equal("Llama 3 8B, 64 rows on one of two devices", 64, 4096, (16, 4), 128, "model"),
    _model("Llama 3 70B", (64, 8), 128),
    _model("Qwen 2.5 32B, group 5", (40, 8), 128),
    _model("Qwen 2.5 7B, group 7", (28, 4), 128),
    _model("Qwen 3 8B", (32, 8), 128, page_size=32),
    _model("Gemma 2 9B", (16, 8), 256, soft_cap=50.0),
    _model("Gemma 3 4B, window", (8, 4), 256, window=1024),
    _model("Gemma 3 27B, window", (32, 16), 128, window=1024),
    _model("Mistral 7B, window", (32, 8), 128, window=4096),
    _model("gpt-oss 20B, sinks", (64, 8), 64, sinks=True),
    _model("Falcon 7B, one kv head", (71, 1), 64),
    _model("SmolLM2 135M", (9, 3), 64),
    _single("Llama 3 8B", (32, 8), 128),
    _single("Llama 3 8B, int8", (32, 8), 128, kv_dtype="int8"),
    _single("Llama 3 8B, vllm", (32, 8), 128, layout="vllm"),
    _single("Llama 3 70B", (64, 8), 128),
    _single("Gemma 2 9B", (16, 8), 256, soft_cap=50.0),
    _single("gpt-oss 20B", (64, 8), 64, sinks=True),
    _single("SmolLM2 135M", (9, 3), 64),
    # About 1 GB of K and V each, as "64 x 4096", and in one way unlike it.
    _shape("head_dim 64", 128, (32, 8), 64),
    _shape("head_dim 256", 32, (32, 8), 256),
    _shape("32/32 heads", 16, (32, 32), 128),
    _shape("32/16 heads", 32, (32, 16), 128),
    _shape("32/4 heads", 128, (32, 4), 128),
    _shape("32/2 heads", 256, (32, 2), 128),
    _shape("16/1 heads", 512, (16, 1), 128),
    *(_shape(f"page {size}", 64, (32, 8), 128, page_size=size) for size in (1, 4, 8, 32, 64, 128, 256)),
    *(_shape(layout, 64, (32, 8), 128, layout=layout) for layout in ("HND", "head_major", "vllm")),
    *(_equal(f"64 x 4096, {dtype}", 64, 4096, (32, 8), 128, "quantised", kv_dtype=dtype) for dtype in _ONE_BYTE),
    # Time should follow the tokens seen, and neither the table's width nor the pool's size.
    _scaling(64, 1024),
    _scaling(64, 2048),
    _scaling(64, 8192),
    _scaling(16, 32768),
    _scaling(16, 32768, ", window 1024", window=1024),
    _scaling(16, 1024, ", table 32 times as wide", spare_blocks=31 * 64),
    _scaling(16, 1024, ", pool 16 times as large", spare_pages=15 * 1024),
    _scaling(64, 4096, ", table 8 times as wide", spare_blocks=7 * 256),
    _scaling(64, 4096, ", pool 4 times as large", spare_pages=3 * 16384),
)


@dataclasses.dataclass(frozen=True)
class PrefillCase:
    """One step with several tokens per row, over what the rows hold with them."""

    name: str
    lengths: tuple[int, ...]  # tokens held by each row, those of the step included
    query_lengths: tuple[int, ...]
    tag: str
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    shared_tokens: int = 0  # that all rows begin with

    @property
    def pool(self) -> DecodeCase:
        """The rows as they are held."""
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim, self.page_size)
        return DecodeCase(self.name, self.lengths, *sizes)

    @property
    def max_context(self) -> int:
        """Tokens held before the step by any row, at most."""
        return max(length - count for length, count in zip(self.lengths, self.query_lengths, strict=True))

    @property
    def flops(self) -> int:
        """Operations of both products: two for each query head, visible key and dim."""
        pairs = sum(
            count * (length - count) + count * (count + 1) // 2
            for length, count in zip(self.lengths, self.query_lengths, strict=True)
        )
        return 4 * pairs * self.num_heads * self.head_dim


def _drafts(count: int) -> PrefillCase:
    return PrefillCase(f"64 x 4096, {count} tokens each", (4096,) * 64, (count,) * 64, "drafts")


def _single_row(length: int, count: int) -> PrefillCase:
    return PrefillCase(f"1 x {length}, {count} tokens", (length,), (count,), "single")


PREFILL_CASES = (
    PrefillCase("2 fresh prompts of 2048", (2048,) * 2, (2048,) * 2, "fresh"),
    PrefillCase("2 fresh prompts of 8192", (8192,) * 2, (8192,) * 2, "fresh"),
    PrefillCase("8 fresh prompts, 54 to 4000", (54, 97, 300, 577, 1000, 1328, 2011, 4000),
                (54, 97, 300, 577, 1000, 1328, 2011, 4000), "fresh"),
    PrefillCase("2 chunks of 2048 on 6144", (8192,) * 2, (2048,) * 2, "chunk"),
    PrefillCase("1 chunk of 512 on 32256", (32768,), (512,), "chunk"),
    PrefillCase("64 x 4096 decoding", (4096,) * 64, (1,) * 64, "mixed"),
    PrefillCase("1 chunk of 2048 on 2048", (4096,), (2048,), "mixed"),
    PrefillCase("64 x 4096 decoding, 1 chunk of 2048 on 2048", (4096,) * 65, (1,) * 64 + (2048,), "mixed"),
    *map(_drafts, (1, 2, 4, 8, 16)),
    *(_single_row(4096, count) for count in (4, 16, 64)),
    _single_row(32768, 4),
    PrefillCase("32 x 8448, 8192 shared", (8448,) * 32, (1,) * 32, "cascade", shared_tokens=8192),
    PrefillCase("32 x 1280, 1024 shared", (1280,) * 32, (1,) * 32, "cascade", shared_tokens=1024),
    PrefillCase("16 x 1280, 1024 shared", (1280,) * 16, (1,) * 16, "cascade", shared_tokens=1024),
    PrefillCase("8 x 1280, 1024 shared", (1280,) * 8, (1,) * 8, "cascade", shared_tokens=1024),
    PrefillCase("4 x 8448, 8192 shared", (8448,) * 4, (1,) * 4, "cascade", shared_tokens=8192),
)  # fmt: skip
