"""The judge's verdict: a grade, what it rests on, and, of a wrong kernel, the worst element and the reason."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashinfer_trace.sandbox.limits import Failed

if TYPE_CHECKING:
    from flashinfer_trace.harness.job import Job
    from flashinfer_trace.judging.failing_case import FailingCase, KeptCase


class Grade:
    """The grades, best first."""

    REFERENCE = "reference-grade"
    KERNEL = "kernel-grade"
    WRONG = "wrong"
    #: Every case was empty, or one that zeros would pass.
    UNPROVEN = "unproven"
    #: It could not be loaded, the machine lacks a package or memory, or it may need the Definition's own sizes, which
    #: nobody chose to leave: nothing is known of what it computes.
    NOT_JUDGED = "not judged"


#: A process's message if an import fails while the kernel runs. This package, which is kept from it, is not missing.
_MISSING = re.compile(r"(ModuleNotFoundError: No module named|ImportError:) ")
#: Part of every message about an output of the wrong shape (see `verdict.outputs.misfits`).
_SHAPE = " has the shape "
_VACUOUS = "no case could have failed: every output was empty, or zeros would have passed"
#: Messages of torch, CUDA, Triton and cuBLAS if a GPU has no memory left. Other processes may have taken it.
_NO_MEMORY = re.compile(
    r"\w+Error: (CUDA out of memory|(CUDA error|Triton Error \[CUDA\]): (out of memory|CUBLAS_STATUS_ALLOC_FAILED))"
)
#: Messages of torch and Triton for GPU code on a machine without a GPU, or for tensors on a CPU.
_FOR_A_GPU = re.compile(
    r"\w+Error: (Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|0 active drivers"
    r"|.*no CUDA-capable device is detected|.*cannot be accessed from Triton|No module named 'triton)"
)


@dataclass(frozen=True)
class Failure:
    """Why a submission is wrong: what the first case showed that it failed under every standard.

    Attributes: see schema/verdict.schema.json. Figures of the worst element are NaN where no element is worst.
    """

    kind: str
    message: str
    standard: str = ""
    output: str = ""
    index: tuple[int, ...] = ()
    got: float = math.nan
    wanted: float = math.nan
    bound: float = math.nan
    ratio: float = math.nan
    reason: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    wrong: int = 0
    share: float = 0.0
    hit: dict[str, str] = field(default_factory=dict)
    signed: float = math.nan
    guess: str = ""
    traceback: str = ""
    printed: str = ""

    @classmethod
    def of(cls, failed: Failed) -> Failure:
        return cls(failed.kind, failed.message, traceback=failed.traceback, printed=failed.printed)

    @property
    def missing(self) -> str:
        """The package that was not found here; empty if none is missing."""
        found = re.search(r"ModuleNotFoundError: No module named '([^'.]+)", self.message)
        return found[1] if found and self.kind in ("not-loaded", "raised") else ""

    @property
    def out_of_memory(self) -> bool:
        return self.kind in ("not-loaded", "raised") and bool(_NO_MEMORY.match(self.message))

    @property
    def refused(self) -> bool:
        """Whether it raised an error instead of returning wrong values, and the device still works."""
        return self.kind == "raised" and "CUDA error" not in self.message

    @property
    def needs_gpu(self) -> bool:
        """Whether it is what code for a GPU raises without one."""
        return self.kind in ("not-loaded", "raised") and bool(_FOR_A_GPU.match(self.message))

    @property
    def excuse(self) -> str:
        """Why it says nothing of what the kernel computes, as `Verdict.code` has it; empty if it does."""
        if self.needs_gpu:
            return "needs-cuda"
        if self.out_of_memory:
            return "no-gpu-memory"
        if self.missing or (self.kind == "raised" and _MISSING.match(self.message)):
            return "missing-package"
        return "not-loaded" if self.kind == "not-loaded" else ""

    @property
    def of_sizes(self) -> bool:
        """Whether a kernel with other sizes written into it fails like this: it raises, or its outputs have those."""
        return self.kind == "raised" or (self.kind == "outputs" and _SHAPE in self.message)

    def advice(self) -> str:
        """Advice on a failure that the machine caused; empty for others."""
        if self.needs_gpu:
            return "needs --device cuda: it is a kernel for a GPU"
        if self.missing:
            return f"the package {self.missing} is not installed here: install it, then judge the kernel again"
        if self.out_of_memory:
            return "the GPU had no memory left: judge the kernel again when other processes use less of it"
        return ""

    def extent(self) -> list[str]:
        """How much of the output is wrong, where, and a guess at why."""
        lines = []
        if self.wrong:
            places = ", ".join(f"{axis} {where}" for axis, where in self.hit.items() if where != "all")
            lines = [f"{100 * self.share:.3g} % of its elements are wrong{f', at {places}' if places else ''}"]
            lines[0] += "" if math.isnan(self.signed) else f", mean signed error {self.signed:.2g} x the bound"
        return [*lines, f"guess: {self.guess}"] if self.guess else lines

    def at(self, axes: dict[str, int], plan: dict[str, Any], seed: int) -> Failure:
        return dataclasses.replace(self, axes=axes, plan=plan, seed=seed)


@dataclass
class OutputFigures:
    """Of one output over all cases: the bound that it met, and the worst error, over its bound and as a norm."""

    policy: str
    worst: float = 0.0
    error: float = 0.0


@dataclass
class Verdict:
    """The findings of the judge.

    Attributes: see schema/verdict.schema.json; and ``kept``, what `failing_case` needs of the first case that it
    failed.
    """

    definition: str
    submission: str
    device: str
    sizes: str
    twin: dict[str, int] = field(default_factory=dict)
    by_default: bool = False
    longer: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    grade: str = Grade.UNPROVEN
    capped: bool = False
    alike: list[str] = field(default_factory=list)
    limited_to: str = ""
    beyond: Failure | None = None
    right_on: str = ""
    failure: Failure | None = None
    code: str = ""
    calls: int = 0
    cases: int = 0
    vacuous: int = 0
    corners: int = 0
    repeated: int = 0
    tally: dict[str, list[int]] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)
    far: str = ""
    kept_apart: bool = True
    seed: int = 0
    seconds: float = 0.0
    replay: str = ""
    outputs: dict[str, OutputFigures] = field(default_factory=dict)
    kept: KeptCase | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def about(cls, job: Job, submission: str, **more: Any) -> Verdict:
        """A verdict on a submission at the sizes of a job, with nothing found yet."""
        own, sized = job.definition.const_axes, job.sized.const_axes
        sizes = "own" if job.sized is job.definition else "twin"
        twin = {axis: value for axis, value in sized.items() if value != own[axis]}
        return cls(job.definition.name, submission, job.device, sizes, twin, **more)

    def reached(self, axes: Mapping[str, int]) -> None:
        """Notes the variable axes of a case that counts."""
        for axis, value in axes.items():
            self.largest[axis] = max(value, self.largest.get(axis, 0))

    @property
    def passed(self) -> bool:
        """Whether it is right by some standard."""
        return self.grade in (Grade.REFERENCE, Grade.KERNEL)

    @property
    def unjudged(self) -> bool:
        """Whether the failure says nothing of what the kernel computes. After calls that were right it does: an error
        that the machine might have caused would be an easy way out of the inputs on which a kernel is wrong."""
        return self.failure is not None and (not self.calls or (not self.cases and bool(self.failure.excuse)))

    def to_dict(self) -> dict[str, Any]:
        fields = dataclasses.asdict(dataclasses.replace(self))  # the copy lacks the case
        del fields["kept"]
        return {"passed": self.passed, **fields}

    def failing_case(self) -> FailingCase | None:
        """The first case that the submission failed: inputs, expected values, bounds and what it left, as tensors on
        the CPU, with `FailingCase.save`. None if it failed none, or before its first call."""
        return self.kept.made_again() if self.kept is not None else None

    def count(self, kinds: Iterable[str], right: bool) -> None:
        for kind in kinds:
            counts = self.tally.setdefault(kind, [0, 0])
            counts[0] += right
            counts[1] += 1

    def summary(self) -> str:
        """The verdict, the worst element, why its bound is what it is, and how to repeat the run: a line each."""
        far = [f"  offsets beyond 32 bits: {self.far}"] if self.far.startswith("not") else []
        return "\n".join([f"{self._head()}{self._extent()}", *self._worst(), *far, f"  repeat: {self.replay}"])

    def _head(self) -> str:
        needed = ": needs --device cuda" if self.code == "needs-cuda" else ""
        return f"{self.submission} for {self.definition} on {self.device}: {self.grade}{needed}"

    def _extent(self) -> str:
        sizes = self._largest()
        parts = [f"in call {self.calls}" if self.calls else "it was not called"]
        if self.failure is None:
            parts = [f"{self.cases} cases{f' up to {sizes}' if sizes else ''}"]
        if self.limited_to:
            parts.append(f"only for {self.limited_to}")
        if self.sizes == "twin":
            parts.append(f"at the sizes of a twin{', the default here' if self.by_default else ''}")
        return f", {', '.join(parts)}"

    def _worst(self) -> list[str]:
        failure = self.failure
        if failure is not None:
            at = "".join(f"; {one}" for one in [f"axes {failure.axes}" * bool(failure.axes), *failure.extent()] if one)
            why = [f"bound: {failure.reason}"] if failure.reason else [failure.advice(), *self._of_twin()[1:]]
            kind = "worst" if failure.kind == "values" else failure.kind
            return [f"  {kind}: {failure.message}{at}", *(f"  {one.strip()}" for one in [*why, self._fewer()] if one)]
        if not self.outputs:
            return [f"  worst: none: {_VACUOUS}"]
        name = max(self.outputs, key=lambda one: self.outputs[one].worst)
        figures = self.outputs[name]
        alike = f", {self._within()}" if self.grade == Grade.KERNEL else ""
        return [f"  worst: {name}, {figures.worst:.3f} x its bound{alike}", f"  bound: {figures.policy}"]

    def __str__(self) -> str:
        lines = [self._head()]
        if self.grade == Grade.KERNEL:
            lines.append(f"  {self._within()}")
        if self.grade == Grade.UNPROVEN:
            lines.append(f"  {_VACUOUS}")
        if self.limited_to:
            lines.append(f"  {'only for' if self.passed else 'on'} {self.limited_to}")
        if self.beyond is not None:
            lines.append(f"  beyond that: {self.beyond.message}; axes {self.beyond.axes}")
        if self.failure is not None:
            lines += _reasons(self.failure, self.definition)
        if self.right_on:
            lines.append(f"  {self._fewer()}")
        for name, figures in self.outputs.items():
            lines.append(f"  {name}: worst error {figures.worst:.3f} x its bound ({figures.policy})")
        if self.passed:
            sizes = self._largest()
            larger = "; for larger ones give --device cuda" if self.device == "cpu" and not self.limited_to else ""
            lines.append(f"  judged up to {sizes or 'its constant sizes'}{larger if sizes else ''}")
        if self.far:
            lines.append(f"  offsets beyond 32 bits: {self.far}")
        if not self.kept_apart:
            lines.append("  this system did not keep it from the judge's memory, which takes Linux 5.19 with Landlock")
        counts = (
            f"{self.cases} cases count, {self.corners} of them corners, {self.repeated} repeated with other elements"
        )
        shown = f"in call {self.calls}" if self.failure else f"{counts}; {self.vacuous} vacuous"
        if self.failure and not self.calls:
            shown = "it was not called"
        if self.failure and self.tally:
            told = ", ".join(f"{right} of {every} {kind}" for kind, (right, every) in self.tally.items())
            lines.append(f"  right: {told}")
        lines += self._of_twin()
        lines.append(f"  {shown}; {self.seconds:.1f} s; seed {self.seed}")
        lines.append(f"  repeat: {self.replay}")
        return "\n".join(lines)

    def _fewer(self) -> str:
        """On which inputs a wrong kernel is right; empty if there are none."""
        advice = "raise an error for all others to be graded on these"
        return f"right on fewer inputs, {self.right_on}: {advice}" if self.right_on else ""

    def _largest(self) -> str:
        longest = f"; longest request {_counts(self.longest)}" if self.longest else ""
        return _counts(self.largest) + longest

    def _within(self) -> str:
        if self.capped:
            return "within the reference's bounds, but reference-grade takes the Definition's own sizes"
        return f"within the bounds stated for {', '.join(self.alike)}, not within the reference's"

    def _of_twin(self) -> list[str]:
        """At which sizes it was judged, and what a kernel needs that was written for others."""
        if self.sizes != "twin":
            return []
        sizes = _counts(self.twin)
        default = ", the default here" if self.by_default else ""
        lines = [f"  at the sizes of a twin{default}: {sizes or 'the same'}"]
        if self.longer:
            lines.append(f"  a few cases with {_counts(self.longer)}, not all at once")
        if self.cut:
            lines.append(f"  too much for a CPU: sums as long as {_counts(self.cut)}")
        if self.failure is not None and not self.unjudged:
            lines.append("  a kernel with the Definition's own sizes written into it needs --full or --device cuda")
        return lines


def _counts(axes: dict[str, int]) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in axes.items())


def _reasons(failure: Failure, definition: str) -> list[str]:
    lines = [f"  {failure.kind}: {failure.message}"]
    if failure.kind == "values":
        lines[0] += f"; bound: {failure.reason}; what is right: `flashinfer-trace show {definition}`"
    lines += [f"  {one}" for one in (failure.advice(), *failure.extent()) if one]
    if failure.standard:
        lines.append(f"  it came closest to the bounds of {failure.standard}")
    if failure.axes:
        lines.append(f"  axes {failure.axes}, plan {failure.plan}, seed of the elements {failure.seed}")
    for what, text in (("traceback of its code", failure.traceback), ("the end of what it printed", failure.printed)):
        lines += [f"  {what}:", *(f"    {line}" for line in text.splitlines())] if text else []
    return lines
