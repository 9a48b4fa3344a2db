"""How the decode kernel cuts its work: tile, warps, pipeline stages and partitions, from shapes and the device."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import itertools
import json
import re
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.layouts import LAYOUTS
from pallas_kernels.quantisation import is_quantised, product_dtype

TUNED = importlib.resources.files("pallas_kernels.paged_decode") / "tuned"  # a file for each kind of device

_RESIDENT = 4  # programs on a processor at a time: so many hide the latency of memory from each other
_FEW = 8  # rows × kv heads are few if there are so many times as many processors
_FAR = 8  # times as many rows, from which on a tuned entry says nothing of a shape
_WIDE = 128  # dims of a head, above which few rows want more warps
_LARGE_ACCUMULATOR = 8192  # elements, of which one program on a processor does: merging more parts takes longer
_PARTITIONS_PER_ROW = 1.45  # of many rows: at 1.5 those of mean length would be cut in two, at 1 long ones would last


class Shape(NamedTuple):
    """What a choice depends on beside the device: of a decode step, what is known while it is traced."""

    group: int
    head_dim: int
    v_head_dim: int
    q_dtype: str
    kv_dtype: str
    layout: str
    kv_rows: int  # rows × kv heads: the programs if no row is cut


@dataclasses.dataclass(frozen=True)
class Config:
    """One way to run the kernel."""

    tile: int  # tokens folded at once; a power of two, at least 16
    num_warps: int
    num_stages: int  # of the software pipeline: the page ids take two, each tile of K and V in flight two more
    programs_per_processor: int = _RESIDENT  # rows are partitioned until there are so many
    merged_lanes: int = 16  # heads of a group × parts that are merged at once


def choose(config: Config | None, shape: Shape, device: Device) -> Config:
    """The config to run with. The first of these that there is:

    1. `config`, the caller's own;
    2. the entry tuned for this kind of device whose shape is the nearest: `kv_rows` by the least ratio, below 8, all
       else equal. Unless `kv_rows` is equal as well, it has the heuristic's number of programs, which depends on little
       else;
    3. the heuristic.

    Tuned entries are data: `tuned/nvidia_h200.json` holds those of an "NVIDIA H200", as `examples/benchmarks/tune.py`
    has measured them. It is read when it is first asked for; a device without a file is none the worse.
    """
    return config or nearest(tuned(device.kind), shape, device) or heuristic(shape, device)


def nearest(entries: dict[Shape, Config], shape: Shape, device: Device) -> Config | None:
    """What the entry nearest to the shape says of it, or None if none is near in `kv_rows` and alike in all else."""
    shape = as_tuned(shape)
    kv_rows = max(1, shape.kv_rows)  # a batch may be empty
    ratios = {
        entry: max(entry.kv_rows / kv_rows, kv_rows / entry.kv_rows)
        for entry in entries
        if entry._replace(kv_rows=shape.kv_rows) == shape
    }
    found = min(ratios, key=ratios.__getitem__, default=None)
    if found is None or ratios[found] >= _FAR:
        return None
    if found.kv_rows == shape.kv_rows:
        return entries[found]
    programs = heuristic(shape, device).programs_per_processor
    return dataclasses.replace(entries[found], programs_per_processor=programs)


def as_tuned(shape: Shape) -> Shape:
    """Layouts that hold a token's head in one piece are read alike, so that one entry serves all of them."""
    return shape._replace(layout="NHD") if all(axes.endswith("H") for axes in LAYOUTS[shape.layout]) else shape


@functools.cache
def tuned(kind: str) -> dict[Shape, Config]:
    """All entries for a kind of device, from its file if there is one."""
    file = TUNED / file_name(kind)
    if not file.is_file():
        return {}
    entries = json.loads(file.read_text(encoding="utf-8"))["entries"]
    return {as_tuned(Shape(**entry["shape"])): Config(**entry["config"]) for entry in entries}


