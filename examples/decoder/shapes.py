"""Every parameter of a model, with its shape: that of the tensor in a file, so that nothing is turned at loading.

A matrix is `layers.3.attention.query.weight` [out, in] for example; experts are [expert, in, out].
"""

from decoder.config import ModelConfig


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model."""
    layer = _attention_shapes(config) | _mlp_shapes(config) | _norm_shapes(config)
    shapes = {"embedding.embedding": (config.vocab_size, config.width), "norm.scale": (config.width,)}
    if not config.tied_embeddings:
        shapes["head.weight"] = (config.vocab_size, config.width)
    return shapes | {f"layers.{i}.{path}": shape for i in range(config.num_layers) for path, shape in layer.items()}


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    attention, width = config.attention, config.width
    heads = {"query": attention.num_heads, "key": attention.num_kv_heads, "value": attention.num_kv_heads}
    sizes = {name: count * attention.head_dim for name, count in heads.items()}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size, width) for name, size in sizes.items()}
    shapes["out.weight"] = (width, sizes["query"])
    if attention.qkv_bias:
        shapes |= {f"{name}.bias": (size,) for name, size in sizes.items()}
    if attention.out_bias:
        shapes["out.bias"] = (width,)
    if attention.qk_norm:
        shapes |= {"query_ln.scale": (attention.head_dim,), "key_ln.scale": (attention.head_dim,)}
    if attention.sinks:
        shapes["sinks"] = (attention.num_heads,)
    return {f"attention.{path}": shape for path, shape in shapes.items()}


def _mlp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, inner, experts = config.width, config.mlp.width, config.mlp.experts
    sides = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}  # (out, in)
    if experts is None:
        shapes: dict[str, tuple[int, ...]] = {f"mlp.{name}.weight": side for name, side in sides.items()}
        return shapes | {f"mlp.{name}.bias": side[:1] for name, side in sides.items() if config.mlp.bias}
    shapes = {"mlp.router.weight": (experts.count, width), "mlp.router.bias": (experts.count,)}
    for name, (outer, inner) in sides.items():
        shapes |= {
            f"mlp.experts.{name}": (experts.count, inner, outer),
            f"mlp.experts.{name}_bias": (experts.count, outer),
        }
    return shapes


def _norm_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    names = ("attention_norm", "mlp_norm", *(("attention_post_norm", "mlp_post_norm") if config.norm.after else ()))
    return {f"{name}.scale": (config.width,) for name in names}
