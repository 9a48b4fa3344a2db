"""A Llama-type GGUF file → a `Decoder` with its weights."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from decoder.gguf import GGUFError, GGUFFile
from decoder.model import Decoder, DecoderConfig


def load_decoder(file: GGUFFile, dtype=jnp.float32, *, track: Callable[[list[str]], Any] = iter) -> Decoder:
    """The model in `file`, its weights dequantised to `dtype`, one tensor in memory at a time.

    Args:
        file: an open GGUF file of architecture "llama".
        dtype: of weights and activations.
        track: wraps the list of tensors to read, to show progress.

    Raises:
        GGUFError: another architecture, a feature or tensor this decoder lacks, or a missing or misshapen tensor.
    """
    config = read_config(file)
    model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    slots = dict(_tensor_slots(config, state))
    if unknown := sorted(file.tensors.keys() - slots.keys()):
        raise GGUFError(f"{file.path}: expected the tensors of a Llama-type model, got {unknown[0]!r} as well")
    if missing := sorted(slots.keys() - file.tensors.keys()):
        raise GGUFError(f"{file.path}: expected a tensor {missing[0]!r}, got none")
    for name, (variable, _) in slots.items():
        file.check_type(name)
        shape = variable.get_value().shape
        if file.tensors[name].shape != shape:
            raise GGUFError(f"{file.path}: tensor {name!r}: expected shape {shape}, got {file.tensors[name].shape}")
    for name in track(list(slots)):
        variable, convert = slots[name]
        variable.set_value(jax.device_put(np.asarray(convert(file.tensor(name)), jnp.dtype(dtype))))
    return nnx.merge(graph, state)


def read_config(file: GGUFFile) -> DecoderConfig:
    """The model's sizes, from the metadata.

    Raises:
        GGUFError: an architecture or feature this decoder lacks, or metadata that is missing or contradicts itself.
    """
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise GGUFError(f"{file.path}: expected architecture 'llama', got {architecture!r}")
    for key, value in {"llama.expert_count": 0, "llama.rope.scaling.type": "none"}.items():
        if metadata.get(key, value) != value:
            raise GGUFError(f"{file.path}: expected a model with {key} = {value!r}, got {metadata[key]!r}")

    def positive(kind: type, key: str, default: Any = None) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
            raise GGUFError(f"{file.path}: expected a positive {kind.__name__} for llama.{key}, got {value!r}")
        return value

    size, real = functools.partial(positive, int), functools.partial(positive, float)
    width, num_heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", width // num_heads)
    if head_dim % 2:
        raise GGUFError(f"{file.path}: expected an even head_dim, whose pairs are rotated, got {head_dim}")
    if size("attention.value_length", head_dim) != head_dim or size("rope.dimension_count", head_dim) != head_dim:
        raise GGUFError(f"{file.path}: expected K, V and rotary dimensions of one size ({head_dim}), got others")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        got = "none" if embedding is None else f"shape {embedding.shape}"
        raise GGUFError(f"{file.path}: expected a matrix as tensor 'token_embd.weight', got {got}")
    config = DecoderConfig(
        vocab_size=embedding.shape[0],
        num_layers=size("block_count"),
        width=width,
        mlp_width=size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rope_base=real("rope.freq_base", 10_000.0),
        norm_eps=real("attention.layer_norm_rms_epsilon"),
        max_length=size("context_length"),
        tied_embeddings="output.weight" not in file.tensors,
    )
    if num_heads % config.num_kv_heads:
        raise GGUFError(
            f"{file.path}: expected heads in whole groups per kv head, got {num_heads} heads and "
            f"{config.num_kv_heads} kv heads"
        )
    return config


def _tensor_slots(config: DecoderConfig, state) -> Iterator[tuple[str, tuple[Any, Callable]]]:
    """Each tensor of the file, with the variable it fills and how it becomes that variable's value."""
    yield "token_embd.weight", (state["embedding"]["embedding"], _same)
    yield "output_norm.weight", (state["norm"]["scale"], _same)
    if not config.tied_embeddings:
        yield "output.weight", (state["head"]["weight"], _same)
    for i in range(config.num_layers):
        layer = state["layers"][i]
        attention, mlp = layer["attention"], layer["mlp"]
        yield f"blk.{i}.attn_norm.weight", (layer["attention_norm"]["scale"], _same)
        yield f"blk.{i}.attn_q.weight", (attention["q"]["weight"], _halves_apart(config.num_heads))
        yield f"blk.{i}.attn_k.weight", (attention["k"]["weight"], _halves_apart(config.num_kv_heads))
        yield f"blk.{i}.attn_v.weight", (attention["v"]["weight"], _same)
        yield f"blk.{i}.attn_output.weight", (attention["out"]["weight"], _same)
        yield f"blk.{i}.ffn_norm.weight", (layer["mlp_norm"]["scale"], _same)
        for name in ("gate", "up", "down"):
            yield f"blk.{i}.ffn_{name}.weight", (mlp[name]["weight"], _same)


def _same(weight: np.ndarray) -> np.ndarray:
    return weight


def _halves_apart(num_heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """GGUF stores Q and K for a rotation of neighbouring pairs; ours turns pairs that lie half a head apart."""

    def convert(weight: np.ndarray) -> np.ndarray:
        rows, width = weight.shape
        pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
        return pairs.swapaxes(1, 2).reshape(rows, width)

    return convert
