"""The decoder equals a dense Llama, whatever the pages: in numpy here, in transformers, and with real weights."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_llama import TOKENS, TinyLlama, tiny_llama

from decoder.chat import render_chat
from decoder.gguf import GGUFError, GGUFFile, open_gguf
from decoder.load import load_decoder, read_config
from decoder.model import Decoder, generate, prefill
from decoder.tokenizer import build_tokenizer
from paged_jax import BlockTable, PagedCache, Sampler

PROMPTS = [[5, 200, 31, 7, 263, 90, 91, 12, 80, 81, 66], [7], [100, 100, 20, 3, 250]]
PAGE_SIZES = [1, 5, 16]


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@dataclasses.dataclass(frozen=True)
class Loaded:
    tiny: TinyLlama
    file: GGUFFile
    model: Decoder


@pytest.fixture(scope="module")
def own_head(folder: Path) -> Loaded:
    return load(tiny_llama(), folder / "own.gguf")


@pytest.fixture(scope="module")
def tied_head(folder: Path) -> Loaded:
    return load(tiny_llama(tied=True), folder / "tied.gguf")


def load(tiny: TinyLlama, path: Path) -> Loaded:
    file = open_gguf(tiny.save(path))
    return Loaded(tiny, file, load_decoder(file))


@pytest.fixture(params=["own_head", "tied_head"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return request.getfixturevalue(request.param)


def new_pool(model: Decoder, rows: int, page_size: int, tokens: int = 64) -> tuple[PagedCache, BlockTable]:
    """Room for `tokens` tokens a row; cells that nothing was written to hold NaN."""
    config, blocks = model.config, -(-tokens // page_size)
    sizes = (config.num_layers, rows * blocks, page_size, config.num_kv_heads, config.head_dim)
    cache = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), PagedCache.create(*sizes, jnp.float32))
    return cache, BlockTable.create(rows * blocks, page_size, rows, blocks)


@functools.partial(jax.jit, static_argnames="size", donate_argnames="cache")
def forward(
    model: Decoder, cache: PagedCache, table: BlockTable, tokens: Any, num_tokens: Any, size: int | None
) -> tuple[jax.Array, PagedCache, BlockTable]:
    table, step, _ = table.step(num_tokens, size=size)
    hidden, cache = model(tokens, step, cache)
    return model.logits(hidden), cache, table


def prompt_logits(
    model: Decoder, prompts: Sequence[Sequence[int]], page_size: int, *, tokens: int = 64
) -> tuple[list[np.ndarray], PagedCache, BlockTable]:
    """Each prompt's logits, all prompts packed into one pass that is padded to `tokens`."""
    cache, table = new_pool(model, len(prompts), page_size)
    packed = np.concatenate([np.array(prompt, np.int32) for prompt in prompts])
    counts = [len(prompt) for prompt in prompts]
    logits, cache, table = forward(
        model, cache, table, np.pad(packed, (0, tokens - packed.size)), np.array(counts, np.int32), tokens
    )
    return np.split(np.asarray(logits)[: packed.size], np.cumsum(counts)[:-1]), cache, table


def continued(
    model: Decoder, prompts: Sequence[Sequence[int]], count: int, page_size: int = 5, **options: Any
) -> list[list[int]]:
    """The next tokens of each prompt, as the example makes them: prefill, then generate."""
    cache, table = new_pool(model, len(prompts), page_size, 128)
    packed = np.concatenate([np.array(prompt[:-1], np.int32) for prompt in prompts])
    counts = np.array([len(prompt) - 1 for prompt in prompts], np.int32)
    cache, table, ok = prefill(model, cache, table, np.pad(packed, (0, 128 - packed.size)), counts)
    assert ok
    newest = np.array([prompt[-1] for prompt in prompts], np.int32)
    active = np.ones(len(prompts), bool)
    result = generate(model, cache, table, newest, active, max_new_tokens=count, **options).check()
    return [row[row >= 0].tolist() for row in np.asarray(result.tokens)]


