"""One line of evidence: what it says, and why it proves nothing, or not a Definition as it stands.

A *run* is one recording: processes that began together, on GPUs of one name. Its header, ``evidence/runs/<run>.json``,
says when it began, on which machine, with which versions, and which code decided. The name of the run has a digest of
all that, so an edited header no longer fits its name. An *entry* is a line of ``evidence/<op_type>/<name>.jsonl``, for
one kernel, and names its run. A line is a list, since there are thousands: see `fields_of`.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from flashinfer_trace.dataset import digests, store
from flashinfer_trace.dataset.accuracy import too_far
from flashinfer_trace.kernels import current_label, library_of
from flashinfer_trace.kernels.stacks import TODAY
from flashinfer_trace.kernels.table import KernelFacts

if TYPE_CHECKING:
    from flashinfer_trace.format.definition import Definition


#: Real cases that one entry needs to prove anything. If a defect showed in a fraction p of all cases, 50 independent
#: ones would miss it with probability (1 - p)^50: at most 5 % for p = 6 % (the rule of three, 3 / 50).
REQUIRED_CASES = 50
#: Real cases that a run against a kernel draws unless told otherwise: a tenth above the requirement, so recorded
#: evidence still suffices if a few of its cases are found to prove nothing.
DRAWN_CASES = REQUIRED_CASES * 11 // 10
#: Seed of all draws of recorded evidence. One that can be chosen could be chosen until a case that fails is not drawn.
SEED = 0
#: Cases that a recorded run may draw, and that an entry may have (with corners and cases at real sizes): more would
#: take a GPU days.
MOST_DRAWN, MOST_CASES = 5_000, 10_000
#: Vacuous cases for each real one, beyond those of corners, that a run may have: the harness draws a tenth more than
#: what is missing, four times at most, for each set of plans.
MOST_VACUOUS = 10
#: No evidence is older than the project, and none is from the future (but clocks differ).
EARLIEST = datetime.datetime(2026, 11, 21, tzinfo=datetime.timezone.utc)
CLOCK_DIFFERENCE = datetime.timedelta(days=1)
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"

#: Figures of each output in a line, in this order: error / bound of the kernel and of the reference, and the relative
#: norm of the error of each.
FIGURES = ("kernel_worst", "reference_worst", "kernel_error", "reference_error")
#: Figures are recorded with three digits.
_RECORDED = 1.01
#: Relative norm of what rounding to a dtype does at most, where few values are subnormal.
_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
#: Relative norm of an error beyond which an output has nothing of the expected one. Codes of small values that become 0
#: are off by 1.
_NOTHING = 2.0

#: Parts of a line of evidence, in this order; the last part, an object, is there if it has fields.
PARTS = ("kernel", "run", "digests", "cases", "outputs", "further")
#: The digests in a line, in this order. Runs of the first days have two: no digest of what drew the cases.
DIGESTS = ("definition", "family", "plans", "drawn")


class Objection(NamedTuple):
    """Why evidence does not prove a Definition.

    Attributes:
        text: what is wrong, or what has changed.
        failed: the run proves nothing; otherwise it proves something else.
    """

    text: str
    failed: bool = False


@dataclass(frozen=True)
class Run:
    """One recording: what its header says.

    Attributes:
        name: of the file, without its suffix (see `run_name`).
        started_at: when it began, UTC, ISO 8601.
        gpu: name as CUDA reports it.
        capability: compute capability, major and minor.
        libraries: distribution -> version of what has kernels, or takes part otherwise.
        seed: of all draws.
        harness: digest of the code that decides for all families.
    """

    name: str
    started_at: str
    gpu: str
    capability: tuple[int, int]
    libraries: Mapping[str, str]
    seed: int
    harness: str

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, Any]) -> Run:
        """A header of schema/evidence_run.schema.json."""
        if run_name(data) != name:
            raise ValueError(f"its content is not that of the run {name}: it was edited")
        major, minor = data["gpu"]["compute_capability"].split(".")
        texts = (data["started_at"], data["gpu"]["name"], data["harness"], *data["libraries"].values())
        _check_texts(*texts)
        return cls(
            name=name,
            started_at=data["started_at"],
            gpu=data["gpu"]["name"],
            capability=(int(major), int(minor)),
            libraries=data["libraries"],
            seed=data["seed"],
            harness=data["harness"],
        )


def run_name(header: Mapping[str, Any]) -> str:
    """The name of a run: the day that it began, and a digest of its header."""
    return f"{str(header.get('started_at'))[:10]}-{digests.content_sha256(header)[:8]}"


def _check_texts(*values: object) -> None:
    if not all(isinstance(value, str) for value in values):
        raise TypeError("a name, a version or a digest is not a string")


def fields_of(line: Sequence[Any]) -> dict[str, Any]:
    """The fields of a line of evidence by their names: kernel, run, the `DIGESTS`, cases, outputs, and further ones."""
    kernel, run, found, cases, outputs, *further = line
    named = dict(zip(DIGESTS, found.split(" "), strict=len(found.split(" ")) != 2))
    return {**dict(*further), "kernel": kernel, "run": run, **named, "cases": cases, "outputs": outputs}


def line_of(fields: Mapping[str, Any]) -> list[Any]:
    """The line of evidence that has these fields (see `fields_of`)."""
    known = {"kernel", "run", "cases", "outputs", *DIGESTS}
    found = " ".join(fields[name] for name in DIGESTS if name in fields)
    further = {name: value for name, value in fields.items() if name not in known}
    line = [fields["kernel"], fields["run"], found, fields["cases"], fields["outputs"]]
    return [*line, further] if further else line


def place_of(field: str) -> tuple[str | int, ...]:
    """Where a line has a field."""
    return (PARTS.index(field),) if field in PARTS else (PARTS.index("further"), field)


@dataclass(frozen=True)
class Entry:
    """One run of one kernel on one GPU.

    Attributes:
        kernel_label: the kernel's name in its family's record.
        run: the one that it is a line of.
        library: the distribution that ships the kernel: the line names it, or the table of kernels knows which of those
            that the run lists; empty if neither does.
        digests: of the ``definition``, and of the code of the ``harness``, the ``family`` and the ``plans``.
        cases: real cases: distinct ones that prove something.
        vacuous: cases that prove nothing (an empty or all-zero expected output). They are counted apart from `cases`.
        outputs: output -> its `FIGURES`: kernel_worst and reference_worst (error / bound), kernel_error and
            reference_error (relative norm).
        plans: the cases by content, as `harness.report.PlansRun` has them; None of older runs.
    """

    kernel_label: str
    run: Run
    library: str
    digests: Mapping[str, str]
    cases: int
    vacuous: int
    outputs: Mapping[str, Mapping[str, float]]
    plans: Mapping[str, Any] | None = None

    @classmethod
    def from_json(cls, line: Sequence[Any], run: Run) -> Entry:
        """A line of schema/evidence.schema.json (KeyError, TypeError or ValueError if it does not follow that)."""
        fields = fields_of(line)
        label = current_label(fields["kernel"])
        library = fields.get("library") or library_of(label.partition("[")[0], run.libraries) or ""
        found = {part: fields[part] for part in ("definition", "family")}
        found |= {"harness": run.harness, "plans": fields.get("plans", "")}
        _check_texts(library, *found.values())
        outputs = {name: dict(zip(FIGURES, values, strict=True)) for name, values in fields["outputs"].items()}
        cases, which = fields["cases"], fields.get("vacuous_cases", [])
        vacuous = fields.get("vacuous", len(which))
        plans = {"counts": fields.get("rounds", [cases + vacuous]), "vacuous": which}
        drawn = {**plans, "sha256": fields["drawn"]} if "drawn" in fields else None
        entry = cls(label, run, library, found, cases, vacuous, outputs, drawn)
        if not all(isinstance(one, (int, float)) for output in outputs.values() for one in output.values()):
            raise TypeError("an error is not a number")
        _ = entry.shortcoming, entry.worst  # touch every field that is computed with
        return entry

    @property
    def path(self) -> str:
        """The kernel's dotted path."""
        return self.kernel_label.partition("[")[0]

    @property
    def version(self) -> str:
        """That of the library; empty if the run does not list it."""
        return self.run.libraries.get(self.library, "")

    @property
    def older_releases(self) -> str:
        """The releases of its library and of torch that today's stack has others of; empty if none."""
        found = {name: self.run.libraries.get(name, "an unknown release") for name in (self.library, "torch")}
        return " and ".join(
            f"{name} {version}, not {TODAY[name]}"
            for name, version in found.items()
            if name in TODAY and version.partition("+")[0] != TODAY[name]
        )

    @property
    def worst(self) -> float:
        """Largest error / bound of the kernel over all outputs."""
        return max(float(output["kernel_worst"]) for output in self.outputs.values())

    @property
    def shortcoming(self) -> str | None:
        """Why this run proves nothing whatever it is for, None if it may prove something."""
        if self.vacuous < 0:
            return f"{self.vacuous} vacuous cases"
        if self.cases < REQUIRED_CASES:
            return f"{self.cases} real cases are fewer than {REQUIRED_CASES}"
        if (reason := chosen_seed(self.run.seed)) is not None:
            return reason
        for name, output in self.outputs.items():
            for figure in ("kernel_worst", "reference_worst"):
                if not 0 <= output[figure] <= 1:  # a NaN fails too
                    return f"{figure} of {name} is {output[figure]}, beyond its bound"
        return next((text for _, text in self.contradictions), None) or implausible(self.run.started_at)

    @property
    def contradictions(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Place in the line and text of figures that no run can have."""
        for field, count in (("cases", self.cases), ("vacuous", self.vacuous)):
            if count > MOST_CASES:
                yield place_of(field), f"{field} is {count}, but no run has more than {MOST_CASES}"
        if self.vacuous > (most := 200 + MOST_VACUOUS * self.cases):
            text = (
                f"vacuous is {self.vacuous}, but a run with {self.cases} real cases ends before it has more than {most}"
            )
            yield place_of("vacuous"), text
        for name, output in self.outputs.items():
            for who in ("kernel", "reference"):
                # The nearest value of a format is off by something, but never by more than 0 is. A worst of more than 0
                # says nothing of the error: a sampler's is that of a test of its draws.
                worst, error = output[f"{who}_worst"], output[f"{who}_error"]
                if worst == 0 and error > 1:
                    text = f"{who}_error of {name} is {error}, but {who}_worst is 0: what is exact is off by 1 at most"
                    yield (*place_of("outputs"), name, FIGURES.index(f"{who}_error")), text

    def objections(self, definition: Definition, kernels: Mapping[str, KernelFacts]) -> Iterator[Objection]:
        """Why this run does not prove the Definition as it stands; nothing if it does."""
        yield from map(Objection, self._mismatches(definition, kernels))
        impossible = self.shortcoming or next(self._impossible(definition), None)
        if impossible is not None:
            yield Objection(impossible, failed=True)

    def _impossible(self, definition: Definition) -> Iterator[str]:
        """Figures that no run has that passed: of outputs that are floating-point numbers."""
        for name, figures in self.outputs.items():
            dtype = definition.outputs[name].dtype if name in definition.outputs else ""
            if not dtype.startswith(("float", "bfloat")):
                continue
            for who in ("kernel", "reference"):
                error, worst = figures[f"{who}_error"], figures[f"{who}_worst"]
                if error > _NOTHING or (error == 0 and worst > 0):
                    yield f"{who}_error of {name} is {error}, which does not go with {who}_worst {worst}"
            closest = max(figures["kernel_error"], _ROUNDING.get(dtype, 1.0))
            if figures["reference_error"] > too_far(closest * _RECORDED):
                yield (
                    f"reference_error of {name} is {figures['reference_error']}, but kernel_error is "
                    f"{figures['kernel_error']}: a reference is not farther from the oracle than a kernel"
                )

    def _mismatches(self, definition: Definition, kernels: Mapping[str, KernelFacts]) -> Iterator[str]:
        if self.digests["definition"] != digests.short(digests.definition_sha256(definition)):
            yield "the reference, name, axes, constraints, inputs, outputs or dtypes have changed since this run"
        kernel = kernels.get(self.kernel_label)
        if kernel is None:
            known = ", ".join(kernels) or "none"
            yield f"no kernel of this label computes the Definition today; those are {known}"
        else:
            if self.library not in kernel.libraries:
                known = " or ".join(kernel.libraries)
                found = f"library is {self.library!r}" if self.library else "the run lists no library that has it"
                yield f"{found}, but the table of kernels says {known}"
            if not kernel.runs_on(self.run.capability):
                yield f"the kernel does not run on compute capability {self.run.capability[0]}.{self.run.capability[1]}"
        for name in dict.fromkeys([*definition.outputs, *self.outputs]):
            if name not in self.outputs:
                yield f"the output {name} is missing"
            elif name not in definition.outputs:
                yield f"the Definition has no output {name}"


def chosen_seed(seed: int) -> str | None:
    """Why a run with this seed proves nothing, None if it may prove something."""
    return None if seed == SEED else f"the seed is {seed}, not {SEED}: one that is chosen can miss the cases that fail"


@functools.lru_cache(maxsize=store.CACHED_FILES)
def implausible(started_at: str) -> str | None:
    """Why a run cannot have begun then, None if it can."""
    try:
        time = datetime.datetime.strptime(started_at, TIME_FORMAT).replace(tzinfo=datetime.timezone.utc)
    except ValueError:
        return f"started_at is {started_at[:40]!r}, which is not in the calendar"
    if not EARLIEST <= time <= datetime.datetime.now(datetime.timezone.utc) + CLOCK_DIFFERENCE:
        return f"started_at is {started_at}, before {EARLIEST:%Y-%m-%d} or in the future"
    return None
