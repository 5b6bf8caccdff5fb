"""The profiler's timeline: which CUDA kernels ran, for how long, and which logged call launched them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.runtime_tracing.call_log import MARK

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass
class Launch:
    """CUDA kernels of one name that one call launched in one layer.

    Attributes:
        cuda_kernel: the name that the profiler reports, demangled.
        call: number of the innermost logged call; None if none was open (a CUDA graph's replay).
        layer: index of the decoder layer; None outside of the layers.
        operator: the innermost PyTorch operator, such as ``aten::mm``; "" if there is none.
        count, microseconds: how many ran, and their summed duration on the GPU.
    """

    cuda_kernel: str
    call: int | None
    layer: int | None
    operator: str
    count: int = 0
    microseconds: float = 0.0


def launches(events: Iterable[Mapping[str, Any]]) -> list[Launch]:
    """The launches in the ``traceEvents`` of a Chrome trace, in order of their first start."""
    on_device: list[Mapping[str, Any]] = []
    started: dict[int, Mapping[str, Any]] = {}
    marks: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    operators: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X":
            continue
        if category in _ON_DEVICE:
            on_device.append(event)
        elif category in _LAUNCHES and "correlation" in event.get("args", {}):
            started[event["args"]["correlation"]] = event
        elif event.get("name", "").startswith(MARK):
            marks[event["tid"]].append(event)
        elif category == "cpu_op":
            operators[event["tid"]].append(event)
    found: dict[tuple[object, ...], Launch] = {}
    for event in sorted(on_device, key=lambda event: event["ts"]):
        start = started.get(event.get("args", {}).get("correlation"))
        mark = _innermost(marks[start["tid"]], start) if start else None
        operator = _innermost(operators[start["tid"]], start) if start else None
        call, layer = _parts(mark["name"]) if mark else (None, None)
        key = (event["name"], call, layer, operator["name"] if operator else "")
        launch = found.setdefault(key, Launch(event["name"], call, layer, str(key[3])))
        launch.count += 1
        launch.microseconds += event.get("dur", 0)
    return list(found.values())


def _innermost(events: Sequence[Mapping[str, Any]], at: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The shortest event of the thread that was running when another began."""
    around = [event for event in events if event["ts"] <= at["ts"] <= event["ts"] + event["dur"]]
    return min(around, key=lambda event: (event["dur"], -event["ts"]), default=None)


def _parts(mark: str) -> tuple[int, int | None]:
    call, _, layer = mark.removeprefix(MARK).partition(":")
    return int(call), int(layer) if layer else None
