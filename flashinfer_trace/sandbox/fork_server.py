"""The process that confined processes are forked from, for references and submissions alike: both ends of it.

It has imported torch, so each process costs milliseconds, and it runs no code of strangers itself. It has one thread,
and ends with the process that started it, because its control socket closes then. `Service` says what its processes do.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: A command: what to do, and with which process.
_COMMAND = struct.Struct("<cq")
_FORK, _KILL, _REAP = b"F", b"K", b"R"

#: The answer: first what `prepare` says; then a process id, or the status that `os.waitpid` gave.
_REPLY = struct.Struct("<q")

#: Seconds that a process whose pipe is closed may take to end.
GRACE = 0.5

#: Seconds that it may take to import torch, on a busy machine with cold disks.
START_SECONDS = 300.0

#: Of each pipe to a process; the system may grant less.
BUFFER_BYTES = 1 << 20

#: The code that a new interpreter runs.
_PROGRAM = """
import importlib, socket, sys
sys.path[0] = {!r}
importlib.import_module({!r}).main(socket.socket(fileno={!r}), {!r})
"""

#: The function that a process runs: it answers requests from the pipe, and never returns.
Serve = Callable[[socket.socket], None]


def available() -> bool:
    """Whether this platform can fork processes (Windows cannot)."""
    return hasattr(os, "fork") and hasattr(socket, "send_fds")


class ServerEnded(RuntimeError):
    """The process that others are forked from has ended, or is another process's."""


@dataclass(frozen=True)
class Service:
    """The work of a server's processes.

    Attributes:
        module: whose ``prepare(payload)`` gets the server ready, and returns a number for `ForkServer.greeting` and
            what each process runs.
        environment: which variables of the environment they get, by name. Credentials are not among them.
    """

    module: str
    environment: Callable[[str], bool]


