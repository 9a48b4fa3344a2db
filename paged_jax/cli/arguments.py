"""What the commands take on their command line."""

import argparse
import math

from paged_jax import __version__
from paged_jax.cache_check import DTYPES
from paged_jax.sampling import Sampler


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The verb, as `verb`, and what it takes. Exits with status 2, as argparse does, if it takes none of that."""
    whole = argparse.ArgumentParser(prog="paged-jax", description="Language models over a paged KV cache, in JAX.")
    whole.add_argument("--version", action="version", version=f"paged-jax {__version__}")
    verbs = whole.add_subparsers(dest="verb", metavar="VERB", required=True)
    about = "generate text with a real language model through a paged KV cache"
    parser = verbs.add_parser("generate", help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="one or more prompts, generated in one batch")
    parser.add_argument("--file", metavar="PATH", help="more prompts, one a line; - reads standard input")
    parser.add_argument("--max-tokens", type=positive_int, default=256, metavar="N", help="new tokens a prompt (256)")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument(
        "--token-ids",
        type=token_ids,
        action="append",
        metavar="IDS",
        help='a prompt as token ids ("1,2,3"), answered in ids; may be repeated, needs no tokenizer',
    )
    parser.add_argument(
        "--model", metavar="PATH", help="a Hugging Face folder or a GGUF file (SmolLM2-135M-Instruct, fetched)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="weights and activations (by device)"
    )
    parser.add_argument(
        "--prefill-tokens",
        type=positive_int,
        default=2048,
        metavar="N",
        help="tokens of the prompts that are read in one call, at most (2048, by each shard): fewer need less memory",
    )
    parser.add_argument(
        "--scan-layers", action="store_true", help="compile one layer for all: starts sooner, a little slower on a CPU"
    )
    parser.add_argument(
        "--compare-dense", action="store_true", help="generate again with a dense cache: fails if a token differs"
    )
    parser.add_argument(
        "--mesh",
        type=mesh_sizes,
        default="rows=1,heads=1",
        metavar="rows=R,heads=N",
        help="deal the prompts to R shards, each of N devices that split model and cache by kv heads (one device)",
    )
    sampling = parser.add_argument_group("sampling", "greedy unless --temperature or the model's own settings say not")
    sampling.add_argument("--temperature", type=finite_float, metavar="T", help="0 is greedy (the model's, or 0)")
    sampling.add_argument("--top-k", type=positive_int, metavar="K", help="keep the K likeliest tokens")
    sampling.add_argument("--top-p", type=probability, metavar="P", help="keep the likeliest tokens, to probability P")
    sampling.add_argument("--seed", type=seed, metavar="N", help="of the random numbers (0)")
    paging = parser.add_argument_group("paging")
    paging.add_argument("--page-size", type=positive_int, default=16, metavar="N", help="tokens per page (16)")
    paging.add_argument(
        "--num-pages",
        type=pages_or_auto,
        metavar="N|auto",
        help="pages in the pool, one for each shard (auto: by need and free memory)",
    )
    paging.add_argument(
        "--cache-dtype",
        type=cache_dtype,
        metavar="int8|fp8|...",
        help=f"of K and V: fp8, {', '.join(DTYPES)}; those of one byte save memory (--dtype)",
    )
    paging.add_argument("--show-table", action="store_true", help="draw each row's block table and the pool")
    args = whole.parse_args(argv)
    if args.token_ids and (args.prompts or args.file is not None or args.raw):
        parser.error("--token-ids stands instead of prompts of text: expected no PROMPT, --file or --raw beside it")
    if args.compare_dense and args.temperature:
        parser.error(f"--compare-dense compares greedy choices: expected --temperature 0, got {args.temperature}")
    return args


def choose_sampler(args: argparse.Namespace, default: Sampler | None) -> Sampler | None:
    """How to sample, by the arguments and then by the model's own settings; None is greedy.

    Raises:
        ValueError: the choice is greedy, and an argument that shapes a random one is given.
    """
    if args.temperature is None and default is not None and not args.compare_dense:
        temperature = default.temperature
    else:
        temperature = args.temperature or 0.0
    if temperature == 0:
        for name in ("top_k", "top_p", "seed"):
            if getattr(args, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} needs --temperature above 0: without it the choice is greedy"
                )
        return None
    default = default or Sampler()
    top_k = default.top_k if args.top_k is None else args.top_k
    return Sampler(temperature, top_k, default.top_p if args.top_p is None else args.top_p)


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def token_ids(text: str) -> list[int]:
    ids = text.replace(",", " ").split()
    if not ids or not all(index.isdecimal() for index in ids):
        raise argparse.ArgumentTypeError(f"expected token ids between commas, got {text!r}")
    return [int(index) for index in ids]


def mesh_sizes(text: str) -> dict[str, int]:
    sizes = {"rows": 1, "heads": 1}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in sizes:
            raise argparse.ArgumentTypeError(f"expected rows=N and heads=N between commas, got {text!r}")
        sizes[name] = positive_int(size)
    return sizes


def pages_or_auto(text: str) -> int | None:
    return None if text == "auto" else positive_int(text)


def cache_dtype(text: str) -> str:
    name = "float8_e4m3fn" if text == "fp8" else text
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"expected fp8 or one of {', '.join(DTYPES)}, got {text!r}")
    return name


def finite_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"expected a finite number of at least 0, got {text!r}")
    return value


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {2**32 - 1}, got {text!r}")
    return int(text)


def probability(text: str) -> float:
    value = finite_float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 1, got {text!r}")
    return value
