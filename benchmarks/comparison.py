"""Our references and those of another dataset on the same inputs, and what theirs are worth where ours are slower.

    python -m tools.compatibility.published      # fetches flashinfer-bench's into .flashinfer-bench
    python -m benchmarks.references --peer .flashinfer-bench --device cuda --json benchmarks/recorded/nvidia_h200.json

Each Definition is compared at two sizes, unless --axes says which: the one that its family chooses, and 64 rows. A run
of both is a pair, and which goes first alternates, so that a change of the machine's load affects both. Times are
the shortest of all pairs: whatever else runs only adds to them. On a CPU they are processor time, of all threads; set
OMP_WAIT_POLICY=passive and GOMP_SPINCOUNT=0 with --threads, or threads that wait count, too. On a GPU they are of the
clock.

A peer that is faster may compute less. If ours is slower, the peer's reference is therefore judged as ours are: in the
corners and drawn cases of the family, against its oracle and within its bounds. The first case that it fails is
printed. The command fails if ours is slower than a reference that passes.

The file of --json is written again after each line, so that it holds what there is whenever the command ends.
docs/reference_speed.md shows the files in benchmarks/recorded/.
"""

from __future__ import annotations

import copy
import datetime
import fnmatch
import itertools
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis.strategies import SearchStrategy

from benchmarks.peers import Peer, peers
from flashinfer_trace import Definition, load, make_inputs
from flashinfer_trace.families import family_of
from flashinfer_trace.format.files import write_json
from flashinfer_trace.harness.case import run_case
from flashinfer_trace.harness.family import Plan
from flashinfer_trace.harness.verify import Job
from tools.compatibility.published import identity

__all__ = ["NOISE", "Comparison", "Ratio", "compare"]

