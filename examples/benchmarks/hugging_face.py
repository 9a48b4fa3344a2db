"""The peer: a decoder's weights in transformers' LlamaForCausalLM, and its `generate` timed."""

import time

import jax
import numpy as np
import torch
import transformers


def to_transformers(forward: jax.tree_util.Partial) -> transformers.LlamaForCausalLM:
    """The same float32 weights, ready for inference."""
    config, model = forward.func.config, forward.func.decoder(*forward.args)
    peer = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.mlp.width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.attention.num_heads,
            num_key_value_heads=config.attention.num_kv_heads,
            head_dim=config.attention.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.rope_theta},
            rms_norm_eps=config.norm.eps,
            max_position_embeddings=config.max_length,
            tie_word_embeddings=config.tied_embeddings,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    weights = {"model.embed_tokens.weight": model.embedding.embedding, "model.norm.weight": model.norm.scale}
    weights["lm_head.weight"] = model.embedding.embedding if config.tied_embeddings else model.head.weight
    for i, layer in enumerate(model.layers):
        prefix, qkv, gate_up = f"model.layers.{i}", layer.attention.qkv.weight, layer.mlp.gate_up.weight
        weights |= {
            f"{prefix}.input_layernorm.weight": layer.attention_norm.scale,
            f"{prefix}.post_attention_layernorm.weight": layer.mlp_norm.scale,
            f"{prefix}.self_attn.q_proj.weight": qkv[:, :-2].reshape(-1, config.width),
            f"{prefix}.self_attn.k_proj.weight": qkv[:, -2].reshape(-1, config.width),
            f"{prefix}.self_attn.v_proj.weight": qkv[:, -1].reshape(-1, config.width),
            f"{prefix}.self_attn.o_proj.weight": layer.attention.out.weight,
            f"{prefix}.mlp.gate_proj.weight": gate_up[0],
            f"{prefix}.mlp.up_proj.weight": gate_up[1],
            f"{prefix}.mlp.down_proj.weight": layer.mlp.down.weight,
        }
    peer.load_state_dict({name: torch.from_numpy(np.array(weight)) for name, weight in weights.items()})
    return peer.eval()


def time_generate(peer: transformers.LlamaForCausalLM, prompt: list[int], num_new: int) -> float:
    """Seconds to decode `num_new` tokens for one row: `generate` of one token more, less `generate` of that one."""
    tokens = torch.tensor([prompt])

    def seconds(count: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            peer.generate(  # pyright: ignore[reportAttributeAccessIssue] (its mixin wants a wider class)
                tokens,
                attention_mask=torch.ones_like(tokens),
                min_new_tokens=count,
                max_new_tokens=count,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        return time.perf_counter() - start

    return seconds(num_new + 1) - seconds(1)
