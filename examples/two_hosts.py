"""Decode with one model over two processes that talk through JAX's own runtime, with a limit on waiting.

    python examples/two_hosts.py

starts both on this machine, on the loopback address, with a small random model whose heads are split over them, and
compares their tokens with those of one device. On two machines, with a model of yours:

    python examples/two_hosts.py --process 0 --coordinator FIRST_HOST:8476 --model PATH --token-ids "1,2,3"
    python examples/two_hosts.py --process 1 --coordinator FIRST_HOST:8476 --model PATH --token-ids "1,2,3"

A process that ends or hangs ends the other one, within --timeout seconds, with an error that says so.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from paged_jax import BlockTable, PagedCache, sharding
from paged_jax.cli.arguments import positive_int, token_ids
from paged_jax.cli.chunks import cut_prompts
from paged_jax.models.config import ModelConfig
from paged_jax.models.loaded import load
from paged_jax.models.mesh import Split
from paged_jax.models.network import Network
from paged_jax.models.programs import generate, prefill
from paged_jax.models.weights.config_json import model_config

NUM_PROCESSES = 2
PAGE_SIZE = 16
PROMPTS = [[3, 9, 4, 1, 7], [8, 2], [60, 2, 9, 11, 3, 6]]
SMALL = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "max_position_embeddings": 1 << 16,
}
LOST = 3  # exit status: another process was waited for in vain


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return work(args) if args.worker else supervise(args, sys.argv[1:] if argv is None else argv)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="two_hosts.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face folder or a GGUF file (a small random model)")
    parser.add_argument("--token-ids", type=token_ids, action="append", metavar="IDS", help='a prompt: "1,2,3"')
    parser.add_argument("--max-tokens", type=positive_int, default=16, metavar="N", help="new tokens a prompt (16)")
    parser.add_argument("--tokens-per-call", type=positive_int, default=8, metavar="N", help="in one program (8)")
    parser.add_argument(
        "--timeout", type=positive_int, default=60, metavar="SECONDS", help="the longest wait for another process (60)"
    )
    parser.add_argument(
        "--process", type=int, choices=range(NUM_PROCESSES), help="which one this is (both, started here)"
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if (args.process is None) != (args.coordinator is None):
        parser.error("expected --process and --coordinator together, or neither")
    return args


# --- The process that is started: it does no work of its own, so it can always say how the work ended -----------------


def supervise(args: argparse.Namespace, argv: list[str]) -> int:
    """Runs this machine's processes and says what became of them; none outlives another by more than the limit."""
    places = [[]] if args.process is not None else local_processes()
    command = [sys.executable, __file__, "--worker", *argv]
    workers = [subprocess.Popen([*command, *place]) for place in places]
    deadline = None
    try:
        while None in (statuses := [worker.poll() for worker in workers]):
            if deadline is None and any(statuses):
                deadline = time.monotonic() + args.timeout  # the others should find out by themselves
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for process, status in enumerate(statuses, args.process or 0):
        if status:
            how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        else:
            how = "stopped, as it did not end by itself"
        if status != 0:
            print(f"two_hosts.py: error: process {process} of {NUM_PROCESSES} was {how}", file=sys.stderr)
    return 1 if any(status != 0 for status in statuses) else 0


