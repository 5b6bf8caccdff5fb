"""Our references and a peer's on the same inputs, and what the peer's results are worth where ours is slower.

A run of both is a pair, and which goes first alternates, so that a change of the machine's load affects both. Times are
the shortest of all pairs: whatever else runs only adds to them. With one CPU thread they are processor time; with
several, and on a GPU, they are of the clock.

A peer that is faster may compute less. If ours is slower, the peer's reference is therefore verified as ours are: by
the corners and drawn cases of the family, against its oracle and within its bounds. What it fails is printed.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis.strategies import SearchStrategy

from flashinfer_trace import Definition
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import run_case
from flashinfer_trace.harness.family import Plan
from flashinfer_trace.harness.verify import Job

__all__ = ["NOISE", "Ratio", "failure_of", "shortest"]

#: Two measurements of one function differ by less than this share on a machine with other work.
NOISE = 0.05
#: Pairs end after this many seconds, if there were at least two.
BUDGET = 2.0
#: Drawn cases by which a faster peer is verified, beside the corners.
EXAMPLES = 8


@dataclass(frozen=True)
class Ratio:
    """One Definition at one size.

    Attributes:
        definition: its name.
        axes: variable axes of the inputs.
        ours, theirs: milliseconds.
        slower: whether ours takes longer than theirs, by more than noise.
        failure: what their reference fails, if ours is slower; empty if nothing.
    """

    definition: str
    axes: Mapping[str, int]
    ours: float
    theirs: float
    slower: bool
    failure: str = ""

    @property
    def ratio(self) -> float:
        """How many times as long theirs takes."""
        return self.theirs / self.ours


def shortest(runs: tuple[Callable[[], Any], Callable[[], Any]], repeat: int, device: str) -> tuple[float, float]:
    """Milliseconds of two functions, each the shortest of up to `repeat` alternating runs after a first one."""
    for run in runs:
        run()
    best, started = [math.inf, math.inf], time.perf_counter()
    for repetition in range(repeat):
        order = (0, 1) if repetition % 2 == 0 else (1, 0)
        for number in order:
            best[number] = min(best[number], taken(runs[number], device))
        if repetition and time.perf_counter() - started > BUDGET:
            break
    return best[0] * 1e3, best[1] * 1e3


def taken(run: Callable[[], Any], device: str) -> float:
    """Seconds that one call takes, with its work on a GPU."""
    on_gpu = device.startswith("cuda")
    clock = time.process_time if not on_gpu and torch.get_num_threads() == 1 else time.perf_counter
    if on_gpu:
        torch.cuda.synchronize()
    start = clock()
    run()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start


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
    hypothesis.seed(0)(settings(hypothesis.given(plans)(found.append)))()
    return found