class ForkServer:
    """A server as the process that started it sees it. Any of its threads may use it.

    Args:
        service: what its processes do.
        fork: copy this process, which takes milliseconds; it must have one thread, and neither have touched CUDA nor
            hold what strangers' code must not see. Otherwise a new interpreter imports torch in a second or two.
        payload: an object of this process for `Service.module`; needs `fork`.

    Attributes:
        alive: whether it was still there when it was last asked for something. It is not waited for before that, so it
            imports torch while the program goes on.
    """

    def __init__(self, service: Service, *, fork: bool = False, payload: object | None = None) -> None:
        if not available():
            raise RuntimeError("confined processes need os.fork and Unix sockets, which this platform lacks")
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_SECONDS)
        with theirs:
            self._process = None if fork else _spawned(service, theirs)
            self._pid = self._process.pid if self._process is not None else _forked(service, theirs, payload)
        self.alive = True
        self._greeting: int | None = None
        _SERVERS.add(self)

    @property
    def greeting(self) -> int:
        """The first message of the service.

        Raises:
            ServerEnded: it did not start. Its own standard error says why.
        """
        return self._ask(None)

    def begin(self) -> tuple[socket.socket, int]:
        """Forks a process: the pipe to it, and its process id.

        Raises:
            ServerEnded: no process can be forked any more.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = self._ask(_FORK, 0, [theirs.fileno()])
                for end in (ours, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            return ours, pid
        except BaseException:
            ours.close()
            raise

    def end(self, pid: int, *, reap: bool = False) -> int:
        """Ends a process and all that it started: its status as `os.waitpid` gives it, or -1 if this call ended it.

        With `reap` it gets a moment to end by itself, because its pipe was seen closed.

        Raises:
            ServerEnded: the server is gone, and took its processes with it.
        """
        return self._ask(_REAP if reap else _KILL, pid)

    def close(self) -> None:
        """Ends the server and all of its processes; in a copy of the process that started it, forgets it."""
        with contextlib.suppress(OSError):
            if self._owner == os.getpid():
                self._control.shutdown(socket.SHUT_RDWR)  # also for copies of the socket in forked processes
        self.alive = False
        self._control.close()
        if self._owner != os.getpid():
            return
        if self._process is not None:
            if self._greeting is None:
                self._process.kill()  # it imports torch still, and has no process
            self._process.wait(timeout=30)
        elif self._pid:
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _ask(self, command: bytes | None, pid: int = 0, descriptors: Sequence[int] = ()) -> int:
        """One command and its answer, or the greeting. An interrupt in between ends the server: the next answer would
        be that of another command."""
        if self._owner != os.getpid():
            raise ServerEnded("this process is a copy of the one that started the server; start another one")
        with self._lock:
            if command is None and self._greeting is not None:
                return self._greeting
            if not self.alive:
                raise ServerEnded("the process that others are forked from has ended")
            try:
                if self._greeting is None:
                    self._greeting = self._reply()
                if command is None:
                    return self._greeting
                if descriptors:
                    socket.send_fds(self._control, [_COMMAND.pack(command, pid)], descriptors)
                else:
                    self._control.sendall(_COMMAND.pack(command, pid))
                return self._reply()
            except BaseException as error:
                self.alive = False
                with contextlib.suppress(OSError):
                    self._control.shutdown(socket.SHUT_RDWR)
                if isinstance(error, OSError):
                    raise ServerEnded("the process that others are forked from has ended") from error
                raise

    def _reply(self) -> int:
        data = self._control.recv(_REPLY.size, socket.MSG_WAITALL)
        if len(data) < _REPLY.size:
            raise ServerEnded("the process that others are forked from has ended; see its error above")
        (value,) = _REPLY.unpack(data)
        return int(value)


#: The servers of this process. A forked copy closes its ends of them: they would keep the servers alive.
_SERVERS: weakref.WeakSet[ForkServer] = weakref.WeakSet()


def _forget() -> None:
    for server in list(_SERVERS):
        server.close()
    _SERVERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _spawned(service: Service, pipe: socket.socket) -> subprocess.Popen[bytes]:
    """A new interpreter. It reads what to do from its standard input: its command line is ``python -``, which tells a
    submission nothing."""
    root = str(Path(__file__).resolve().parents[2])  # the same package as this one
    process = subprocess.Popen(
        [sys.executable, "-"],
        cwd=root,
        env={name: os.environ[name] for name in os.environ if service.environment(name)} | {"OMP_NUM_THREADS": "1"},
        pass_fds=[pipe.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process, which then ends the others
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # that it has ended is seen when it is asked
        process.stdin.write(_PROGRAM.format(root, __name__, pipe.fileno(), service.module).encode())
    return process


def _forked(service: Service, pipe: socket.socket, payload: object | None) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of OpenBLAS, which end before a fork
        pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for name in list(os.environ):
            if not service.environment(name):
                del os.environ[name]
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        # Above all this process's own end of the pipe: a copy of it here would keep the pipe open forever.
        os.closerange(3, pipe.fileno())
        os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        main(pipe, service.module, payload)
    finally:
        os._exit(0)


def main(control: socket.socket, module: str, payload: object | None = None) -> None:
    """The program of the server: it answers commands until its socket is closed, then ends every process that is
    left."""
    import torch

    torch.set_num_threads(1)  # a fork copies one thread: others must not have been started
    greeting, serve = importlib.import_module(module).prepare(payload)
    children: set[int] = set()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who asked has ended, as after an interrupt
        control.sendall(_REPLY.pack(greeting))
        _answer(control, children, serve)
    for pid in children:
        _ended(pid, 0.0)


def _answer(control: socket.socket, children: set[int], serve: Serve) -> None:
    """Forks and ends processes as it is told, until the socket is closed; those that run are in `children`."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _COMMAND.size, 1)
        if len(data) < _COMMAND.size:
            return
        command, pid = _COMMAND.unpack(data)
        if command == _FORK:
            pid = os.fork()
            if pid == 0:
                try:
                    os.setsid()
                    control.close()
                    serve(socket.socket(fileno=descriptors[0]))
                finally:
                    os._exit(1)
            os.close(descriptors[0])
            children.add(pid)
            control.sendall(_REPLY.pack(pid))
            continue
        status = -1
        if pid in children:  # no other process is ever signaled
            status = _ended(pid, GRACE if command == _REAP else 0.0)
            children.discard(pid)
        control.sendall(_REPLY.pack(status))


def _ended(pid: int, grace: float) -> int:
    """The status of a child that ended by itself, or -1 after ending it; what it started is ended as well."""
    deadline = time.monotonic() + grace
    status = -1
    while True:
        ended, found = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = found
            break
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return status
