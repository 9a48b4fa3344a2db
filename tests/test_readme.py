"""The Markdown files keep their word: code runs, commands and paths exist, tables are the measured results."""

import re
import sys
from pathlib import Path

import jax
import pytest

import paged_jax
from examples.benchmarks.readme import DOCUMENTS, with_tables
from paged_jax.cli import main

ROOT = Path(__file__).parents[1]
NAMES = (
    "README.md",
    "CHANGELOG.md",
    "examples/README.md",
    "examples/benchmarks/README.md",
    "pallas_kernels/README.md",
)
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
README = TEXTS["README.md"]
NOW = [name for name in NAMES if name != "CHANGELOG.md"]  # which names what is gone, too
FOLDERS = r"(?:paged_jax|pallas_kernels|examples|tests)/"


def blocks() -> dict[str, str]:
    """All Python of all files, by file and heading."""
    found = {}
    for name, text in TEXTS.items():
        heading = ""
        for title, code in re.findall(r"^#+ ([^\n]*)$|^```python\n(.*?)^```", _only_python(text), re.M | re.S):
            heading = title or heading
            if code:
                id = f"{name}: {heading}"
                assert id not in found, "one block for each heading"
                found[id] = code
    return found


def _only_python(text: str) -> str:
    """Without the other blocks, whose comments look like headings."""
    return re.sub(r"^```(?!python\n)\w+\n.*?^```", "", text, flags=re.M | re.S)


BLOCKS = blocks()
OF_MODELS = [id for id, code in BLOCKS.items() if "models.load(" in code]


def run(code: str) -> dict:
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


@pytest.mark.parametrize("id", [id for id in BLOCKS if id not in OF_MODELS])
def test_code_prints_what_it_says(id, capsys):
    names = run(BLOCKS[id])
    assert f"# {capsys.readouterr().out.strip()}" in BLOCKS[id]
    if "text" in names:  # what a model says: not one token for ever
        assert len(set(names["text"].ravel().tolist())) > 3


@pytest.mark.parametrize("id", OF_MODELS)
def test_code_with_a_model_runs_with_a_small_one(id, model, monkeypatch, capsys):
    monkeypatch.setattr("paged_jax.models.loaded.fetch_smollm2", lambda: model)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        run(BLOCKS[id])
    assert capsys.readouterr().out.strip() not in ("", "False")


@pytest.mark.download
@pytest.mark.usefixtures("smollm2_path")
@pytest.mark.parametrize("id", OF_MODELS)
def test_code_with_a_model_prints_what_it_says(id, capsys):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        run(BLOCKS[id])
    assert f"# {capsys.readouterr().out.strip()}" in BLOCKS[id]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_tables_are_made_from_the_results(name):
    assert with_tables(name, TEXTS[name]) == TEXTS[name], "run python -m examples.benchmarks.readme"


def test_every_place_for_a_table_is_filled():
    for name, text in TEXTS.items():
        assert set(re.findall(r"<!-- table: (.*?) -->", text)) == set(DOCUMENTS.get(name, ()))


@pytest.mark.parametrize("name", NOW)
def test_every_path_named_exists(name):
    text = TEXTS[name]
    named = {path.rstrip(".") for path in re.findall(rf"(?<![\w/.]){FOLDERS}[\w./-]*", text)}
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]


@pytest.mark.parametrize("name", NOW)
def test_every_file_named_beside_a_folder_is_there(name):
    """In a line about a folder names are of that folder or stand beside it, elsewhere of the document's folder."""
    for line in re.sub(r"^```.*?^```", "", TEXTS[name], flags=re.M | re.S).splitlines():
        paths = re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.py)`", line)
        folders = [ROOT, (ROOT / name).parent]
        for path in paths:
            found = [folder / path for folder in folders if (folder / path).exists()]
            assert found, f"{name}: {path}"
            folders += [found[0], found[0].parent]


@pytest.mark.parametrize("name", NOW)
def test_every_module_that_a_command_runs_exists(name):
    modules = re.findall(r"python -m ((?:examples|paged_jax)[\w.]*)", TEXTS[name])
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        path, _, anchor = target.partition("#")
        if path.startswith("https:"):
            continue
        file = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", _only_python(file.read_text(encoding="utf-8")), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target


def test_the_first_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 200
    prose = re.sub(r"<!-- table: .*?<!-- end -->", "", README, flags=re.S).splitlines()
    assert not [line for line in prose if len(line) > 120 and not line.startswith("|")]
    assert len(re.findall(r"^!\[", README, re.M)) == 1  # picture
    assert len(re.findall(r"^\| \d+ x ", README, re.M)) == 9  # cases


def test_ci_runs_the_readme_test_command():
    (command,) = re.findall(r"&& (python -m pytest.*)\n", README)
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_option_of_the_command_is_explained(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["generate", "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert len(options) > 15
    (section,) = re.findall(r"^## The command line\n(.*?)^## ", TEXTS["examples/README.md"], re.M | re.S)
    assert options <= set(re.findall(r"--[a-z-]+", section))


def test_python_version_promised_is_the_one_required():
    assert "Python 3.11 or newer" in README
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert sys.version_info >= (3, 11)


def test_every_extra_named_exists():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\[project.optional-dependencies\]\n(.*?)^\[", text, re.M | re.S)
    extras = set(re.findall(r"^([\w-]+) = \[", table, re.M))
    named = ",".join(group for name in NOW for group in re.findall(r'"\.\[(.*?)\]"', TEXTS[name])).split(",")
    assert {"models", "cuda13", "test"} <= set(named) <= extras


def test_the_changes_begin_with_this_version():
    first = re.findall(r"^## (\S+)", TEXTS["CHANGELOG.md"], re.M)[0]
    assert first == paged_jax.__version__
