"""A seccomp filter for a worker process: the few system calls that arithmetic needs, and no others.

Written with ctypes. The packages for it on PyPI need libseccomp beside them and have seen no release for years, and a
filter that only lists numbers is short: it is a program of the classic Berkeley packet filter (see seccomp(2)).

What is not listed fails with EPERM. Nothing is listed that opens a file, makes a socket, starts a process, sends a
signal, looks into another process, or changes a limit. `clone` makes threads only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

__all__ = ["install"]

#: Calls by name: their numbers on x86-64 and on AArch64 (None: the call does not exist there).
_CALLS: dict[str, tuple[int | None, int | None]] = {
    # The pipe to the parent, which is open already, and whatever is closed
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "close": (3, 57),
    # Memory
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    # Threads of this process
    "futex": (202, 98),
    "rseq": (334, 293),
    "set_robust_list": (273, 99),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "membarrier": (324, 283),
    "gettid": (186, 178),
    "getpid": (39, 172),
    "getcpu": (309, 168),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # Signals that this process gets
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    # Time, random bytes, the figures of this process
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
}

#: machine -> (column of `_CALLS`, audit architecture, clone, clone3, seccomp)
_MACHINES = {"x86_64": (0, 0xC000003E, 56, 435, 317), "aarch64": (1, 0xC00000B7, 220, 435, 277)}

_CLONE_THREAD = 0x00010000
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _SET, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JSET|K, BPF_RET|K
_NUMBER, _ARCHITECTURE, _ARGUMENT_0 = 0, 4, 16  # offsets in struct seccomp_data


def program(machine: str) -> bytes | None:
    """The filter for a machine as instructions of 8 bytes; None if its system calls are not known here."""
    if machine not in _MACHINES:
        return None
    column, architecture, clone, clone3, _ = _MACHINES[machine]
    numbers = sorted(number for numbers in _CALLS.values() if (number := numbers[column]) is not None)

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    tail = [
        # glibc makes threads by clone where clone3 does not exist; a filter cannot look into clone3's arguments.
        instruction(_EQUAL, clone3, 0, 1),
        instruction(_RETURN, _ERRNO | errno.ENOSYS),
        instruction(_EQUAL, clone, 0, 2),
        instruction(_LOAD, _ARGUMENT_0),
        instruction(_SET, _CLONE_THREAD, 1, 0),
        instruction(_RETURN, _ERRNO | errno.EPERM),
        instruction(_RETURN, _ALLOW),
    ]
    allow = len(tail) - 1
    jumps = [instruction(_EQUAL, number, len(numbers) - 1 - i + allow, 0) for i, number in enumerate(numbers)]
    head = [
        instruction(_LOAD, _ARCHITECTURE),
        instruction(_EQUAL, architecture, 1, 0),
        instruction(_RETURN, _KILL_PROCESS),
        instruction(_LOAD, _NUMBER),
    ]
    return b"".join(head + jumps + tail)


def install() -> bool:
    """Puts the filter on this thread and those that it makes; False if this platform has none.

    ``PR_SET_NO_NEW_PRIVS`` must be set before. Numbers of x86-64's x32 calls have a bit of their own, so they are
    refused as every number that is not listed.
    """
    machine = platform.machine()
    code = program(machine) if sys.platform == "linux" else None
    if code is None or struct.calcsize("P") != 8:
        return False
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    argument = Program(len(code) // 8, ctypes.addressof(buffer))
    number = _MACHINES[machine][4]
    if libc.syscall(number, 1, 0, ctypes.byref(argument)) != 0:  # SECCOMP_SET_MODE_FILTER
        if ctypes.get_errno() in (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EACCES):
            return False
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return True
