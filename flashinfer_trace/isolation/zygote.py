"""The process that worker processes are forked from: it has imported torch, and runs no reference itself.

`worker` starts it with ``python -m flashinfer_trace.isolation.zygote DESCRIPTOR`` in an interpreter of its own, so that
neither the harness nor an oracle is in the memory of a worker. It has one thread, and ends with the process that
started it: then its pipe closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import platform
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

__all__ = ["COMMAND", "FORK", "KILL", "REAP", "REPLY", "main"]

#: A command: what to do, the worker's process id, and its limits (memory, output, threads).
COMMAND = struct.Struct("<cqQQI")
FORK, KILL, REAP = b"F", b"K", b"R"

#: Seconds that a worker whose pipe is closed may take to end.
GRACE = 0.5

#: The answer: the process id of a new worker, or the status that `os.waitpid` gave of one that was ended.
REPLY = struct.Struct("<q")


def main(descriptor: int) -> None:
    """Answers commands until the pipe is closed."""
    import torch

    from flashinfer_trace.isolation import state
    from flashinfer_trace.isolation.child import serve

    torch.set_num_threads(1)  # a fork copies one thread: others must not have been started
    _warm_up(torch)
    baseline = state.settings(), state.functions()
    _keep_freed_memory()
    gc.freeze()  # a collection in a worker would touch, and so copy, all memory that it shares
    control = socket.socket(fileno=descriptor)
    workers: set[int] = set()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who asked has ended, as after an interrupt
        control.sendall(REPLY.pack(os.getpid()))
        _answer(control, workers, functools.partial(serve, baseline=baseline))
    for pid in workers:
        _end(pid, 0.0)


def _answer(control: socket.socket, workers: set[int], serve: Callable[[int, int, int, int], None]) -> None:
    """Forks and ends workers as it is told, until the pipe is closed; those that run are in `workers`."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if len(data) < COMMAND.size:
            break
        command, pid, memory, output, threads = COMMAND.unpack(data)
        if command == FORK:
            pid = os.fork()
            if pid == 0:
                serve(descriptors[0], memory, output, threads)
                os._exit(1)
            os.close(descriptors[0])
            workers.add(pid)
            control.sendall(REPLY.pack(pid))
        else:
            control.sendall(REPLY.pack(_end(pid, GRACE if command == REAP else 0.0)))
            workers.discard(pid)


def _end(pid: int, grace: float) -> int:
    """Ends a worker that does not end by itself; the status that `os.waitpid` gave, or -1 if it was ended here."""
    deadline = time.monotonic() + grace
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -1
        time.sleep(0.002)


def _keep_freed_memory() -> None:
    """Has glibc reuse large blocks: the kernel need not map and clear them for each call."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its maximum
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def _warm_up(torch: object) -> None:
    """Loads what torch loads when first used: a worker opens no files."""
    from typing import Any, cast

    t = cast(Any, torch)
    for dtype in (t.float32, t.bfloat16):
        a = t.ones(4, 4, dtype=dtype)
        t.einsum("ij,jk->ik", a, a @ a).softmax(-1).sum().item()
    t.linalg.vector_norm(t.ones(4))
    repr(t.ones(1))
    t.get_default_device()


if __name__ == "__main__":
    main(int(sys.argv[1]))
