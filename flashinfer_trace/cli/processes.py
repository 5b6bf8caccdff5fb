"""Runs the tasks of `verify` in several processes of this machine, on its CPU or its GPUs. Imports torch.

Not with concurrent.futures: in Python before 3.12, its pool waits forever for a thread that writes more to a process
than a pipe holds if that process has died (https://github.com/python/cpython/issues/94777).
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import click
import torch

from flashinfer_trace.cli.runs import Answer, Batch, Settings, batches, by_family, recorded, reference_process
from flashinfer_trace.cli.tasks import Task
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.verify import Report
from flashinfer_trace.sandbox.confine import STRONGEST
from flashinfer_trace.sandbox.fork_server import available
from flashinfer_trace.verdict.tensors import torch_dtype

#: Seconds within which a process answers for each Definition that it verifies with its kernels. The slowest took 120 on
#: an H200 with eight processes; where FlashInfer compiles its kernels first, that takes minutes more.
ANSWERS_WITHIN = 1200.0
#: Seconds that a process may take to end.
PATIENCE = 5.0
#: Words of CUDA, torch and the libraries if the GPU has no memory left.
OUT_OF_MEMORY = "out of memory"

#: Tasks that one process verifies, those of each Definition together.
Group = Sequence[Sequence[Task]]

#: Bytes of a CUDA context and of what libraries allocate by themselves.
CONTEXT = 1 << 30
#: Bytes that a Definition is thought to need besides those of its weights before one of its family was verified.
BESIDES = 2 << 30
#: How many times its own bytes a weight takes: itself, drawn as float32 and converted; or copied, and compared.
DRAWN = 3
#: Bytes for each weight of a matrix whose float64 products an oracle computes: itself, its magnitude and its square.
JUDGED = 28


class Answers(NamedTuple):
    """The answer of a process for one Definition.

    Attributes:
        batch: the answers.
        level: how references were isolated.
        usable: whether it can go on; a kernel may have left its CUDA context unusable.
        peak: bytes of GPU memory that torch had at most.
        kept: bytes that it still has, although nothing is verified.
    """

    batch: Sequence[Answer]
    level: str = STRONGEST
    usable: bool = True
    peak: int = 0
    kept: int = 0

    @property
    def lack_memory(self) -> bool:
        """Whether something failed because the GPU has no memory left."""
        return any(OUT_OF_MEMORY in report.message for report, _ in self.batch)


def memory_of_weights(definition: Definition) -> int:
    """Bytes that a process needs about, at most, for the weights of a Definition: inputs whose axes are all constant.

    Those of experts are judged one matrix at a time.
    """
    constant, drawn, judged = definition.const_axes, 0, 0
    for spec in definition.inputs.values():
        if spec.shape and all(axis in constant for axis in spec.shape):
            shape = [constant[axis] for axis in spec.shape]
            drawn += DRAWN * math.prod(shape) * torch_dtype(spec.dtype).itemsize
            judged = max(judged, JUDGED * math.prod(shape[-2:]))
    return drawn + judged


def memory_of(device: str) -> float:
    """Bytes of a GPU's memory; no limit for the CPU."""
    if not device.startswith("cuda"):
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory


@dataclass
class Work:
    """A group of tasks.

    Attributes:
        family: of its first task.
        weights: bytes for weights, see `memory_of_weights`.
        least: bytes that it needs at least, because fewer were too few.
    """

    group: Group
    family: str
    weights: int
    least: float = 0.0

    @classmethod
    def of(cls, group: Group) -> Work:
        first = group[0][0]
        return cls(group, first.family.name if first.family else "", memory_of_weights(first.definition))


class Queue:
    """Groups of tasks that wait for a process, and for room on its GPU next to the work of other processes.

    How much a Definition needs is found out from those of its family that went before: where weights are most of it,
    how many times their estimate, elsewhere how much besides.

    Args:
        groups: on GPUs, those with the largest weights go first, and small ones fill the room that they leave.
        room: device -> bytes of its memory.
    """

    def __init__(self, groups: Sequence[Group], room: Mapping[str, float]) -> None:
        self._room = room
        self._waiting = [Work.of(group) for group in groups]
        if any(math.isfinite(one) for one in room.values()):
            self._waiting.sort(key=lambda work: work.weights, reverse=True)
        self._times: defaultdict[str, float] = defaultdict(lambda: 1.0)
        self._besides: defaultdict[str, float] = defaultdict(lambda: BESIDES)

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, device: str, beside: Sequence[Work], kept: int = 0) -> Work | None:
        """The first that the device has room for, besides what is verified on it now; any, if nothing is.

        Args:
            kept: bytes of its memory that processes hold between two verifications.
        """
        free = self._room[device] - kept - sum(map(self._needed, beside)) if beside else math.inf
        for work in self._waiting:
            if self._needed(work) <= free:
                self._waiting.remove(work)
                return work
        return None

    def learn(self, work: Work, peak: int) -> None:
        """Takes down that torch had so many bytes at most while this was verified."""
        if 2 * work.weights > peak:
            self._times[work.family] = max(self._times[work.family], peak / work.weights)
        else:
            self._besides[work.family] = max(self._besides[work.family], peak - work.weights)

    def add(self, group: Group) -> None:
        """Lets those go first that a process has left."""
        if group:
            self._waiting.insert(0, Work.of(group))

    def put_back(self, work: Work, device: str) -> bool:
        """Lets wait again what ran out of memory, for twice as much; not if it had all of the device's."""
        had = self._needed(work)
        if had >= self._room[device]:
            return False
        work.least = 2 * had
        self._waiting.insert(0, work)
        return True

    def _needed(self, work: Work) -> float:
        return max(work.least, CONTEXT + work.weights * self._times[work.family] + self._besides[work.family])


