"""The system calls of a worker, also on machines that are not at hand, and the limits without seccomp."""

from __future__ import annotations

import errno
import struct
import subprocess
import sys

import pytest

from flashinfer_trace.sandbox import confine

ALLOWED, EPERM, ENOSYS, KILLED = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

#: Numbers of calls that must be refused, from the kernel's tables.
REFUSED = {
    "x86_64": {"open": 2, "socket": 41, "connect": 42, "fork": 57, "vfork": 58, "execve": 59, "kill": 62}
    | {"ptrace": 101, "fcntl": 72, "ioctl": 16, "prctl": 157, "openat": 257, "unlink": 87, "setrlimit": 160}
    | {"tgkill": 234, "prlimit64": 302, "process_vm_writev": 311, "seccomp": 317, "memfd_create": 319, "bpf": 321}
    | {"io_uring_setup": 425, "openat2": 437, "pidfd_getfd": 438, "shmget": 29, "userfaultfd": 323, "mount": 165},
    "aarch64": {"openat": 56, "socket": 198, "connect": 203, "execve": 221, "kill": 129, "tgkill": 131}
    | {"ptrace": 117, "fcntl": 25, "ioctl": 29, "prctl": 167, "unlinkat": 35, "setrlimit": 164, "prlimit64": 261}
    | {"process_vm_writev": 271, "seccomp": 277, "memfd_create": 279, "bpf": 280, "io_uring_setup": 425}
    | {"openat2": 437, "pidfd_getfd": 438, "shmget": 194, "userfaultfd": 282, "mount": 40},
}
CLONE = {"x86_64": 56, "aarch64": 220}
WRITE = {"x86_64": 1, "aarch64": 64}
THREAD_FLAGS = 0x003D0F00  # what glibc's pthread_create asks for


def verdict(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """Runs a filter as the kernel does."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, argument, 0, 0, 0, 0, 0)
    instructions = list(struct.iter_unpack("=HBBI", program))
    value, at = 0, 0
    while True:
        code, if_true, if_false, operand = instructions[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif code == 0x15:
            at += if_true if value == operand else if_false
        elif code == 0x45:
            at += if_true if value & operand else if_false
        else:
            assert code == 0x06
            return int(operand)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter(machine: str) -> None:
    program, architecture = confine.filter_program(machine), ARCHITECTURES[machine]
    assert program is not None
    assert verdict(program, architecture, WRITE[machine]) == ALLOWED
    for name, number in REFUSED[machine].items():
        assert verdict(program, architecture, number) == EPERM, name
    assert verdict(program, architecture, CLONE[machine], THREAD_FLAGS) == ALLOWED
    assert verdict(program, architecture, CLONE[machine], 17) == EPERM  # SIGCHLD alone: a fork
    assert verdict(program, architecture, 435) == ENOSYS  # clone3
    for other in set(ARCHITECTURES.values()) - {architecture} | {0x40000003}:  # and i386
        assert verdict(program, other, WRITE[machine]) == KILLED
    assert verdict(program, architecture, 0x40000000 | WRITE[machine]) == EPERM  # x32
    allowed = [number for number in range(1024) if verdict(program, architecture, number) == ALLOWED]
    assert len(allowed) < 45


def test_a_machine_whose_calls_are_not_known() -> None:
    assert confine.filter_program("riscv64") is None


def run(code: str) -> str:
    """Runs Python elsewhere: what it changes in this package stays there."""
    head = "import sys; sys.path.insert(0, 'tests'); from sandbox.conftest import *; import torch\n"
    return subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is part of Linux")
def test_without_seccomp_landlock_keeps_files_away(tmp_path) -> None:
    target = tmp_path / "canary"
    printed = run(f"""
from flashinfer_trace.sandbox import confine
confine.filter_calls = lambda: False
worker_module.check_allowed = lambda *_: None
with ReferenceWorker(LIMITS, fork=True) as worker:
    worker.run(HONEST, x(), 0)
    print(worker.level)
    try:
        worker.run(definition_of('def run(x):\\n    torch.save(x, "{target}")\\n    return 2 * x\\n'), x(), 0)
    except Exception as error:
        print(error.kind)
""")
    if printed.split()[0] == "limits":
        pytest.skip("this kernel has no Landlock")
    assert printed.split() == ["files", "raised"] and not target.exists()


def test_the_process_that_verify_forks_knows_no_oracle_and_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "token")
    code = """
import sys, os
import flashinfer_trace.cli.verification, torch
from flashinfer_trace.sandbox import worker as module
module.check_allowed = lambda *_: None
with module.reference_worker("cpu", False) as worker:
    sys.path.insert(0, "tests")
    from sandbox.conftest import definition_of, x
    import flashinfer_trace.families.rmsnorm
    source = '''
def run(x):
    known = [m for m in torch.sys.modules if m.startswith(("flashinfer_trace.harness", "flashinfer_trace.families"))]
    return x * len(known) + ("SECRET_TOKEN" in torch.os.environ)
'''
    print(worker.run(definition_of(source), x(), 0)["y"].abs().sum().item(), worker.level)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("0.0 ")
