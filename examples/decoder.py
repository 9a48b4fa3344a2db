"""A whole Llama decoder in one file: Flax NNX modules, SmolLM2's weights, and text generated over paged K and V.

    python examples/decoder.py "What is gravity? Answer in one sentence."

Read it from the top: sizes → model → weights → generation → command line. What is particular to pages is little: layers
hand a `PagedCache` on and share one `step`, and `generate` makes the pool and the block table. The first run fetches
SmolLM2-135M-Instruct, 98 MB; `--model` takes any GGUF file of a plain Llama.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from paged_jax import BlockTable, PagedCache, PagedStep, decode
from paged_jax.layers import PagedAttention, RopeConfig
from paged_jax.models.text.special_ids import special_ids
from paged_jax.models.text.text import gguf_text
from paged_jax.models.weights.fetch import FetchError, fetch_smollm2
from paged_jax.models.weights.gguf import GGUFFile, open_gguf

PAGE_SIZE = 16  # tokens in a page

# --- Sizes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    vocab_size: int
    width: int  # of a token's hidden state
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    is_tied: bool  # the head is the embedding table


def read_config(file: GGUFFile) -> Config:
    """The sizes in a file's metadata; ValueError if it is no Llama, or one that turns q and k in another way."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{file.path}: expected architecture llama, got {architecture}")
    sizes = {key.removeprefix("llama."): value for key, value in file.metadata.items() if key.startswith("llama.")}
    width, num_heads = sizes["embedding_length"], sizes["attention.head_count"]
    head_dim = sizes.get("attention.key_length", width // num_heads)
    for key, expected in {"rope.scaling.type": "none", "rope.dimension_count": head_dim}.items():
        if (got := sizes.get(key, expected)) != expected:
            raise ValueError(f"{file.path}: expected llama.{key} {expected}, got {got}")
    return Config(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        width=width,
        mlp_width=sizes["feed_forward_length"],
        num_layers=sizes["block_count"],
        num_heads=num_heads,
        num_kv_heads=sizes.get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        norm_eps=sizes["attention.layer_norm_rms_epsilon"],
        rope_theta=sizes.get("rope.freq_base", 10_000.0),
        is_tied="output.weight" not in file.tensors,
    )


# --- The model: tokens → logits, for T tokens packed side by side, whichever rows they belong to ----------------------


class Decoder(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(config.vocab_size, config.width, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.width, epsilon=config.norm_eps, rngs=rngs)
        self.head = None if config.is_tied else nnx.Linear(config.width, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Int32[Array, " T"], step: PagedStep, cache: PagedCache):
        x = self.embedding(tokens)  # [T, width]
        for i, layer in enumerate(self.layers):
            x, cache = layer(x, step, cache, i)
        x = self.norm(x)
        return self.embedding.attend(x) if self.head is None else self.head(x), cache


class Layer(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, epsilon=config.norm_eps, rngs=rngs)
        self.attention = PagedAttention(
            config.width,
            config.num_heads,
            config.head_dim,
            num_kv_heads=config.num_kv_heads,
            rope=RopeConfig(rope_theta=config.rope_theta),
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(config.width, epsilon=config.norm_eps, rngs=rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: Float[Array, "T D"], step: PagedStep, cache: PagedCache, layer: int):
        # The step tells where each token stands, which cell its K and V go to, and which pages it looks at.
        y, cache = self.attention(self.attention_norm(x), cache, step, layer=layer)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache


class MLP(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.gate = nnx.Linear(config.width, config.mlp_width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(config.width, config.mlp_width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(config.mlp_width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


# --- Weights: a GGUF file → the model as a function of its weights ----------------------------------------------------

TENSORS = {  # a module's place in the model, or in a layer → its name in the file
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.out": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}


def load_forward(file: GGUFFile, config: Config) -> jax.tree_util.Partial:
    """`forward(tokens, step, cache) -> (logits, cache)` with the file's weights bound; ValueError if they don't fit."""
    # Traced and not run, so that no random weights are ever made: the parameters are shapes until a tensor comes.
    graphdef, weights = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    unread = set(file.tensors)
    for path, param in nnx.to_flat_state(weights):  # path: ("layers", 3, "mlp", "gate", "kernel"), for one
        prefix, module = (f"blk.{path[1]}.", path[2:-1]) if path[0] == "layers" else ("", path[:-1])
        name = f"{prefix}{TENSORS['.'.join(map(str, module))]}.weight"
        tensor = file.tensor(name)
        unread.remove(name)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            # The file's rotation turns neighbours, elements 2i and 2i + 1 of a head; ours turns i and i + head_dim / 2.
            # q · k is the same in any order of elements that both share, so theirs becomes ours here, once.
            pairs = tensor.reshape(-1, config.head_dim // 2, 2, config.width)
            tensor = pairs.swapaxes(1, 2).reshape(tensor.shape)
        if module != ("embedding",):
            tensor = tensor.T  # the file has [out, in], Flax [in, out], with heads and head_dim as two axes
        param.set_value(jnp.asarray(tensor.reshape(param.get_value().shape)))
    if unread:
        raise ValueError(f"{file.path}: expected the tensors of a plain Llama, got {min(unread)} too")

    def forward(weights, tokens, step, cache):
        return nnx.merge(graphdef, weights)(tokens, step, cache)  # runs while JAX traces: free of cost afterwards

    # A Partial hands its weights to a jitted function as arguments, where a closure would make constants of them.
    return jax.tree_util.Partial(forward, weights)


# --- Generation -------------------------------------------------------------------------------------------------------


@jax.jit(donate_argnames=("cache", "table"))  # donated: pages are written in place
def prefill(forward, cache, table, tokens, num_tokens):
    """Writes the K and V of packed prompts: the first num_tokens[0] tokens are row 0's, the next are row 1's ..."""
    table, step, ok = table.step(num_tokens, size=tokens.shape[0])  # takes the pages; tells which token goes where
    _, cache = forward(tokens, step, cache)  # nobody asks for these logits, so XLA does not compute them
    return cache, table, ok


def generate(forward, config: Config, prompts: list[list[int]], *, max_tokens: int, stop_tokens=()) -> list[list[int]]:
    """Greedily continues all prompts at once, each in a row of its own; returns the new tokens of each."""
    # Here every row gets the pages it can ever need; with fewer, `ok` would be False where they run out.
    blocks = [-(-(len(prompt) + max_tokens) // PAGE_SIZE) for prompt in prompts]
    table = BlockTable.create(sum(blocks), PAGE_SIZE, max_rows=len(prompts), max_blocks_per_row=max(blocks))
    heads = config.num_kv_heads, config.head_dim
    cache = PagedCache.create(config.num_layers, sum(blocks), PAGE_SIZE, *heads, dtype=jnp.float32)

    # All but the last token of each prompt are read at once; the last is the first that the loop of `decode` reads.
    num_tokens = np.array([len(prompt) - 1 for prompt in prompts], np.int32)
    size = (num_tokens.sum() // 64 + 1) * 64  # padded, so that prompts of about one length share a compiled program
    packed = np.zeros(size, np.int32)
    packed[: num_tokens.sum()] = [token for prompt in prompts for token in prompt[:-1]]
    cache, table, ok = prefill(forward, cache, table, packed, num_tokens)
    assert ok  # there are pages enough

    newest, active = jnp.array([prompt[-1] for prompt in prompts]), jnp.ones(len(prompts), bool)
    result = decode(forward, cache, table, newest, active, max_new_tokens=max_tokens, stop_tokens=stop_tokens).check()
    return [row[row >= 0].tolist() for row in np.asarray(result.tokens)]  # −1 follows a row's end


# --- Command line -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="answered together, in one batch")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of each answer, at most (%(default)s)")
    parser.add_argument("--model", metavar="PATH", help="a GGUF file of a Llama (SmolLM2-135M-Instruct)")
    args = parser.parse_args(argv)
    try:
        file = open_gguf(args.model or fetch_smollm2())
        config, text = read_config(file), gguf_text(file)
        prompts = [text.encode(prompt, is_raw=False) for prompt in args.prompts]
        forward = load_forward(file, config)
    except (FetchError, OSError, ValueError) as problem:
        sys.exit(f"decoder.py: error: {problem}")
    stop_tokens = sorted(special_ids(file.metadata).end)
    for tokens in generate(forward, config, prompts, max_tokens=args.max_tokens, stop_tokens=stop_tokens):
        print(text.tokenizer.decode(tokens))  # without the stop token, which is a special one


if __name__ == "__main__":
    main()
