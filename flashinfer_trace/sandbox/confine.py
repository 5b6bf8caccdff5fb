"""Confines the process that calls it, as far as its platform can: for good, and before strangers' code runs in it.

Landlock (Linux 5.13) denies a reference everything, and keeps a submission from looking into other processes. Its
system calls have the same numbers on all machines, so it also holds where the filter does not know the machine. A
filter of seccomp(2) leaves a reference the few system calls that arithmetic needs; what is not listed fails with EPERM.
Nothing is listed that opens a file, makes a socket, starts a process, sends a signal, looks into another process, or
changes a limit; `clone` makes threads only. Both are written with ctypes: the packages on PyPI are pre-releases, or
need libseccomp and have seen no release for years.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446

#: Rights over files that each version of the kernel's interface knows: bits 0 to n - 1.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP_BIND_AND_CONNECT = 0b11  # since version 4
_ABSTRACT_SOCKETS, _SIGNALS = 0b01, 0b10  # since version 6
_MAKE_BLOCK_DEVICE, _MOVE_BETWEEN_DIRECTORIES = 1 << 11, 1 << 13
_RULE_PATH_BENEATH = 1
#: The first version of the kernel's interface that can allow moves between directories.
_MOVES_VERSION = 2
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


def deny_files() -> int:
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


def landlock_domain_works() -> bool:
    """Whether processes can enter a domain here: a copy of this one, which must have one thread, tries."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = int(not enter_landlock_domain())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def enter_landlock_domain() -> bool:
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


def filter_program(machine: str) -> bytes | None:
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


def filter_calls() -> bool:
    """Puts the filter on this thread and those that it makes; False if this platform has none.

    ``PR_SET_NO_NEW_PRIVS`` must be set before. Numbers of x86-64's x32 calls have a bit of their own, so they are
    refused as every number that is not listed.
    """
    machine = platform.machine()
    code = filter_program(machine) if sys.platform == "linux" else None
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


#: The measures in force in a worker, strongest first. SECURITY.md says what each of them promises.
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
    limit_address_space(memory_bytes)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    if sys.platform != "linux":
        return "limits"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)  # SIGKILL: no worker outlives the process that forked it
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no other process of the same user looks into it, nor it into others
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return "limits"
    files = deny_files() > 0
    if filter_calls():
        return "system calls"
    return "files" if files else "limits"


def limit_address_space(more: int) -> None:
    """Limits the address space of this process, for good, to so many bytes more than it has."""
    import resource

    limit, hard = _address_space() + more, resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _highest_descriptor() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


def _address_space() -> int:
    """Bytes of address space that the process has; an allowance for torch where that cannot be read."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 4 << 30
