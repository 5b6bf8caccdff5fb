"""`bench`: correctness first, then the times of a submission and of real kernels on the same inputs, round by round."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from flashinfer_trace.dataset import store
from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel
from flashinfer_trace.harness.job import Job
from flashinfer_trace.judging.bench.environment import Clocks, clocks, environment, name_of, worst
from flashinfer_trace.judging.bench.report import Measured, Report, Timetable
from flashinfer_trace.judging.bench.statistics import Policy, Series, summary
from flashinfer_trace.judging.costs import Cost, cost_of
from flashinfer_trace.judging.costs.work import load_gpus, roofline, tensor_bytes
from flashinfer_trace.judging.grades import JudgedInputs, Standard, standards
from flashinfer_trace.judging.judge import as_submission, checked, judge
from flashinfer_trace.judging.output_form import filled_outputs
from flashinfer_trace.judging.process import Failed, Launch, SubmissionProcess, Timing
from flashinfer_trace.judging.server import Server, shared_server
from flashinfer_trace.judging.stopwatch import Stopwatch
from flashinfer_trace.judging.submission import RunLimits, Submission, known
from flashinfer_trace.judging.traffic import Workload
from flashinfer_trace.judging.traffic.plans import unfit
from flashinfer_trace.judging.verdict import Failure, Verdict
from flashinfer_trace.kernels.names import kernels_named, no_kernel_named
from flashinfer_trace.verdict.compare import Expected

#: Bytes that are written to empty the cache, in sizes of it, and at least.
FLUSH, LEAST_FLUSH = 4, 256 << 20
#: Figures that exist for every call.
TOTALS = ("total", "ahead")
#: Flushes before each series: a millisecond or two, in which clocks rise.
WARM_UP = 20


@dataclass
class _Contender:
    """A kernel, its processes, and how it did on the workload that is being timed."""

    submission: Submission
    kernel: Kernel | None
    processes: list[SubmissionProcess] = field(default_factory=list)
    failure: Failure | None = None
    left: list[Standard] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """The context of a step that may fail. After a failure, the kernel is not timed any further."""
        try:
            yield
        except Failed as failed:
            for process in self.processes:
                process.end()  # no other kernel is run where one went wrong
            self.failure, self.processes = Failure(failed.kind, failed.message), []

    def result(self, inputs: int) -> Measured:
        library = self.kernel.library if self.kernel else ""
        version = importlib.metadata.version(library) if library else ""
        found = None
        if self.series and self.failure is None:
            found = summary(self.series, len(self.series) // inputs)
        label = self.kernel.label if self.kernel else self.submission.label
        return Measured(label, library, version, found, self.failure)

    def counted(self, process: SubmissionProcess, calls: Sequence[dict[str, float]]) -> Sequence[dict[str, float]]:
        """The reported times that count: only real kernels and submissions that plan have phases."""
        return calls if self.kernel or process.plans else [{name: call[name] for name in TOTALS} for call in calls]

    def unfit(self, workload: Workload) -> str | None:
        return unfit(self.kernel, workload.axes) if self.kernel else None


def bench(
    kernels: Sequence[Submission | str | Path],
    definition: Definition | str,
    workloads: Sequence[Workload],
    *,
    device: str = "cuda",
    policy: Policy | None = None,
    against: Sequence[str] | None = None,
    examples: int = 20,
    seed: int | None = None,
    server: Server | None = None,
    limits: RunLimits | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Judges kernels, then times those that are right and the real kernels of their Definition.

    Args:
        kernels: as `judge` takes each; none to time real kernels only.
        device: ``cuda``, ``cuda:N``, or ``cpu``, whose times say little.
        against: real kernels, by label, path or tag (see `kernels_named`); by default all that can run here.
        examples, seed: of the judgment.
        server: where processes are forked from; by default one for all of this process.
        limits: how long a kernel may take before it counts as one that hangs.
        progress: called with a line for each step.

    Raises:
        SubmissionError, DatasetError: the argument is not a submission, or a name in `against` matches no kernel.
    """
    started = time.perf_counter()
    loaded = store.definition_of(definition)
    policy = policy or Policy()
    with contextlib.ExitStack() as stack:
        contenders, wanted, verdicts = list[_Contender](), _wanted(loaded, against), list[Verdict]()
        report = Report(loaded.name, verdicts, environment(device), policy.warm, policy.graph)
        options: dict[str, Any] = {"device": device, "examples": examples, "seed": seed, "server": server}
        for submission in distinct([as_submission(kernel, device) for kernel in kernels]):
            progress(f"judging {submission.label}")
            verdicts.append(judge(submission, loaded, twin=False, limits=limits, **options))
            contenders += [_Contender(submission, None)] if verdicts[-1].passed else []
        if contenders or not kernels:
            chosen, report.left_out = _real(wanted, device)
            contenders += [_Contender(known(loaded, one.label), one) for one in chosen]
        if contenders:
            progress(f"loading {', '.join(one.submission.label for one in contenders)}")
            limits, server = limits or RunLimits(), server or shared_server()
            _start(contenders, policy.processes, loaded, device, limits, server, stack)
            _time(_TimingRun(loaded, device, policy, contenders), workloads, report, progress)
        report.seconds = time.perf_counter() - started
    return report


