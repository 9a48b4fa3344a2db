"""The device that a kernel will run on, as far as a choice of configuration depends on it."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax

# By compute capability, from the CUDA programming guide; 64 for others, as an AMD compute unit has.
_SHARED_MEMORY_KIB = {"8.0": 164, "8.6": 100, "8.7": 164, "8.9": 100, "9.0": 228, "10.0": 228, "10.3": 228, "12.0": 100}


class Device(NamedTuple):
    """What a choice depends on."""

    processors: int
    shared_memory: int  # bytes for each processor
    kind: str = ""  # its name, under which it was tuned
    ptx: bool = True  # whether it takes instructions in NVIDIA's notation


INTERPRETED = Device(processors=2, shared_memory=164 << 10, ptx=False)  # every program costs time there


def current_device(platform: str | None = None) -> Device:
    """The GPU at hand; where there is none, as in lowering for one from another host, a middling one.

    Args:
        platform: "cuda" or "rocm", which a program is lowered for; None is that of the GPU at hand, or "cuda".
    """
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    if not gpus:
        return Device(processors=108, shared_memory=164 << 10, ptx=platform != "rocm")
    capability = str(getattr(gpus[0], "compute_capability", ""))
    is_nvidia = re.fullmatch(r"\d+\.\d+", capability) is not None  # AMD's are like "gfx942"
    return Device(
        processors=gpus[0].core_count,
        shared_memory=_SHARED_MEMORY_KIB.get(capability, 64) << 10,
        kind=gpus[0].device_kind,
        ptx=is_nvidia if platform is None else platform == "cuda",
    )
