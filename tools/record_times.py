"""Records times of real kernels in results/, of one Definition a family: what shows most for its seconds comes first.

python -m tools.record_times --record results --budget 500     # on a GPU; again, to go on where it stopped
python -m tools.record_times --plan 9.0 > order                # anywhere: the order for that compute capability
python -m tools.record_times --order order --record results    # in that order, which takes half a minute to make

Definitions without a time come first. Then every Definition with a kernel over 20 us is timed a second time, in new
processes, for docs/performance.md to say how far two runs differ. The exit status is 1 if something could not be timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flashinfer_trace import Definition, definitions, load
from flashinfer_trace.cli.options import counted
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.plans import input_bytes
from flashinfer_trace.judging.bench import Policy, Report, bench, results
from flashinfer_trace.judging.bench.environment import environment
from flashinfer_trace.judging.server import Server
from flashinfer_trace.judging.submission import RunLimits
from flashinfer_trace.judging.traffic import workloads
from flashinfer_trace.sandbox.limits import printable
from tools.record_workloads import bytes_of, chosen
from tools.shared.command import end_with

#: Times above which two runs are compared, in seconds.
COMPARED = 20e-6
#: Bytes of inputs, of all kernels on all workloads of a Definition, above which a smaller one of its family is taken;
#: and of all kernels on one workload, above which that is left out if another one is smaller.
LARGE, LARGEST = 400 << 20, 1 << 30
#: Expected cost of a set of inputs: bytes per second on their way to a kernel's process and back, with what is
#: compared, and seconds besides, for a series of calls and for all; and the time of a Definition. They only order what
#: is timed.
BYTES_PER_SECOND, PER_SERIES, PER_INPUTS, PER_DEFINITION = 1 << 30, 0.05, 0.05, 1.5
#: A kernel that takes longer hangs, and gets no more of the budget.
LIMITS = RunLimits(load=120.0, first_call=90.0, call=10.0)
#: Characters of what went wrong that are shown.
MOST_TEXT = 300
#: Threads that copy and compare inputs here, while no kernel runs.
THREADS = 8


@dataclass(frozen=True)
class Item:
    """A Definition that stands for its family.

    Attributes:
        workloads: names of those that are timed.
        members: Definitions that the family has.
        seconds: that it is expected to take.
    """

    definition: Definition
    workloads: tuple[str, ...]
    members: int
    seconds: float

    @classmethod
    def from_line(cls, line: str) -> Item:
        """The item that `str` wrote."""
        name, names, members, seconds = line.split()
        return cls(load(name), tuple(names.split(",")), int(members), float(seconds))

    def __str__(self) -> str:
        return f"{self.definition.name} {','.join(self.workloads)} {self.members} {self.seconds:.1f}"

    @property
    def value(self) -> float:
        """Definitions that it stands for, per second."""
        return self.members / self.seconds


def plan(capability: tuple[int, int], policy: Policy) -> list[Item]:
    """One Definition of each family that has a kernel for such a GPU, in the order in which they are timed."""
    families: dict[str, list[Definition]] = {}
    for one in definitions():
        families.setdefault(family_of(one).name, []).append(one)
    found = []
    for usual in chosen():
        members = families[family_of(usual).name]
        most = max(_kernels(one, capability) for one in members)
        if most:
            able = [one for one in members if _kernels(one, capability) == most]
            first = usual if usual in able else able[0]
            item, size = _item(first, most, len(members), policy)
            if size > LARGE:
                smallest = min(able, key=lambda one: (input_bytes(one), one.name))
                item = min(item, _item(smallest, most, len(members), policy)[0], key=lambda one: one.seconds)
            found.append(item)
    return sorted(found, key=lambda one: (-one.value, one.definition.name))


def _kernels(definition: Definition, capability: tuple[int, int]) -> int:
    every = family_of(definition).kernels_of(definition)
    return sum(one.unavailable(capability) is None for one in every)


def _item(definition: Definition, kernels: int, members: int, policy: Policy) -> tuple[Item, int]:
    """An item, and the bytes of its inputs for all kernels."""
    every = workloads(definition)
    quick = [one for one in every if one.quick] or list(every[:2])
    smallest = min(quick, key=bytes_of)
    kept = tuple(one for one in quick if one is smallest or kernels * bytes_of(one) <= LARGEST)
    sizes = [kernels * bytes_of(one) for one in kept]
    seconds = PER_DEFINITION + sum(_seconds(kernels, size, policy) for size in sizes)
    return Item(definition, tuple(one.name for one in kept), members, seconds), sum(sizes)


def _seconds(kernels: int, size: int, policy: Policy) -> float:
    """The expected time of a workload: its first inputs, which are not timed, and then the policy's."""
    each = PER_INPUTS + policy.processes * (kernels * PER_SERIES + size / BYTES_PER_SECOND)
    return each + max(policy.least * each, min(policy.fresh * each, policy.seconds))


def without_time(items: Sequence[Item], root: Path, gpu: str) -> list[Item]:
    """Those that have no time on a GPU."""
    there = results.timed(root, gpu, [one.definition for one in items])
    return [one for one in items if one.definition.name not in there]


