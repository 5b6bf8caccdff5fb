"""Kernels for rmsnorm_h512 that attack the judge instead of computing."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import struct
import sys
import time

import torch


def patches_the_clock(hidden_states, weight, output):
    """No time passes, and nothing is waited for."""
    time.perf_counter = lambda: 0.0
    torch.cuda.synchronize = lambda *_: None


def patches_the_comparison(hidden_states, weight):
    """All that is compared in this process is equal."""
    torch.equal = lambda *_: True
    torch.allclose = lambda *_, **__: True
    torch.Tensor.isnan = lambda self: torch.zeros_like(self, dtype=torch.bool)
    return torch.zeros_like(hidden_states)


def computes_with_the_oracle(hidden_states, weight):
    """Asks the dataset for the answer."""
    import flashinfer_trace

    return flashinfer_trace.load("rmsnorm_h512").compiled(hidden_states, weight)


def looks_for_the_oracle(hidden_states, weight):
    """Looks for float64 tensors of the output's shape, on the heap and in the frames of its callers."""
    frame, found = sys._getframe(), []
    while frame is not None:
        found += frame.f_locals.values()
        frame = frame.f_back
    for one in [*found, *gc.get_objects()]:
        if isinstance(one, torch.Tensor) and one.dtype == torch.float64 and one.shape == hidden_states.shape:
            return one.to(hidden_states.dtype)
    return torch.zeros_like(hidden_states)


def reads_the_memory_of_the_judge(hidden_states, weight):
    """Opens the memory of the process that its parent was forked from."""
    with open(f"/proc/{os.getppid()}/stat") as file:
        judge = file.read().rpartition(")")[2].split()[1]
    with open(f"/proc/{judge}/mem", "rb"):
        return torch.zeros_like(hidden_states)


def forges_an_answer(hidden_states, weight, output):
    """Tells the judge by itself that all is well."""
    text = json.dumps({"returned": {}, "tampered": [], "passed": True}).encode()
    write_to_sockets(struct.pack("<I", len(text)) + text)


def write_to_sockets(data):
    """Sends data to whoever this process is connected with."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
                os.write(int(name), data)


def answers_nonsense(hidden_states, weight, output):
    """Sends a header of 4 GB."""
    write_to_sockets(b"\xff" * 8)


def in_another_process(hidden_states, weight, output):
    """Returns at once, and leaves the work to a process that shares the memory."""
    if os.fork() == 0:
        time.sleep(0.02)
        x = hidden_states.float()
        norm = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
        output.copy_(norm.to(hidden_states.dtype))
        os._exit(0)


def ends_its_process(hidden_states, weight):
    """Ends before anything is compared, with the status of success."""
    os._exit(0)


def exits(hidden_states, weight):
    """As `sys.exit(0)` ends a benchmark."""
    sys.exit(0)


def crashes(hidden_states, weight):
    """Reads address 0."""
    ctypes.string_at(0)


def hangs(hidden_states, weight):
    """Never returns."""
    time.sleep(3600)


def interrupts(hidden_states, weight):
    """As Ctrl-C ends a benchmark."""
    raise KeyboardInterrupt


def ends_its_parent(hidden_states, weight):
    """Ends the process that it was forked from, and with it what watches it."""
    os.kill(os.getppid(), signal.SIGKILL)
    return torch.zeros_like(hidden_states)
