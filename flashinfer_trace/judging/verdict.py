"""The judge's verdict: a grade, what it rests on, and, of a wrong kernel, the worst element and the reason."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Failure", "Grade", "OutputFigures", "Verdict"]


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


#: What a process says if an import fails while the kernel runs. This package, which is kept from it, is not missing.
_MISSING = re.compile(r"(ModuleNotFoundError: No module named|ImportError:) ")
#: Part of every message about an output of the wrong shape (see `verdict.outputs.misfits`).
_SHAPE = " has the shape "
_VACUOUS = "no case could have failed: every output was empty, or zeros would have passed"
#: What torch, CUDA, Triton and cuBLAS say if a GPU has no memory left. Other processes may have taken it.
_NO_MEMORY = re.compile(
    r"\w+Error: (CUDA out of memory|(CUDA error|Triton Error \[CUDA\]): (out of memory|CUBLAS_STATUS_ALLOC_FAILED))"
)
#: What torch and Triton say of code for a GPU where there is none, or of tensors on a CPU.
_FOR_A_GPU = re.compile(
    r"\w+Error: (Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|0 active drivers"
    r"|.*no CUDA-capable device is detected|.*cannot be accessed from Triton|No module named 'triton)"
)


@dataclass(frozen=True)
class Failure:
    """Why a submission is wrong: what the first case showed that it failed under every standard.

    Attributes:
        kind: ``values``, ``outputs``, ``inputs-changed``, ``outside``, ``tampered``, ``relation``, ``same-draws``,
            ``not-loaded``, ``raised``, ``timed-out``, ``died`` or ``protocol``.
        message: in one line.
        standard: under whose bounds it came closest.
        output, index, got, wanted, bound, ratio: the worst element, of the kind ``values`` where one element is worst.
        reason: why that output's bound is what it is.
        axes, plan, seed: the case.
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

    @property
    def missing(self) -> str:
        """The package that was not found here; empty if none is missing."""
        found = re.search(r"ModuleNotFoundError: No module named '([^'.]+)", self.message)
        return found[1] if found and self.kind in ("not-loaded", "raised") else ""

    @property
    def out_of_memory(self) -> bool:
        """Whether the GPU had no memory left."""
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
        """What to do about a failure that the machine caused; empty for others."""
        if self.needs_gpu:
            return "needs --device cuda: it is a kernel for a GPU"
        if self.missing:
            return f"the package {self.missing} is not installed here: install it, then judge the kernel again"
        if self.out_of_memory:
            return "the GPU had no memory left: judge the kernel again when other processes use less of it"
        return ""

    def at(self, axes: dict[str, int], plan: dict[str, Any], seed: int) -> Failure:
        """The failure, of this case."""
        return dataclasses.replace(self, axes=axes, plan=plan, seed=seed)


@dataclass
class OutputFigures:
    """Of one output over all cases: the bound that it met, and the worst error, over its bound and as a norm."""

    policy: str
    worst: float = 0.0
    error: float = 0.0


