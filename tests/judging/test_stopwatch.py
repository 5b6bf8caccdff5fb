"""The stopwatch on a made-up GPU: when it is held, and which calls it began before all of them was launched."""

import pytest

from flashinfer_trace.judging.stopwatch import HEAD_START, Stopwatch


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
