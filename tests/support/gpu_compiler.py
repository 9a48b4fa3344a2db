"""XLA's compiler for GPUs on a host that has none: it refuses what lowering lets pass."""

import functools
import importlib
from importlib import metadata
from typing import Any, NamedTuple

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from lowering import cuda_device

from pallas_kernels.device import Device


class GPU(NamedTuple):
    kind: str
    capability: tuple[int, int]
    processors: int
    shared_memory_kib: int  # of a processor; a block may have one less


GPUS = {  # a small one, whose kernels are Ampere's too, and a large one
    "L4": GPU("NVIDIA L4", (8, 9), 58, 100),
    "H200": GPU("NVIDIA H200", (9, 0), 132, 228),
}

# The share of all cases that isn't marked `full`: every kernel, GPU, layout and kind of dtype; names of
# pallas_kernels.cases. test_samples says what it covers.
SAMPLE = {
    ("paged_decode", "L4"): (
        "64 x 4096",
        "1 x 4096, Llama 3 8B, int8",
        "Gemma 3 4B, window",
        "Falcon 7B, one kv head",
        "64 x 4096, page 1",
        "64 x 4096, HND",
        "64 x 4096, vllm",
        "64 x 4096, float8_e4m3fn",
    ),
    ("paged_decode", "H200"): (
        "gpt-oss 20B, sinks",
        "1 x 4096, Gemma 2 9B",
        "64 x 4096, page 256",
        "64 x 4096, head_major",
        "64 x 4096, int8",
        "64 x 4096, float8_e5m2",
    ),
    ("paged_prefill", "L4"): ("fresh", "drafts"),
    ("paged_prefill", "H200"): ("chunk", "mixed"),
    ("paged_cascade", "L4"): ("64 x 4096, int8",),
    ("paged_cascade", "H200"): ("32 x 8448, 8192 shared", "64 x 4096, vllm"),
}
WRITE_SAMPLE = {  # which way, dtype and layout
    ("xla", "float32", "NHD"),
    ("xla", "float8_e4m3fn", "HND"),
    ("triton", "bfloat16", "vllm"),
    ("triton", "int8", "head_major"),
}


def on_gpus(kernel: str, cases: dict) -> list:
    """A parameter (GPU, case) for each GPU and each of the cases, which have names."""
    strangers = {name for (of, _), names in SAMPLE.items() if of == kernel for name in names} - cases.keys()
    assert not strangers, f"no such cases: {strangers}"
    return [
        pytest.param(gpu, case, id=f"{gpu}-{name}", marks=() if name in SAMPLE[kernel, gpu] else pytest.mark.full)
        for gpu in GPUS
        for name, case in cases.items()
    ]


needs_gpu_compiler = pytest.mark.skipif(
    not {"jax-cuda12-pjrt", "jax-cuda13-pjrt"} & {found.name for found in metadata.distributions()},
    reason="needs XLA's compiler for CUDA and no GPU: install the extra gpu-compiler, then run with JAX_PLATFORMS=cpu",
)


def use_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The kernels' settings become those of this GPU."""
    gpu = GPUS[name]
    device = Device(gpu.processors, gpu.shared_memory_kib << 10, gpu.kind)
    for kernel in ("paged_cascade", "paged_decode", "paged_prefill"):
        module = importlib.import_module(f"pallas_kernels.{kernel}.triton")
        monkeypatch.setattr(module, "current_device", lambda _=None: device)


def compile_for(name: str, function, *arguments, donate_argnums=()) -> Any:  # jax.stages.Compiled
    """`jax.jit(function)` for this GPU; arguments are arrays or `jax.ShapeDtypeStruct`s.

    It is exported first: lowering a kernel takes a GPU from the mesh in scope, and compiling takes another way to it.
    """
    leaves, tree = jax.tree.flatten(arguments)
    flat = jax.jit(lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves))))
    kernels = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    with cuda_device():
        exported = jax.export.export(flat, platforms=("cuda",), disabled_checks=[kernels])(*leaves)
    place = SingleDeviceSharding(_topology(GPUS[name]).devices[0])
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place) for leaf in leaves]
    sizes = [len(jax.tree.leaves(argument)) for argument in arguments]
    donated = [sum(sizes[:i]) + n for i in donate_argnums for n in range(sizes[i])]
    lowered = jax.jit(exported.call, donate_argnums=donated).lower(*shapes)
    return lowered.compile({"xla_gpu_autotune_level": "0"})  # there is nothing to time


@functools.cache
def _topology(gpu: GPU) -> topologies.TopologyDescription:
    major, minor = gpu.capability
    config = f"""
        platform_name: "CUDA"
        device_description_str: "{gpu.kind}"
        dnn_version_info {{ major: 9 minor: 10 }}
        gpu_device_info {{
            cuda_compute_capability {{ major: {major} minor: {minor} }}
            core_count: {gpu.processors}
            shared_memory_per_core: {gpu.shared_memory_kib << 10}
            shared_memory_per_block_optin: {gpu.shared_memory_kib - 1 << 10}
            shared_memory_per_block: 49152
            threads_per_warp: 32
            threads_per_block_limit: 1024
            threads_per_core_limit: 1536
            registers_per_block_limit: 65536
            registers_per_core_limit: 65536
            fpus_per_core: 128
            block_dim_limit_x: 2147483647
            block_dim_limit_y: 65535
            block_dim_limit_z: 65535
            clock_rate_ghz: 1.7
            memory_bandwidth: 2000000000000
            l2_cache_size: 41943040
            device_memory_size: 80000000000
        }}
    """
    return topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