@dataclass
class Verdict:
    """What the judge found.

    Attributes:
        definition: name.
        submission: its label.
        device: where it ran.
        sizes: ``own``, or ``twin`` for the family's small twin.
        twin: its values of the constant axes that it changes; empty at the own sizes.
        by_default: whether it was the small twin that was judged, and nobody had asked for it.
        grade: see `Grade`.
        alike: known kernels whose stated bounds it stays within; of a reference-grade submission all of them.
        limited_to: the inputs that it was graded on, if it refused others; empty for all valid inputs.
        beyond: how it refused them.
        right_on: the inputs, of those that known kernels take, on which a submission is right that is wrong elsewhere.
        failure: why it is wrong, or why it was not judged.
        code: a word for that: the kind of failure; or, of one that was not judged, ``not-loaded``, ``missing-package``,
            ``no-gpu-memory``, ``needs-cuda``, ``other-sizes``, or how its process ended before the first call.
        calls: how often the submission was called.
        cases, vacuous: right calls that count, and those that could not fail; before the failure, if there is one.
        corners: how many of the cases the family names.
        repeated: how many of them had the shapes and addresses of the case before, with other elements.
        largest: the largest value of each variable axis over the cases that count: of larger ones nothing is known.
        kept_apart: whether the system kept its process from reading the judge's memory.
        seed: repeats the run.
        outputs: figures of each output, under the grade's bounds.
    """

    definition: str
    submission: str
    device: str
    sizes: str
    twin: dict[str, int] = field(default_factory=dict)
    by_default: bool = False
    grade: str = Grade.UNPROVEN
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
    largest: dict[str, int] = field(default_factory=dict)
    kept_apart: bool = True
    seed: int = 0
    seconds: float = 0.0
    replay: str = ""
    outputs: dict[str, OutputFigures] = field(default_factory=dict)

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
        """The verdict as JSON."""
        return {"passed": self.passed, **dataclasses.asdict(self)}

    def summary(self) -> str:
        """The verdict, the worst element, why its bound is what it is, and how to repeat the run: a line each."""
        return "\n".join([f"{self._head()}{self._extent()}", *self._worst(), f"  repeat: {self.replay}"])

    def _head(self) -> str:
        needed = ": needs --device cuda" if self.code == "needs-cuda" else ""
        return f"{self.submission} for {self.definition} on {self.device}: {self.grade}{needed}"

    def _extent(self) -> str:
        """On what the verdict rests."""
        sizes = ", ".join(f"{axis} {value}" for axis, value in self.largest.items())
        parts = [f"in call {self.calls}" if self.calls else "it was not called"]
        if self.failure is None:
            parts = [f"{self.cases} cases{f' up to {sizes}' if sizes else ''}"]
        if self.limited_to:
            parts.append(f"only for {self.limited_to}")
        if self.sizes == "twin":
            parts.append(f"at the sizes of its small twin{', the default here' if self.by_default else ''}")
        return f", {', '.join(parts)}"

    def _worst(self) -> list[str]:
        failure = self.failure
        if failure is not None:
            at = f"; axes {failure.axes}" if failure.axes else ""
            why = [f"bound: {failure.reason}"] if failure.reason else [failure.advice(), *self._of_twin()[1:]]
            kind = "worst" if failure.kind == "values" else failure.kind
            return [f"  {kind}: {failure.message}{at}", *(f"  {one.strip()}" for one in [*why, self._fewer()] if one)]
        if not self.outputs:
            return [f"  worst: none: {_VACUOUS}"]
        name = max(self.outputs, key=lambda one: self.outputs[one].worst)
        figures = self.outputs[name]
        alike = f", within the bounds of {', '.join(self.alike)}" if self.grade == Grade.KERNEL else ""
        return [f"  worst: {name}, {figures.worst:.3f} x its bound{alike}", f"  bound: {figures.policy}"]

    def __str__(self) -> str:
        lines = [self._head()]
        if self.grade == Grade.KERNEL:
            lines.append(f"  within the bounds stated for {', '.join(self.alike)}, not within the reference's")
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
            sizes = ", ".join(f"{axis} {value}" for axis, value in self.largest.items())
            larger = "; for larger ones give --device cuda" if self.device == "cpu" and not self.limited_to else ""
            lines.append(f"  judged up to {sizes or 'its constant sizes'}{larger if sizes else ''}")
        if not self.kept_apart:
            lines.append("  this system did not keep it from the judge's memory, which takes Linux 5.19 with Landlock")
        counts = (
            f"{self.cases} cases count, {self.corners} of them corners, {self.repeated} repeated with other elements"
        )
        shown = f"in call {self.calls}" if self.failure else f"{counts}; {self.vacuous} vacuous"
        if self.failure and not self.calls:
            shown = "it was not called"
        lines += self._of_twin()
        lines.append(f"  {shown}; {self.seconds:.1f} s; seed {self.seed}")
        lines.append(f"  repeat: {self.replay}")
        return "\n".join(lines)

    def _fewer(self) -> str:
        """On which inputs a wrong kernel is right; empty if there are none."""
        advice = "raise an error for all others to be graded on these"
        return f"right on fewer inputs, {self.right_on}: {advice}" if self.right_on else ""

    def _of_twin(self) -> list[str]:
        """At which sizes it was judged, and what a kernel needs that was written for others."""
        if self.sizes != "twin":
            return []
        sizes = ", ".join(f"{axis} {value}" for axis, value in self.twin.items())
        default = ", the default here" if self.by_default else ""
        lines = [f"  at the sizes of the small twin{default}: {sizes or 'the same'}"]
        if self.failure is not None and not self.unjudged:
            lines.append("  a kernel with the Definition's own sizes written into it needs --full or --device cuda")
        return lines


def _reasons(failure: Failure, definition: str) -> list[str]:
    lines = [f"  {failure.kind}: {failure.message}"]
    if failure.kind == "values":
        lines[0] += f"; bound: {failure.reason}; what is right: `flashinfer-trace show {definition}`"
    if failure.advice():
        lines.append(f"  {failure.advice()}")
    if failure.standard:
        lines.append(f"  it came closest to the bounds of {failure.standard}")
    if failure.axes:
        lines.append(f"  axes {failure.axes}, plan {failure.plan}, seed of the elements {failure.seed}")
    return lines
