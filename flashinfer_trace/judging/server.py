"""The process that submissions' processes are forked from: it has imported torch, and runs no submission itself.

It has never touched CUDA, so that what is forked from it can; and it has imported neither a family nor the harness.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import time

__all__ = ["COMMAND", "FORK", "KILL", "REAP", "REPLY", "main"]

#: A command: what to do, and with which process.
COMMAND = struct.Struct("<cq")
FORK, KILL, REAP = b"F", b"K", b"R"

#: The answer: first of all whether `domain.works`; then a process id, or the status that `os.waitpid` gave, which is -1
#: if the process was ended here.
REPLY = struct.Struct("<q")

#: Seconds that a process whose pipe is closed may take to end.
GRACE = 0.5


def main(control: socket.socket, kernel: object | None = None) -> None:
    """Answers commands until the pipe is closed, then ends every process that is left."""
    import torch

    from flashinfer_trace.judging import domain
    from flashinfer_trace.judging.child import serve

    torch.set_num_threads(1)  # a fork copies one thread: others must not have been started
    control.sendall(REPLY.pack(domain.works()))  # asked of no process that has a submission in it, which could lie
    children: set[int] = set()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if len(data) < COMMAND.size:
            break
        command, pid = COMMAND.unpack(data)
        if command == FORK:
            pid = os.fork()
            if pid == 0:
                os.setsid()
                control.close()
                serve(socket.socket(fileno=descriptors[0]), kernel)
                os._exit(1)
            os.close(descriptors[0])
            children.add(pid)
            control.sendall(REPLY.pack(pid))
        else:
            control.sendall(REPLY.pack(_ended(pid, GRACE if command == REAP else 0.0)))
            children.discard(pid)
    for pid in children:
        _ended(pid, 0.0)


def _ended(pid: int, grace: float) -> int:
    """The status of a process that ended by itself, or -1 after ending it and all that it started."""
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


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
