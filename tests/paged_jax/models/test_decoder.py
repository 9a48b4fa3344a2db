"""The decoder equals a dense Llama, whatever the pages: in numpy here, in transformers, and with real weights.

Other families are in `test_parity.py`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forwards import load_forward
from paged_runs import forward, new_pool, packed
from tiny_llama import NAMES, TOKENS, TinyLlama, tiny_llama

from paged_jax import BlockTable, PagedCache, Sampler
from paged_jax.models.programs import generate, prefill
from paged_jax.models.text.text import gguf_text
from paged_jax.models.weights.config_gguf import gguf_config
from paged_jax.models.weights.gguf import GGUFFile, open_gguf

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
    model: jax.tree_util.Partial


@pytest.fixture(scope="module")
def own_head(folder: Path) -> Loaded:
    return load(tiny_llama(), folder / "own.gguf")


@pytest.fixture(scope="module")
def tied_head(folder: Path) -> Loaded:
    return load(tiny_llama(tied=True), folder / "tied.gguf")


def load(tiny: TinyLlama, path: Path) -> Loaded:
    file = open_gguf(tiny.save(path))
    return Loaded(tiny, file, load_forward(file, gguf_config(file)))


@pytest.fixture(params=["own_head", pytest.param("tied_head", marks=pytest.mark.full)])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return request.getfixturevalue(request.param)


def full_unless(heads_and_sizes: set[tuple[str, int]]) -> Any:
    """Each head with each page size; only these by default."""
    pairs = itertools.product(("own_head", "tied_head"), PAGE_SIZES)
    marks = {False: (), True: pytest.mark.full}
    return pytest.mark.parametrize(
        ("loaded", "page_size"),
        [pytest.param(*pair, marks=marks[pair not in heads_and_sizes]) for pair in pairs],
        indirect=["loaded"],
    )


def prompt_logits(
    model: jax.tree_util.Partial, prompts: Sequence[Sequence[int]], page_size: int, *, tokens: int = 64
) -> tuple[list[np.ndarray], PagedCache, BlockTable]:
    """Each prompt's logits, all prompts packed into one pass that is padded to `tokens`."""
    return packed(model, *new_pool(model, len(prompts), page_size), prompts, tokens)


def continued(
    model: jax.tree_util.Partial, prompts: Sequence[Sequence[int]], count: int, page_size: int = 5, **options: Any
) -> list[list[int]]:
    """The next tokens of each prompt, as the example makes them: prefill, then generate."""
    cache, table = new_pool(model, len(prompts), page_size, 128)
    tokens = np.concatenate([np.array(prompt[:-1], np.int32) for prompt in prompts])
    counts = np.array([len(prompt) - 1 for prompt in prompts], np.int32)
    cache, table, ok = prefill(model, cache, table, np.pad(tokens, (0, 128 - tokens.size)), counts)
    assert ok
    newest = np.array([prompt[-1] for prompt in prompts], np.int32)
    active = np.ones(len(prompts), bool)
    result = generate(model, cache, table, newest, active, max_new_tokens=count, **options).check()
    return [row[row >= 0].tolist() for row in np.asarray(result.tokens)]


def assert_close(got: Any, expected: Any, atol: float = 1e-4) -> None:
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=atol)


# --- Against dense numpy


@full_unless({("own_head", 5)})
def test_prompt_logits_equal_the_dense_model(loaded: Loaded, page_size: int) -> None:
    """The prompts of a packed batch, of unequal lengths, each as if it were alone."""
    got, _, table = prompt_logits(loaded.model, PROMPTS, page_size)
    for row, prompt in enumerate(PROMPTS):
        assert_close(got[row], loaded.tiny.logits(prompt))
    table.check()


@full_unless({("tied_head", 1)})
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
        (logits,), cache, table = packed(own_head.model, cache, table, [prompt[first:end]], 8)
        pieces.append(logits)
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
    def step(model: jax.tree_util.Partial, cache: PagedCache, table: BlockTable, tokens: Any) -> Any:
        traces.append(tokens.shape)
        table, step, ok = table.step(jnp.ones(2, jnp.int32))
        logits, cache = model(tokens, step, cache)
        return logits.argmax(-1).astype(jnp.int32), cache, table, ok

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


