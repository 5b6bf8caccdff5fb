"""How the process that submissions' processes are forked from is started, and what it keeps of the environment."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

from flashinfer_trace.judging import server

__all__ = ["available", "forked", "passed_on", "spawned"]

#: Environment variables that a submission gets, and prefixes of them: what compilers and CUDA need.
ENVIRONMENT = (
    *("CC", "CXX", "HOME", "LANG", "LC_ALL", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_TF32_OVERRIDE"),
    *("NVIDIA_VISIBLE_DEVICES", "PATH", "PYTHONPATH", "TMPDIR", "USER", "VIRTUAL_ENV", "XDG_CACHE_HOME"),
)
PREFIXES = (
    "CUDA_",
    "DG_JIT_",
    "DYLD_LIBRARY_",
    "FLASHINFER_",
    "LD_LIBRARY_",
    "PYTORCH_",
    "SGLANG_DG_",
    "SGLANG_JIT_",
    "TORCH_",
    "TRITON_",
)


#: Names of credentials, which it does not get, whatever they begin with.
_SECRET = re.compile("CREDENTIAL|KEY|PASSW|SECRET|TOKEN")


def available() -> bool:
    """Whether this platform can fork processes (Windows cannot)."""
    return hasattr(os, "fork") and hasattr(socket, "send_fds")


def passed_on(name: str) -> bool:
    """Whether a submission gets an environment variable."""
    return name in ENVIRONMENT or (name.startswith(PREFIXES) and not _SECRET.search(name.upper()))


def spawned(pipe: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", server.__name__, str(pipe.fileno())],
        cwd=Path(__file__).resolve().parents[2],  # `-m` looks there first: the same package as this one
        env={name: os.environ[name] for name in os.environ if passed_on(name)} | {"OMP_NUM_THREADS": "1"},
        pass_fds=[pipe.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process, which then ends the others
    )


def forked(pipe: socket.socket, kernel: object | None) -> int:
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
            if not passed_on(name):
                del os.environ[name]
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        # Above all this process's own end of the pipe: a copy of it here would keep the pipe open for ever.
        os.closerange(3, pipe.fileno())
        os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        server.main(pipe, kernel)
    finally:
        os._exit(0)