def run_in_processes(tasks: Sequence[Task], settings: Settings, jobs: int) -> Iterator[Report]:
    """Yields the report of each task as it comes, and records what it proves if asked for.

    On a CPU, the Definitions of one family go to one process, because many of them have the same small twin. If a
    process dies or does not answer in time, the reports of what it was verifying are failures, and another process goes
    on with what is left. A warning on standard error says so where references could not be isolated, or not fully.

    On GPUs, each Definition goes to the next process, if its GPU has room for it: see `Queue`. The processes share all
    GPUs, or the one that `settings` names. Jobs that run out of memory are retried with more, and
    a process that keeps more than half of its share of a GPU is replaced.
    """
    if settings.device == "cpu" and not settings.full and not available():
        click.echo("warning: this platform cannot isolate references", err=True)
    weaker: set[str] = set()
    on_gpus = settings.device.startswith("cuda")
    groups: Sequence[Group] = [[batch] for batch in batches(tasks)] if on_gpus else by_family(tasks)
    with closing(_answered(groups, settings, jobs)) as coming:
        for batch, answers in coming:
            weaker |= {answers.level} - {STRONGEST}
            yield from recorded(answers.batch, batch, settings)
    for level in sorted(weaker):
        click.echo(f"warning: references were isolated by {level} only; see SECURITY.md", err=True)


def _answered(
    groups: Sequence[Group], settings: Settings, jobs: int
) -> Generator[tuple[Sequence[Task], Answers], None, None]:
    """The tasks of each Definition with their answers, as they come from `jobs` processes at most."""
    helpers: list[_Helper] = []
    devices = _devices(settings.device)
    room = {device: memory_of(device) for device in devices}
    queue = Queue(groups, room)
    share = {device: room[device] * len(devices) / (2 * jobs) for device in devices}
    try:
        with no_interrupt():
            for number in range(min(jobs, len(queue))):
                helpers.append(_Helper(devices[number % len(devices)]))
        _begin(queue, helpers, settings)
        while busy := [helper for helper in helpers if helper.work]:
            for helper, work, batch, answers in _next_answers(busy):
                again = False
                if not helper.work:
                    queue.learn(work, answers.peak)
                    again = answers.lack_memory and len(helpers) > 1 and queue.put_back(work, helper.device)
                if not answers.usable or answers.kept > share[helper.device]:
                    queue.add(helper.left)
                    helper.kill()
                    helpers.remove(helper)
                    if queue:
                        with no_interrupt():
                            helpers.append(_Helper(helper.device))
                _begin(queue, helpers, settings)
                if not again:
                    yield batch, answers
        for helper in helpers:
            helper.finish()
    finally:
        with no_interrupt():
            for helper in helpers:
                helper.terminate()
            for helper in helpers:
                helper.kill()


def _next_answers(busy: Sequence[_Helper]) -> Iterator[tuple[_Helper, Work, Sequence[Task], Answers]]:
    """The next Definition of each process that answered, died or took too long, with its answers."""
    soonest = min(helper.seconds_left() for helper in busy)
    ready = wait([helper.connection for helper in busy], max(soonest, 0.0))
    for helper in busy:
        work = helper.work
        assert work is not None
        if helper.connection in ready:
            yield helper, work, *helper.answers()
        elif helper.seconds_left() <= 0:
            yield helper, work, *helper.gave_up()


def _begin(queue: Queue, helpers: Sequence[_Helper], settings: Settings) -> None:
    """Gives work to processes that have none, as far as there is room for it."""
    for helper in helpers:
        if not helper.work:
            same = [one for one in helpers if one.device == helper.device]
            work = queue.take(helper.device, [one.work for one in same if one.work], sum(one.kept for one in same))
            if work is not None:
                helper.begin(work, settings)


def _devices(device: str) -> list[str]:
    """Every GPU that torch sees, for ``cuda``; otherwise the device itself."""
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] if device == "cuda" else [device]


