r"""Decoding with random models of Llama 3's shapes on GPUs: beside the memory ceiling, a dense cache and a mesh.

    python -m examples.benchmarks.llama --only compile dense --out examples/benchmarks/results/llama-h200.json
    python -m examples.benchmarks.llama --only step --out examples/benchmarks/results/llama-step-h200.json
    python -m examples.benchmarks.llama --shape 8b --devices 2 --only mesh attention \
        --out examples/benchmarks/results/llama-8b-h200-x2.json
    XLA_FLAGS="--xla_gpu_experimental_use_collective_kernels= --xla_gpu_enable_command_buffer=+COLLECTIVES" \
        python -m examples.benchmarks.llama --shape 8b --devices 2 --only mesh \
        --out examples/benchmarks/results/llama-8b-nccl-h200-x2.json

What `--only` chooses from, in this order:

- compile: seconds until the loop over all layers is compiled, scanned and unrolled;
- step: time of a step in one compiled `generate`, over the time that reading its bytes takes at the bandwidth that the
  same run measures: all weights but the embedding table, of which a step reads a row per token, and the rows' K and V;
- dense: tokens per second from as many rows as fit in a budget, paged and reserved for the longest row;
- mesh: a step with kv heads split over the devices, beside one device;
- attention: the same of attention alone.

Weights and caches are drawn on the devices. Nothing is prefilled: rows begin on permuted pages of random K and V. Each
time is that of a call with its steps, less that of the same program with no row active, medians of both.
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from examples.benchmarks.decode import attend_paged, make_problem, measure, measure_ceiling, reason
from examples.benchmarks.environment import describe
from examples.benchmarks.loops import (
    PAGE_SIZE,
    Case,
    compile_loop,
    compile_paged,
    forward_shapes,
    measure_loop,
    measure_paged,
    paged_cache_shapes,
    random_arrays,
    weight_bytes,
    whole,
)
from examples.benchmarks.peers import Contestant
from paged_jax import BlockTable, PagedCache, decode, paged_attention, sharding
from paged_jax.models.config import ModelConfig
from paged_jax.models.dense import DenseCache, attend_dense, generate_dense
from paged_jax.models.mesh import Split
from paged_jax.models.programs import generate
from paged_jax.models.weights.config_json import model_config
from pallas_kernels.cases import DecodeCase

_ROWS_TOGETHER = 8  # a batch is filled up with empty rows to a multiple: matrix units like no other number
_SHARE_OF_MEMORY = "0.92"  # that JAX may take of a GPU; three quarters by its own default


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model, and the rows that it is measured with."""

    fields: Mapping[str, Any]  # of config.json
    rows: int
    context: int  # tokens that each of these rows holds
    shortest: int  # row beside a dense cache
    reserved: int  # tokens that a dense cache has room for in each row, and the longest row beside it

    def config(self, layers: int | None) -> ModelConfig:
        """The model with another number of layers, or with its own."""
        return model_config({**self.fields, **({} if layers is None else {"num_hidden_layers": layers})})


def _llama(layers: int, width: int, heads: tuple[int, int], mlp: int, vocabulary: int = 128256) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    }


