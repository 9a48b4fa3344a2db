"""Files → decoder: the structure that the shapes promise, the dtype asked for, and the memory it takes."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from forwards import load_forward
from jax import lax
from safetensors.numpy import save_file
from tiny_checkpoints import TINY
from tiny_llama import TinyLlama, tiny_llama

from paged_jax import BlockTable, PagedCache, decode
from paged_jax.models import load
from paged_jax.models import loaded as loaded_module
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder
from paged_jax.models.pretrained import open_pretrained
from paged_jax.models.weights.checkpoint import open_checkpoint
from paged_jax.models.weights.config_gguf import gguf_config
from paged_jax.models.weights.config_json import model_config
from paged_jax.models.weights.gguf import GGUFFile, open_gguf
from paged_jax.models.weights.parameters import load_parameters
from paged_jax.models.weights.shapes import parameter_parts, parameter_shapes
from paged_jax.sampling import Sampler


def values_of(model: Decoder) -> dict[str, jax.Array]:
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}


def config_of(name: str) -> ModelConfig:
    model_type, fields = TINY[name]
    return model_config({"model_type": model_type, **fields})


@pytest.mark.parametrize("name", TINY)
def test_a_model_has_the_parameters_that_its_config_promises(name: str) -> None:
    config = config_of(name)
    model = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    values = values_of(model)
    assert {path: value.shape for path, value in values.items()} == parameter_shapes(config)
    for path, value in values.items():
        assert value.dtype == (jnp.float32 if path.endswith(".scale") else jnp.bfloat16), path


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_stacked_layers_have_the_same_parameters_with_an_axis_before(name: str) -> None:
    config = config_of(name)
    model = nnx.eval_shape(lambda: Decoder(config, scan_layers=True, rngs=nnx.Rngs(0)))
    expected = {}
    for path, shape in parameter_shapes(config).items():
        if path.startswith("layers."):
            path, shape = f"layers.{path.split('.', 2)[2]}", (config.num_layers, *shape)
        expected[path] = shape
    assert {path: value.shape for path, value in values_of(model).items()} == expected


def test_a_new_model_is_random_in_every_layer_and_matrix() -> None:
    config = dataclasses.replace(config_of("llama2"), num_layers=2, windows=(None, None))
    for scan_layers in (False, True):
        values = values_of(Decoder(config, scan_layers=scan_layers, rngs=nnx.Rngs(0)))
        matrices = [value for path, value in values.items() if path.endswith("gate_up.weight")]
        layers = matrices[0] if scan_layers else jnp.stack(matrices)
        assert layers.shape == (2, 2, 96, 64)
        assert len(np.unique(layers)) > 0.9 * layers.size


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return open_gguf(tiny_llama().save(tmp_path_factory.mktemp("load") / "tiny.gguf"))


@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_value_is_the_files(file: GGUFFile, dtype: Any, scan_layers: bool) -> None:
    config = gguf_config(file)
    (got,) = load_forward(file, config, dtype, scan_layers=scan_layers).args
    for path, start, value in load_parameters(file, config, dtype):
        if scan_layers and path.startswith("layers."):
            _, layer, rest = path.split(".", 2)
            mine = got[f"layers.{rest}"][int(layer)]
        else:
            mine = got[path]
        assert mine.dtype == value.dtype
        np.testing.assert_array_equal(lax.dynamic_slice(mine, start, value.shape), value)


def test_progress_is_told_of_every_tensor(file: GGUFFile) -> None:
    seen: list[str] = []

    def track(names: list[str]) -> Iterator[str]:
        for name in names:
            seen.append(name)
            yield name

    load_forward(file, gguf_config(file), track=track)
    assert sorted(seen) == sorted(tiny_llama().weights)


# --- Memory -----------------------------------------------------------------------------------------------------------

LARGE = {
    "model_type": "llama",
    "vocab_size": 16_384,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}

# Prints the peak of resident memory while the model was loaded, less what was resident before, over its parameters.
# It was loaded once before, because compiled code stays, and is a tenth of so small a model.
MEASURE = """
import gc, json, sys
from pathlib import Path
import jax, jax.numpy as jnp, psutil
from paged_jax import sharding
from paged_jax.models.loaded import load_weights
from paged_jax.models.mesh import Split
from paged_jax.models.network import Network
from paged_jax.models.weights.checkpoint import open_checkpoint
from paged_jax.models.weights.config_json import read_config

folder = Path(sys.argv[1])
config, source = read_config(folder), open_checkpoint(folder)

def load(how, dtype):
    if how == "all at once":
        hold = [source.tensor(name) for name in source.tensors]
        return [jnp.array(tensor) for tensor in hold]
    split = Split(sharding.make_mesh(heads=2), heads="heads") if "mesh" in how else None
    return load_weights(source, Network(config, "scan" in how, split), jnp.dtype(dtype))

