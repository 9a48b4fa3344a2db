"""`paged-jax generate` as a command in the tests' own process."""

from collections.abc import Callable
from typing import Any

import pytest
from tiny_llama import TinyLlama

from paged_jax.cli import main
from paged_jax.models.text.chat import render_chat
from paged_jax.models.text.text import gguf_template

Run = Callable[..., tuple[int, str, str]]

COUNT = 12  # new tokens


def run_command(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """Its exit status, standard output and standard error."""
    capsys.readouterr()
    try:
        status = main(["generate", *(str(argument) for argument in arguments)])
    except SystemExit as exit:
        status = exit.code
    return status, *capsys.readouterr()


def expected_text(tiny: TinyLlama, text: str, count: int = COUNT, *, raw: bool = False, bos: bool = False) -> str:
    """What the tiny model says to a prompt."""
    if not raw:
        text = render_chat(gguf_template(tiny.metadata), [{"role": "user", "content": text}])
    return tiny.tokenizer.decode(tiny.greedy([1] * bos + tiny.tokenizer.encode(text).ids, count))