def assert_close(got: Any, expected: Any, atol: float = 1e-4) -> None:
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=atol)


# --- Against dense numpy


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prompt_logits_equal_the_dense_model(loaded: Loaded, page_size: int) -> None:
    """The prompts of a packed batch, of unequal lengths, each as if it were alone."""
    got, _, table = prompt_logits(loaded.model, PROMPTS, page_size)
    for row, prompt in enumerate(PROMPTS):
        assert_close(got[row], loaded.tiny.logits(prompt))
    table.check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decode_logits_equal_the_dense_model_token_by_token(loaded: Loaded, page_size: int) -> None:
    rows = [list(prompt) for prompt in PROMPTS]
    _, cache, table = prompt_logits(loaded.model, rows, page_size)
    for step in range(8):
        for row in rows:
            row.append((7 * step + 13 * len(row)) % len(TOKENS))
        newest = np.array([row[-1] for row in rows], np.int32)
        logits, cache, table = forward(loaded.model, cache, table, newest, np.ones(len(rows), np.int32), None)
        for got, row in zip(logits, rows, strict=True):
            assert_close(got, loaded.tiny.logits(row)[-1])


def test_a_row_of_a_packed_batch_equals_the_row_alone(own_head: Loaded) -> None:
    together, _, _ = prompt_logits(own_head.model, PROMPTS, 5)
    for row, prompt in enumerate(PROMPTS):
        (alone,), _, _ = prompt_logits(own_head.model, [prompt], 5, tokens=16)
        assert_close(together[row], alone, 2e-5)


def test_a_prompt_in_pieces_equals_the_prompt_whole(own_head: Loaded) -> None:
    prompt = PROMPTS[0]
    cache, table = new_pool(own_head.model, 1, 5)
    pieces = []
    for first, end in ((0, 3), (3, 4), (4, 11)):
        tokens = np.pad(np.array(prompt[first:end], np.int32), (0, 8 - end + first))
        logits, cache, table = forward(own_head.model, cache, table, tokens, np.array([end - first], np.int32), 8)
        pieces.append(np.asarray(logits)[: end - first])
    assert_close(np.concatenate(pieces), own_head.tiny.logits(prompt))


def test_greedy_tokens_equal_the_dense_model(loaded: Loaded) -> None:
    expected = [loaded.tiny.greedy(prompt, 20) for prompt in PROMPTS]
    assert len({token for row in expected for token in row}) > 10  # not one token for ever
    assert continued(loaded.model, PROMPTS, 20) == expected


def test_generate_passes_its_options_on(own_head: Loaded) -> None:
    free = continued(own_head.model, PROMPTS, 20)
    assert (
        continued(own_head.model, PROMPTS, 20, stop_tokens=(free[0][3],))[0] == free[0][: free[0].index(free[0][3]) + 1]
    )
    sampled = [
        continued(own_head.model, PROMPTS, 20, sample=Sampler(2.0), key=jax.random.key(seed)) for seed in (0, 0, 1)
    ]
    assert sampled[0] == sampled[1]
    assert sampled[0] not in (sampled[2], free)


def test_prompts_that_do_not_fit_are_refused_without_a_trace(own_head: Loaded) -> None:
    cache, table = new_pool(own_head.model, 1, 5, tokens=10)
    cache, table, ok = prefill(own_head.model, cache, table, np.zeros(16, np.int32), np.array([11], np.int32))
    assert not ok
    assert np.isnan(cache.k).all()
    assert table.lengths.tolist() == [0]


def test_a_step_compiles_once_while_lengths_grow(own_head: Loaded) -> None:
    traces = []

    @functools.partial(jax.jit, donate_argnums=1)
    def step(model: Decoder, cache: PagedCache, table: BlockTable, tokens: Any) -> Any:
        traces.append(tokens.shape)
        table, step, ok = table.step(jnp.ones(2, jnp.int32))
        hidden, cache = model(tokens, step, cache)
        return model.logits(hidden).argmax(-1).astype(jnp.int32), cache, table, ok

    cache, table = new_pool(own_head.model, 2, 5)
    tokens = jnp.zeros(2, jnp.int32)
    pointer = cache.k.unsafe_buffer_pointer()
    for _ in range(40):
        tokens, cache, table, ok = step(own_head.model, cache, table, tokens)
        assert ok
    assert table.lengths.tolist() == [40, 40]
    assert traces == [(2,)]
    assert cache.k.unsafe_buffer_pointer() == pointer