for how, dtype in json.loads(sys.argv[2]):
    load(how, dtype)
    gc.collect()
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    model = jax.block_until_ready(load(how, dtype))
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    print((peak - before) / sum(leaf.nbytes for leaf in jax.tree.leaves(model)))
    del model
"""


HEADS = {"query": "q", "key": "k", "value": "v", "out": "o"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 84 M parameters, in two shards of bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    config = model_config(LARGE)
    rng = np.random.default_rng(0)
    piece = rng.standard_normal((1024, 1024)).astype(ml_dtypes.bfloat16)
    names = {"embedding.embedding": "model.embed_tokens.weight", "norm.scale": "model.norm.weight"}
    for i in range(4):
        layer = {f"attention.{ours}": f"self_attn.{name}_proj" for ours, name in HEADS.items()}
        layer |= {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
        names |= {f"layers.{i}.{ours}.weight": f"model.layers.{i}.{name}.weight" for ours, name in layer.items()}
        for ours, name in (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            names[f"layers.{i}.{ours}.scale"] = f"model.layers.{i}.{name}.weight"
    parts = parameter_parts(config)
    tensors = {names[name]: np.resize(piece, part.stored_shape) for name, part in parts.items()}
    weight_map = {}
    for shard in range(2):
        name = f"model-{shard + 1:05}-of-00002.safetensors"
        part = dict(list(tensors.items())[shard::2])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(LARGE))
    return folder


def peaks(large: Path, ways: Sequence[tuple[str, str]]) -> list[float]:
    command = [sys.executable, "-c", MEASURE, str(large), json.dumps(ways)]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    # What is freed goes back to the system at once, rather than be used again unseen or kept for a while.
    environment = os.environ | {"XLA_FLAGS": flags, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [float(peak) for peak in done.stdout.split()]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the parameters lie elsewhere than on the host")
@pytest.mark.parametrize(
    "ways",
    [
        pytest.param([("unrolled", "bfloat16"), ("mesh, scan", "float32")], marks=pytest.mark.full),
        pytest.param([("unrolled", "float32"), ("scan", "float32")], marks=pytest.mark.full),
    ],
    ids=["bfloat16, and a mesh", "float32, and a scan"],
)
def test_the_peak_of_memory_is_at_most_a_fifth_more_than_the_parameters(
    large: Path, ways: list[tuple[str, str]]
) -> None:
    *found, held_twice = peaks(large, [*ways, ("all at once", "float32")])
    assert 1.9 < held_twice < 2.1  # the measure shows what is held twice
    for way, peak in zip(ways, found, strict=True):
        assert 0.9 < peak <= 1.2, (way, peak)


def test_the_structure_is_traced_and_not_initialised(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No random numbers are drawn: nothing is run but what puts the values in place."""
    drawn: list[Any] = []
    original = jax.random.truncated_normal
    monkeypatch.setattr(jax.random, "truncated_normal", lambda *a, **o: drawn.append(original(*a, **o)) or drawn[-1])
    load_forward(open_checkpoint(large), model_config(LARGE))
    assert all(isinstance(values, jax.core.Tracer) for values in drawn)


# --- The one door


def test_a_loaded_model_decodes_in_a_compiled_loop(model: Path, tiny: TinyLlama) -> None:
    loaded = load(model)
    assert loaded.forward.args == (loaded.weights,)
    assert not loaded.forward.keywords
    attention = loaded.config.attention
    sizes = (loaded.config.num_layers, 8, 4, attention.num_kv_heads, attention.head_dim, jnp.float32)
    table, active = BlockTable.create(8, 4, 1, 8), jnp.array([True])
    with jax.default_matmul_precision("highest"):
        result = decode(loaded.forward, PagedCache.create(*sizes), table, jnp.array([7]), active, max_new_tokens=9)
    assert result.check().tokens[0].tolist() == tiny.greedy([7], 9)


def test_dense_logits_are_the_models_and_can_be_differentiated(model: Path, tiny: TinyLlama) -> None:
    loaded, tokens = load(model, dtype="float32"), np.array([[5, 200, 31, 7], [9, 9, 260, 1]])
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(loaded.dense)(loaded.weights, tokens)
        gradient = jax.jit(jax.grad(lambda weights: loaded.dense(weights, tokens)[..., 3].sum()))(loaded.weights)
        nudge = 1e-2 * jax.random.normal(jax.random.key(0), loaded.weights["layers.0.mlp.down.weight"].shape)
        nudged = {**loaded.weights, "layers.0.mlp.down.weight": loaded.weights["layers.0.mlp.down.weight"] + nudge}
        change = (jax.jit(loaded.dense)(nudged, tokens) - logits)[..., 3].sum()
    for row, of_row in zip(tokens, logits, strict=True):
        np.testing.assert_allclose(of_row, tiny.logits(row), atol=1e-4)
    assert gradient.keys() == loaded.weights.keys()
    assert all(np.abs(value).max() > 0 for value in gradient.values())
    np.testing.assert_allclose((gradient["layers.0.mlp.down.weight"] * nudge).sum(), change, rtol=0.1)


