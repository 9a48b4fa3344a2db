"""Every parameter of a model, with its shape, and the parts of it that files have as tensors.

A matrix is `layers.3.attention.out.weight` [out, in] for example, as files store it, so that nothing is turned at
loading; experts are [expert, in, out]. Two matrices are made of parts, whose names are like those of parameters:

attention.qkv   [kv head, its query heads + its key + its value, head_dim, in]   attention.query, .key and .value
mlp.gate_up     [gate + up, out, in]                                             mlp.gate and .up
"""

import math
from dataclasses import dataclass

from paged_jax.models.config import ModelConfig


@dataclass(frozen=True)
class Part:
    """A part of a parameter, or all of it."""

    path: str  # of the parameter
    start: tuple[int, ...]  # where in the parameter it begins
    shape: tuple[int, ...]  # in the parameter, with all of its axes
    stored_shape: tuple[int, ...]  # in a file: what it gives out is one axis


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model."""
    layer = _attention_shapes(config) | _mlp_shapes(config) | _norm_shapes(config)
    shapes = {"embedding.embedding": (config.vocab_size, config.width), "norm.scale": (config.width,)}
    if not config.tied_embeddings:
        shapes["head.weight"] = (config.vocab_size, config.width)
    return shapes | {f"layers.{i}.{path}": shape for i in range(config.num_layers) for path, shape in layer.items()}


def parameter_parts(config: ModelConfig) -> dict[str, Part]:
    """Every part by its name; a parameter that is not made of parts is one, and its path the name."""
    # The axis of a matrix along which its parts lie, and how much of it each has.
    made_of_parts = {
        "qkv": (1, {"query": config.attention.group, "key": 1, "value": 1}),
        "gate_up": (0, {"gate": 1, "up": 1}),
    }
    parts = {}
    for path, shape in parameter_shapes(config).items():
        *owner, matrix, kind = path.split(".")
        if matrix not in made_of_parts:
            parts[path] = Part(path, (0,) * len(shape), shape, shape)
            continue
        axis, sizes = made_of_parts[matrix]
        columns = shape[-1:] if kind == "weight" else ()
        start = [0] * len(shape)
        for name, size in sizes.items():
            part = (*shape[:axis], size, *shape[axis + 1 :])
            rows = math.prod(part) // math.prod(columns)
            parts[".".join([*owner, name, kind])] = Part(path, tuple(start), part, (rows, *columns))
            start[axis] += size
    return parts


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    attention, width = config.attention, config.width
    heads = (attention.num_kv_heads, attention.group + 2, attention.head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "qkv.weight": (*heads, width),
        "out.weight": (width, attention.num_heads * attention.head_dim),
    }
    if attention.qkv_bias:
        shapes["qkv.bias"] = heads
    if attention.out_bias:
        shapes["out.bias"] = (width,)
    if attention.qk_norm:
        shapes |= {"query_ln.scale": (attention.head_dim,), "key_ln.scale": (attention.head_dim,)}
    if attention.sinks:
        shapes["sinks"] = (attention.num_heads,)
    return {f"attention.{path}": shape for path, shape in shapes.items()}


def _mlp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, inner, experts = config.width, config.mlp.width, config.mlp.experts
    if experts is None:
        shapes: dict[str, tuple[int, ...]] = {"mlp.gate_up": (2, inner, width), "mlp.down": (width, inner)}
        biases = {f"{path}.bias": shape[:-1] for path, shape in shapes.items() if config.mlp.bias}
        return {f"{path}.weight": shape for path, shape in shapes.items()} | biases
    shapes = {"mlp.router.weight": (experts.count, width), "mlp.router.bias": (experts.count,)}
    sides = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}  # (out, in)
    for name, (outer, inner) in sides.items():
        shapes |= {
            f"mlp.experts.{name}": (experts.count, inner, outer),
            f"mlp.experts.{name}_bias": (experts.count, outer),
        }
    return shapes


def _norm_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    names = ("attention_norm", "mlp_norm", *(("attention_post_norm", "mlp_post_norm") if config.norm.after else ()))
    return {f"{name}.scale": (config.width,) for name in names}
