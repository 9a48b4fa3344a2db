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

# What each module of paged_jax may import at module level, besides JAX, numpy and the standard library.
MAY_IMPORT = {
    "paged_jax": {
        "attention",
        "block_table",
        "cache",
        "cascade",
        "compat",
        "decode",
        "exported",
        "layouts",
        "prefill",
        "prefix_cache",
        "sampling",
        "sharding",
        "step",
        "swap",
        "table_check",
    },
    "paged_jax.integers": set(),
    "paged_jax.table_check": set(),
    "paged_jax.block_table": {"integers", "pallas_kernels.integers", "table_check"},
    "paged_jax.prefix_cache": {"block_table", "integers"},
    "paged_jax.sampling": set(),
    "paged_jax.exported": {"block_table", "cache", "decode", "step"},
    "paged_jax.platform_choice": set(),
    "paged_jax.backends": {"pallas_kernels", "platform_choice"},
    "paged_jax.step": {"block_table", "integers", "pallas_kernels.integers"},
    "paged_jax.layouts": {"cache_check", "pallas_kernels.layouts"},
    "paged_jax.cache": {
        "backends",
        "block_table",
        "cache_check",
        "cache_write_xla",
        "integers",
        "layouts",
        "pallas_kernels.arguments",
        "pallas_kernels.integers",
        "pallas_kernels.quantisation",
    },
    "paged_jax.cache_check": {"integers", "pallas_kernels", "pallas_kernels.arguments", "pallas_kernels.layouts"},
    "paged_jax.cache_write_xla": {"layouts", "pallas_kernels.quantisation"},
    "paged_jax.swap": {"block_table", "cache", "cache_check", "integers", "pallas_kernels.integers"},
    "paged_jax.attention_xla": {"block_table", "layouts", "pallas_kernels.softmax"},
    "paged_jax.attention": {
        "attention_xla",
        "backends",
        "block_table",
        "cache",
        "cache_check",
        "pallas_kernels.arguments",
        "pallas_kernels.integers",
        "pallas_kernels.softmax",
    },
    "paged_jax.cascade": {
        "attention",
        "backends",
        "block_table",
        "cache",
        "cascade_xla",
        "pallas_kernels.arguments",
    },
    "paged_jax.cascade_xla": {"attention_xla", "layouts", "pallas_kernels.softmax"},
    "paged_jax.cudnn": set(),
    "paged_jax.prefill": {
        "attention",
        "block_table",
        "cache",
        "cudnn",
        "layouts",
        "pallas_kernels.arguments",
        "pallas_kernels.integers",
        "pallas_kernels.softmax",
        "pallas_kernels.token_fill",
        "platform_choice",
    },
    "paged_jax.compat": {
        "attention",
        "block_table",
        "cache",
        "pallas_kernels.integers",
        "pallas_kernels.quantisation",
    },
    "paged_jax.decode": {"block_table", "sampling", "step"},
    "paged_jax.sharding": {"block_table", "cache", "decode", "integers", "layouts", "step"},
    "paged_jax.layers": {"layers.attention", "layers.rope"},
    "paged_jax.layers.rope": set(),
    "paged_jax.layers.attention": {"attention", "cache", "integers", "layers.rope", "prefill", "step"},
}


def module_level_imports(path: Path) -> set[str]:
    """Full names of what a file imports outside functions and `if TYPE_CHECKING`."""
    names = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[0] == "paged_jax"], ids=str)
def test_imports_of_the_library_go_one_way(path):
    allowed = {
        name if name.startswith("pallas_kernels") else f"paged_jax.{name}" for name in MAY_IMPORT[module_name(path)]
    }
    ours = {name for name in module_level_imports(path) if name.split(".")[0] in ("paged_jax", "pallas_kernels")}
    for name in ours:
        assert any(name == target or name.startswith(f"{target}.") for target in allowed), f"{path} imports {name}"


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
    roots = {name.split(".")[0] for name in module_level_imports(path)}
    assert roots <= standard | {"jax", "jaxtyping", "numpy", "pallas_kernels"}


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.parts[0] in ("paged_jax", "pallas_kernels")], ids=str
)
def test_no_private_jax_imports(path):
    if path.as_posix() == "paged_jax/cudnn.py":
        return  # the one file that may: JAX has no public name for what it needs
    assert not [name for name in module_level_imports(path) if name.startswith("jax._src")]
    assert "jax._src" not in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[0] != "tests"], ids=str)
def test_a_file_says_its_job_first_and_stays_small(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert re.match(r'(#!.*\n)?r?"""\S', text), f"{path}: the first line says what the file is for"
    assert len(text.splitlines()) <= 500


def test_the_oracle_shares_nothing_with_the_packages():
    for name in ("oracle.py",):
        roots = {imported.split(".")[0] for imported in module_level_imports(Path("tests") / name)}
        assert roots <= {"numpy", "math", "__future__"}
