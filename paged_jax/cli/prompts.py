"""The prompts that a command line names: its arguments, and the lines of a file."""

import argparse
import sys
from pathlib import Path

from paged_jax.models.files import decode_text


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts from the command line, then the file's lines, which end at \\n or \\r\\n and at nothing else: other
    separators (form feed, U+2028, ...) are a prompt's own.

    Raises:
        ValueError: there are none, or one is empty or not UTF-8.
    """
    prompts = list(args.prompts)
    if args.file is not None:
        data = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
        lines = decode_text(data, f"--file {args.file}").replace("\r\n", "\n").split("\n")
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError('expected a prompt, as an argument ("What is gravity?") or in a --file, got none')
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise ValueError(f"prompt {number}: expected some text, got {prompt!r}")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as problem:  # bytes of another encoding, as the command line hands them over
            raise ValueError(f"prompt {number}: expected UTF-8 text, got {prompt!r}") from problem
    return prompts
