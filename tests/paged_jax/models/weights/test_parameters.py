"""Tensors → parameters: each form a tensor may have, what is refused, memory, and every tensor of every family once."""

import dataclasses
import itertools
import math
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from gguf_writer import gguf_bytes, random_blocks
from safetensors.numpy import save_file
from tiny_checkpoints import TINY

from paged_jax.layers import RopeConfig
from paged_jax.models.config import AttentionConfig, MLPConfig, ModelConfig, NormConfig
from paged_jax.models.weights.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from paged_jax.models.weights.config_gguf import gguf_config
from paged_jax.models.weights.config_json import model_config, read_config
from paged_jax.models.weights.gguf import GGUFError, GGUFFile, open_gguf
from paged_jax.models.weights.parameters import load_parameters
from paged_jax.models.weights.shapes import parameter_shapes

V, D, F, N, K, H, E = 11, 6, 10, 4, 2, 8, 3  # sizes of vocabulary, width, MLP, heads, kv heads, head, experts
FIELDS = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
}
ATTENTION = {"q_proj.weight": (N * H, D), "k_proj.weight": (K * H, D), "v_proj.weight": (K * H, D)}
OUT = {"o_proj.weight": (D, N * H)}
BIASES = {"q_proj.bias": (N * H,), "k_proj.bias": (K * H,), "v_proj.bias": (K * H,)}
MLP = {"gate_proj.weight": (F, D), "up_proj.weight": (F, D), "down_proj.weight": (D, F)}
NORMS = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
EXPERTS = {
    "router.weight": (E, D),
    "router.bias": (E,),
    "experts.gate_up_proj": (E, D, 2 * F),
    "experts.gate_up_proj_bias": (E, 2 * F),
    "experts.down_proj": (E, F, D),
    "experts.down_proj_bias": (E, D),
}
# Family → what its attention, its MLP and its layer hold.
LAYERS = {
    "llama": (ATTENTION | OUT, MLP, NORMS),
    "qwen2": (ATTENTION | BIASES | OUT, MLP, NORMS),
    "gemma": (ATTENTION | OUT, MLP, NORMS),
    "phi3": (
        {"qkv_proj.weight": ((N + 2 * K) * H, D)} | OUT,
        {"gate_up_proj.weight": (2 * F, D), "down_proj.weight": (D, F)},
        NORMS,
    ),
    "gpt_oss": (ATTENTION | BIASES | OUT | {"o_proj.bias": (D,), "sinks": (N,)}, EXPERTS, NORMS),
}


def tensors_of(family: str) -> dict[str, np.ndarray]:
    attention, mlp, norms = LAYERS[family]
    layer = {f"self_attn.{name}": shape for name, shape in attention.items()}
    layer |= {f"mlp.{name}": shape for name, shape in mlp.items()} | norms
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    if family != "gemma":
        shapes["lm_head.weight"] = (V, D)
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def saved(tensors: dict[str, np.ndarray], folder: Path) -> Checkpoint:
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return open_checkpoint(folder)


def config_of(family: str, **changes: Any) -> ModelConfig:
    return model_config({"model_type": family, **FIELDS, **changes})


