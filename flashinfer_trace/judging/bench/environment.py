"""The machine that times are measured on: versions, and the clocks of the GPU, from nvidia-smi."""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


#: Reasons for which a GPU lowers its clocks, by bit, as NVML documents them. An idle GPU is none.
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_FIELDS = "clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw,clocks_throttle_reasons.active"
#: Digits of a UUID that are enough to tell cards apart.
CARD_DIGITS = 8

Run = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Clocks:
    """The state of a GPU at one moment, or the worst of several (see `worst`): MHz of its processors (`sm`; `most` is
    their highest) and memory, degrees, watts, and why its clocks are lowered, if they are."""

    sm: int
    most: int
    memory: int
    celsius: int
    watts: float
    throttled: tuple[str, ...]


@dataclass(frozen=True)
class Environment:
    """The environment of a time: names and versions, and which of many cards of one model it was, by digits of its
    UUID."""

    gpu: str
    capability: str
    driver: str
    cuda: str
    torch: str
    python: str
    card: str = ""


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout


def name_of(device: torch.device) -> str:
    """The name by which nvidia-smi knows a GPU: its UUID, with a prefix. Its number would be another one where
    CUDA_VISIBLE_DEVICES selects some GPUs, or CUDA puts the fastest first."""
    import torch

    return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"


def clocks(gpu: str, run: Run = _run) -> Clocks | str:
    """The state of a GPU now, by its name for nvidia-smi, or why nothing is known about it."""
    try:
        line = run(["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", f"--id={gpu}"])
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi cannot be run: {type(error).__name__}"
    try:
        sm, most, memory, celsius, watts, reasons = (part.strip() for part in line.strip().split(","))
        active = int(reasons, 16)
        lowered = tuple(name for bit, name in REASONS.items() if active & bit)
        return Clocks(int(sm), int(most), int(memory), int(celsius), float(watts), lowered)
    except ValueError:
        return f"nvidia-smi does not say: {line.strip()!r}"


def worst(states: Sequence[Clocks | str]) -> Clocks | str:
    """Several readings as one: the lowest clocks, the highest temperature and power, and every reason that was given.
    Those that failed do not count unless all have."""
    read = [one for one in states if isinstance(one, Clocks)]
    if not read:
        return states[0]
    given = {reason for one in read for reason in one.throttled}
    return Clocks(
        sm=min(one.sm for one in read),
        most=max(one.most for one in read),
        memory=min(one.memory for one in read),
        celsius=max(one.celsius for one in read),
        watts=max(one.watts for one in read),
        throttled=tuple(reason for reason in REASONS.values() if reason in given),
    )


@functools.cache
def _driver(gpu: str, run: Run) -> str:
    try:
        return run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={gpu}"]).strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def environment(device: str, run: Run = _run) -> Environment:
    """The machine and its software; a CPU has no driver."""
    import torch

    kind = torch.device(device)
    if kind.type != "cuda":
        return Environment(platform.machine(), "", "", "", str(torch.__version__), platform.python_version())
    driver = _driver(name_of(kind), run)
    major, minor = torch.cuda.get_device_capability(kind)
    name, cuda = torch.cuda.get_device_name(kind), torch.version.cuda or ""
    card = name_of(kind).removeprefix("GPU-")[:CARD_DIGITS]
    return Environment(name, f"{major}.{minor}", driver, cuda, str(torch.__version__), platform.python_version(), card)
