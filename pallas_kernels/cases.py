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
    dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    tags: frozenset[str] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether it is attention without options."""
        return self.window is None and self.soft_cap is None and not self.sinks

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one step must read: each visible token's once."""
        seen = (min(length, self.window or length) for length in self.lengths)
        itemsize = 4 if self.dtype == "float32" else 2
        return sum(seen) * self.num_kv_heads * self.head_dim * 2 * itemsize


def log_uniform(rows: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Random lengths between the two, evenly spread on a logarithmic scale; the same at every call."""
    spread = np.random.default_rng(0).uniform(math.log(shortest), math.log(longest), rows)
    return tuple(int(length) for length in np.exp(spread))


def _model(name: str, heads: tuple[int, int], head_dim: int, **options) -> DecodeCase:
    return DecodeCase(name, (4096,) * 32, *heads, head_dim, tags=frozenset({"model"}), **options)


_HEADLINE = frozenset({"headline"})

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
    _model("Llama 3 70B", (64, 8), 128),
    _model("Qwen 2.5 32B, group 5", (40, 8), 128),
    _model("Qwen 2.5 7B, group 7", (28, 4), 128),
    _model("Qwen 3 8B", (32, 8), 128, page_size=32),
    _model("Gemma 2 9B", (16, 8), 256, soft_cap=50.0),
    _model("Gemma 3 27B, window", (32, 16), 128, window=1024),
    _model("Mistral 7B, window", (32, 8), 128, window=4096),
    _model("gpt-oss 20B, sinks", (64, 8), 64, sinks=True),
    _model("Falcon 7B, one kv head", (71, 1), 64),
    _model("SmolLM2 135M", (9, 3), 64),
)
