"""Process groups without other ranks: PyTorch's own fake backend, and SGLang's ways around ``torch.distributed``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tools.dry_run import tensors

_COMMUNICATORS = "sglang.srt.distributed.device_communicators"
#: Functions that ask whether the GPUs of a node reach each other: those of one HGX board do.
_QUESTIONS = (
    *("can_use_custom_all_reduce_with_nvlink", "can_use_custom_all_reduce_v2", "is_full_nvlink"),
    *("gpu_p2p_access_check", "is_weak_contiguous"),
)


def install() -> None:
    """Makes every group one of the fake backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    module: Any = dist
    real_init, real_new = module.init_process_group, module.new_group

    def init(backend: Any = None, init_method: Any = None, timeout: Any = None, **kwargs: Any) -> Any:
        size, rank = max(kwargs.get("world_size", 1), 1), max(kwargs.get("rank", 0), 0)
        return real_init(backend="fake", store=FakeStore(), world_size=size, rank=rank)

    def new(ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        return real_new(ranks, backend="fake")

    module.init_process_group, module.new_group = init, new
    module.is_nccl_available = module.distributed_c10d.is_nccl_available = lambda: True
    module.barrier = module.monitored_barrier = lambda *args, **kwargs: None
    _install_symmetric_memory()
    module.all_gather_object, module.broadcast_object_list = _gathered, lambda *args, **kwargs: None


def _install_symmetric_memory() -> None:
    """Memory that the GPUs of one board map into each other; its switch multicasts."""
    from torch._C import _distributed_c10d

    class Memory:
        """One allocation, as every rank sees it."""

        multicast_ptr, signal_pad_ptrs_dev, buffer_ptrs_dev = 1 << 41, 1 << 42, 1 << 43

        def __init__(self, tensor: Any) -> None:
            self.tensor, self.world_size, self.rank = tensor, dist.get_world_size(), dist.get_rank()
            self.buffer_ptrs = self.signal_pad_ptrs = [1 << 40] * self.world_size

        def get_buffer(self, rank: int, sizes: Any, dtype: Any, storage_offset: int = 0) -> Any:
            """The memory of a rank."""
            return torch.empty(tuple(sizes), dtype=dtype, device=self.tensor.device)

    class SymmetricMemory:
        """PyTorch's entry points."""

        signal_pad_size = 2048

        @staticmethod
        def empty_strided_p2p(size: Any, stride: Any, dtype: Any, device: Any, *group: Any) -> Any:
            """An allocation on this rank."""
            return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=device)

        @staticmethod
        def rendezvous(tensor: Any, group: Any = None) -> Memory:
            """The memory that the ranks allocated together."""
            return Memory(tensor)

    private: Any = _distributed_c10d
    private._SymmetricMemory = SymmetricMemory
    public: Any = importlib.import_module("torch.distributed._symmetric_memory")
    public.rendezvous = SymmetricMemory.rendezvous
    public.empty = lambda *size, dtype=None, device=None: torch.empty(*size, dtype=dtype, device=device)


def _gathered(found: list[Any], own: Any, group: Any = None) -> None:
    """Every rank says what this one says."""
    found[:] = [own] * len(found)


def replace_communicators(logged: Callable[[Any, str, str], Any]) -> None:
    """SGLang's custom all-reduce and NCCL, which exchange handles of memory when they start.

    Args:
        logged: is given a function, a library and a path, and returns a function that logs its calls.
    """
    state: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    state.in_the_same_node_as = lambda group, source_rank=0: [True] * dist.get_world_size(group=group)
    for name in ("custom_all_reduce", "custom_all_reduce_v2", "custom_all_reduce_utils"):
        with contextlib.suppress(ImportError):
            module: Any = importlib.import_module(f"{_COMMUNICATORS}.{name}")
            for question in _QUESTIONS:
                if hasattr(module, question):
                    setattr(module, question, lambda *args, **kwargs: True)
            if hasattr(module, "CustomAllreduce"):
                module.CustomAllreduce.create_shared_buffer = staticmethod(_shared)
                module.CustomAllreduce.close = lambda self: None
    with contextlib.suppress(ImportError):
        queue: Any = importlib.import_module(f"{_COMMUNICATORS}.shm_broadcast")
        queue.MessageQueue.create_from_process_group = staticmethod(lambda *args, **kwargs: None)
    _replace_fusion()
    wrapper: Any = importlib.import_module(f"{_COMMUNICATORS}.pynccl_wrapper")
    pynccl: Any = importlib.import_module(f"{_COMMUNICATORS}.pynccl")

    class Nccl:
        """NCCL's library: its functions exchange nothing."""

        def __init__(self, *args: Any) -> None:
            """Loads nothing: a dry run needs no library."""

        ncclGetUniqueId = staticmethod(wrapper.ncclUniqueId)
        ncclGetRawVersion = staticmethod(lambda: 22800)
        ncclGetVersion = staticmethod(lambda: "2.28.0")

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)

            def exchange(*args: Any, **kwargs: Any) -> None:
                tensors.launched(name)

            return exchange

    pynccl.NCCLLibrary = wrapper.NCCLLibrary = Nccl


def _replace_fusion() -> None:
    """FlashInfer's all-reduce that is fused with a norm: it maps memory through the driver, after SGLang tried that."""

    class SharedMemory:
        """Memory of each rank, by address."""

        def __init__(self, buf_size: int, group_size: int, *args: Any, **kwargs: Any) -> None:
            self.addresses = [(1 << 44) + rank * (1 << 36) for rank in range(group_size)]
            self.size = buf_size

        def get_buffer_ptrs_host(self) -> list[int]:
            """The addresses."""
            return self.addresses

        def get_usable_buffer_size(self) -> int:
            """Bytes."""
            return self.size

        def get_unicast_ptr(self, rank: int) -> int:
            """The memory of a rank."""
            return self.addresses[rank]

        def get_multicast_ptr(self) -> int:
            """The memory of all ranks at once: the switch of a board writes to each."""
            return 1 << 41

        def get_buffer_ptrs_dev(self) -> int:
            """Where the addresses are on the GPU."""
            return 1 << 43

        def lamport_initialize(self, rank: int, dtype: Any) -> None:
            """Writes what marks a value that has not arrived."""

    try:
        importlib.metadata.version("cuda-bindings")  # without it, flashinfer.comm cannot be imported
    except importlib.metadata.PackageNotFoundError:
        return
    with contextlib.suppress(ImportError):
        fusion: Any = importlib.import_module("sglang.srt.layers.flashinfer_comm_fusion")
        if hasattr(fusion, "_preflight_check_workspace_memory"):
            fusion._preflight_check_workspace_memory = lambda *args, **kwargs: True
    with contextlib.suppress(ImportError):
        for name in ("mnnvl", "trtllm_ar"):
            module: Any = importlib.import_module(f"flashinfer.comm.{name}")
            if hasattr(module, "SymmDeviceMemory"):
                module.SymmDeviceMemory = SharedMemory


def _shared(size: int, group: Any = None) -> list[int]:
    """Addresses of a buffer on each rank."""
    return [1 << 40] * dist.get_world_size(group=group)