class _Helper:
    """A process that verifies one group after another, and answers after each Definition.

    Attributes:
        device: where it verifies.
        connection: to it.
        work: what it verifies now, if anything.
        left: the Definitions of it that it has not answered for.
        kept: bytes of GPU memory that it holds between two of them, for libraries that allocate a workspace once.
    """

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.device = device
        self.work: Work | None = None
        self.kept = 0
        self.left: list[Sequence[Task]] = []
        self._began = 0.0
        self._process = context.Process(target=_serve, args=(theirs,), daemon=False)
        self._process.start()
        # With this end open here as well, nobody would notice that the process has died.
        theirs.close()

    def begin(self, work: Work, settings: Settings) -> None:
        self.work, self.left = work, list(work.group)
        self._began = time.monotonic()
        own = replace(settings, device=self.device)
        with suppress(OSError):  # it has died: `answers` finds out
            self.connection.send([Batch.of(tasks, own) for tasks in work.group])

    def answers(self) -> tuple[Sequence[Task], Answers]:
        """The next Definition and what was answered for it: a failure if the process died."""
        try:
            found: Answers = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(PATIENCE)
            code = self._process.exitcode
            return self._lost(f"the process that verified it, or what came with it, died (exit code {code})")
        self.kept, self._began = found.kept, time.monotonic()
        tasks = self.left.pop(0)
        if not self.left or not found.usable:
            self.work = None
        return tasks, found

    def seconds_left(self) -> float:
        """Until it must have answered for the next Definition, if it has work."""
        return self._began + ANSWERS_WITHIN - time.monotonic()

    def gave_up(self) -> tuple[Sequence[Task], Answers]:
        """The next Definition, and a failure, because it was not answered for in time."""
        return self._lost(f"did not answer within {ANSWERS_WITHIN:g} s: a kernel hangs, or the machine is overloaded")

    def _lost(self, text: str) -> tuple[Sequence[Task], Answers]:
        """The failed work that it was verifying. Then it has no work."""
        self.work, tasks = None, self.left.pop(0)
        names = [(task.definition.name, task.target) for task in tasks]
        return tasks, _failed(names, self.device, text, usable=False)

    def finish(self) -> None:
        """Waits until it has ended, because nobody asks any more."""
        self.connection.close()
        self._process.join(PATIENCE)

    def terminate(self) -> None:
        """Tells it to end, if it has not ended."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends it, if it has not ended."""
        self._process.terminate()
        self._process.join(PATIENCE)
        self._process.kill()
        self._process.join()
        self.connection.close()


def _failed(names: Sequence[tuple[str, str]], device: str, text: str, usable: bool) -> Answers:
    """Failures of these pairs of a Definition and a target."""
    return Answers([(Report(*pair, device, "failed", message=text), None) for pair in names], usable=usable)


def _serve(connection: Connection) -> None:
    """Runs in the other process, until nobody asks any more."""
    # An interrupt at the terminal reaches all processes of its group; the one that asked ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        while True:
            for batch in connection.recv():
                connection.send(_served(batch))


def _served(batch: Batch) -> Answers:
    """The answers; failures with the reason if there are none, for example because a file of the dataset has gone."""
    device = batch.settings.device
    try:
        return _run(batch)
    except Exception as error:
        text = f"it could not be verified: {type(error).__name__}: {error}"
    names = [(batch.definition.name, target) for target, *_ in batch.targets]
    return _failed(names, device, text, usable=not device.startswith("cuda") or _usable())


def _run(batch: Batch) -> Answers:
    device = batch.settings.device
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats()
        answers = batch.run()
        peak = torch.cuda.max_memory_reserved()
        usable = _usable()
        return Answers(answers, usable=usable, peak=peak, kept=torch.cuda.memory_reserved() if usable else 0)
    answers = batch.run()
    worker = reference_process() if not batch.settings.full else None
    return Answers(answers, (worker.level if worker is not None else "") or STRONGEST)


def _usable() -> bool:
    """Whether the CUDA context still is; if so, other processes get the memory that this one has no more use for."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


@contextmanager
def no_interrupt() -> Iterator[None]:
    """Holds an interrupt and a termination back. An interrupt would end processes that start and do not ignore it yet,
    with a traceback each; and a second one would leave processes that are being ended, for which this one would wait
    when it ends."""
    held = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    usual = held[signal.SIGINT]
    here = threading.current_thread() is threading.main_thread()  # where Python handles signals
    if not here or usual in (None, signal.SIG_IGN) or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which would let interrupts through again when it starts
    came: list[int] = []
    for number, handler in held.items():
        if callable(handler):
            signal.signal(number, lambda number, frame: came.append(number))  # on another thread of this process
    # Processes that start inherit the mask. They must end on SIGTERM, so it is not in it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in held.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
