"""Every parameter of a model, with its shape in Flax and its shape in a file.

Parameters are named and shaped as Flax's modules have them, `layers.3.attention.query.kernel` [D, N, H] for example.
Files store a kernel transposed and without its axis of heads, [out, in], and experts as they are, [E, in, out].
"""

import math

from decoder.config import ModelConfig


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model."""
    layer = _attention_shapes(config) | _mlp_shapes(config) | _norm_shapes(config)
    shapes = {"embedding.embedding": (config.vocab_size, config.width), "norm.scale": (config.width,)}
    if not config.tied_embeddings:
        shapes["head.kernel"] = (config.width, config.vocab_size)
    return shapes | {f"layers.{i}.{path}": shape for i in range(config.num_layers) for path, shape in layer.items()}


def stored_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter in a file."""
    if path.endswith(".bias"):
        return (math.prod(shape),)
    if not path.endswith(".kernel"):
        return shape
    num_inner = 2 if path.endswith(".attention.out.kernel") else 1
    return math.prod(shape[num_inner:]), math.prod(shape[:num_inner])


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    attention, width = config.attention, config.width
    heads = {"query": attention.num_heads, "key": attention.num_kv_heads, "value": attention.num_kv_heads}
    heads = {name: (count, attention.head_dim) for name, count in heads.items()}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.kernel": (width, *shape) for name, shape in heads.items()}
    shapes["out.kernel"] = (*heads["query"], width)
    if attention.qkv_bias:
        shapes |= {f"{name}.bias": shape for name, shape in heads.items()}
    if attention.out_bias:
        shapes["out.bias"] = (width,)
    if attention.qk_norm:
        shapes |= {"query_ln.scale": (attention.head_dim,), "key_ln.scale": (attention.head_dim,)}
    if attention.sinks:
        shapes["sinks"] = (attention.num_heads,)
    return {f"attention.{path}": shape for path, shape in shapes.items()}


def _mlp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, experts = config.width, config.mlp.experts
    sides = {"gate": (width, config.mlp.width), "up": (width, config.mlp.width), "down": (config.mlp.width, width)}
    if experts is None:
        shapes: dict[str, tuple[int, ...]] = {f"mlp.{name}.kernel": side for name, side in sides.items()}
        return shapes | {f"mlp.{name}.bias": side[1:] for name, side in sides.items() if config.mlp.bias}
    shapes = {"mlp.router.kernel": (width, experts.count), "mlp.router.bias": (experts.count,)}
    for name, side in sides.items():
        shapes |= {f"mlp.experts.{name}": (experts.count, *side), f"mlp.experts.{name}_bias": (experts.count, side[1])}
    return shapes


def _norm_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    names = ("attention_norm", "mlp_norm", *(("attention_post_norm", "mlp_post_norm") if config.norm.after else ()))
    return {f"{name}.scale": (config.width,) for name in names}
