"""Runs the tasks of `verify` in several processes of this machine, on its CPU or its GPUs. Imports torch.

Not with concurrent.futures: in Python before 3.12, its pool waits forever for a thread that writes more to a process
than a pipe holds if that process has died (https://github.com/python/cpython/issues/94777).
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import click
import torch

from flashinfer_trace.cli.gpu_memory import Group, Queue, Work, memory_of
from flashinfer_trace.cli.runs import Settings, batches, by_family
from flashinfer_trace.cli.shipments import Answer, Shipment, received, reference_process, run_shipment, shipment
from flashinfer_trace.cli.tasks import Task
from flashinfer_trace.harness.verify import Report
from flashinfer_trace.isolation.confine import STRONGEST
from flashinfer_trace.isolation.processes import available

__all__ = ["ANSWERS_WITHIN", "run_in_processes"]

#: Seconds within which a process answers for each Definition that it verifies with its kernels. The slowest took 120 on
#: an H200 with eight processes; where FlashInfer compiles its kernels first, that takes minutes more.
ANSWERS_WITHIN = 1200.0
#: Seconds that a process may take to end.
PATIENCE = 5.0
#: What CUDA, torch and the libraries say if the GPU has no memory left.
OUT_OF_MEMORY = "out of memory"


class Answers(NamedTuple):
    """What a process answers.

    Attributes:
        batches: of each shipment, the answers.
        level: how references were isolated.
        usable: whether it can go on; a kernel may have left its CUDA context unusable.
        peak: bytes of GPU memory that torch had at most.
        kept: bytes that it still has, although nothing is verified.
    """

    batches: Sequence[Sequence[Answer]]
    level: str = STRONGEST
    usable: bool = True
    peak: int = 0
    kept: int = 0

    @property
    def lack_memory(self) -> bool:
        """Whether something failed because the GPU has no memory left."""
        return any(OUT_OF_MEMORY in report.message for batch in self.batches for report, _ in batch)


def run_in_processes(
    tasks: Sequence[Task], settings: Settings, jobs: int, advance: Callable[[str, bool], None]
) -> Iterator[Report]:
    """Yields the report of each task as it comes, and records what it proves if asked for.

    On a CPU, the Definitions of one family go to one process, because many of them have the same small twin. If a
    process dies or does not answer in time, the reports of what it was verifying are failures, and another process goes
    on with the next one. A warning on standard error says so where references could not be isolated, or not fully.

    On GPUs, each Definition goes to the next process, if its GPU has room for it: see `Queue`. The processes share all
    GPUs, or the one that `settings` names. What lacks memory beside others is verified again with more, and a process
    that keeps more than half of its share of a GPU is replaced.
    """
    if settings.device == "cpu" and not settings.full and not available():
        click.echo("warning: this platform cannot isolate references", err=True)
    weaker: set[str] = set()
    on_gpus = settings.device.startswith("cuda")
    groups: Sequence[Group] = [[batch] for batch in batches(tasks)] if on_gpus else by_family(tasks)
    with closing(_answered(groups, settings, jobs)) as coming:
        for group, answers in coming:
            weaker |= {answers.level} - {STRONGEST}
            for batch, each in zip(group, answers.batches, strict=True):
                for report in received(each, batch, settings):
                    advance(report.definition, True)
                    yield report
    for level in sorted(weaker):
        click.echo(f"warning: references were isolated by {level} only; see SECURITY.md", err=True)


def _answered(groups: Sequence[Group], settings: Settings, jobs: int) -> Generator[tuple[Group, Answers], None, None]:
    """Each group with its answers, as they come from `jobs` processes at most."""
    helpers: list[_Helper] = []
    devices = _devices(settings.device)
    room = {device: memory_of(device) for device in devices}
    queue = Queue(groups, room)
    share = {device: room[device] * len(devices) / (2 * jobs) for device in devices}
    try:
        with _no_interrupt():
            for number in range(min(jobs, len(queue))):
                helpers.append(_Helper(devices[number % len(devices)]))
        _begin(queue, helpers, settings)
        while busy := [helper for helper in helpers if helper.work]:
            soonest = min(helper.seconds_left() for helper in busy)
            ready = wait([helper.connection for helper in busy], max(soonest, 0.0))
            for helper in busy:
                work = helper.work
                assert work is not None
                if helper.connection in ready:
                    answers = helper.answers()
                elif helper.seconds_left() <= 0:
                    answers = helper.gave_up()
                else:
                    continue
                queue.learn(work, answers.peak)
                again = answers.lack_memory and len(helpers) > 1 and queue.put_back(work, helper.device)
                if not answers.usable or answers.kept > share[helper.device]:
                    helper.kill()
                    helpers.remove(helper)
                    if queue:
                        with _no_interrupt():
                            helpers.append(_Helper(helper.device))
                _begin(queue, helpers, settings)
                if not again:
                    yield work.group, answers
        for helper in helpers:
            helper.finish()
    finally:
        with _no_interrupt():
            for helper in helpers:
                helper.terminate()
            for helper in helpers:
                helper.kill()


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
    """A process that verifies one group after another.

    Attributes:
        device: where it verifies.
        connection: to it.
        work: what it verifies now, if anything.
        kept: bytes of GPU memory that it holds between two of them, for libraries that allocate a workspace once.
    """

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.device = device
        self.work: Work | None = None
        self.kept = 0
        self._began = 0.0
        self._process = context.Process(target=_serve, args=(theirs,), daemon=False)
        self._process.start()
        # With this end open here as well, nobody would notice that the process has died.
        theirs.close()

    def begin(self, work: Work, settings: Settings) -> None:
        self.work = work
        self._began = time.monotonic()
        own = replace(settings, device=self.device)
        with suppress(OSError):  # it has died: `answers` finds out
            self.connection.send([shipment(batch, own) for batch in work.group])

    def answers(self) -> Answers:
        """What it answered; failures if it died. Then it has no work."""
        work, self.work = self.work, None
        assert work is not None
        try:
            found: Answers = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(PATIENCE)
            code = self._process.exitcode
            return self._lost(work, f"the process that verified it, or what came with it, died (exit code {code})")
        self.kept = found.kept
        return found

    def seconds_left(self) -> float:
        """Until it must have answered, if it has work."""
        return self._began + self._limit() - time.monotonic()

    def gave_up(self) -> Answers:
        """Failures, because it has not answered in time. Then it has no work."""
        work, limit = self.work, self._limit()
        assert work is not None
        self.work = None
        return self._lost(work, f"did not answer within {limit:g} s: a kernel hangs, or the machine is overloaded")

    def _limit(self) -> float:
        return ANSWERS_WITHIN * len(self.work.group if self.work else ())

    def _lost(self, work: Work, text: str) -> Answers:
        failures = [
            [_failed(task.definition.name, task.target, self.device, text) for task in batch] for batch in work.group
        ]
        return Answers(failures, usable=False)

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


def _failed(definition: str, target: str, device: str, text: str) -> Answer:
    return Report(definition, target, device, "failed", message=text), None


def _serve(connection: Connection) -> None:
    """Runs in the other process, until nobody asks any more."""
    # An interrupt at the terminal reaches all processes of its group; the one that asked ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        while True:
            connection.send(_served(connection.recv()))


def _served(sent: Sequence[Shipment]) -> Answers:
    """The answers; failures with the reason if there are none, for example because a file of the dataset has gone."""
    try:
        return _run(sent)
    except Exception as error:
        text = f"the process that verified it ended: {type(error).__name__}: {error}"
    failures = [
        [_failed(one.definition.name, target, one.settings.device, text) for target, *_ in one.targets] for one in sent
    ]
    return Answers(failures, usable=False)


def _run(sent: Sequence[Shipment]) -> Answers:
    settings = sent[0].settings
    if settings.device.startswith("cuda"):
        torch.cuda.set_device(settings.device)
        torch.cuda.reset_peak_memory_stats()
        answers = [run_shipment(one) for one in sent]
        peak = torch.cuda.max_memory_reserved()
        usable = _usable()
        return Answers(answers, usable=usable, peak=peak, kept=torch.cuda.memory_reserved() if usable else 0)
    answers = [run_shipment(one) for one in sent]
    worker = reference_process() if not settings.full else None
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
def _no_interrupt() -> Iterator[None]:
    """Holds an interrupt back. It would end processes that start and do not ignore it yet, with a traceback each; and a
    second one would leave processes that are being ended, for which this one would wait when it ends."""
    usual = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread()  # where Python handles signals
    if not here or usual in (None, signal.SIG_IGN) or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which would let interrupts through again when it starts
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))  # on another thread of this process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # of processes that start, too
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, usual)
        if came:
            signal.raise_signal(signal.SIGINT)
