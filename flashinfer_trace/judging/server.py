"""The server of submissions: it forks their processes, and keeps those that ran known kernels. Imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashinfer_trace.judging.submission import SubmissionError
from flashinfer_trace.sandbox.fork_server import ForkServer, Service, available

#: The part of a GPU's memory that must be free for a process to be kept: libraries leave up to 7 GiB in each.
FREE = 0.5

#: Environment variables that a submission gets, and prefixes of them: what compilers and CUDA need.
ENVIRONMENT = (
    *("CC", "CXX", "HOME", "LANG", "LC_ALL", "LD_PRELOAD", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_TF32_OVERRIDE"),
    *("NVIDIA_VISIBLE_DEVICES", "PATH", "PYTHONPATH", "TMPDIR", "USER", "VIRTUAL_ENV", "XDG_CACHE_HOME"),
)
PREFIXES = (
    *("CUDA_", "DG_JIT_", "DYLD_LIBRARY_", "FLASHINFER_", "LD_LIBRARY_", "PYTORCH_", "SGLANG_DG_", "SGLANG_JIT_"),
    *("TORCH_", "TRITON_"),
)
#: Names of credentials, which it does not get, whatever they begin with.
_SECRET = re.compile("CREDENTIAL|KEY|PASSW|SECRET|TOKEN")


def passed_on(name: str) -> bool:
    return name in ENVIRONMENT or (name.startswith(PREFIXES) and not _SECRET.search(name.upper()))


SUBMISSIONS = Service("flashinfer_trace.judging.child", passed_on)


@dataclass(frozen=True)
class Idle:
    """A process that ran known kernels and waits for the next one; `libraries` were imported by it."""

    pipe: socket.socket
    pid: int
    device: str
    libraries: frozenset[str]


def library_of(request: Mapping[str, Any]) -> str:
    """The package that the known kernel of a request is imported from; empty of anybody else's kernel."""
    return str(request["kernel"]).partition(".")[0] if request["kind"] == "known" else ""


def has_room(device: str) -> bool:
    """Whether so much of a device's memory is free that processes may wait there."""
    if device == "cpu":
        return True
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return free >= FREE * total


class Server(ForkServer):
    """The process that submissions' processes are forked from.

    One that ran known kernels, and failed in nothing, waits for the next known kernel while half of the memory of its
    GPU is free: importing the libraries of kernels takes seconds, and no kernel of the dataset's own records has to be
    kept from what came before it. Anybody else's kernel has a process of its own.
    """

    def __init__(self, fork: bool = False, kernel: object | None = None) -> None:
        if not available():
            raise SubmissionError("the judge needs os.fork and Unix sockets, which this platform lacks")
        self._idle: list[Idle] = []
        super().__init__(SUBMISSIONS, fork=fork, payload=kernel)

    @property
    def keeps_apart(self) -> bool:
        """Whether the system keeps its processes from the memory of this one (see `confine.enter_landlock_domain`)."""
        return bool(self.greeting)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def keep(self, idle: Idle) -> None:
        self._idle.append(idle)

    def take(self, library: str, device: str) -> Idle | None:
        """A process for a kernel of that library: best of all one that has imported it. None if none waits."""
        while True:
            fitting = [one for one in self._idle if library and one.device == device]
            if not fitting:
                return None
            chosen = max(fitting, key=lambda one: library in one.libraries)
            with contextlib.suppress(ValueError):  # another thread took it
                self._idle.remove(chosen)
                return chosen

    def close(self) -> None:
        for one in self._idle:
            one.pipe.close()
        self._idle.clear()
        super().close()


#: One server for all judgments of this process; the lock is for its threads.
_SHARED: list[Server] = []
_LOCK = threading.Lock()


def shared_server() -> Server:
    """The server of this process; a new one if a submission or an interrupt ended the last."""
    with _LOCK:
        if not _SHARED or not _SHARED[-1].alive:
            _SHARED.append(Server())
            atexit.register(_SHARED[-1].close)
        return _SHARED[-1]


def _unlock() -> None:
    global _LOCK  # a forked copy of this process has no thread that would release it
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)
