"""Starts the process that worker processes are forked from (see `zygote`), forks workers, and ends them all."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Literal

from flashinfer_trace.isolation import zygote

__all__ = ["Start", "Zygote", "available"]

#: How the process that others are forked from comes to be; see `Zygote`.
Start = Literal["spawn", "fork"]

#: Seconds that it may take to import torch, on a busy machine with cold disks.
START_SECONDS = 300.0

#: Of each pipe to a worker; the system may grant less.
BUFFER_BYTES = 1 << 20

#: Environment variables that it gets when it is spawned; credentials are not among them.
ENVIRONMENT = ("DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")


def available() -> bool:
    """Whether this platform can fork worker processes (Windows cannot)."""
    return hasattr(os, "fork") and hasattr(socket, "send_fds")


class Zygote:
    """The process that worker processes are forked from, as the harness sees it.

    Args:
        start: ``spawn`` runs a new interpreter, which knows nothing of this process and takes a second or two to
            import torch. ``fork`` copies this process, which takes milliseconds: for a program that has imported torch
            and not yet what no reference should read, and that runs no other thread.
    """

    def __init__(self, start: Start = "spawn") -> None:
        if not available():
            raise RuntimeError("worker processes need os.fork and Unix sockets, which this platform has not")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = None if start == "fork" else _spawn(theirs)
            self._pid = self._process.pid if self._process is not None else _fork(theirs)
        ours.settimeout(START_SECONDS)
        self._control = ours
        try:
            self._reply()
        except BaseException:
            self.close()
            raise

    def fork(self, memory_bytes: int, output_bytes: int, threads: int) -> tuple[socket.socket, int]:
        """Forks a worker with these limits: the pipe to it, and its process id."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = zygote.COMMAND.pack(zygote.FORK, 0, memory_bytes, output_bytes, threads)
            socket.send_fds(self._control, [command], [theirs.fileno()])
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            return ours, self._reply()

    def end(self, pid: int, *, reap: bool) -> int:
        """Ends a worker: its status as `os.waitpid` gives it, or -1 if it was ended by this call.

        With `reap` it gets a moment to end by itself, because its pipe was seen closed.
        """
        self._control.sendall(zygote.COMMAND.pack(zygote.REAP if reap else zygote.KILL, pid, 0, 0, 0))
        return self._reply()

    def close(self) -> None:
        """Ends the process and all workers."""
        self._control.close()
        if self._process is not None:
            self._process.wait(timeout=30)
        else:
            os.waitpid(self._pid, 0)

    def _reply(self) -> int:
        data = self._control.recv(zygote.REPLY.size)
        if len(data) < zygote.REPLY.size:
            raise RuntimeError("the process that worker processes are forked from has ended; see its error above")
        (value,) = zygote.REPLY.unpack(data)
        return int(value)


def _spawn(pipe: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", zygote.__name__, str(pipe.fileno())],
        cwd=Path(__file__).resolve().parents[2],  # `-m` looks there first: the same package as this one
        env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | {"OMP_NUM_THREADS": "1"},
        pass_fds=[pipe.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process, which then ends the others
    )


def _fork(pipe: socket.socket) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's idle threads: OpenBLAS ends them before a fork
        pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for name in set(os.environ) - set(ENVIRONMENT):
            del os.environ[name]
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        # Above all this process's own end of the pipe: a copy of it here would keep the pipe open for ever.
        os.closerange(3, pipe.fileno())
        os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        zygote.main(pipe.fileno())
    finally:
        os._exit(0)