def distinct(submissions: Sequence[Submission]) -> list[Submission]:
    """The submissions with labels that tell them apart: those that share one get their number among them."""
    labels, found = [one.label for one in submissions], []
    for number, one in enumerate(submissions, 1):
        shared = labels.count(one.label) > 1
        found.append(replace(one, label=f"{one.label} #{labels[:number].count(one.label)}") if shared else one)
    return found


def _time(run: _TimingRun, workloads: Sequence[Workload], report: Report, progress: Callable[[str], None]) -> None:
    """Adds the timetables of workloads to a report, and which kernels do not take which of them."""
    for workload in workloads:
        progress(f"timing {workload.name}")
        report.timetables.append(run.timetable(workload))
        report.left_out |= run.left_out(workload)


def _wanted(definition: Definition, against: Sequence[str] | None) -> list[Kernel]:
    every = family_of(definition).kernels_of(definition)
    if against is None:
        return list(every)
    found: list[Kernel] = []
    for name in against:
        named = kernels_named(name, every)
        if not named:
            raise store.DatasetError(no_kernel_named(name, f"{definition.name} has", every, [definition]))
        found += [one for one in named if one not in found]
    return found


def _real(wanted: Sequence[Kernel], device: str) -> tuple[list[Kernel], dict[str, str]]:
    """The real kernels that can run on this device, and why others cannot."""
    chosen, left_out = [], {}
    on_gpu = torch.device(device).type == "cuda"
    for one in wanted:
        why = "needs a GPU" if not on_gpu else one.unavailable(torch.cuda.get_device_capability(device))
        why = why or one.missing()
        if why is None:
            chosen.append(one)
        else:
            left_out[one.label] = why
    return chosen, left_out


def _start(
    contenders: Sequence[_Contender],
    count: int,
    definition: Definition,
    device: str,
    limits: RunLimits,
    server: Server,
    stack: contextlib.ExitStack,
) -> None:
    """Processes for each contender. They load at the same time: most of it is importing, which takes seconds each.

    All have loaded before the first call, and from then on run only while they are called. No process of another
    Definition is started before the last call: imports keep processors busy that launch what is timed.
    """
    names = list(definition.inputs), list(definition.outputs)
    for one in contenders:
        launch = Launch(server, stack.enter_context(one.submission.on_disk()), *names, device, limits)
        with one.failing():
            one.processes += (stack.enter_context(launch.begin()) for _ in range(count))
    for done in (SubmissionProcess.loaded, SubmissionProcess.stop):
        for one in contenders:
            with one.failing():
                for process in one.processes:
                    done(process)


def _bytes(inputs: Inputs) -> int:
    return sum(value.nbytes for value in inputs.values() if isinstance(value, torch.Tensor))


def workload_bytes(definition: Definition, workload: Workload) -> int:
    """Bytes of the inputs and outputs of a workload."""
    read = tensor_bytes(definition.inputs, definition.input_shapes(workload.axes))
    return read + tensor_bytes(definition.outputs, definition.output_shapes(workload.axes))


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