def loaded(family: str, folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What stands in the file, and the parameters."""
    tensors = tensors_of(family)
    config = config_of(family)
    return tensors, assembled(load_parameters(saved(tensors, folder), config, np.float32), config)


def assembled(found: Iterable[tuple[str, tuple[int, ...], jax.Array]], config: ModelConfig) -> dict[str, np.ndarray]:
    """The parameters, of which every value has come once."""
    shapes = parameter_shapes(config)
    got = {path: np.zeros(shape, np.float32) for path, shape in shapes.items()}
    times = {path: np.zeros(shape, int) for path, shape in shapes.items()}
    for path, start, value in found:
        place = tuple(slice(first, first + size) for first, size in zip(start, value.shape, strict=True))
        got[path][place] = value
        times[path][place] += 1
    assert all((count == 1).all() for count in times.values())
    return got


# --- Forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", LAYERS)
def test_every_parameter_is_loaded_once(family: str, tmp_path: Path) -> None:
    tensors, got = loaded(family, tmp_path)
    assert sum(value.size for value in got.values()) == sum(tensor.size for tensor in tensors.values())


def test_matrices_are_those_of_the_file(tmp_path: Path) -> None:
    stored, got = loaded("qwen2", tmp_path)
    layer = "model.layers.1"
    np.testing.assert_array_equal(got["layers.1.attention.out.weight"], stored[f"{layer}.self_attn.o_proj.weight"])
    for ours, name in zip(got["layers.1.mlp.gate_up.weight"], ("gate", "up"), strict=True):
        np.testing.assert_array_equal(ours, stored[f"{layer}.mlp.{name}_proj.weight"])
    np.testing.assert_array_equal(got["layers.1.mlp.down.weight"], stored[f"{layer}.mlp.down_proj.weight"])
    np.testing.assert_array_equal(got["head.weight"], stored["lm_head.weight"])
    np.testing.assert_array_equal(got["embedding.embedding"], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(
        got["layers.0.mlp_norm.scale"], stored["model.layers.0.post_attention_layernorm.weight"]
    )


def assert_in_order(qkv: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """The rows of each kv head: two query heads, the key, the value."""
    rest = qkv.shape[3:]
    rows, (q, k, v) = qkv.reshape(-1, *rest), (x.reshape(-1, H, *rest) for x in (q, k, v))
    expected = [q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]]
    np.testing.assert_array_equal(rows, np.concatenate(expected))


def test_each_kv_head_has_its_query_heads_then_its_key_then_its_value(tmp_path: Path) -> None:
    stored, got = loaded("qwen2", tmp_path)
    for i, kind in itertools.product(range(2), ("weight", "bias")):
        parts = (stored[f"model.layers.{i}.self_attn.{name}_proj.{kind}"] for name in "qkv")
        assert_in_order(got[f"layers.{i}.attention.qkv.{kind}"], *parts)


def test_fused_matrices_are_cut_in_rows(tmp_path: Path) -> None:
    stored, got = loaded("phi3", tmp_path)
    fused = stored["model.layers.0.self_attn.qkv_proj.weight"]
    assert_in_order(got["layers.0.attention.qkv.weight"], fused[:32], fused[32:48], fused[48:])
    gate_up = stored["model.layers.0.mlp.gate_up_proj.weight"]
    np.testing.assert_array_equal(got["layers.0.mlp.gate_up.weight"], [gate_up[:F], gate_up[F:]])


def test_gemmas_norms_are_stored_less_one(tmp_path: Path) -> None:
    stored, got = loaded("gemma", tmp_path)
    np.testing.assert_array_equal(got["norm.scale"], 1 + stored["model.norm.weight"])
    np.testing.assert_array_equal(
        got["layers.1.attention_norm.scale"], 1 + stored["model.layers.1.input_layernorm.weight"]
    )


def test_experts_gates_and_ups_take_turns(tmp_path: Path) -> None:
    stored, got = loaded("gpt_oss", tmp_path)
    for stored_name, ours in (("gate_up_proj", ""), ("gate_up_proj_bias", "_bias")):
        both = stored[f"model.layers.0.mlp.experts.{stored_name}"]
        np.testing.assert_array_equal(got[f"layers.0.mlp.experts.gate{ours}"], both[..., ::2])
        np.testing.assert_array_equal(got[f"layers.0.mlp.experts.up{ours}"], both[..., 1::2])
    np.testing.assert_array_equal(got["layers.0.mlp.experts.down"], stored["model.layers.0.mlp.experts.down_proj"])
    np.testing.assert_array_equal(got["layers.0.attention.sinks"], stored["model.layers.0.self_attn.sinks"])


@pytest.mark.parametrize("begin", ["model.language_model.", "language_model.model.", ""])
def test_the_text_part_of_another_models_files(begin: str, tmp_path: Path) -> None:
    tensors = {begin + name.removeprefix("model."): tensor for name, tensor in tensors_of("gemma").items()}
    tensors["vision_tower.patches.weight"] = np.ones((2, 2), np.float32)
    assembled(load_parameters(saved(tensors, tmp_path), config_of("gemma"), np.float32), config_of("gemma"))


def test_tensors_that_say_nothing_new_are_passed_over(tmp_path: Path) -> None:
    tensors = tensors_of("llama") | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    tied = config_of("llama", tie_word_embeddings=True)
    assembled(load_parameters(saved(tensors, tmp_path), tied, np.float32), tied)


# --- GGUF -------------------------------------------------------------------------------------------------------------

GGUF_LAYER = {
    "attn_norm.weight": (D,),
    "attn_q.weight": (N * H, D),
    "attn_k.weight": (K * H, D),
    "attn_v.weight": (K * H, D),
    "attn_output.weight": (D, N * H),
    "ffn_norm.weight": (D,),
    "ffn_gate.weight": (F, D),
    "ffn_up.weight": (F, D),
    "ffn_down.weight": (D, F),
}
GGUF_BIASES = {"attn_q.bias": (N * H,), "attn_k.bias": (K * H,), "attn_v.bias": (K * H,)}
GGUF_GEMMA3 = {
    "attn_q_norm.weight": (H,),
    "attn_k_norm.weight": (H,),
    "post_attention_norm.weight": (D,),
    "post_ffw_norm.weight": (D,),
}


def loaded_gguf(layer: dict[str, tuple[int, ...]], config: ModelConfig, folder: Path) -> tuple[Any, Any]:
    """What stands in the file, and the parameters."""
    shapes = {"token_embd.weight": (V, D), "output_norm.weight": (D,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    stored = {name: rng.standard_normal(shape).astype("<f4") for name, shape in shapes.items()}
    content = [(name, tensor.shape, "F32", tensor.tobytes()) for name, tensor in stored.items()]
    content.append(("rope_freqs.weight", (4,), "F32", bytes(16)))
    (folder / "model.gguf").write_bytes(gguf_bytes({}, content))
    return stored, assembled(load_parameters(open_gguf(folder / "model.gguf"), config, np.float32), config)


def test_a_gguf_llama_rotates_neighbours_and_ours_rotates_halves(tmp_path: Path) -> None:
    config = config_of("qwen2", tie_word_embeddings=True)  # for its biases
    stored, got = loaded_gguf(GGUF_LAYER | GGUF_BIASES, dataclasses.replace(config, family="llama"), tmp_path)
    qkv, qkv_bias = (got[f"layers.1.attention.qkv.{kind}"] for kind in ("weight", "bias"))
    for name, heads, ours in (("q", N, slice(0, 2)), ("k", K, slice(2, 3))):
        matrix = stored[f"blk.1.attn_{name}.weight"].reshape(heads, H, D)
        bias = stored[f"blk.1.attn_{name}.bias"].reshape(heads, H)
        our_matrix, our_bias = qkv[:, ours].reshape(heads, H, D), qkv_bias[:, ours].reshape(heads, H)
        for i in range(H // 2):
            for place, stored_place in ((i, 2 * i), (i + H // 2, 2 * i + 1)):
                np.testing.assert_array_equal(our_matrix[:, place], matrix[:, stored_place])
                np.testing.assert_array_equal(our_bias[:, place], bias[:, stored_place])
    np.testing.assert_array_equal(qkv[:, 3].reshape(K * H, D), stored["blk.1.attn_v.weight"])
    np.testing.assert_array_equal(got["layers.1.mlp.down.weight"], stored["blk.1.ffn_down.weight"])


def test_a_gguf_gemma_3_is_stored_as_it_is_used(tmp_path: Path) -> None:
    stored, got = loaded_gguf(GGUF_LAYER | GGUF_GEMMA3, config_of("gemma3_text"), tmp_path)
    assert_in_order(got["layers.1.attention.qkv.weight"], *(stored[f"blk.1.attn_{name}.weight"] for name in "qkv"))
    for name, ours in (
        ("attn_norm", "attention_norm"),
        ("post_attention_norm", "attention_post_norm"),
        ("ffn_norm", "mlp_norm"),
        ("post_ffw_norm", "mlp_post_norm"),
        ("attn_q_norm", "attention.query_ln"),
        ("attn_k_norm", "attention.key_ln"),
    ):
        np.testing.assert_array_equal(got[f"layers.0.{ours}.scale"], stored[f"blk.0.{name}.weight"])
    np.testing.assert_array_equal(got["norm.scale"], stored["output_norm.weight"])


@pytest.mark.download
def test_every_tensor_of_smollm2_is_loaded(smollm2_path: Path) -> None:
    file = open_gguf(smollm2_path)
    found = load_parameters(file, gguf_config(file), jax.numpy.bfloat16)
    sizes = {(path, start): value.size for path, start, value in found}
    assert len(sizes) == len(file.tensors) == 272
    assert sum(sizes.values()) == 134_515_008


# --- dtype, device, progress, memory ----------------------------------------------------------------------------------


def test_values_have_the_dtype_asked_for_and_scales_keep_their_digits(tmp_path: Path) -> None:
    tensors = tensors_of("gemma")
    found = load_parameters(saved(tensors, tmp_path), config_of("gemma"), jax.numpy.bfloat16)
    got = {path: value for path, _, value in found}
    assert {path for path, value in got.items() if value.dtype != jax.numpy.bfloat16} == {
        path for path in got if path.endswith(".scale")
    }
    np.testing.assert_array_equal(
        np.asarray(got["embedding.embedding"]), tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    )
    np.testing.assert_array_equal(got["norm.scale"], 1 + tensors["model.norm.weight"])


def test_values_are_put_on_the_device_asked_for_and_progress_is_told(tmp_path: Path) -> None:
    seen = []

    def track(names: list[str]) -> Iterator[str]:
        for done, name in enumerate(names, 1):
            yield name
            seen.append((done, len(names), name))

    device = jax.devices()[-1]
    tensors = tensors_of("phi3")
    found = load_parameters(saved(tensors, tmp_path), config_of("phi3"), np.float32, device=device, track=track)
    assert not seen
    assert all(value.devices() == {device} for *_, value in found)
    assert seen[0] == (1, len(tensors), "model.embed_tokens.weight")
    assert sorted(name for _, _, name in seen) == sorted(tensors)
    assert seen[-1][:2] == (len(tensors), len(tensors))


LARGE = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 256}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_one_tensor_at_a_time_is_on_the_host(dtype: Any, tmp_path: Path) -> None:
    config = config_of("phi3", **LARGE, tie_word_embeddings=True)
    tensors = {"model.embed_tokens.weight": (4096, 1024), "model.norm.weight": (1024,)}
    for i in range(2):
        tensors |= {
            f"model.layers.{i}.self_attn.qkv_proj.weight": (2048, 1024),
            f"model.layers.{i}.self_attn.o_proj.weight": (1024, 1024),
            f"model.layers.{i}.mlp.gate_up_proj.weight": (2048, 1024),
            f"model.layers.{i}.mlp.down_proj.weight": (1024, 1024),
            f"model.layers.{i}.input_layernorm.weight": (1024,),
            f"model.layers.{i}.post_attention_layernorm.weight": (1024,),
        }
    checkpoint = saved({name: np.ones(shape, np.float32) for name, shape in tensors.items()}, tmp_path)
    assert_one_at_a_time(checkpoint, config, dtype, 4096 * 1024)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_one_dequantised_tensor_at_a_time_is_on_the_host(dtype: Any, tmp_path: Path) -> None:
    shapes = {"token_embd": (4096, 1024), "blk.0.attn_q": (1024, 1024), "blk.0.attn_k": (512, 1024)}
    shapes |= {"blk.0.attn_v": (512, 1024), "blk.0.attn_output": (1024, 1024)}
    shapes |= {"blk.0.ffn_gate": (1024, 1024), "blk.0.ffn_up": (1024, 1024), "blk.0.ffn_down": (1024, 1024)}
    tensors: list[Any] = [
        (f"{name}.weight", shape, "Q4_K", random_blocks("Q4_K", math.prod(shape) // 256))
        for name, shape in shapes.items()
    ]
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    tensors += [(f"{name}.weight", (1024,), "F32", bytes(4096)) for name in norms]
    (tmp_path / "model.gguf").write_bytes(gguf_bytes({}, tensors))
    rope = RopeConfig()
    config = ModelConfig(
        family="llama",
        vocab_size=4096,
        num_layers=1,
        width=1024,
        max_length=64,
        attention=AttentionConfig(4, 2, 256, 1 / 16),
        mlp=MLPConfig(1024, "silu"),
        norm=NormConfig(1e-5),
        rope=rope,
        window_rope=rope,
        windows=(None,),
        tied_embeddings=True,
    )
    assert_one_at_a_time(open_gguf(tmp_path / "model.gguf"), config, dtype, 4096 * 1024)


def assert_one_at_a_time(source: Checkpoint | GGUFFile, config: ModelConfig, dtype: Any, largest: int) -> None:
    total = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    assert total > 2.2 * largest
    tracemalloc.start()
    try:
        for *_, value in load_parameters(source, config, dtype):
            del value  # on a CPU it may be the host's array
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < largest * np.dtype(dtype).itemsize + (3 << 20)  # the largest, and a piece in the making


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"expected a tensor 'model\.layers\.1\.mlp\.up_proj\.weight', got none$"):
        load_parameters(saved(tensors, tmp_path), config_of("llama"), np.float32)


def test_a_renamed_tensor_is_named_with_its_new_name(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    tensors["final.weight"] = tensors.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight', got none, which has 'final\.weight'"):
        load_parameters(saved(tensors, tmp_path), config_of("llama"), np.float32)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "lora"])
def test_a_tensor_too_many_is_named(name: str, tmp_path: Path) -> None:
    tensors = tensors_of("llama") | {name: np.ones(1, np.float32)}
    with pytest.raises(CheckpointError, match=f"expected the tensors of a llama model, got '{name}' too"):
        load_parameters(saved(tensors, tmp_path), config_of("llama"), np.float32)


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("llama", "model.embed_tokens.weight", (V, D)),
        ("llama", "model.layers.1.self_attn.o_proj.weight", (D, N * H)),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias", (K * H,)),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", ((N + 2 * K) * H, D)),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj", (E, D, 2 * F)),
    ],
)
def test_a_shape_that_disagrees_with_the_config(
    family: str, name: str, expected: tuple[int, ...], tmp_path: Path
) -> None:
    wrong = (*expected[:-1], expected[-1] + 1)
    tensors = tensors_of(family) | {name: np.ones(wrong, np.float32)}
    with pytest.raises(CheckpointError) as caught:
        load_parameters(saved(tensors, tmp_path), config_of(family), np.float32)
    assert str(caught.value) == f"{tmp_path}: tensor {name!r}: expected shape {expected}, got {wrong}"


def test_a_quantised_tensor_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    tensors = tensors_of("llama") | {"model.norm.weight": np.ones(D, np.int8)}
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight': expected one of the types .*, got I8"):
        load_parameters(saved(tensors, tmp_path), config_of("llama"), np.float32)


def test_a_gguf_tensor_of_another_type_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    config = config_of("llama", num_hidden_layers=1, tie_word_embeddings=True, hidden_size=256)
    shapes = {name: tuple(256 if size == D else size for size in shape) for name, shape in GGUF_LAYER.items()}
    content: list[Any] = [
        (f"blk.0.{name}", shape, "F32", bytes(4 * math.prod(shape))) for name, shape in shapes.items()
    ]
    content += [("token_embd.weight", (V, 256), "F32", bytes(1024 * V)), ("output_norm.weight", (256,), 16, bytes(66))]
    (tmp_path / "model.gguf").write_bytes(gguf_bytes({}, content))
    with pytest.raises(GGUFError, match=r"tensor 'output_norm\.weight': expected one of the types .*, got IQ2_XXS"):
        load_parameters(open_gguf(tmp_path / "model.gguf"), config, np.float32)


# --- Against transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("name", TINY)
def test_every_tensor_that_transformers_writes_is_mapped_once(name: str, tmp_path: Path) -> None:
    """In shards, as bfloat16; the values, in any order, are those of the model, which no two share."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model_type, fields = TINY[name]
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **fields))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.normal_()
    theirs.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="50KB")
    config, checkpoint = read_config(tmp_path), open_checkpoint(tmp_path)
    assert len({stored.file for stored in checkpoint.tensors.values()}) > 1
    read: list[str] = []
    found = load_parameters(checkpoint, config, np.float32, track=lambda names: read.extend(names) or names)
    got = assembled(found, config)
    assert sorted(read) == sorted(checkpoint.tensors)
    if config.family.startswith("gemma"):
        got = {path: value - 1 if path.endswith(".scale") else value for path, value in got.items()}
    ours = np.concatenate([value.ravel() for value in got.values()])
    expected = np.concatenate([weight.detach().float().numpy().ravel() for weight in theirs.parameters()])
    np.testing.assert_allclose(np.sort(ours), np.sort(expected), atol=2e-7)