def second_runs(items: Sequence[Item], root: Path, gpu: str) -> list[Item]:
    """Those with one run only of a kernel for which two are compared, each with the workloads that this concerns."""
    times: dict[tuple[str, str], dict[str, list[float]]] = {}
    references = {one.definition.name: one.definition.reference_sha256 for one in items}
    for one in results.read(root):
        if one["gpu"] == results.directory(gpu) and references.get(one["definition"]) == one["reference_sha256"]:
            kernels = times.setdefault((one["definition"], one["workload"]), {})
            kernels.setdefault(one["kernel"], []).append(float(one["run"] or one["seconds"]))
    found = []
    for item in items:
        once = [
            workload
            for workload in item.workloads
            if any(
                len(runs) == 1 and runs[0] > COMPARED
                for runs in times.get((item.definition.name, workload), {}).values()
            )
        ]
        if once:
            share = len(once) / len(item.workloads)
            found.append(replace(item, workloads=tuple(once), seconds=PER_DEFINITION + share * item.seconds))
    return found


def record(
    items: Sequence[Item],
    measure: Callable[[Item], Report],
    root: Path,
    left: Callable[[], float],
    say: Callable[[str], None] = print,
) -> list[str]:
    """Times Definitions in their order, and appends what was found at once.

    Returns:
        The names of those that have no time, or have a kernel without one.
    """
    failed, no_turn = [], []
    for item in items:
        name, started = item.definition.name, left()
        if item.seconds > started:
            no_turn.append(name)
            continue
        try:
            report = measure(item)
        except Exception as error:  # of any library, or of CUDA
            say(f"failed: {name}: {printable(f'{type(error).__name__}: {error}')}")
            failed.append(name)
            continue
        results.append(report, item.definition, root)
        wrong = {
            f"{one.kernel} on {each.workload}: {one.failure.message if one.failure else 'not timed'}"
            for each in report.timetables
            for one in each.kernels
            if one.summary is None
        } | {f"{each.workload}: {each.skipped}" for each in report.timetables if each.skipped}
        say(f"{name}: {_summary(report)}; {started - left():.1f} s, expected {item.seconds:.1f}")
        for line in sorted(wrong):
            say(f"not timed: {name}: {line[:MOST_TEXT]}")
        if wrong or not report.timed:
            failed.append(name)
    if no_turn:
        say(f"no time left for {len(no_turn)}: {' '.join(no_turn)}")
    return failed


def _summary(report: Report) -> str:
    timed = [one for each in report.timetables for one in each.kernels if one.summary is not None]
    disputed = sum(one.summary.disputed for one in timed if one.summary is not None)
    parts = [f"{len({one.kernel for one in timed})} kernels", f"{len(report.timetables)} workloads"]
    parts += [f"{disputed} disputed"] if disputed else []
    return ", ".join(parts + [f"without {label} ({why})" for label, why in report.left_out.items()])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", metavar="CAPABILITY", help="print the order, and time nothing")
    parser.add_argument("--order", type=Path, help="a file with what --plan has printed [it is made anew]")
    parser.add_argument("--record", type=Path, default=Path("results"), help="the directory of results [results]")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which nothing is begun [3600]")
    parser.add_argument("--seconds", type=float, default=0.8, help="for further inputs of a workload [0.8]")
    parser.add_argument("--device", default="cuda", help="[cuda]")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="of N machines or GPUs, the part of the I-th")
    parser.add_argument("--last", type=Path, help="a file with names that come last; names that fail are added")
    given = parser.parse_args(arguments)
    policy = Policy(seconds=given.seconds)
    if given.plan is not None:
        major, _, minor = given.plan.partition(".")
        for one in plan((int(major), int(minor or 0)), policy):
            print(one)
        return 0
    ends = time.monotonic() + given.budget
    torch.set_num_threads(max(torch.get_num_threads(), THREADS))
    number, count = map(int, given.share.split("/"))
    if given.order:
        items = [Item.from_line(line) for line in given.order.read_text(encoding="utf-8").splitlines()]
    else:
        items = plan(_capability(given.device), policy)
    last = given.last.read_text(encoding="utf-8").split() if given.last and given.last.is_file() else []
    failed = _both(
        _ordered(items[number::count], last), given.record, given.device, policy, lambda: ends - time.monotonic()
    )
    if given.last:
        with given.last.open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in failed)
    return 1 if failed else 0


def _capability(device: str) -> tuple[int, int]:
    return torch.cuda.get_device_capability(torch.device(device)) if device != "cpu" else (9, 0)


def _ordered(items: Iterable[Item], last: Collection[str]) -> list[Item]:
    """The items in their order, but with the named ones last."""
    return sorted(items, key=lambda one: one.definition.name in last)


def _both(items: Sequence[Item], root: Path, device: str, policy: Policy, left: Callable[[], float]) -> list[str]:
    """First what has no time, then second runs; names of those that failed."""
    gpu, failed = environment(device).gpu, []
    for choose in (without_time, second_runs):
        now = choose(items, root, gpu)
        print(
            f"{choose.__name__.replace('_', ' ')}: {counted(len(now), 'Definition')}, {left():.0f} s left", flush=True
        )
        if not now:
            continue
        with Server() as server:

            def measure(item: Item, server: Server = server) -> Report:
                one = item.definition
                kept = [each for each in workloads(one) if each.name in item.workloads]
                return bench([], one, kept, device=device, policy=policy, server=server, limits=LIMITS)

            failed += record(now, measure, root, left, lambda line: print(line, flush=True))
    return failed


if __name__ == "__main__":
    end_with(main)
