"""Confines the process that calls it, as far as its platform can: for good, and before strangers' code runs in it."""

from __future__ import annotations

import ctypes
import os
import sys

from flashinfer_trace.sandbox import landlock, seccomp

__all__ = ["LEVELS", "STRONGEST", "confine"]

#: What is in force in a worker, strongest first. SECURITY.md says what each of them promises.
LEVELS = {
    "system calls": "the worker can compute and answer; it opens no file or socket, starts and signals no process",
    "files": "the worker opens no file; it may reach the network and start processes where the kernel lets it",
    "limits": "a process of its own with limits of time, memory and output; files and network are not kept from it",
}

STRONGEST = "system calls"

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38


def confine(memory_bytes: int, keep: int) -> str:
    """Limits memory and files, closes what is open but the descriptor `keep`, and drops every right that it can.

    Args:
        memory_bytes: address space that the process may take beyond what it has.
        keep: the descriptor of the pipe to the parent; it becomes 3, and 0 to 2 become /dev/null.

    Returns:
        The level in force, a key of `LEVELS`.
    """
    import resource  # not on Windows, where this module is only read

    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    if keep != 3:
        os.dup2(keep, 3, inheritable=False)
    os.closerange(4, max(64, os.sysconf("SC_OPEN_MAX") if sys.platform != "linux" else _highest_descriptor() + 1))
    for name, value in (
        ("RLIMIT_AS", _address_space() + memory_bytes),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_FSIZE", 0),
    ):
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(limit, (value, value))
    if sys.platform != "linux":
        return "limits"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)  # SIGKILL: no worker outlives the process that forked it
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no other process of the same user looks into it, nor it into others
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return "limits"
    files = landlock.install() > 0
    if seccomp.install():
        return "system calls"
    return "files" if files else "limits"


def _highest_descriptor() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


def _address_space() -> int:
    """Bytes of address space that the process has; an allowance for torch where that cannot be read."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 4 << 30