def file_name(kind: str) -> str:
    """The name of the file with the entries for a kind of device: "NVIDIA H200" has nvidia_h200.json."""
    return "_".join(re.findall("[a-z0-9]+", kind.lower())) + ".json"


def heuristic(shape: Shape, device: Device) -> Config:
    """A sound choice for any shape and GPU.

    The tiles of K and V of all programs that are meant to be resident fit in a processor's shared memory, and wide
    heads and groups spread their accumulator over more warps. Groups of more than 16 heads do more with each key: fewer
    programs with larger tiles, whose parts are merged sooner. Few rows take them too, as their time goes to latency:
    one program of four warps on a processor takes 10 to 45 % less than four smaller ones for one row of 4096 tokens on
    an H200; with heads of 256 dims two of eight warps take a fifth less than that. float32 products run without matrix
    units and want small tiles. Many rows are cut a little, so that the long ones among them do not last when the others
    are done.
    """
    in_float32 = product_dtype(shape.q_dtype, shape.kv_dtype) == "float32"
    is_narrow = is_quantised(shape.kv_dtype)
    lanes = max(16, 1 << (shape.group - 1).bit_length())
    accumulator = lanes * max(shape.head_dim, shape.v_head_dim)
    are_few = not in_float32 and shape.kv_rows * _FEW <= device.processors
    are_wide = not is_narrow and max(shape.head_dim, shape.v_head_dim) > _WIDE
    programs = _RESIDENT if lanes == 16 else max(1, min(_RESIDENT, _LARGE_ACCUMULATOR // accumulator))
    if are_few:
        programs = 2 if are_wide else 1
    largest_tile = 16 if in_float32 else 64 if is_narrow or (lanes == 16 and not are_few) else 128
    room = device.shared_memory // max(3, programs)  # one program has two tiles under way, and queries
    tile = 16
    while tile < largest_tile and 2 * tile * _token_bytes(shape) <= room:
        tile *= 2
    # What is packed is turned within a warp; what is quantised gives warps more to do than to wait for.
    num_warps = max(1, tile // (64 if shape.layout == "vllm" else 16 if is_narrow else 32))
    if are_few:
        num_warps = max(8 if are_wide and tile >= 64 else 4, num_warps)
    while num_warps < 8 and accumulator > 2048 * num_warps * (1 if not in_float32 else 0.5):
        num_warps *= 2
    if shape.kv_rows > programs * device.processors:
        programs = max(programs, int(_PARTITIONS_PER_ROW * shape.kv_rows) // device.processors)
    merged_lanes = 32 if are_few and not is_narrow else 16
    return Config(tile, num_warps, 5 if is_narrow else 4, programs, merged_lanes)


def candidates(shape: Shape, device: Device) -> list[Config]:
    """What is worth timing for a shape: the heuristic's choice first, then a grid around what such choices are.

    Left out are those of which not one program's tiles fit in a processor's shared memory, and those whose warps would
    share a tile too finely for matrix units, or too coarsely for registers.
    """
    first = heuristic(shape, device)
    grid = (
        Config(tile, num_warps, num_stages, programs, first.merged_lanes)
        for tile, num_warps, num_stages, programs in itertools.product(
            (32, 64, 128), (1, 2, 4), (3, 4, 5, 7), sorted({1, 2, 4, 8, 12, first.programs_per_processor})
        )
        if 16 <= tile // num_warps <= 64
        # The tile at hand and those in flight; see Config.num_stages.
        and tile * _token_bytes(shape) * (num_stages // 2) < device.shared_memory
    )
    return list(dict.fromkeys((first, *grid)))


def _token_bytes(shape: Shape) -> int:
    return (shape.head_dim + shape.v_head_dim) * jnp.dtype(shape.kv_dtype).itemsize


def num_partitions(config: Config, num_kv_heads: int, device: Device) -> int:
    """Partitions wanted over all rows: so many that the programs of all kv heads are as many as the config says."""
    return max(1, config.programs_per_processor * device.processors // num_kv_heads)
