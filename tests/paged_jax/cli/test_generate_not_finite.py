"""An answer whose logits are not finite ends early, and a note says so; the other prompts' answers are as ever."""

from pathlib import Path

import numpy as np
import pytest
from command_line import COUNT, Run, expected_text
from tiny_llama import TinyLlama

PROMPTS = ["hello world", "zzz", "the 42 cats"]
pytestmark = pytest.mark.usefixtures("own_cache")


def save(tiny: TinyLlama, path: Path, **changed: np.ndarray) -> Path:
    """The model with other weights, by names in which `__` stands for a dot."""
    tensors = {name.replace("__", "."): value for name, value in changed.items()}
    return tiny.save(
        path,
        tensors={name: (name, value.shape, "F32", value.astype("<f4").tobytes()) for name, value in tensors.items()},
    )


def poisoned(tiny: TinyLlama, path: Path, token: int) -> Path:
    """The model, in which one token reads as NaN."""
    embedding = tiny.weights["token_embd.weight"].copy()
    embedding[token] = np.nan
    return save(tiny, path, token_embd__weight=embedding)


def test_one_row_ends_and_the_others_go_on(run: Run, tiny: TinyLlama, tmp_path: Path) -> None:
    prompts = [tiny.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    answers = [tiny.greedy(prompt, COUNT) for prompt in prompts]
    others = {token for row in (0, 2) for token in prompts[row] + answers[row]}
    count = next(i for i, token in enumerate(answers[1]) if token not in others and token not in prompts[1]) + 1
    path = poisoned(tiny, tmp_path / "nan.gguf", answers[1][count - 1])
    status, out, err = run(*PROMPTS, "--raw", "--dtype", "float32", path=path)
    assert status == 1
    texts = [expected_text(tiny, prompt, raw=True) for prompt in PROMPTS]
    texts[1] = expected_text(tiny, PROMPTS[1], count, raw=True)
    lines = [f"[{i}/3] {prompt}\n{text}\n" for i, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True), 1)]
    assert out == "".join(lines)
    note = f"prompt 2 ended after {count} new tokens: its logits are not finite in float32"
    assert [line for line in err.splitlines() if "finite" in line] == [
        f"{note} (NaN or infinities in the weights do this)"
    ]
    assert "Traceback" not in err


def test_a_prompt_that_gets_no_token_is_named_too(run: Run, tiny: TinyLlama, tmp_path: Path) -> None:
    path = poisoned(tiny, tmp_path / "nan.gguf", tiny.tokenizer.encode("zzz").ids[0])
    status, out, err = run("zzz", "--raw", "--compare-dense", path=path)
    assert (status, out) == (1, "\n")
    assert "prompt 1 ended after 0 new tokens" in err
    assert "dense " not in err  # there is nothing to compare


def test_float16_that_overflows_within_a_layer_is_told_what_helps(run: Run, tiny: TinyLlama, tmp_path: Path) -> None:
    names = ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight")
    large = {name.replace(".", "__"): 1e3 * tiny.weights[name] for name in names}
    path = save(tiny, tmp_path / "large.gguf", **large)
    status, out, err = run(*PROMPTS[:2], "--raw", "--dtype", "float16", path=path)
    assert status == 1
    assert out == f"[1/2] {PROMPTS[0]}\n\n[2/2] {PROMPTS[1]}\n\n"
    for number in (1, 2):
        assert f"prompt {number} ended after 0 new tokens: its logits are not finite in float16" in err
    assert err.count("try --dtype float32 or bfloat16)") == 2
    assert run(*PROMPTS[:2], "--raw", path=path)[0] == 0


def test_a_stream_beyond_float16_answers_as_float32_does(run: Run, tiny: TinyLlama, tmp_path: Path) -> None:
    """What the layers add passes 65504 together; nothing that is multiplied does."""
    names = [name for name in tiny.weights if name.endswith(("attn_output.weight", "ffn_down.weight"))]
    large = {name.replace(".", "__"): 2e4 * tiny.weights[name] for name in names}
    path = save(tiny, tmp_path / "large.gguf", **large)
    answers = [run("zzz", "--raw", "--dtype", dtype, path=path, max_tokens=6) for dtype in ("float32", "float16")]
    assert answers[0][:2] == answers[1][:2]
    assert answers[0][0] == 0
