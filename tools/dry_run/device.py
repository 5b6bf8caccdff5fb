"""torch.cuda as GPUs that are not there. Nothing here knows SGLang."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet and the CUDA programming guide.

    Attributes:
        name: as the driver reports it.
        capability: compute capability.
        multiprocessors, memory, l2_cache: how many; bytes.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    l2_cache: int

    @property
    def architecture(self) -> str:
        """Such as ``sm_90``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


#: The GPUs that can be made, by the name that ``--gpu`` takes; the recorded runs are of an H200.
GPUS = {
    "sm90": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * GIB, 50 << 20),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 141 * GIB, 50 << 20),
    "sm100": Gpu("NVIDIA B200", (10, 0), 148, 180 * GIB, 126 << 20),
}
#: Shared memory of a block, at most, and of a multiprocessor: the same for both, in bytes.
SHARED, SHARED_MULTIPROCESSOR = 232448, 233472


class Nothing(contextlib.ContextDecorator):
    """A stream, event, graph, pool or guard: whatever is called on it, nothing happens."""

    cuda_stream = stream_id = device_index = priority = cuda_event = 0
    device = torch.device("cuda", 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what the real one takes."""

    def query(self) -> bool:
        """Everything is done."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds; every tuner sees the same."""
        return 1.0

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class Stream(Nothing):
    """``torch.cuda.Stream``. SGLang replaces the method while it captures a graph."""

    def wait_stream(self, stream: Any) -> None:
        """Everything is done."""


class Event(Nothing):
    """``torch.cuda.Event``."""


class Graph(Nothing):
    """``torch.cuda.CUDAGraph``: what it captures runs once, under Python; a replay launches what no call shows."""


#: How many GPUs there are.
_count = [1]


def set_count(count: int) -> None:
    """Makes `torch` believe in so many GPUs from now on."""
    _count[0] = count
    torch.cuda.default_generators = tuple(CudaGenerator() for _ in range(count))  # type: ignore[assignment]


def _counted(*args: Any) -> int:
    return _count[0]


def install(gpu: Gpu, folder: Path) -> None:
    """Makes `torch` believe in one GPU, which is the current one.

    Args:
        folder: where the device guard is compiled, once for each release of PyTorch.
    """
    ctypes.CDLL(str(_guard(folder)), mode=ctypes.RTLD_GLOBAL)
    _cuda(gpu)
    _memory_counters(gpu)
    _private()
    _generators()
    _elsewhere()
    set_count(1)


def properties(gpu: Gpu) -> SimpleNamespace:
    """The result of ``torch.cuda.get_device_properties``."""
    return SimpleNamespace(
        **{"major": gpu.capability[0], "minor": gpu.capability[1], "name": gpu.name, "total_memory": gpu.memory},
        **{"multi_processor_count": gpu.multiprocessors, "L2_cache_size": gpu.l2_cache, "warp_size": 32},
        **{"shared_memory_per_block_optin": SHARED, "shared_memory_per_block": 49152},
        **{"shared_memory_per_multiprocessor": SHARED_MULTIPROCESSOR, "regs_per_multiprocessor": 65536},
        **{"max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "uuid": "GPU-0", "pci_bus_id": 1},
        **{"is_integrated": False, "is_multi_gpu_board": False, "gcnArchName": "", "clock_rate": 1980000},
    )


def install_command(gpu: Gpu, folder: Path) -> None:
    """Writes an ``nvidia-smi`` that knows what SGLang asks it, and puts it first among the commands of this process."""
    path = folder / "nvidia-smi"
    answers = {"memory.total": gpu.memory >> 20, "compute_cap": ".".join(map(str, gpu.capability))}
    cases = "".join(f"*{question}*) echo {answer};; " for question, answer in answers.items())
    path.write_text(f'#!/bin/sh\ncase "$*" in {cases}*) exit 1;; esac\n', encoding="utf-8")
    path.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


def _cuda(gpu: Gpu) -> None:
    cuda: Any = torch.cuda
    stream = Stream()
    constants = {
        **{"is_available": True, "current_device": 0, "is_initialized": True},
        **{"get_device_name": gpu.name, "get_device_capability": gpu.capability, "get_arch_list": [gpu.architecture]},
        **{"get_device_properties": properties(gpu), "is_bf16_supported": True, "can_device_access_peer": True},
        **{"current_stream": stream, "default_stream": stream, "is_current_stream_capturing": False},
        **{"current_blas_handle": 0, "graph_pool_handle": (0, 0), "initial_seed": 0, "utilization": 0},
    }
    ignored = (
        *("synchronize", "empty_cache", "_lazy_init", "init", "manual_seed", "manual_seed_all", "set_device", "seed"),
        *("reset_peak_memory_stats", "ipc_collect", "set_stream", "seed_all", "set_rng_state", "set_sync_debug_mode"),
        *("_check_capability", "_sleep", "reset_max_memory_allocated"),
    )
    for name, value in {**constants, **dict.fromkeys(ignored)}.items():
        setattr(cuda, name, _constant(value))
    cuda.device_count = _counted
    cuda.get_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8)
    cuda.cudart = Nothing
    cuda.Stream, cuda.ExternalStream, cuda.Event, cuda.CUDAGraph = Stream, Stream, Event, Graph
    cuda.device = cuda.stream = cuda.device_of = cuda.StreamContext = cuda.graph = Nothing


def _constant(value: Any) -> Any:
    def constant(*args: Any, **kwargs: Any) -> Any:
        return value

    return constant


def _memory_counters(gpu: Gpu) -> None:
    used = GIB
    constants = {
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), used),
        **{"memory_stats": {}, "memory_summary": "", "mem_get_info": (gpu.memory - used, gpu.memory)},
    }
    for name, value in constants.items():
        setattr(torch.cuda, name, _constant(value))


