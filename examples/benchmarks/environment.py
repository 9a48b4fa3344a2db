"""Where and when a measurement was made, for the head of its results file."""

import datetime
import importlib.metadata
import os
import platform

import jax


def describe(*packages: str) -> dict[str, object]:
    """Date, device, processors, XLA's flags, and the versions of JAX and of those packages that are installed."""
    versions = {}
    for package in ("jax", "jaxlib", *packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = jax.devices()[0]
    return {
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind if device.platform != "cpu" else _processor_name(),
        "platform": device.platform,
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