class _TimingRun:
    """Contenders on one workload after the other."""

    def __init__(self, definition: Definition, device: str, policy: Policy, contenders: Sequence[_Contender]) -> None:
        self._definition, self._device, self._policy = definition, torch.device(device), policy
        self._contenders = contenders
        self._family: Family = family_of(definition)
        self._job = Job(definition, self._family, None, device, full=True)
        self._gpus = load_gpus(definition.root or store.find_root())
        self._timing, self._stopwatch = self._how(), Stopwatch(self._device.type)
        # Real kernels alone are timed on the same inputs in every run, and draw the same numbers. A submission must not
        # know them beforehand, nor may one of its processes know what another has computed.
        self._secret = any(one.kernel is None for one in contenders)

    @torch.no_grad()
    def timetable(self, workload: Workload) -> Timetable:
        """Times every kernel that takes it and has not failed."""
        torch.cuda.empty_cache()  # kernels share this memory
        if why := self._policy.too_large(workload_bytes(self._definition, workload)):
            return Timetable(workload.name, workload.axes, workload.seed, skipped=why)
        running = [one for one in self._contenders if one.processes and one.unfit(workload) is None]
        for one in running:
            one.series, one.left = [], standards(JudgedInputs(self._job, self._family.kernels_of(self._definition)))
        found = Timetable(workload.name, workload.axes, workload.seed)
        started, done = time.perf_counter(), 0
        states: list[Clocks | str] = []
        try:
            inputs = workload.inputs(self._device)
            cost = cost_of(self._definition, {name: _on_cpu(value) for name, value in inputs.items()})
            every = range(self._processes(inputs, len(running)))
            self._all(running, every, inputs, None)  # compiles, and chooses among variants of itself
            while any(one.processes for one in running) and self._policy.goes_on(done, time.perf_counter() - started):
                for numbers in self._sharing(every):
                    inputs = workload.inputs(self._device, 1 + self._seed(done))
                    self._all(running, numbers, inputs, done)
                states.append(self._clocks())
                done += 1
        except torch.OutOfMemoryError:
            return Timetable(workload.name, workload.axes, workload.seed, skipped="it does not fit into the memory")
        return self._filled(found, cost, running, done, worst(states or [self._clocks()]))

    def left_out(self, workload: Workload) -> dict[str, str]:
        reasons = ((one.submission.label, one.unfit(workload)) for one in self._contenders)
        return {f"{label} on {workload.name}": why for label, why in reasons if why is not None}

    def _processes(self, inputs: Inputs, kernels: int) -> int:
        """Of each of so many kernels, those that the GPU has memory for."""
        if self._device.type == "cpu":
            return self._policy.processes
        return self._policy.fitting(
            kernels * _bytes(inputs), self._policy.budget(torch.cuda.mem_get_info(self._device)[0])
        )

    def _sharing(self, every: range) -> list[range]:
        """The processes of each kernel, by number, that get the same inputs.

        With a submission, each has inputs of its own: one of its processes could leave its results to the next. Other
        kernels get the same ones in the process of that number.
        """
        return [range(number, number + 1) for number in every] if self._secret else [every]

    def _clocks(self) -> Clocks | str:
        gpu = self._device.type == "cuda"
        return clocks(name_of(self._device)) if gpu else "the clocks of a CPU are not read"

    def _filled(
        self, empty: Timetable, cost: Cost, running: Sequence[_Contender], inputs: int, state: Clocks | str
    ) -> Timetable:
        failed = [one for one in self._contenders if not one.processes and one not in running]
        return Timetable(
            *(empty.workload, empty.axes, empty.seed, cost.bytes, dict(cost.operations), self._least(cost)),
            kernels=[one.result(inputs) for one in self._contenders if one in running or one in failed],
            clocks=state,
        )

    def _seed(self, number: int) -> int:
        return secrets.randbits(30) if self._secret else number

    def _all(self, running: Sequence[_Contender], numbers: range, inputs: Inputs, done: int | None) -> None:
        """One set of inputs for some processes (by number) of every kernel, judged; those that fail take no more.
        `done` are the rounds before; None if the calls are not timed."""
        expected = self._family.expected(self._definition, inputs)
        aside = 0.0 if done is None else self._flush_seconds(inputs)
        for one in running:
            with one.failing():
                for number, process in list(enumerate(one.processes))[numbers.start : numbers.stop]:
                    seed = self._seed((len(numbers) * (done or 0) + number) * self._timing.repeats)
                    poisoned = filled_outputs(self._definition, inputs, seed)
                    if done is None:
                        self._judge(one, [process.call(inputs, poisoned, seed)], inputs, expected)
                    else:
                        found = process.timed(inputs, poisoned, seed, self._timing)
                        self._judge(one, found.answers, inputs, expected)
                        one.series.append(Series(one.counted(process, found.calls), found.outside, aside, self._held))

    def _judge(self, one: _Contender, answers: Sequence[Any], inputs: Inputs, expected: Mapping[str, Expected]) -> None:
        in_place = one.kernel.in_place if one.kernel else ()
        for answer in answers:
            failure = checked(self._job, answer, inputs, expected, one.left, in_place)
            if failure is not None:
                raise Failed(failure.kind, failure.message)

    def _how(self) -> Timing:
        flush = 0
        if self._device.type == "cuda" and not self._policy.warm:
            cache = torch.cuda.get_device_properties(self._device).L2_cache_size
            flush = max(LEAST_FLUSH, FLUSH * cache)
        elif not self._policy.warm:
            flush = 1 << 20
        return Timing(self._policy.repeats, flush, WARM_UP if flush else 0, self._policy.graph)

    def _flush_seconds(self, inputs: Inputs) -> float:
        """Seconds that this process's GPU needs to write as much as is written between two calls."""
        memory = torch.empty(self._timing.flush + 2 * _bytes(inputs), dtype=torch.uint8, device=self._device)
        return self._quickest(memory.zero_)

    @functools.cached_property
    def _held(self) -> float:
        """Seconds for which it is held before a call."""
        if self._device.type == "cpu":
            return 0.0
        with torch.cuda.device(self._device):
            return self._quickest(self._stopwatch.hold)

    def _quickest(self, work: Callable[[], Any]) -> float:
        times = []
        for _ in range(3):
            started = time.perf_counter()
            work()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            times.append(time.perf_counter() - started)
        return min(times)

    def _least(self, cost: Cost) -> float | None:
        """Seconds that this GPU needs at least, if its figures are known."""
        if self._device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self._device)
        gpu = next((one for one in self._gpus.values() if name in one.driver_names), None)
        found = roofline(cost, gpu) if gpu else None
        return found.seconds if found else None
