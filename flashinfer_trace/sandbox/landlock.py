"""Landlock (Linux 5.13): denies a reference everything, and keeps a submission from looking into other processes.

Written with ctypes, as `seccomp` is: the package on PyPI has pre-releases only. System calls of Landlock have the same
numbers on all machines, so it also holds where `seccomp` does not know the machine.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["domain_works", "enter_domain", "install"]

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446

#: Rights over files that each version of the kernel's interface knows: bits 0 to n - 1.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP_BIND_AND_CONNECT = 0b11  # since version 4
_ABSTRACT_SOCKETS, _SIGNALS = 0b01, 0b10  # since version 6
_MAKE_BLOCK_DEVICE, _MOVE_BETWEEN_DIRECTORIES = 1 << 11, 1 << 13
_RULE_PATH_BENEATH = 1
#: The first version of the kernel's interface that can allow moves between directories.
_MOVES_VERSION = 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SIGKILL = 9


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def _version(libc: ctypes.CDLL) -> int:
    """The version of the kernel's interface; less than 1 where there is none."""
    return int(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def _ruleset(libc: ctypes.CDLL, version: int, files: int, network: int, scoped: int) -> int:
    """The descriptor of a new set of rules, with what this version knows of these rights; negative if it fails."""
    ruleset = _Ruleset(files, network if version >= 4 else 0, scoped if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    return int(libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0))


def install() -> int:
    """Denies this thread, and those that it makes, every right that Landlock knows of; returns its version, or 0.

    It opens no file, reaches no TCP port and signals no other process. Files that are open stay usable.
    ``PR_SET_NO_NEW_PRIVS`` must be set before.
    """
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    version = _version(libc)
    if version < 1:
        return 0
    files = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    descriptor = _ruleset(libc, version, files, _TCP_BIND_AND_CONNECT, _ABSTRACT_SOCKETS | _SIGNALS)
    if descriptor < 0 or libc.syscall(_RESTRICT_SELF, descriptor, 0) != 0:
        return 0
    libc.close(descriptor)
    return version


def domain_works() -> bool:
    """Whether processes can enter a domain here: a copy of this one, which must have one thread, tries."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = int(not enter_domain())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def enter_domain() -> bool:
    """Puts this process into a domain of its own, for good, and has it end with the one that forked it.

    A submission compiles, opens files and talks to a GPU, so little can be forbidden. But a process in a domain of
    Landlock can trace, and read the memory of, only processes of that domain (the judge's is outside, even for root),
    and from Linux 6.12 signal only those. The domain itself forbids one thing that no kernel needs: making block
    devices. Every domain also forbids moving a file into another directory unless a rule allows that
    (``LANDLOCK_ACCESS_FS_REFER`` in landlock(7)). Triton and DeepGEMM move what they compiled into their caches, hence
    the one rule.

    Returns:
        Whether the kernel has domains (Linux 5.19). Where it has none, the user's processes can look into each other as
        they always can.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    version = _version(libc)
    if version < _MOVES_VERSION or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    descriptor = _ruleset(libc, version, _MAKE_BLOCK_DEVICE | _MOVE_BETWEEN_DIRECTORIES, 0, _SIGNALS)
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
