"""The layout shows the architecture: imports go one way, files stay small and say what they are for."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in ("paged_jax", "pallas_kernels", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
)

# From the ground up: a file imports from floors below its own only, or from its neighbours within one folder.
FLOORS = (
    ("pallas_kernels",),
    ("paged_jax.integers", "paged_jax.table_check", "paged_jax.platform_choice", "paged_jax.sampling"),
    ("paged_jax.text_stream", "paged_jax.cudnn"),
    ("paged_jax.block_table",),
    ("paged_jax.step", "paged_jax.backends", "paged_jax.cache_check"),
    ("paged_jax.layouts",),
    ("paged_jax.cache_write_xla", "paged_jax.attention_xla"),
    ("paged_jax.cache", "paged_jax.cascade_xla"),
    ("paged_jax.attention",),
    ("paged_jax.cascade", "paged_jax.prefill"),
    ("paged_jax.decode", "paged_jax.prefix_cache", "paged_jax.swap", "paged_jax.compat"),
    ("paged_jax.sharding", "paged_jax.exported"),
    ("paged_jax",),
    ("paged_jax.layers",),
    ("paged_jax.models",),
    ("paged_jax.cli",),
    ("paged_jax.__main__",),
    ("examples",),
)
FLOOR = {name: number for number, floor in enumerate(FLOORS) for name in floor}
# Both are loaded by then: a method of tables makes a step, and steps are made of tables.
KNOWN_CIRCLE = ("paged_jax.block_table", "paged_jax.step")

# Third-party libraries, and where alone they may be imported.
ONLY_IN = {
    "flax": ("paged_jax.layers", "paged_jax.models", "examples"),
    "tokenizers": ("paged_jax.models.text",),
    "jinja2": ("paged_jax.models.text",),
    "safetensors": ("paged_jax.models.weights",),
    "psutil": ("paged_jax.models", "paged_jax.cli", "examples"),
    "rich": ("paged_jax.models", "paged_jax.cli", "examples"),
}


def imports(path: Path) -> set[str]:
    """Full names of what a file imports when it runs, in functions too; what is for type checkers alone is left out."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    unseen = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    names = set()
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in SOURCES if path.parts[0] in ("paged_jax", "pallas_kernels", "examples")}


def module_of(name: str) -> str | None:
    """The module of ours in which an imported name stands; None for others' names."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def floor_of(module: str) -> tuple[int, str]:
    """Its number, and the entry of `FLOORS` that holds the module."""
    entry = module
    while entry not in FLOOR:
        entry = entry.rpartition(".")[0]
        assert entry, f"{module} has no floor: give it one in FLOORS"
    assert entry != "paged_jax" or module == "paged_jax", f"{module} has no floor: give it one in FLOORS"
    return FLOOR[entry], entry


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_from_floor_to_lower_floor(module):
    number, entry = floor_of(module)
    for name in imports(MODULES[module]):
        imported = module_of(name)
        if imported is None or imported == module or (module, imported) == KNOWN_CIRCLE:
            continue
        its_number, its_entry = floor_of(imported)
        assert its_number < number or its_entry == entry, f"{module} imports {name}, which is not below it"


def test_no_file_is_needed_by_what_it_needs():
    """Within a folder too: an order exists in which all files can be loaded."""
    needs = {module: {module_of(name) for name in imports(path)} - {None, module} for module, path in MODULES.items()}
    needs["paged_jax.block_table"].discard("paged_jax.step")
    while ready := [module for module, needed in needs.items() if not needed & needs.keys()]:
        for module in ready:
            del needs[module]
    assert not needs, f"import each other: {sorted(needs)}"


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_where_its_extra_is_wanted_alone(library):
    for module, path in MODULES.items():
        if library in {name.split(".")[0] for name in imports(path)}:
            assert module.startswith(ONLY_IN[library]), f"{module} imports {library}"


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[0] == "tests"], ids=str)
def test_tests_import_no_other_test(path):
    """What tests share lies in tests/support, which alone is on the path."""
    tests = {path.stem for path in SOURCES if path.parts[0] == "tests" and path.parts[1] != "support"}
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & (tests | {"tests"}), path


def test_nothing_changes_the_path():
    for path in SOURCES:
        if path.name != "test_architecture.py":
            assert "sys.path.insert" not in (ROOT / path).read_text(encoding="utf-8"), path


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[0] == "pallas_kernels"], ids=str)
def test_kernels_are_a_leaf_that_imports_only_jax_and_numpy(path):
    standard = {
        "__future__",
        "collections",
        "dataclasses",
        "functools",
        "importlib",
        "itertools",
        "json",
        "math",
        "re",
        "typing",
    }
    roots = {name.split(".")[0] for name in imports(path)}
    assert roots <= standard | {"jax", "jaxtyping", "numpy", "pallas_kernels"}


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.parts[0] in ("paged_jax", "pallas_kernels")], ids=str
)
def test_no_private_jax_imports(path):
    if path.as_posix() == "paged_jax/cudnn.py":
        return  # the one file that may: JAX has no public name for what it needs
    assert not [name for name in imports(path) if name.startswith("jax._src")]
    assert "jax._src" not in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[0] != "tests"], ids=str)
def test_a_file_says_its_job_first_and_stays_small(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert re.match(r'(#!.*\n)?r?"""\S', text), f"{path}: the first line says what the file is for"
    assert len(text.splitlines()) <= 500


def test_the_oracle_shares_nothing_with_the_packages():
    for name in ("oracle.py",):
        roots = {imported.split(".")[0] for imported in imports(Path("tests") / "support" / name)}
        assert roots <= {"numpy", "math", "__future__"}
