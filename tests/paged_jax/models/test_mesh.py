"""The decoder on a mesh of forced CPU devices: the tokens of one device, and nothing that nobody asked for."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from mesh_runs import BIASED, CHECKS, CONFIG, DEVICES, EXPERTS, FULL
from tiny_llama import tiny_llama

from paged_jax.cli import pool
from paged_jax.cli.arguments import parse_arguments
from paged_jax.models.config import ModelConfig
from paged_jax.models.mesh import Split, parameter_specs
from paged_jax.models.weights.config_json import model_config
from paged_jax.models.weights.shapes import parameter_shapes

TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """What each check of `mesh_runs` of a kind, "default" or "full", has to say: nothing, if all is well."""
    return functools.cache(functools.partial(run_checks, tmp_path_factory))


def run_checks(tmp_path_factory: pytest.TempPathFactory, kind: str) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("mesh")
    path = tiny_llama().save(folder / "tiny.gguf")
    folders = [TESTS.parent, TESTS / "support"]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    flags += " --xla_backend_optimization_level=0"  # most of the time goes into compiling programs that run once
    environment = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    environment["PAGED_JAX_CACHE"] = str(folder)
    command = [sys.executable, "-W", "error", str(TESTS / "support" / "mesh_runs.py"), str(path), kind]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.full  # forty seconds of compiling, and CI's share has it
@pytest.mark.parametrize("name", [name for name in CHECKS if name not in FULL])
def test_on_eight_devices(name: str, said: Callable[[str], dict[str, str]]) -> None:
    assert said("default")[name] == ""


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(FULL))
def test_other_meshes_on_eight_devices(name: str, said: Callable[[str], dict[str, str]]) -> None:
    assert said("full")[name] == ""


def heads(devices: int) -> Split:
    return Split(AbstractMesh((devices,), ("tp",)), heads="tp")


@pytest.mark.parametrize("changes", [{}, BIASED, EXPERTS], ids=["dense", "biases", "experts"])
def test_every_matrix_is_split_and_the_axes_divide(changes: dict[str, Any]) -> None:
    config = model_config(CONFIG | changes)
    shapes, specs = parameter_shapes(config), parameter_specs(config, heads(8))
    assert specs.keys() == shapes.keys()
    for path, shape in shapes.items():
        split = [axis for axis, name in enumerate(specs[path]) if name == "tp"]
        is_whole = path.endswith((".scale", "out.bias", "down.bias", "down_bias")) or "router" in path
        assert len(split) == (0 if is_whole else 1), path
        assert all(shape[axis] % 8 == 0 for axis in split), path


def test_without_an_axis_for_heads_the_model_is_whole() -> None:
    mesh = AbstractMesh((2,), ("dp",))
    assert set(parameter_specs(model_config(CONFIG), Split(mesh, rows="dp")).values()) == {PartitionSpec()}


def test_free_memory_is_that_of_all_devices_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices get equal shares, so the fullest one decides."""
    stats = [{"bytes_limit": 100, "bytes_in_use": used} for used in (10, 30, 0)]
    devices = [types.SimpleNamespace(memory_stats=lambda of_device=of_device: of_device) for of_device in stats]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert [pool.free_bytes(count) for count in (1, 2, 3)] == [90, 140, 210]


# --- Mistakes


def test_a_mesh_without_the_axis_is_named() -> None:
    mesh = AbstractMesh((2,), ("x",))
    for names in ({"heads": "tp"}, {"rows": "tp"}):
        with pytest.raises(ValueError, match=r"mesh: expected an axis 'tp', got axes \('x',\)"):
            Split(mesh, **names)


def test_fewer_kv_heads_than_devices_are_refused_with_what_would_do() -> None:
    with pytest.raises(ValueError, match=r"'tp'.*divisor of the model's 8 kv heads, got 16.*over 8 and rows over 2"):
        parameter_specs(model_config(CONFIG), heads(16))
    with pytest.raises(ValueError, match=r"divisor of the model's 8 kv heads, got 3 .*over 1 and rows over 3"):
        parameter_specs(model_config(CONFIG), heads(3))


def test_an_mlp_that_does_not_divide_is_refused() -> None:
    config: ModelConfig = model_config(CONFIG)
    config = dataclasses.replace(config, mlp=dataclasses.replace(config.mlp, width=42))
    with pytest.raises(ValueError, match=r"divisor of the model's 42 MLP columns, got 4 .*over 2 and rows over 2"):
        parameter_specs(config, heads(4))


@pytest.mark.parametrize("mesh", ["rows=0,heads=2", "heads=0", "heads", "tp=2", "heads=2;rows=1"])
def test_generate_refuses_other_meshes(mesh: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["generate", "a prompt", "--mesh", mesh])
    assert "argument --mesh: expected" in capsys.readouterr().err
