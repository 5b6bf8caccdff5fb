"""Our references and those of another dataset on the same inputs, and what theirs are worth where ours are slower.

    python -m benchmarks.references --peer flashinfer_trace/definitions --device cuda --json ratios.json

A run of both is a pair, and which goes first alternates, so that a change of the machine's load affects both. Times are
the shortest of all pairs: whatever else runs only adds to them. On a CPU they are processor time, of all threads; set
OMP_WAIT_POLICY=passive and GOMP_SPINCOUNT=0 with --threads, or threads that wait count, too. On a GPU they are of the
clock.

A peer that is faster may compute less. If ours is slower, the peer's reference is therefore judged as ours are: in the
corners and drawn cases of the family, against its oracle and within its bounds. The first case that it fails is
printed. The command fails if ours is slower than a reference that passes.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis.strategies import SearchStrategy

from benchmarks.peers import peers
from flashinfer_trace import Definition, load, make_inputs
from flashinfer_trace.families import family_of
from flashinfer_trace.files import write_json
from flashinfer_trace.harness.case import run_case
from flashinfer_trace.harness.family import Plan
from flashinfer_trace.harness.verify import Job

__all__ = ["NOISE", "Ratio", "compare"]

#: Two measurements of one function differ by less than this share on a machine with other work.
NOISE = 0.05
#: Pairs end after this many seconds, if there were at least two; and go on for so many, because the shortest of a few
#: runs of some microseconds is a matter of chance.
BUDGET, LEAST = 2.0, 0.05
#: Drawn cases by which a faster peer is verified, beside the corners.
EXAMPLES = 8


@dataclass(frozen=True)
class Ratio:
    """One Definition at one size.

    Attributes:
        definition: its name.
        axes: values of the variable axes.
        ours, theirs: milliseconds.
        failure: if ours is slower, the first case that their reference fails; empty if it fails none.
    """

    definition: str
    axes: Mapping[str, int]
    ours: float
    theirs: float
    failure: str = ""

    @property
    def ratio(self) -> float:
        """How many times as long theirs takes."""
        return self.theirs / self.ours

    @property
    def slower(self) -> bool:
        """Whether ours takes longer, by more than noise."""
        return self.ratio < 1 - NOISE

    @property
    def line(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in self.axes.items())
        verdict = f"slower; theirs fails {self.failure}" if self.failure else "SLOWER" if self.slower else ""
        head = f"{self.definition + '  ' + sizes:120}"
        return f"{head} {self.ours:9.2f}ms {self.theirs:9.2f}ms {self.ratio:6.2f}x  {verdict}"


def compare(
    directory: Path, names: set[str], axes: Mapping[str, int], device: str, repeat: int, out: Path | None
) -> int:
    """Prints a line for each Definition of both datasets, and a summary; writes them to `out` if it is given.

    Returns:
        The exit status: 1 if ours is slower than a reference that passes, or nothing could be compared.
    """
    print(f"{'Definition and axes':120} {'ours':>11} {'theirs':>11} {'ratio':>7}")
    ratios: list[Ratio] = []
    skipped: dict[str, str] = {}
    for one in peers(directory, names):
        try:
            if one.run is None:
                raise ValueError(one.reason)
            ratios.append(ratio_of(load(one.name), one.run, axes, device, repeat))
            print(ratios[-1].line[:320].rstrip(), flush=True)
        except Exception as error:  # their reference may fail in any way: the others still count
            kind = "" if one.run is None else f"{type(error).__name__}: "
            skipped[one.name] = kind + " ".join(str(error).split())[:160]
            print(f"{one.name:120} not compared: {skipped[one.name]}", flush=True)
    if out is not None:
        rows = [{**asdict(one), "ratio": round(one.ratio, 3)} for one in ratios]
        write_json(out, {"device": describe(device), "ratios": rows, "not compared": skipped})
    slower = [one for one in ratios if one.slower]
    unexplained = [one for one in slower if not one.failure]
    if ratios:
        mean = statistics.geometric_mean(one.ratio for one in ratios)
        print(f"\n{len(ratios)} compared on {describe(device)}: geometric mean of the ratios {mean:.2f}x")
        print(f"ours is slower in {len(slower)}, in {len(unexplained)} of them than a reference that passes")
    return 1 if unexplained or not ratios else 0


def describe(device: str) -> str:
    """What the times were taken on, for a reader of the ratios."""
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"


def ratio_of(
    definition: Definition,
    peer: Callable[[Mapping[str, Any]], Any],
    axes: Mapping[str, int],
    device: str,
    repeat: int,
) -> Ratio:
    """Times both references, once more if ours seems slower, and judges theirs if it is."""
    inputs = make_inputs(definition, axes, seed=0, device=device)
    arguments = [inputs[name] for name in definition.inputs]
    runs = (lambda: definition.compiled(*arguments), lambda: peer(inputs))
    found = Ratio(definition.name, definition.bind_axes(inputs), *shortest(runs, repeat, device))
    if found.slower:
        again = zip((found.ours, found.theirs), shortest(runs, repeat, device), strict=True)
        found = Ratio(found.definition, found.axes, *(min(both) for both in again))
    return replace(found, failure=failure_of(definition, peer, device)) if found.slower else found


def shortest(runs: tuple[Callable[[], Any], Callable[[], Any]], repeat: int, device: str) -> tuple[float, float]:
    """Milliseconds of two functions, each the shortest of alternating runs after a first one.

    There are `repeat` runs of each, fewer of slow functions, and more of fast ones: see BUDGET and LEAST.
    """
    for run in runs:
        run()
    best, started = [math.inf, math.inf], time.perf_counter()
    for repetition in itertools.count(1):
        order = (0, 1) if repetition % 2 else (1, 0)
        for number in order:
            best[number] = min(best[number], taken(runs[number], device))
        spent = time.perf_counter() - started
        if (repetition >= repeat and spent > LEAST) or (repetition > 1 and spent > BUDGET):
            break
    return best[0] * 1e3, best[1] * 1e3


def taken(run: Callable[[], Any], device: str) -> float:
    """Seconds of processor time that one call takes; on a GPU, seconds of the clock until its work is done."""
    if not device.startswith("cuda"):
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def failure_of(definition: Definition, peer: Callable[[Mapping[str, Any]], Any], device: str) -> str:
    """The first case in which the peer's reference, in place of ours, is wrong; empty if it passes all of them.

    The cases have the Definition's own sizes. Whether inputs of wrong sizes are refused is not asked.
    """
    theirs = copy.copy(definition)
    theirs.__dict__["compiled"] = lambda *inputs: peer(dict(zip(definition.inputs, inputs, strict=True)))
    family = family_of(definition)
    job = Job(theirs, family, device=device, full=True)
    for number, plan in enumerate([*job.corners, *drawn(job.plans)]):
        try:
            failures = run_case(theirs, family, plan, number, device).failures
        except Exception as error:  # their reference may fail in any way
            failures = [f"{type(error).__name__}: {error}"]
        if failures:
            return " ".join(f"{json.dumps(plan)}: {failures[0]}".split())
    return ""


def drawn(plans: SearchStrategy[Plan]) -> list[Plan]:
    """The first plans that hypothesis draws."""
    found: list[Plan] = []
    settings = hypothesis.settings(
        max_examples=EXAMPLES, database=None, deadline=None, phases=[hypothesis.Phase.generate]
    )

    def keep(plan: Plan) -> None:
        found.append(plan)

    hypothesis.seed(0)(settings(hypothesis.given(plans)(keep)))()
    return found
