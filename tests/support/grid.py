"""The grid of shapes, dtypes and devices that kernels and their settings are tested on, and samples that cover it.

A sample runs by default, for what takes time is each further program; the rest of a grid is marked `full`.
"""

import itertools

import pytest

from pallas_kernels.device import Device

HEADS = [(4, 4), (8, 2), (5, 1), (7, 1), (12, 2), (14, 2), (16, 1), (64, 8), (71, 1)]
DIMS = [(16, 16), (64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256), (192, 128)]
PAGE_SIZES = [1, 5, 8, 16, 32, 64, 128, 256]
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16"),
          ("bfloat16", "float32"), ("float16", "bfloat16")]  # fmt: skip
QUANTISED = [*itertools.product(("float32", "bfloat16", "float16"), ("int8", "float8_e4m3fn", "float8_e5m2"))]
LAYOUTS = ["NHD", "HND", "head_major", "vllm"]

DEVICES = {  # processors and shared memory
    "H200": Device(132, 228 << 10),
    "A100": Device(108, 164 << 10),
    "L4": Device(58, 100 << 10),
    "MI300": Device(304, 64 << 10),
}
every_device = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


def sampled(cases, default):
    """A parameter for each of the cases, which have names; those that `default` doesn't name are marked `full`."""
    assert cases.keys() >= set(default), f"no such cases: {set(default) - cases.keys()}"
    return [
        pytest.param(case, id=name, marks=() if name in default else pytest.mark.full) for name, case in cases.items()
    ]


def crossed(*axes):
    """A parameter for each element of the product of axes; all are marked `full` but a few that cover every axis."""
    few = {tuple(i % len(axis) for axis in axes) for i in range(max(map(len, axes)))}
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, at, strict=True)),
            id="-".join(_name(axis[i]) for axis, i in zip(axes, at, strict=True)),
            marks=() if at in few else pytest.mark.full,
        )
        for at in itertools.product(*(range(len(axis)) for axis in axes))
    ]


def is_default(parameter):
    return all(mark.name != "full" for mark in parameter.marks)


def _name(value):
    return getattr(value, "__name__", str(value))