#: Two measurements of one function differ by less than this share on a machine with other work.
NOISE = 0.05
#: Pairs end after this many seconds, if there were at least two; and go on for so many, because the shortest of a few
#: runs of some microseconds is a matter of chance.
BUDGET, LEAST = 2.0, 0.05
#: Drawn cases by which a faster peer is verified, beside the corners.
EXAMPLES = 8
#: Seconds for which a faster peer is judged; what fails in none of the cases until then counts as right.
JUDGED = 15.0
#: Rows of the larger size, and the axes that count rows: the first that a Definition has is the one.
ROWS, ROW_AXES = 64, ("total_q", "num_tokens", "seq_len", "M", "batch_size")


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        directory: the Definitions of the other dataset.
        names: of ours.
        axes: values of variable axes, for all of them; empty for the two sizes.
        device, repeat: where, and how many pairs of runs at least.
        out: the file of the results, if one is written.
        budget: seconds after which no further size is begun.
        without: glob of names that are left out -> why.
    """

    directory: Path
    names: set[str]
    axes: Mapping[str, int] = field(default_factory=dict)
    device: str = "cpu"
    repeat: int = 7
    out: Path | None = None
    budget: float = math.inf
    without: Mapping[str, str] = field(default_factory=dict)

    def sizes(self, definition: Definition) -> list[Mapping[str, int]]:
        """The values of variable axes at which one Definition is compared."""
        rows = next((axis for axis in ROW_AXES if axis in definition.var_axes), None)
        return [self.axes] if self.axes or rows is None else [{}, {rows: ROWS}]

    def excuse(self, name: str) -> str | None:
        """Why a Definition is left out; None if it is not."""
        return next((why for glob, why in self.without.items() if fnmatch.fnmatch(name, glob)), None)


@dataclass(frozen=True)
class Ratio:
    """One Definition at one size.

    Attributes:
        definition: its name.
        axes: values of the variable axes.
        reference_sha256: of our reference.
        ours, theirs: milliseconds.
        failure: if ours is slower, the first case that their reference fails; empty if none was found.
    """

    definition: str
    axes: Mapping[str, int]
    reference_sha256: str
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


def compare(wanted: Comparison) -> int:
    """Prints a line for each size of the Definitions of both datasets, and a summary; `wanted.out` gets them, too.

    Returns:
        The exit status: 1 if ours is slower than a reference that passes, or nothing could be compared.
    """
    print(f"{'Definition and axes':120} {'ours':>11} {'theirs':>11} {'ratio':>7}")
    ratios: list[Ratio] = []
    skipped: dict[str, str] = {}
    for found in results(wanted):
        if isinstance(found, Ratio):
            ratios.append(found)
            print(found.line[:320].rstrip(), flush=True)
        else:
            skipped[found[0]] = found[1]
            print(f"{found[0]:120} not compared: {found[1]}", flush=True)
        if wanted.out is not None:
            write_json(wanted.out, document(wanted, ratios, skipped))
    slower = [one for one in ratios if one.slower]
    unexplained = [one for one in slower if not one.failure]
    if ratios:
        mean = statistics.geometric_mean(one.ratio for one in ratios)
        where = environment(wanted.device)
        print(f"\n{len(ratios)} compared on {where['processor']}, torch {where['torch']}: ", end="")
        print(f"geometric mean of the ratios {mean:.2f}x")
        print(f"ours is slower in {len(slower)}, in {len(unexplained)} of them than a reference that passes")
    return 1 if unexplained or not ratios else 0


def results(wanted: Comparison) -> Iterator[Ratio | tuple[str, str]]:
    """The ratio of each size, or its name and why it was not compared."""
    end = time.monotonic() + wanted.budget
    for one in peers(wanted.directory, wanted.names):
        excuse = one.reason or wanted.excuse(one.name)
        if excuse or one.run is None:
            yield one.name, excuse or "has no reference"
            continue
        for size in wanted.sizes(load(one.name)):
            label = " ".join([one.name, *(f"{axis}={value}" for axis, value in size.items())])
            if time.monotonic() > end:
                yield label, f"no time was left of {wanted.budget:g} s"
            else:
                yield attempted(one, label, size, wanted)


def attempted(peer: Peer, label: str, size: Mapping[str, int], wanted: Comparison) -> Ratio | tuple[str, str]:
    """The ratio at one size, or its label and why there is none."""
    assert peer.run is not None
    try:
        return ratio_of(load(peer.name), peer.run, size, wanted.device, wanted.repeat)
    except Exception as error:  # their reference may fail in any way: the others still count
        return label, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def document(wanted: Comparison, ratios: list[Ratio], skipped: Mapping[str, str]) -> dict[str, Any]:
    """The results as the file holds them."""
    rows = [{**asdict(one), "ratio": round(one.ratio, 3)} for one in ratios]
    for row in rows:
        row |= {key: float(f"{row[key]:.4g}") for key in ("ours", "theirs")}
    return {
        "peer": identity(wanted.directory),
        "environment": environment(wanted.device),
        "ratios": rows,
        "not_compared": dict(skipped),
    }


def environment(device: str) -> dict[str, Any]:
    """What the times were taken on, and when."""
    is_gpu = device.startswith("cuda")
    return {
        "processor": torch.cuda.get_device_name(device) if is_gpu else cpu(),
        **({"cuda": torch.version.cuda} if is_gpu else {"threads": torch.get_num_threads()}),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def cpu() -> str:
    """The model of the processor as Linux tells it, elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]} ({platform.machine()})" if models else platform.machine()


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
    axes = definition.bind_axes(inputs)
    found = Ratio(definition.name, axes, definition.reference_sha256, *shortest(runs, repeat, device))
    if found.slower:
        ours, theirs = shortest(runs, repeat, device)
        found = replace(found, ours=min(ours, found.ours), theirs=min(theirs, found.theirs))
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
    """The first case in which the peer's reference, in place of ours, is wrong; empty if none is found in time.

    The cases have the Definition's own sizes. Whether inputs of wrong sizes are refused is not asked.
    """
    theirs = copy.copy(definition)
    theirs.__dict__["compiled"] = lambda *inputs: peer(dict(zip(definition.inputs, inputs, strict=True)))
    family = family_of(definition)
    job = Job(theirs, family, device=device, full=True)
    end = time.monotonic() + JUDGED
    for number, plan in enumerate([*job.corners, *drawn(job.plans)]):
        if time.monotonic() > end:
            break
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
