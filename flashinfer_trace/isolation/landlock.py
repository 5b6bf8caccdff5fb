"""Landlock for a worker process: opens no file, reaches no TCP port, signals no other (Linux 5.13).

Written with ctypes, as `seccomp` is: the package on PyPI has pre-releases only. System calls of Landlock have the same
numbers on all machines, so that it holds also where `seccomp` does not know the machine.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["install"]

_CREATE_RULESET, _RESTRICT_SELF = 444, 446

#: Rights over files that each version of the kernel's interface knows: bits 0 to n - 1.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP_BIND_AND_CONNECT = 0b11  # since version 4
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11  # since version 6


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


def install() -> int:
    """Denies this thread, and those that it makes, every right that Landlock knows of; returns its version, or 0.

    ``PR_SET_NO_NEW_PRIVS`` must be set before. Files that are open stay usable.
    """
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    version: int = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return 0
    ruleset = _Ruleset(
        (1 << _FILE_RIGHTS.get(version, 16)) - 1,
        _TCP_BIND_AND_CONNECT if version >= 4 else 0,
        _ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0,
    )
    size = 8 if version < 4 else 16 if version < 6 else 24
    descriptor = libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0)
    if descriptor < 0 or libc.syscall(_RESTRICT_SELF, descriptor, 0) != 0:
        return 0
    libc.close(descriptor)
    return version