def test_prefill_and_generate_compile_once(own_head: Loaded, caplog: pytest.LogCaptureFixture) -> None:
    continued(own_head.model, PROMPTS, 9)
    other = [[*prompt[1:], 5, 6, 7] for prompt in PROMPTS]
    with jax.log_compiles():
        jax.jit(lambda x: x + 41)(0)
        assert "Compiling" in caplog.text  # so that silence means something
        caplog.clear()
        continued(own_head.model, other, 9)
    assert not [record for record in caplog.messages if "Compiling" in record and "_decode" in record]
    assert not [record for record in caplog.messages if "Compiling" in record and "prefill" in record]


# --- Loading


def test_weights_have_the_dtype_asked_for(own_head: Loaded) -> None:
    model = load_decoder(own_head.file, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(own_head.model)} == {jnp.dtype(jnp.float32)}


def test_the_sizes_are_read_from_the_metadata(loaded: Loaded) -> None:
    config = read_config(loaded.file)
    for name in ("num_layers", "width", "mlp_width", "num_heads", "num_kv_heads", "head_dim", "max_length"):
        assert getattr(config, name) == getattr(loaded.tiny, name), name
    assert config.vocab_size == len(TOKENS)
    assert config.tied_embeddings == ("output.weight" not in loaded.tiny.weights)
    assert (config.rope_base, config.norm_eps) == (10_000.0, np.float32(1e-5))


def test_loading_reports_every_tensor(own_head: Loaded) -> None:
    seen = []
    load_decoder(own_head.file, track=lambda names: (seen.append(name) or name for name in names))
    assert sorted(seen) == sorted(own_head.tiny.weights)


def test_another_rope_base_gives_other_logits(folder: Path) -> None:
    """The base in the file counts, not a default."""
    tiny = dataclasses.replace(tiny_llama(), rope_base=500.0)
    got, _, _ = prompt_logits(load_decoder(open_gguf(tiny.save(folder / "base.gguf"))), PROMPTS, 16)
    assert_close(got[0], tiny.logits(PROMPTS[0]))
    assert np.abs(got[0] - tiny_llama().logits(PROMPTS[0])).max() > 0.01


