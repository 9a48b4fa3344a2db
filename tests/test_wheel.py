"""What people install: the wheel holds all that the command needs, says which extra is missing, and runs elsewhere."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from tiny_llama import tiny_llama

ROOT = Path(__file__).parents[1]
PROMPT = [5, 200, 31, 7]

# Runs a module with the repository off the path, where an editable install puts it.
ELSEWHERE = f"""
import runpy, sys
sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]
for name in sys.argv[1].split(",") if sys.argv[1] else []:
    sys.modules[name] = None  # not installed
sys.argv[:2] = ["paged_jax"]
runpy.run_module("paged_jax", run_name="__main__")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built by the project's own backend, in this environment."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_elsewhere(unpacked: Path, tmp_path: Path, *arguments, without: str = "") -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(unpacked), "PAGED_JAX_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", ELSEWHERE, without, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_the_wheel_has_what_is_not_python_too(unpacked):
    names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    for name in ("paged_jax/py.typed", "pallas_kernels/py.typed", "pallas_kernels/paged_decode/tuned/nvidia_h200.json"):
        assert name in names
    assert not [name for name in names if name.split("/")[0] in ("tests", "examples")]
    (scripts,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert "paged-jax = paged_jax.cli:main" in scripts.read_text()


def test_the_wheel_answers(unpacked, tmp_path):
    path = tiny_llama().save(tmp_path / "tiny.gguf")
    ids = ",".join(map(str, PROMPT))
    done = run_elsewhere(unpacked, tmp_path, "generate", "--model", path, "--token-ids", ids, "--max-tokens", 6)
    assert (done.returncode, done.stdout) == (0, ",".join(map(str, tiny_llama().greedy(PROMPT, 6))) + "\n"), done.stderr


def test_without_the_extra_the_command_says_which_one(unpacked, tmp_path):
    done = run_elsewhere(unpacked, tmp_path, "generate", "hello", without="flax,tokenizers")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "paged-jax generate: error: paged_jax.models: expected flax, tokenizers, got none: "
        'pip install "paged-jax[models]"\n'
    )


def test_the_version_needs_no_extra(wheel, unpacked, tmp_path):
    done = run_elsewhere(unpacked, tmp_path, "--version", without="flax,jinja2,psutil,rich,safetensors,tokenizers")
    assert (done.returncode, done.stdout) == (0, f"paged-jax {wheel.name.split('-')[1]}\n"), done.stderr


@pytest.mark.download
def test_the_wheel_installs_with_its_extra_and_runs_a_real_model(wheel, tmp_path):
    """As a user does: a new environment, one wheel, the console script."""
    venv.create(tmp_path / "new", with_pip=True)
    programs = tmp_path / "new" / ("Scripts" if os.name == "nt" else "bin")
    subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", f"{wheel}[models]"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [programs / "paged-jax", "generate", "--max-tokens", "32", "What is gravity? Answer in one sentence."]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Gravity is" in done.stdout