SHAPES = {
    "8b": Shape(_llama(32, 4096, (32, 8), 14336), 64, 4096, 1024, 8192),
    "70b": Shape(_llama(42, 8192, (64, 8), 28672), 64, 4096, 1024, 8192),  # of 80 layers: what one H200 has room for
    "tiny": Shape(_llama(2, 64, (4, 2), 64, 64), 4, 24, 8, 64),
}
STEP_TARGETS = {"batch": 1.2, "one row": 1.15}  # times what reading memory takes, at most
DENSE_TARGET = 1.3  # times the tokens per second of the dense cache, at least
COMPILE_TARGET = 20.0  # seconds, at most
MESH_TARGET, ATTENTION_TARGET = 0.6, 0.52  # of one device's time, at most; for two devices


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _SHARE_OF_MEMORY)  # JAX has not looked for devices yet
    results: dict[str, Any] = {
        "benchmark": "llama",
        "environment": describe("flax", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"),
        "devices": args.devices,
        "num_steps": args.steps,
        "page_size": PAGE_SIZE,
        "ceiling_gb_per_s": measure_ceiling(args.calls),
    }
    print(f"reading memory: {results['ceiling_gb_per_s']:.0f} GB/s", flush=True)
    results["check"] = check(args)
    for section, name in itertools.product(args.only, args.shape):
        start = time.perf_counter()
        measured = SECTIONS[section](args, name, results["ceiling_gb_per_s"])
        results.setdefault(section, {})[name] = measured
        print(f"{section}, {name}: took {time.perf_counter() - start:.0f} s", flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        gc.collect()  # the arrays of a section go before those of the next come


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["8b"], help="models (8b)")
    parser.add_argument("--layers", type=int, help="of each model (8b: 32, 70b: 42 of its 80)")
    parser.add_argument("--devices", type=int, default=1, help="of the mesh, which splits kv heads (1: no mesh)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="what to measure (all that the devices allow)")
    parser.add_argument("--scan-layers", action="store_true", help="one compiled layer for all, in all that is timed")
    parser.add_argument("--steps", type=int, default=32, help="decoded in one call (32)")
    parser.add_argument("--calls", type=int, default=5, help="timed of each kind (5)")
    parser.add_argument("--budget-gib", type=float, default=32, help="of the caches that are compared (32)")
    parser.add_argument("--out", type=Path, help="JSON file for the results, rewritten after every measurement")
    args = parser.parse_args(arguments)
    for_mesh = [section for section in ("mesh", "attention") if section in (args.only or ())]
    if args.devices == 1 and for_mesh:
        parser.error(f"--only {for_mesh[0]}: expected --devices of at least 2, got 1")
    args.only = [
        section
        for section in SECTIONS
        if (args.only is None or section in args.only) and (args.devices > 1 or section not in ("mesh", "attention"))
    ]
    return args


def split_heads(devices: int) -> Split:
    return Split(sharding.make_mesh(heads=devices), heads="heads")


def step_cases(args: argparse.Namespace, name: str) -> dict[str, Case]:
    shape = SHAPES[name]
    rows = {"batch": shape.rows, "one row": 1}
    config = shape.config(args.layers)
    return {kind: Case(config, (shape.context,) * n, args.steps, args.scan_layers) for kind, n in rows.items()}


# --- What is measured -------------------------------------------------------------------------------------------------


def measure_compile(args: argparse.Namespace, name: str, _: float) -> dict[str, Any]:
    """The scanned loop comes first, before anything has chosen settings for matrix products of these shapes."""
    case = step_cases(args, name)["batch"]
    measured: dict[str, Any] = {"layers": case.config.num_layers}
    for kind, scan_layers in (("scanned", True), ("unrolled", False)):
        measured[kind] = compile_paged(dataclasses.replace(case, scan_layers=scan_layers))[1]
        print(f"{kind}: {measured[kind]['trace']:.1f} s to trace, {measured[kind]['compile']:.1f} s to compile")
    seconds = measured["scanned"]["trace"] + measured["scanned"]["compile"]
    return measured | judged(seconds, seconds <= COMPILE_TARGET, COMPILE_TARGET, "scanned, s")


def measure_step(args: argparse.Namespace, name: str, ceiling: float) -> dict[str, Any]:
    measured = {}
    for kind, case in step_cases(args, name).items():
        timed = measure_paged(case, args.calls)
        weights, kv = weight_bytes(case), case.kv_bytes
        floor = (weights["read"] + kv) / ceiling / 1e9
        ratio, target = timed["seconds_per_step"] / floor, STEP_TARGETS[kind]
        label = f"{len(case.lengths)} x {case.lengths[0]}"
        print(f"{label}: {1e3 * timed['seconds_per_step']:.2f} ms a step, reading alone {1e3 * floor:.2f} ms")
        measured[label] = {
            "layers": case.config.num_layers,
            "scan_layers": case.scan_layers,
            "parameter_bytes": weights["all"],
            "weight_bytes_read": weights["read"],
            "kv_bytes_read": kv,
            "seconds_reading": floor,
            **timed,
            **judged(ratio, ratio <= target, target, f"{label}, times reading"),
        }
    return measured


def measure_dense(args: argparse.Namespace, name: str, _: float) -> dict[str, Any]:
    """Rows of uniform lengths under one budget, in pages or each with room for the longest; one cache at a time."""
    shape, config, budget = SHAPES[name], SHAPES[name].config(args.layers), int(args.budget_gib * 2**30)
    paged, reserved = cases_in_budget(shape, config, args, budget)
    contestants = {
        "paged": (paged, functools.partial(generate, max_new_tokens=args.steps), paged_cache_shapes(paged)),
        **{
            peer: (
                reserved,
                functools.partial(generate_reserved, attend, max_new_tokens=args.steps),
                dense_cache_shapes(reserved),
            )
            for peer, attend in {"dense": attend_dense, "dense, cuDNN": attend_cudnn}.items()
        },
    }
    measured: dict[str, Any] = {
        "layers": config.num_layers,
        "scan_layers": args.scan_layers,
        "budget_bytes": budget,
        "token_bytes": paged.token_bytes,
        "lengths": [length for length in paged.lengths if length],
        "reserved_tokens": shape.reserved,
        "contestants": {},
        "failures": {},
        "gains": {},
    }
    for contestant, (case, run, cache) in contestants.items():
        rows, cells = sum(length > 0 for length in case.lengths), case.num_pages * case.page_size
        print(
            f"{contestant}: {rows} rows of {sum(case.lengths) / rows:.0f} tokens hold {cells} cells of "
            f"{case.token_bytes} bytes, {cells * case.token_bytes / 2**30:.2f} of {args.budget_gib:g} GiB",
            flush=True,
        )
        try:
            timed = measure_loop(case, *compile_loop(case, run, cache), cache, args.calls)
        except Exception as obstacle:
            if contestant == "paged":
                raise
            measured["failures"][contestant] = reason(obstacle)
            print(f"{contestant} failed: {reason(obstacle)}", flush=True)
            continue
        rate = rows / timed["seconds_per_step"]
        print(f"{contestant}: {rate:.0f} tokens/s", flush=True)
        held = {"rows": rows, "cells": cells, "cache_bytes": cells * case.token_bytes}
        measured["contestants"][contestant] = {**held, **timed, "tokens_per_second": rate}
    paged_rate, *rates = (found["tokens_per_second"] for found in measured["contestants"].values())
    for peer, rate in zip(list(measured["contestants"])[1:], rates, strict=True):
        gain = paged_rate / rate
        measured["gains"][peer] = judged(gain, gain >= DENSE_TARGET, DENSE_TARGET, f"paged beside {peer}, times")
    return measured


def measure_mesh(args: argparse.Namespace, name: str, _: float) -> dict[str, Any]:
    case = step_cases(args, name)["batch"]
    cases = {"1": case, str(args.devices): dataclasses.replace(case, split=split_heads(args.devices))}
    measured = {"layers": case.config.num_layers, "scan_layers": case.scan_layers, "devices": {}}
    for devices, of_devices in cases.items():
        measured["devices"][devices] = timed = measure_paged(of_devices, args.calls)
        print(f"on {devices}: {1e3 * timed['seconds_per_step']:.2f} ms a step", flush=True)
    one, several = (timed["seconds_per_step"] for timed in measured["devices"].values())
    ratio = several / one
    return measured | judged(ratio, ratio <= MESH_TARGET, MESH_TARGET, "step on the mesh, of one device's")


def measure_attention(args: argparse.Namespace, name: str, _: float) -> dict[str, Any]:
    """One layer in a chain, as `decode.py` measures it; what crosses devices is nothing."""
    shape, attention = SHAPES[name], SHAPES[name].config(args.layers).attention
    sizes = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
    problem = make_problem(DecodeCase(f"{shape.rows} x {shape.context}", (shape.context,) * shape.rows, *sizes))
    split = split_heads(args.devices)

    def specs(cache, table):
        return sharding.cache_specs(cache, heads=split.heads), sharding.table_specs(table)

    def place(problem):
        arrays = problem.cache, problem.table
        return sharding.place(split.mesh, arrays, specs(*arrays))

    def attend(_, q, cache, table, layer):
        by_head = PartitionSpec(None, split.heads)
        in_specs = (by_head, *specs(cache, table), PartitionSpec())
        return sharding.on_mesh(attend_share, split.mesh, in_specs=in_specs, out_specs=by_head)(q, cache, table, layer)

    def attend_share(q, cache, table, layer):
        return paged_attention(q, cache, table, layer=layer)

    devices = str(args.devices)
    measured = measure(problem, {"1": Contestant(attend_paged), devices: Contestant(attend, place)}, args.calls)
    if measured["failures"]:
        raise RuntimeError(f"expected attention on 1 and on {devices} devices, got {measured['failures']}")
    ratio = measured["microseconds"][devices] / measured["microseconds"]["1"]
    return measured | judged(ratio, ratio <= ATTENTION_TARGET, ATTENTION_TARGET, "attention, of one device's")


def judged(value: float, is_reached: bool, target: float, what: str) -> dict[str, Any]:
    print(f"{what}: {value:.3f}, target {target:g} {'reached' if is_reached else 'MISSED'}", flush=True)
    return {"value": value, "target": target, "is_target_reached": is_reached}


SECTIONS: dict[str, Callable[[argparse.Namespace, str, float], dict[str, Any]]] = {
    "compile": measure_compile,
    "step": measure_step,
    "dense": measure_dense,
    "mesh": measure_mesh,
    "attention": measure_attention,
}


# --- A dense cache ----------------------------------------------------------------------------------------------------


def cases_in_budget(shape: Shape, config: ModelConfig, args: argparse.Namespace, budget: int) -> tuple[Case, Case]:
    """As many rows as fit, of the same drawn lengths: in pages for what they hold, and in pieces for the longest.

    Raises:
        ValueError: the budget has no room for one row.
    """
    attention = config.attention
    num_pages, num_reserved = (
        PagedCache.pages_for(budget, config.num_layers, size, attention.num_kv_heads, attention.head_dim)
        for size in (PAGE_SIZE, shape.reserved)
    )
    if num_reserved == 0:
        raise ValueError(f"--budget-gib: expected room for a row of {shape.reserved} tokens, got {budget / 2**30} GiB")
    most = num_pages * PAGE_SIZE // shape.shortest
    drawn = np.random.default_rng(0).integers(shape.shortest, shape.reserved - args.steps, most, endpoint=True)
    pages_held = np.cumsum(-(-(drawn + args.steps) // PAGE_SIZE))
    lengths = tuple(drawn[: np.searchsorted(pages_held, num_pages, side="right")].tolist())
    empty = (0,) * (-len(lengths) % _ROWS_TOGETHER)
    paged = Case(config, lengths + empty, args.steps, args.scan_layers)
    return paged, dataclasses.replace(paged, lengths=lengths[:num_reserved], page_size=shape.reserved)


def dense_cache_shapes(case: Case) -> Any:
    """One array for all layers if they are scanned; else each has its own, which costs no slice."""
    layers, rows, *sizes = case.pool_sizes

    def of_layers(count: int) -> DenseCache:
        return jax.eval_shape(lambda: DenseCache(*(jnp.zeros((count, rows, *sizes), case.dtype) for _ in "kv")))

    return of_layers(layers) if case.scan_layers else (of_layers(1),) * layers


def generate_reserved(attend: Callable, forward, cache, table, tokens, active, *, max_new_tokens: int):
    """`generate` over a dense cache, in the same loop; the table, with a page for each row, counts the tokens."""

    def run(weights, tokens, step, cache):
        model = forward.func.decoder(weights)
        hidden, cache = model(tokens, step, cache, attend if model.scan_layers else attend_own)
        return model.logits(hidden), cache

    def attend_own(q, k, v, caches, step, *, layer, **options):
        out, cache = attend(q, k, v, caches[layer], step, layer=0, **options)
        return out, (*caches[:layer], cache, *caches[layer + 1 :])

    return decode(
        jax.tree_util.Partial(run, *forward.args), cache, table, tokens, active, max_new_tokens=max_new_tokens
    )


def attend_cudnn(q, k, v, cache: DenseCache, step, *, layer, scale, **options):
    """`attend_dense` for one token per row through cuDNN, which reads the cells that are filled and no others."""
    if given := [name for name, value in options.items() if value is not None]:
        raise NotImplementedError(f"expected a model without {given[0]}, got {options[given[0]]}")
    row, position = jnp.arange(q.shape[0]), step.positions
    cache = DenseCache(cache.k.at[layer, row, position].set(k), cache.v.at[layer, row, position].set(v))
    out = jax.nn.dot_product_attention(
        q[:, None], cache.k[layer], cache.v[layer], scale=scale, key_value_seq_lengths=position + 1,
        implementation="cudnn",
    )  # fmt: skip
    return out[:, 0], cache


# --- Whether it is right ----------------------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> dict[str, Any]:
    """How many greedy tokens of a small float32 model differ from those of its dense cache, on these devices."""
    rows, new_tokens = 4, 40
    case = Case(SHAPES["tiny"].config(None), (1,) * rows, new_tokens, args.scan_layers, dtype="float32")
    first = np.random.default_rng(3).choice(case.config.vocab_size, rows, replace=False).astype(np.int32)
    with jax.default_matmul_precision("highest"):
        prompts = first[:, None].tolist()
        expected = np.array(generate_dense(random_arrays(forward_shapes(case)), prompts, new_tokens, (), jnp.float32))
        different = {"1": int((greedy_tokens(case, first) != expected).sum())}
        if args.devices > 1:
            on_several = dataclasses.replace(case, split=split_heads(args.devices))
            different[str(args.devices)] = int((greedy_tokens(on_several, first) != expected).sum())
    print(f"of {rows} rows of {new_tokens} tokens differ, by devices: {different}", flush=True)
    return {"rows": rows, "new_tokens": new_tokens, "distinct": len(np.unique(expected)), "different": different}


def greedy_tokens(case: Case, first: np.ndarray) -> np.ndarray:
    """Int32 [B, n]: the tokens that follow the first one of each row."""
    forward, cache, table = (
        random_arrays(forward_shapes(case)),
        random_arrays(paged_cache_shapes(case)),
        BlockTable.create(*case.table_sizes),
    )
    if case.split is not None:
        table = sharding.place(case.split.mesh, table, whole(table))
    result = generate(
        forward, cache, table, jnp.array(first), jnp.ones(first.size, bool), max_new_tokens=case.num_steps
    )
    return np.asarray(result.check().tokens)


if __name__ == "__main__":
    main()