def local_processes() -> list[list[str]]:
    """The arguments of both processes, which meet on the loopback address."""
    address = f"127.0.0.1:{free_port()}"
    return [["--process", str(process), "--coordinator", address] for process in range(NUM_PROCESSES)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# --- The processes that work ------------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library for collectives says of itself is no answer
    with time_limit(args, "meeting the other process"):
        jax.distributed.initialize(
            args.coordinator,
            NUM_PROCESSES,
            args.process,
            initialization_timeout=args.timeout,
            # JAX's own way to notice is to abort, so it comes after ours.
            heartbeat_timeout_seconds=2 * args.timeout,
        )
    prompts = args.token_ids or PROMPTS
    rows = [[] for _ in prompts]
    mesh = sharding.make_mesh(heads=jax.device_count())
    with time_limit(args, "loading the model"):
        forward = on_mesh(args.model, mesh)
    config = forward.func.config
    cache, table = new_pool(config, prompts, args.max_tokens, mesh)
    for chunk in cut_prompts(prompts, 2048):
        with time_limit(args, "reading the prompts"):
            cache, table, ok = prefill(
                forward, cache, table, chunk.tokens, chunk.num_tokens, max_context=chunk.max_context
            )
            jax.block_until_ready(ok)
    newest, active = np.array([prompt[-1] for prompt in prompts], np.int32), np.ones(len(prompts), bool)
    for done in range(0, args.max_tokens, args.tokens_per_call):
        with time_limit(args, "decoding"):
            count = min(args.tokens_per_call, args.max_tokens - done)
            result = generate(forward, cache, table, newest, active, max_new_tokens=count).check()
            tokens = np.asarray(result.tokens)
        cache, table, newest = result.cache, result.table, result.tokens[:, -1]
        for row, new in zip(rows, tokens.tolist(), strict=True):
            row += new
        if args.process == 0:
            print(f"{done + count} tokens a row", file=sys.stderr, flush=True)
    if args.process == 0:
        for row in rows:
            print(",".join(map(str, row)), file=answers, flush=True)
        if args.model is None:
            compare(prompts, rows)
    with time_limit(args, "parting"):
        jax.distributed.shutdown()
    return 0


@contextmanager
def time_limit(args: argparse.Namespace, what: str) -> Iterator[None]:
    """Ends this process with a message if the body takes longer than the limit, or fails as it does without its peer.

    A collective that waits for another process cannot be interrupted, and JAX would wait for the others once more on
    the way out: so the process goes at once.
    """

    def give_up(why: str) -> None:
        print(
            f"two_hosts.py: error: process {args.process}: {what}: {why}. The other process has ended, hangs, or is "
            f"slower than --timeout {args.timeout} allows.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(LOST)

    timer = threading.Timer(args.timeout, give_up, [f"expected an end within {args.timeout} s, got none"])
    timer.daemon = True
    timer.start()
    try:
        yield
    except jax.errors.JaxRuntimeError as problem:
        give_up(str(problem).splitlines()[0])
    finally:
        timer.cancel()


def on_mesh(path: str | None, mesh: Mesh) -> jax.tree_util.Partial:
    """The `forward` of the model there, or of the small one, split by heads."""
    if path is not None:
        return load(path, dtype="float32", mesh=mesh, heads="heads", scan_layers=True).forward
    network = Network(model_config(SMALL), scan_layers=True, split=Split(mesh, heads="heads"))
    return jax.tree_util.Partial(network, sharding.place(mesh, small_weights(network), network.specs()))


def small_weights(network: Network) -> dict[str, np.ndarray]:
    """The same random ones in every process."""
    rng = np.random.default_rng(0)
    shapes = network.shapes("float32").items()
    return {name: rng.normal(scale=0.3, size=shape.shape).astype(shape.dtype) for name, shape in shapes}


def new_pool(
    config: ModelConfig, prompts: list[list[int]], max_tokens: int, mesh: Mesh | None
) -> tuple[PagedCache, BlockTable]:
    """Room for the prompts and their answers, on one device or split by heads."""
    blocks, attention = -(-(max(map(len, prompts)) + max_tokens) // PAGE_SIZE), config.attention
    pages = blocks * len(prompts)
    sizes = (config.num_layers, pages, PAGE_SIZE, attention.num_kv_heads, attention.head_dim, np.float32)
    table_sizes = (pages, PAGE_SIZE, len(prompts), blocks)
    if mesh is None:
        return PagedCache.create(*sizes), BlockTable.create(*table_sizes)
    return sharding.create_cache(mesh, *sizes, heads="heads"), sharding.create_table(mesh, *table_sizes)


def compare(prompts: list[list[int]], rows: list[list[int]]) -> None:
    """The same model again, on one device of this process."""
    network = Network(model_config(SMALL), scan_layers=True)
    forward = jax.tree_util.Partial(network, jax.tree.map(jnp.asarray, small_weights(network)))
    cache, table = new_pool(network.config, prompts, len(rows[0]), None)
    for chunk in cut_prompts(prompts, 2048):
        cache, table, _ = prefill(forward, cache, table, chunk.tokens, chunk.num_tokens)
    newest, active = np.array([prompt[-1] for prompt in prompts], np.int32), np.ones(len(prompts), bool)
    result = generate(forward, cache, table, newest, active, max_new_tokens=len(rows[0])).check()
    if np.asarray(result.tokens).tolist() != rows:
        raise RuntimeError(f"expected one device's tokens {np.asarray(result.tokens).tolist()}, got {rows}")
    print(f"one device gives the same {sum(map(len, rows))} tokens", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