def test_a_loaded_model_has_what_its_files_say(model: Path, tiny: TinyLlama) -> None:
    loaded = load(model)
    assert loaded.config.num_layers == tiny.num_layers
    assert loaded.end_tokens == (0, 2)
    assert loaded.sampling is None
    assert loaded.text.decode(loaded.text.encode("hello world", is_raw=True)) == "hello world"
    assert {weight.dtype.name for weight in loaded.weights.values()} == {"float32"}
    assert {name for name, weight in load(model, dtype="bfloat16").weights.items() if weight.dtype == jnp.float32} == {
        name for name in loaded.weights if name.endswith(".scale")
    }


def test_two_loads_of_a_model_are_one_program(model: Path) -> None:
    """Equal networks: a second load compiles nothing anew, and the options that change programs show."""
    one, other = (jax.tree.structure(load(model, scan_layers=scan).forward) for scan in (False, False))
    assert one == other
    assert hash(one) == hash(other)
    assert one != jax.tree.structure(load(model, scan_layers=True).forward)


def test_the_default_model_is_fetched(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_module, "fetch_smollm2", lambda: model)
    assert load().config == load(model).config


def test_what_a_models_files_ask_for_in_vain_is_warned_of(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = dataclasses.replace(open_pretrained(model), notes=("one [thing]", "another"))
    monkeypatch.setattr(loaded_module, "open_pretrained", lambda _: opened)
    with pytest.warns(UserWarning, match="one|another") as said:
        load(model)
    assert [(str(warning.message), warning.filename) for warning in said] == [
        ("one [thing]", __file__),
        ("another", __file__),
    ]


def test_what_a_gguf_file_says_of_sampling_and_asks_in_vain(tiny: TinyLlama, tmp_path: Path) -> None:
    keys = {"temp": 0.5, "top_k": 20, "min_p": 0.25}
    opened = open_pretrained(
        tiny.save(tmp_path / "said.gguf", metadata={f"general.sampling.{key}": item for key, item in keys.items()})
    )
    assert opened.sampler == Sampler(0.5, 20)
    assert opened.notes == (f"{tmp_path / 'said.gguf'}: without effect here: general.sampling.min_p = 0.25",)
    opened = open_pretrained(tiny.save(tmp_path / "greedy.gguf", metadata={"general.sampling.temp": 0.0}))
    assert (opened.sampler, opened.notes) == (None, ())


def no_config(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def no_such_file(folder: Path) -> Path:
    return folder / "missing"


def a_text(folder: Path) -> Path:
    (folder / "notes.txt").write_text("no model")
    return folder / "notes.txt"


@pytest.mark.parametrize(
    ("make", "problem", "message"),
    [
        (no_such_file, OSError, "missing"),
        (no_config, OSError, r"empty.config\.json"),
        (a_text, ValueError, r"notes\.txt: expected .*GGUF.* got"),
    ],
)
def test_a_path_that_is_no_model_is_named(make: Any, problem: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(problem, match=message):
        load(make(tmp_path))


def test_a_truncated_shard_is_named(large: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(large, tmp_path / "cut", symlinks=True))
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:100_000])
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors: expected a whole .* got .* 100000 bytes"):
        load(folder)


def test_a_model_without_a_tokenizer_generates_and_refuses_text(tiny: TinyLlama, tmp_path: Path) -> None:
    without = {key: None for key in tiny.metadata if key.startswith("tokenizer.")}
    loaded = load(tiny.save(tmp_path / "bare.gguf", metadata=without))
    assert loaded.forward.args
    with pytest.raises(ValueError, match=r"bare\.gguf: .*describes no tokenizer"):
        _ = loaded.text


def test_a_model_without_a_template_refuses_a_chat(tiny: TinyLlama, tmp_path: Path) -> None:
    loaded = load(tiny.save(tmp_path / "base.gguf", metadata={"tokenizer.chat_template": None}))
    with pytest.raises(ValueError, match=r"expected a chat model, .* got a model without a template"):
        loaded.text.encode("hello", is_raw=False)


def test_places_that_contradict_each_other_are_refused(model: Path) -> None:
    mesh = jax.make_mesh((1,), ("x",))
    with pytest.raises(ValueError, match="mesh: expected a mesh with axes 'x' and None, got None"):
        load(model, heads="x")
    with pytest.raises(ValueError, match="device: expected None beside a mesh"):
        load(model, mesh=mesh, device=jax.devices()[0])
    with pytest.raises(ValueError, match=r"mesh: expected an axis 'y', got axes \('x',\)"):
        load(model, mesh=mesh, heads="y")
