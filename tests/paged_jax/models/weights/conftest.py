"""What tests of files share: a GGUF file from its bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from paged_jax.models.weights.gguf import GGUFFile, open_gguf


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[bytes], GGUFFile]:
    def write_and_open(content: bytes) -> GGUFFile:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return open_gguf(path)

    return write_and_open
