"""A small random Llama as a GGUF file, and the same model in plain numpy: what the decoder is compared with.

The text it writes is letters, digits and spaces: one hidden dimension is held positive by every embedding, and the head
weighs it against all other tokens. So a text can be compared without thinking of bytes that end inside a character.
"""

import dataclasses
import functools
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf_writer import Tensor, gguf_bytes
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from paged_jax.models.text.tokenizer import build_tokenizer

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "t h", "th e", "Ġ the"]
TOKENS = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WRITTEN = [i for i, token in enumerate(TOKENS) if set(token) <= {*string.ascii_letters, *string.digits, "Ġ"}]

# The parts of a Llama, by their names in a GGUF file and in a Hugging Face folder.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclasses.dataclass(frozen=True, eq=False)
class TinyLlama:
    """Weights by GGUF name, [out, in], with Q and K as the rotation by halves wants them."""

    weights: dict[str, np.ndarray]
    embedding_blocks: bytes  # the embedding as Q8_0
    num_layers: int = 3
    width: int = 64
    mlp_width: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    max_length: int = 256

    @property
    def metadata(self) -> dict[str, Any]:
        sizes = {
            "block_count": self.num_layers,
            "embedding_length": self.width,
            "feed_forward_length": self.mlp_width,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.layer_norm_rms_epsilon": self.norm_eps,
            "rope.freq_base": self.rope_base,
            "rope.dimension_count": self.head_dim,
            "context_length": self.max_length,
        }
        tokenizer = {
            "ggml.model": "gpt2",
            "ggml.pre": "smollm",
            "ggml.tokens": TOKENS,
            "ggml.token_type": np.array([3] * len(SPECIAL_TOKENS) + [1] * (len(TOKENS) - 3), np.int32),
            "ggml.merges": MERGES,
            "ggml.bos_token_id": 1,
            "ggml.eos_token_id": 2,
            "chat_template": TEMPLATE,
        }
        return {
            "general.architecture": "llama",
            **{f"llama.{key}": item for key, item in sizes.items()},
            **{f"tokenizer.{key}": item for key, item in tokenizer.items()},
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What stands in the file: Q and K with the two halves of each head interleaved."""
        found = {}
        for name, weight in self.weights.items():
            kind, raw = "F32", weight
            if name.endswith(("attn_q.weight", "attn_k.weight")):
                halves = weight.reshape(-1, 2, self.head_dim // 2, self.width)
                raw = halves.swapaxes(1, 2)
            data = np.ascontiguousarray(raw, "<f4").tobytes()
            if name == "token_embd.weight":
                kind, data = "Q8_0", self.embedding_blocks
            found[name] = (name, weight.shape, kind, data)
        return found

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return build_tokenizer(self.metadata)

    def save(
        self, path: Path, *, metadata: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None
    ) -> Path:
        """Writes the file; a change to None takes a key or a tensor out."""
        keys = self.metadata | (metadata or {})
        parts = self.tensors | (tensors or {})
        path.write_bytes(
            gguf_bytes(
                {key: item for key, item in keys.items() if item is not None},
                [tensor for tensor in parts.values() if tensor is not None],
            )
        )
        return path

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """[T, V] in float64: the dense model, with no cache."""
        w = {name: weight.astype(np.float64) for name, weight in self.weights.items()}
        count, half = len(tokens), self.head_dim // 2
        angles = np.arange(count)[:, None, None] * self.rope_base ** (-np.arange(half) / half)
        cos, sin = np.cos(angles), np.sin(angles)
        is_later = np.triu(np.ones((count, count), bool), 1)

        def norm(x: np.ndarray, name: str) -> np.ndarray:
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.norm_eps) * w[f"{name}.weight"]

        def rotated(x: np.ndarray) -> np.ndarray:
            first, second = x[..., :half], x[..., half:]
            return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

        x = w["token_embd.weight"][np.asarray(tokens, int)]
        for i in range(self.num_layers):
            at = f"blk.{i}"
            h = norm(x, f"{at}.attn_norm")
            q, k, v = ((h @ w[f"{at}.attn_{name}.weight"].T).reshape(count, -1, self.head_dim) for name in "qkv")
            q, k, y = rotated(q), rotated(k), np.empty_like(q)
            for head in range(self.num_heads):
                kv_head = head * self.num_kv_heads // self.num_heads
                scores = q[:, head] @ k[:, kv_head].T / np.sqrt(self.head_dim)
                scores[is_later] = -np.inf
                exp = np.exp(scores - scores.max(-1, keepdims=True))
                y[:, head] = exp / exp.sum(-1, keepdims=True) @ v[:, kv_head]
            x = x + y.reshape(count, -1) @ w[f"{at}.attn_output.weight"].T
            h = norm(x, f"{at}.ffn_norm")
            gate = h @ w[f"{at}.ffn_gate.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w[f"{at}.ffn_up.weight"].T)) @ w[f"{at}.ffn_down.weight"].T
        return norm(x, "output_norm") @ w.get("output.weight", w["token_embd.weight"]).T

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens, end tokens or not."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


@functools.cache
def tiny_llama(*, tied: bool = False, seed: int = 0) -> TinyLlama:
    rng = np.random.default_rng(seed)
    sizes = TinyLlama({}, b"")
    width, mlp, kv_width = sizes.width, sizes.mlp_width, sizes.num_kv_heads * sizes.head_dim
    shapes = {"token_embd": (len(TOKENS), width), "output_norm": (width,), "output": (len(TOKENS), width)}
    for i in range(sizes.num_layers):
        layer = {
            "attn_norm": (width,),
            "attn_q": (width, width),
            "attn_k": (kv_width, width),
            "attn_v": (kv_width, width),
            "attn_output": (width, width),
            "ffn_norm": (width,),
            "ffn_gate": (mlp, width),
            "ffn_up": (mlp, width),
            "ffn_down": (width, mlp),
        }
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    if tied:
        del shapes["output"]
    weights = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        # Norms around 1; matrices so large that what a token attends to decides what comes next.
        weights[f"{name}.weight"] = (1 + 0.1 * values if len(shape) == 1 else 1.5 * values / np.sqrt(shape[-1])).astype(
            np.float32
        )
    embedding = weights["token_embd.weight"]
    if not tied:
        embedding[:, 0] = 0.5
        for name in weights:
            if name.endswith(("attn_output.weight", "ffn_down.weight")):
                weights[name][0] = 0  # no layer moves the dimension that the head relies on
        weights["output_norm.weight"][0] = 1
        weights["output.weight"][:, 0] = [0 if token in WRITTEN else -300 for token in range(len(TOKENS))]
    weights["token_embd.weight"], blocks = q8_0(embedding)
    return TinyLlama(weights, blocks)


def q8_0(weight: np.ndarray) -> tuple[np.ndarray, bytes]:
    """The weight rounded as Q8_0 rounds it, and its bytes: per 32 values a half-precision scale and 8-bit integers."""
    groups = weight.reshape(-1, 32)
    scale = (np.abs(groups).max(-1, keepdims=True) / 127).astype("<f2")
    whole = np.round(groups / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
    data = np.concatenate([scale.view(np.uint8), whole.view(np.uint8)], axis=-1).tobytes()
    return (scale.astype(np.float32) * whole).reshape(weight.shape), data