def _private() -> None:
    private: Any = torch._C
    private._cuda_getDeviceCount = _counted
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice", "_cuda_clearCublasWorkspaces"):
        setattr(private, name, _constant(0))
    private._cuda_getCompiledVersion = _constant(13000)
    private._cuda_isCurrentStreamCapturing = _constant(False)


class CudaGenerator:
    """As FlashInfer reads it: 16 bytes of state, the seed and the offset."""

    device = torch.device("cuda", 0)
    get_state = staticmethod(lambda: torch.zeros(16, dtype=torch.uint8))
    set_state = manual_seed = staticmethod(lambda value: None)
    initial_seed = staticmethod(lambda: 0)


def _generators() -> None:
    real = torch.Generator

    class IsGenerator(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, real)

    class Generator(metaclass=IsGenerator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return real("cpu")

    torch.Generator = Generator  # type: ignore[misc]


def _elsewhere() -> None:
    module: Any = torch
    module.Stream, module.Event, module.version.cuda = Stream, Event, "13.0"
    module.backends.cuda.is_built = _constant(True)
    module.backends.cuda.preferred_blas_library = _constant(None)
    module.backends.cudnn.version = _constant(91300)
    module.accelerator.device_count = _counted
    accelerator = {"is_available": True, "current_device_index": 0, "synchronize": None}
    for name, value in {**accelerator, "current_accelerator": torch.device("cuda")}.items():
        setattr(module.accelerator, name, _constant(value))
    real_module = module.get_device_module
    module.get_device_module = lambda device=None: module.cuda if device is None else real_module(device)
    module.compiler.cudagraph_mark_step_begin = _constant(None)
    module.Tensor.pin_memory = lambda self, *args, **kwargs: self
    module.Tensor.is_pinned = _constant(False)


#: A CUDA device guard that does nothing, for a PyTorch that was built without CUDA, and the functions of CUDA's runtime
#: that Python calls by name: they succeed and do nothing.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::DeviceGuardImplRegistrar registrar(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
extern "C" const char* cudaGetErrorString(int) { return "no error"; }
extern "C" int cudaMalloc(char** address, size_t size) {
    static char* next = reinterpret_cast<char*>(0x710000000000);
    *address = next;
    next += (size + 4095) / 4096 * 4096;
    return 0;
}
"""
_RUNTIME = (
    *("cudaSetDevice", "cudaDeviceSynchronize", "cudaDeviceReset", "cudaFree", "cudaMemset", "cudaMemcpy"),
    *("cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"),
)


def _guard(folder: Path) -> Path:
    library = folder / f"torch-{torch.__version__}" / "libcudart.so.13"
    if not library.exists():
        from torch.utils.cpp_extension import include_paths, library_paths

        library.parent.mkdir(exist_ok=True)
        source = library.with_name("guard.cpp")
        functions = [f'extern "C" int {name}(...) {{ return 0; }}' for name in _RUNTIME]
        source.write_text("\n".join([_GUARD, *functions, ""]), encoding="utf-8")
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", *(f"-I{path}" for path in include_paths())]
        command += [str(source), *(f"-L{path}" for path in library_paths()), "-lc10", "-o", f"{library}.partial"]
        subprocess.run(command, check=True)
        Path(f"{library}.partial").rename(library)
    return library
