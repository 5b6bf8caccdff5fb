"""Keeps a submission's process from looking into the judge's: Landlock's domains (Linux 5.19).

A submission compiles, opens files and talks to a GPU, so that little can be forbidden. But a process in a domain of
Landlock may trace, and read the memory of, only processes of that domain (the judge's is outside, even for root), and
from Linux 6.12 signal only those. The domain itself forbids one thing that no kernel needs: making block devices.

Every domain also forbids to move a file into another directory unless a rule allows that (``LANDLOCK_ACCESS_FS_REFER``
in landlock(7)). Compilers do so: Triton and DeepGEMM move what they compiled into their caches. Hence the one rule.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["enter", "works"]

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_MAKE_BLOCK_DEVICE, _MOVE_BETWEEN_DIRECTORIES = 1 << 11, 1 << 13
_RULE_PATH_BENEATH = 1
#: The first version of the kernel's interface that can allow moves between directories.
_MOVES_VERSION = 2
_SIGNALS = 1 << 1
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SIGKILL = 9


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def works() -> bool:
    """Whether processes can enter a domain here: a copy of this one, which must have one thread, tries."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = int(not enter())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def enter() -> bool:
    """Puts this process into a domain of its own, for good, and has it end with the one that forked it.

    Returns:
        Whether the kernel has domains; where it has not, the user's processes can look into each other as they always
        can.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    version: int = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < _MOVES_VERSION or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    ruleset = _Ruleset(_MAKE_BLOCK_DEVICE | _MOVE_BETWEEN_DIRECTORIES, 0, _SIGNALS if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    descriptor = libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0)
    if descriptor < 0:
        return False
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    anywhere = _PathBeneath(_MOVE_BETWEEN_DIRECTORIES, root)
    entered: bool = (
        libc.syscall(_ADD_RULE, descriptor, _RULE_PATH_BENEATH, ctypes.byref(anywhere), 0) == 0
        and libc.syscall(_RESTRICT_SELF, descriptor, 0) == 0
    )
    os.close(root)
    os.close(descriptor)
    return entered
