"""The README keeps its word: its code runs, its commands are those of CI, its tables are the measured results."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "code", re.findall(r"```python\n(.*?)```", README, re.DOTALL), ids=["loop", "sharing", "nnx", "linen", "mesh"]
)
def test_code_runs_as_printed(code, capsys):
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out.strip()
    assert f"# {printed}" in code
    if "text" in names:  # what a model says: not one token for ever
        assert len(set(names["text"].ravel().tolist())) > 3


@pytest.mark.parametrize("name", ["README.md", "pallas_kernels/README.md"])
def test_the_tables_are_made_from_the_results(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from examples.benchmarks.readme import with_tables

    text = (ROOT / name).read_text(encoding="utf-8")
    assert with_tables(name, text) == text, "run examples/benchmarks/readme.py"


def test_ci_runs_the_readme_test_command():
    (command,) = re.findall(r"&& (python -m pytest.*)\n", README)
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:paged_jax|pallas_kernels|examples)/[\w./]*)`", README))))
def test_every_path_named_exists(path):
    assert (ROOT / path).exists()


def test_python_version_promised_is_the_one_required():
    assert "Python 3.11 or newer" in README
    assert sys.version_info >= (3, 11)
