"""The command line: `paged-jax`, and `python -m paged_jax` is the same."""

import importlib
import sys

from paged_jax.cli.arguments import parse_arguments


def main(argv: list[str] | None = None) -> int:
    """Runs a verb; returns the exit status."""
    args = parse_arguments(argv)
    try:
        importlib.import_module("paged_jax.models")  # says which extra it lacks
    except ImportError as problem:
        print(f"paged-jax {args.verb}: error: {problem}", file=sys.stderr)
        return 2
    return importlib.import_module(f"paged_jax.cli.{args.verb}").command(args)