def test_another_rope_base_gives_other_logits(folder: Path) -> None:
    """The base in the file counts, not a default."""
    loaded = load(dataclasses.replace(tiny_llama(), rope_base=500.0), folder / "base.gguf")
    got, _, _ = prompt_logits(loaded.model, PROMPTS, 16)
    assert_close(got[0], loaded.tiny.logits(PROMPTS[0]))
    assert np.abs(got[0] - tiny_llama().logits(PROMPTS[0])).max() > 0.01


# --- Against transformers


def hf_llama(file: GGUFFile) -> Any:
    """transformers' Llama of the same sizes and weights, with Q and K turned back to halves."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = gguf_config(file)
    attention = config.attention
    hf_config = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.mlp.width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        max_position_embeddings=config.max_length,
        rms_norm_eps=config.norm.eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    state = {}
    for name in file.tensors:
        *layer, part, _ = name.split(".")
        weight = file.tensor(name)
        if part in ("attn_q", "attn_k"):
            pairs = weight.reshape(-1, attention.head_dim // 2, 2, config.width)
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        state[f"{prefix}{NAMES[part]}.weight"] = torch.from_numpy(weight)
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


def assert_greedy(rows: Sequence[Sequence[int]], count: int, model: Any, prompts: Sequence[Sequence[int]]) -> None:
    """One pass of transformers a row: it chooses each token after those before exactly if it decodes all of them."""
    for prompt, tokens in zip(prompts, rows, strict=True):
        choices = hf_logits(model, [*prompt, *tokens[:-1]])[len(prompt) - 1 :].argmax(-1)
        assert len(tokens) == count
        assert tokens == choices.tolist()


@pytest.mark.parity
def test_the_same_weights_in_transformers_give_the_same(loaded: Loaded) -> None:
    theirs = hf_llama(loaded.file)
    ours, _, _ = prompt_logits(loaded.model, PROMPTS, 5)
    for got, prompt in zip(ours, PROMPTS, strict=True):
        assert_close(got, hf_logits(theirs, prompt))
    assert_greedy(continued(loaded.model, PROMPTS, 20), 20, theirs, PROMPTS)


TEXTS = [
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
]


@pytest.mark.parity
@pytest.mark.download
def test_the_real_model_equals_transformers(smollm2_path: Path) -> None:
    file = open_gguf(smollm2_path)
    text = gguf_text(file)
    prompts = [text.encode(prompt, is_raw=True) for prompt in ("The capital of France is", *TEXTS[:2])]
    prompts.append(text.encode("What is gravity? Answer in one sentence.", is_raw=False))
    theirs = hf_llama(file)
    model = load_forward(file, gguf_config(file), scan_layers=True)  # thirty layers: compiled in less time
    ours, _, _ = prompt_logits(model, prompts, 16, tokens=128)
    for got, prompt in zip(ours, prompts, strict=True):
        assert_close(got, hf_logits(theirs, prompt), 1e-3)
    tokens = continued(model, prompts, 40)
    assert_greedy(tokens, 40, theirs, prompts)
    assert text.tokenizer.decode(tokens[0]).startswith(" Paris.")


@pytest.mark.parity
@pytest.mark.download
def test_gemma_3_equals_transformers(gemma3_path: Path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    files = {"pretrained_model_name_or_path": str(gemma3_path.parent), "gguf_file": gemma3_path.name}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**files, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None
    file = open_gguf(gemma3_path)
    text, model = gguf_text(file), load_forward(file, gguf_config(file), scan_layers=True)
    prompts = [text.encode(prompt, is_raw=True) for prompt in ("The capital of France is", *TEXTS)]
    ours, _, _ = prompt_logits(model, prompts, 16, tokens=128)
    for got, prompt in zip(ours, prompts, strict=True):
        assert_close(got, hf_logits(theirs, prompt), 1e-3)
    assert_greedy(continued(model, prompts, 40), 40, theirs, prompts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**files)
    for prompt in (*TEXTS, "x" + 29 * " " + "y\n\n\n", "naïve 日本語 🙂 <b>"):
        assert tokenizer(prompt)["input_ids"] == text.encode(prompt, is_raw=True)