def f32(name: str, *shape: int) -> dict[str, Any]:
    return {name: (name, shape, "F32", np.zeros(shape, "<f4").tobytes())}


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"general.architecture": "mamba"}, {}, "expected architecture 'llama', got 'mamba'"),
        ({"general.architecture": None}, {}, "expected architecture 'llama', got None"),
        ({"llama.expert_count": 8}, {}, r"llama\.expert_count.* got 8"),
        ({"llama.rope.scaling.type": "yarn"}, {}, r"llama\.rope\.scaling\.type.* got 'yarn'"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {}, r"scaling\.type.* got 'linear'"),
        ({"llama.block_count": None}, {}, r"llama\.block_count, got None"),
        ({"llama.context_length": 0}, {}, r"llama\.context_length, got 0"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, {}, r"layer_norm_rms_epsilon, got None"),
        ({"llama.embedding_length": "wide"}, {}, r"llama\.embedding_length, got 'wide'"),
        ({"llama.rope.dimension_count": 8}, {}, r"rotary dimensions of one size \(16\)"),
        ({"llama.attention.value_length": 32}, {}, r"K, V and rotary dimensions of one size \(16\)"),
        ({"llama.attention.head_count_kv": 3}, {}, "4 heads and 3 kv heads"),
        ({}, {"blk.1.attn_v.weight": None}, r"tensor 'blk\.1\.attn_v\.weight', got none"),
        ({}, {"token_embd.weight": None}, r"tensor 'token_embd\.weight', got none"),
        ({"llama.block_count": 2}, {}, r"got 'blk\.2\.\w+\.weight' as well"),
        ({}, f32("blk.0.attn_q.bias", 64), r"got 'blk\.0\.attn_q\.bias' as well"),
        ({}, f32("rope_freqs.weight", 8), r"got 'rope_freqs\.weight' as well"),
        ({}, f32("blk.1.attn_q.weight", 32, 64), r"tensor 'blk\.1\.attn_q\.weight': expected shape"),
        ({}, f32("blk.1.attn_q.weight", 64), r"tensor 'blk\.1\.attn_q\.weight': expected shape"),
        ({}, f32("blk.1.attn_k.weight", 31, 64), r"tensor 'blk\.1\.attn_k\.weight': expected shape"),
        ({}, f32("blk.2.ffn_down.weight", 96, 64), r"tensor 'blk\.2\.ffn_down\.weight': expected shape"),
        ({}, f32("output_norm.weight", 65), r"tensor 'output_norm\.weight': expected shape"),
        ({}, f32("token_embd.weight", 64), r"token_embd\.weight"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(
    folder: Path, metadata: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    file = open_gguf(tiny_llama().save(folder / "broken.gguf", metadata=metadata, tensors=tensors))
    with pytest.raises(GGUFError, match=message) as caught:
        load_decoder(file)
    assert str(file.path) in str(caught.value)


# --- Against transformers


def hf_llama(file: GGUFFile) -> Any:
    """transformers' Llama of the same sizes and weights, with Q and K turned back to halves."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = read_config(file)
    hf_config = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_length,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        tie_word_embeddings=config.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    names = {
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
    state = {}
    for name in file.tensors:
        *layer, part, _ = name.split(".")
        weight = file.tensor(name)
        if part in ("attn_q", "attn_k"):
            pairs = weight.reshape(-1, config.head_dim // 2, 2, config.width)
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        state[f"{prefix}{names[part]}.weight"] = torch.from_numpy(weight)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(hf_config)
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(hf_config)  # its frequencies are no weights
    return model.eval()


def hf_logits(model: Any, prompt: Sequence[int]) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model(torch.tensor([list(prompt)])).logits[0].numpy()


def hf_greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    torch = pytest.importorskip("torch")
    tokens = torch.tensor([list(prompt)])
    with torch.no_grad():
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parity
def test_the_same_weights_in_transformers_give_the_same(loaded: Loaded) -> None:
    theirs = hf_llama(loaded.file)
    ours, _, _ = prompt_logits(loaded.model, PROMPTS, 5)
    for got, prompt in zip(ours, PROMPTS, strict=True):
        assert_close(got, hf_logits(theirs, prompt))
    assert continued(loaded.model, PROMPTS, 20) == [hf_greedy(theirs, prompt, 20) for prompt in PROMPTS]


@pytest.mark.parity
@pytest.mark.download
def test_the_real_model_equals_transformers(smollm2_path: Path) -> None:
    file = open_gguf(smollm2_path)
    question = render_chat(file.metadata, [{"role": "user", "content": "What is gravity? Answer in one sentence."}])
    texts = [
        "The capital of France is",
        "Once upon a time, in a small village by the sea,",
        "def fibonacci(n):\n",
        question,
    ]
    tokenizer = build_tokenizer(file.metadata)
    prompts = [tokenizer.encode(text).ids for text in texts]
    theirs = hf_llama(file)
    model = load_decoder(file)
    ours, _, _ = prompt_logits(model, prompts, 16, tokens=128)
    for got, prompt in zip(ours, prompts, strict=True):
        assert_close(got, hf_logits(theirs, prompt), 1e-3)
    tokens = continued(model, prompts, 40)
    assert tokens == [hf_greedy(theirs, prompt, 40) for prompt in prompts]
    assert tokenizer.decode(tokens[0]).startswith(" Paris.")
