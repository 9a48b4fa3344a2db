"""Fixtures of the tests of the command line: the command, and a cache of compiled programs that is theirs alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from command_line import COUNT, Run, run_command
from jax.experimental.compilation_cache import compilation_cache

from paged_jax.cli import generate


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled programs go to a folder of this run, and JAX's settings are put back."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("PAGED_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture
def run(model: Path, own_cache: None, capsys: pytest.CaptureFixture[str]) -> Run:  # noqa: ARG001
    """Runs the command with the tiny model: (exit status, standard output, standard error)."""

    def run(*arguments: Any, path: Path = model, max_tokens: int | None = COUNT) -> tuple[int, str, str]:
        limit = [] if max_tokens is None else ["--max-tokens", max_tokens]
        return run_command(capsys, "--model", path, *arguments, *limit)

    return run


@pytest.fixture
def nothing_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither weights are read nor a model is fetched."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were read")

    for name in ("load_weights", "fetch_smollm2"):
        monkeypatch.setattr(generate, name, refuse)
