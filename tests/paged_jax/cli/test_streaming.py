"""What is streamed of a real model with byte fallback is what its tokenizer makes of all its tokens."""

import random
from pathlib import Path

import pytest
from command_line import run_command

from paged_jax import text_streams
from paged_jax.models.pretrained import open_pretrained

PROMPTS = ["ᚠᛇᚻ᛫ᛒᛦᚦ", "😀🏴", "ꦲꦏ꧀ꦱꦫ", "Łódź 日本語"]  # rare scripts, which are written in bytes

pytestmark = [pytest.mark.download, pytest.mark.usefixtures("own_cache")]


def test_random_tokens_of_gemma_3(gemma3_path: Path) -> None:
    text = open_pretrained(gemma3_path).text()
    new_stream, draw, size = text_streams(text.decode), random.Random(0), text.tokenizer.get_vocab_size()
    for _ in range(2000):
        share = draw.random()
        tokens = [draw.randrange(238, 494) if draw.random() < share else draw.randrange(size) for _ in range(30)]
        stream = new_stream()
        assert "".join(stream.push([token]) for token in tokens) + stream.finish() == text.decode(tokens), tokens


def test_sampled_text_of_gemma_3(gemma3_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed twice: streamed as text, and as ids that are decoded at the end."""
    text = open_pretrained(gemma3_path).text()
    options = ["--model", gemma3_path, "--temperature", 1, "--seed", 5, "--max-tokens", 40, "--scan-layers"]
    ids = [",".join(map(str, text.encode(prompt, is_raw=True))) for prompt in PROMPTS]
    written, tokens = (
        run_command(capsys, *options, *arguments)
        for arguments in (["--raw", *PROMPTS], [part for prompt in ids for part in ("--token-ids", prompt)])
    )
    assert (written[0], tokens[0]) == (0, 0), (written[2], tokens[2])
    answers = [line for line in tokens[1].splitlines() if not line.startswith("[")]
    expected = [text.decode([int(token) for token in line.split(",")]) for line in answers]
    pieces = [
        f"[{i}/4] {prompt}\n{answer}\n" for i, (prompt, answer) in enumerate(zip(PROMPTS, expected, strict=True), 1)
    ]
    assert written[1] == "".join(pieces)
