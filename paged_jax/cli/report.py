"""What is told of a batch when it is done: speed, memory, and how it compares with a dense cache."""

from __future__ import annotations

import itertools

import numpy as np
from rich.console import Console

from paged_jax.block_table import BlockTable
from paged_jax.cli.pool import Pool


class DenseMismatch(RuntimeError):
    """A token differs between the paged and the dense cache."""


def report(
    seconds: dict[str, float],
    num_prefilled: int,
    num_new: int,
    table: BlockTable,
    pool: Pool,
    prompts: list[list[int]],
    max_tokens: int,
    notes: Console,
) -> None:
    """Speed, and memory beside what a contiguous cache, and one of the model's dtype, would take for the same batch."""

    def rate(tokens: int, phase: str) -> str:
        return f"{tokens} tokens in {seconds[phase]:.2f} s, {tokens / seconds[phase]:.1f} tokens/s"

    def memory(cells: int) -> str:
        return f"{cells * pool.page_bytes / pool.page_size / 1e6:.1f} MB, {1 - held / cells:.0%} waste"

    held, pages_used = int(table.lengths.sum()), table.free_pages.size - int(table.num_free.sum())
    reserved = len(prompts) * (max(map(len, prompts)) + max_tokens)
    notes.print(
        f"prefill     {rate(num_prefilled, 'prefill')}\n"
        f"decode      {rate(num_new, 'decode')} (compiled in {seconds['compile']:.1f} s)\n"
        f"paged       {pages_used} of {table.free_pages.size} pages used for {held} tokens: "
        f"{memory(pages_used * pool.page_size)}\n"
        f"contiguous  would reserve {len(prompts)} x {reserved // len(prompts)} tokens: {memory(reserved)}"
    )
    if pool.dtype != pool.plain_dtype:
        notes.print(
            f"cache dtype {pool.dtype}; {pool.plain_dtype} would take "
            f"{pages_used * pool.plain_page_bytes / 1e6:.1f} MB for the same pages"
        )


def note_not_finite(finite: np.ndarray, new_tokens: list[list[int]], pool: Pool, notes: Console) -> None:
    """Names each prompt whose answer ended because its logits were not finite, and what may help."""
    options = {"--dtype": pool.plain_dtype, "--cache-dtype": pool.dtype}  # the second goes by the first
    narrow = next((option for option, dtype in options.items() if dtype == np.float16), None)
    cause = "NaN or infinities in the weights do this"
    if narrow is not None:
        cause = f"numbers beyond 65504 are none in float16: try {narrow} float32 or bfloat16"
    for row in np.flatnonzero(~finite):
        notes.print(
            f"prompt {row + 1} ended after {len(new_tokens[row])} new tokens: its logits are not finite in "
            f"{pool.plain_dtype} ({cause})",
            soft_wrap=True,
        )


def compare(rows: list[list[int]], expected: list[list[int]], notes: Console) -> None:
    """Raises DenseMismatch, which names the first token of the paged cache's that is not the dense one's."""
    for number, (got, dense) in enumerate(zip(rows, expected, strict=True), 1):
        for place, tokens in enumerate(itertools.zip_longest(dense, got), 1):
            if len(set(tokens)) > 1:
                one, other = ("no more" if token is None else token for token in tokens)
                raise DenseMismatch(
                    f"prompt {number}, new token {place}: expected {one}, as from a dense cache, got {other}"
                )
    notes.print(f"dense       a contiguous cache gives the same {sum(map(len, rows))} tokens")
