"""A series of timed calls on a made-up GPU: what a kernel has seen before it, when the GPU is held, and which calls it
began before all of them was launched.
"""

from __future__ import annotations

import json
import socket

import pytest
import torch

from flashinfer_trace.judging import child
from flashinfer_trace.judging.stopwatch import HEAD_START, Stopwatch
from flashinfer_trace.sandbox import protocol
from flashinfer_trace.sandbox.shared_memory import Filled, SharedMemory

REPEATS = 2


class Kernel:
    """Doubles its input, and notes what it is called on, and where that lies."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def __call__(self, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> None:
        self.seen.append((inputs["x"][0].item(), inputs["x"].data_ptr()))
        outputs["y"].copy_(2 * inputs["x"])


@pytest.fixture
def session(monkeypatch):
    """A submission's process as it is on a GPU, but with memory of the CPU, and no other pages to move to."""
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(child._Session, "_move", lambda self: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = child._Session(theirs, None)
        made._device = "cpu:0"  # which is not "cpu", so inputs are copied as they are for a GPU
        made._inputs, made._outputs = ["x"], ["y"]
        made._stopwatch, made._shared = Stopwatch("cpu"), SharedMemory(1 << 16)
        made.judge = ours
        yield made


def called_before(session, request: dict[str, object]) -> None:
    """Leaves the inputs of a request on the device, as a call does."""
    session._tensors(session._device_memory(session._shared.memory[: request["size"]]), request)


def before(session, value: float, size: int = 4) -> dict[str, object]:
    """A request for a call on inputs of one value."""
    memory = Filled({"x": torch.full((size,), value)}, {"y": torch.full((size,), torch.nan)})
    memory.fill(session._shared.memory)
    slots = json.loads(json.dumps({name: slot.to_json() for name, slot in memory.slots.items()}))
    return {"size": memory.size, "slots": slots}


def filled(session, value: float, graph: bool) -> tuple[Filled, dict[str, object]]:
    """Inputs of one value in the memory of a session, and the request for a series of calls on them."""
    memory = Filled({"x": torch.full((4,), value)}, {"y": torch.full((4,), torch.nan)})
    memory.fill(session._shared.memory)
    timing = {"repeats": REPEATS, "flush": 0, "warm_up": 0, "graph": graph}
    slots = json.loads(json.dumps({name: slot.to_json() for name, slot in memory.slots.items()}))
    for told in ({"go": True, **memory.hide()}, {"collect": True}):
        session.judge.sendall(protocol.pack_header(told))
    return memory, {"size": memory.size, "slots": slots, "numbers": {}, "seed": 0, "timing": timing}


@pytest.mark.parametrize("graph", [False, True])
def test_a_kernel_is_prepared_on_earlier_inputs_where_those_that_are_timed_will_lie(graph, session, monkeypatch):
    captured = []

    def capture(call):
        call()
        captured.append(call())
        return call

    monkeypatch.setattr(child, "captured", capture)
    called_before(session, before(session, 3.0))
    kernel = Kernel()
    memory, request = filled(session, 5.0, graph)
    session._timed(kernel, request)
    prepared = 3 if graph else 1  # before capturing there is a call that is not captured
    assert [value for value, _ in kernel.seen] == [3.0] * prepared + [5.0] * REPEATS
    assert len({address for _, address in kernel.seen}) == 1 and len(captured) == graph
    assert [memory.outputs(copy)["y"].tolist() for copy in range(REPEATS)] == [[10.0] * 4] * REPEATS


@pytest.mark.parametrize("size", [0, 8])
def test_no_graph_is_captured_on_what_is_timed(size, session):
    """No earlier inputs at all, or none of these shapes."""
    if size:
        called_before(session, before(session, 3.0, size))
    kernel = Kernel()
    with pytest.raises(RuntimeError, match="captured on earlier inputs of the same shapes, and there are none"):
        session._timed(kernel, filled(session, 5.0, True)[1])
    assert not kernel.seen


class Gpu:
    """A stream that reaches an event only when it is waited for, unless it `catches_up` at once."""

    def __init__(self):
        self.log, self.catches_up = [], False

    def event(self, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu):
        self.gpu, self.reached = gpu, False

    def record(self, stream):
        assert stream == "stream"
        self.gpu.log.append("event")
        self.reached = self.gpu.catches_up

    def query(self):
        return self.reached

    def synchronize(self):
        self.gpu.log.append("wait")
        self.reached = True

    def elapsed_time(self, end):
        return 2.0  # milliseconds


class Wrapper:
    def plan(self):
        return "planned"

    def run(self):
        return "computed"


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def watch(gpu):
    made = Stopwatch("cpu")
    made._on_gpu, made._event, made._spin = True, gpu.event, lambda cycles: gpu.log.append(cycles)
    made.watch_phases(f"{__name__}.Wrapper")
    yield made
    made.watch_no_phases()


def test_a_gpu_is_held_before_run_and_plan_is_timed_by_the_clock(watch, gpu):
    watch.stream = "stream"
    assert Wrapper().plan() == "planned" and gpu.log == ["event", "wait", "event", "wait"]
    gpu.log.clear()
    assert Wrapper().run() == "computed" and gpu.log == [HEAD_START, "event", "event"]
    phases, late = watch.take_phases()
    (plan,), (run,) = phases["plan"], phases["run"]
    assert run() == pytest.approx(2e-3) and 0 < plan() < 1 and not late


def test_a_run_that_the_gpu_begins_before_it_was_launched_is_late(watch, gpu):
    watch.stream, gpu.catches_up = "stream", True
    Wrapper().run()
    gpu.catches_up = False
    Wrapper().run()
    assert watch.take_phases()[1] and not watch.take_phases()[1]


def test_calls_that_are_not_timed_are_left_alone(watch, gpu):
    assert Wrapper().plan() == "planned" and Wrapper().run() == "computed"
    assert gpu.log == [] and watch.take_phases() == ({}, False)
