"""docs/coverage.md: the share of a step's GPU time that is spent in kernels with evidence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashinfer_trace.kernels import launched_by
from flashinfer_trace.kernels.names import key_of
from tools.runtime_tracing.composed_calls import composed
from tools.runtime_tracing.matching import Evidence, Standing
from tools.runtime_tracing.recording import RecordedCall, Recording
from tools.shared.markdown import code, escape, table

#: The phases that are measured.
PHASES = ("prefill", "decode")

TEXT = """## Share of GPU time

Runs recorded in `traces/runtime/` (SGLang {sglang} on one or two {gpu}): models with their real sizes, few layers,
random weights. A prefill takes a batch of prompts, a decode step adds a token to each; the recordings hold the lengths.
*Time* is what the kernels, copies and fills of one step take on the GPU, for the whole model: the time within a layer
counts as often as the model has layers like it. Time in which the GPU waits does not count. Neither does what exchanges
data between GPUs, with the copies that such a call makes (NCCL makes them within its kernels): it contains the wait for
the other GPU, and no Definition describes it, because Definitions are functions of tensors on one GPU. That time has a
table of its own.

A call counts as *verified* if evidence names its kernel (the library, and the function or class) for a Definition whose
constant sizes, dtypes and settings are those of the recorded arguments. The settings are eps, causality, the dtype of
the output, a cap of the logits, a window, and which features are rotated together. They also are whether scales are
powers of two, whether top-k comes before top-p, and numbers that a call names as the Definition names an axis
(`block_size`). A tag that names a kernel without evidence from it does not count. For products of two bfloat16 matrices
the kernel is `torch.matmul` (cuBLAS); products with a bias, of float32 matrices and of batches are other functions. A
Definition that quantizes its activations itself also covers the product that its kernel launches with the quantized
ones. The window of a Triton kernel is that of the model, because the call does not say it; a cache may have any size
and dtype if the call reads nothing from it; launches that only merge or sum what another launch computed count by the
sizes of their outputs. Norms, routers, a rotary embedding and samplers that SGLang computes step by step in PyTorch
count as one call of their function, with its inputs, if all their steps are those that the function is known to take
(`tools/runtime_tracing/composed_calls.py`); single casts and copies do not count. *Other sizes* is the time in kernels
that have evidence, but only for other sizes or settings. Kernels that SGLang compiles by itself (`sglang.jit_kernel`)
are not those of sgl-kernel that have the same name.

The mean is over configurations, each of which counts once. These runs have no row:

{unmeasured}
"""

GAPS = """### Gaps, by time

Every kernel, and every function of PyTorch, whose time no verified Definition covers: its mean share over all
configurations, its largest share of a step, the step, and why (`traces/kernels_without_definition.json`).
"""


@dataclass
class StepTime:
    """The GPU time of one step of the whole model.

    Attributes:
        run, phase: which.
        microseconds: all of it, but what exchanges data between GPUs.
        between_gpus: that, in microseconds.
        standing: by what the dataset says of the call.
        missing: by kernel, of the calls that are not verified.
        reasons: why these are not, by kernel; "" if nobody wrote it.
    """

    run: str
    phase: str
    microseconds: float = 0.0
    between_gpus: float = 0.0
    standing: dict[Standing, float] = field(default_factory=lambda: defaultdict(float))
    missing: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reasons: dict[str, str] = field(default_factory=dict)

    def share(self, standing: Standing) -> float:
        """The share of the time, from 0 to 1."""
        return self.standing.get(standing, 0.0) / self.microseconds if self.microseconds else 0.0


def step_times(run: Recording, evidence: Evidence, known: Mapping[str, str] | None = None) -> list[StepTime]:
    """The time of each phase of a run; none if its kernels are not all real, or not all attributed to calls.

    Args:
        run: it.
        evidence: what the dataset has.
        known: reasons of traces/kernels_without_definition.json (`coverage.reasons`).
    """
    if unmeasured(run):
        return []
    found = {phase: StepTime(run.name, phase) for phase in PHASES}
    window = run.document.get("model_config", {}).get("sliding_window")
    for call in composed(run.calls):
        step = found.get(call.phase)
        if step is None or not call.launches:
            continue
        exchanged = call.exchanged
        exchange, time = (
            sum(one.microseconds * run.weight(one.layer) for one in call.launches if (one in exchanged) is kind)
            for kind in (True, False)
        )
        step.between_gpus += exchange
        if not time:
            continue
        standing, _ = evidence.of(call, window)
        step.microseconds += time
        step.standing[standing] += time
        if standing is not Standing.VERIFIED:
            name = kernel_name(call)
            step.missing[name] += time
            step.reasons[name] = _reason(call, standing, evidence, known or {}) or step.reasons.get(name, "")
    return [step for step in found.values() if step.microseconds]


def _reason(call: RecordedCall, standing: Standing, evidence: Evidence, known: Mapping[str, str]) -> str:
    """Why no verified Definition covers a call; "" if nobody wrote it."""
    if standing is Standing.OTHER_SIZES:
        return f"{standing.value}."
    if evidence.awaits(call):
        return "A Definition names this kernel, which has not been run for it."
    paths = (launched_by().get(call.kernel, call.kernel), *call.through)
    keys = [f"torch:{call.kernel.removeprefix('torch.')}", *map(key_of, paths)]
    return next((known[key] for key in keys if key in known), "")


def unmeasured(run: Recording) -> str:
    """Why the time of a run says nothing; "" if it is measured."""
    if run.stand_ins:
        return f"stand-ins ran for {', '.join(map(code, run.stand_ins))}"
    if any(not call.kernel for call in run.calls):
        return "CUDA graphs, in which no single call launches a kernel"
    return ""


def kernel_name(call: RecordedCall) -> str:
    """A short name: the last part of the path, with its class, and the library."""
    parts = call.kernel.removeprefix("torch.ops.").split(".")
    name = ".".join(parts[-2:]) if len(parts) > 1 and parts[-2][:1].isupper() else parts[-1]
    return f"{name} ({call.library})"


def time_coverage(runs: Sequence[Recording], evidence: Evidence, reasons: Mapping[str, str] | None = None) -> str:
    """The part of the document about the GPU time of recorded runs; `reasons` as `step_times` takes them."""
    steps = [step for run in runs for step in step_times(run, evidence, reasons)]
    by_run: dict[str, dict[str, StepTime]] = defaultdict(dict)
    for step in steps:
        by_run[step.run][step.phase] = step
    measured = {run.name: run.document["versions"] for run in runs if run.name in by_run}
    versions = {key: ", ".join(sorted({one[key] for one in measured.values()})) for key in ("sglang", "gpu")}
    without = [f"- {code(run.name)}: {why}" for run in runs if (why := unmeasured(run))]
    lines = ["", TEXT.format(**versions, unmeasured="\n".join(without) or "none")]
    heading = ["Configuration"]
    for phase in PHASES:
        heading += [f"{phase.capitalize()}, ms", "verified", "other sizes"]
    rows = [
        [code(name), *(cell for phase in PHASES for cell in _cells(of_run.get(phase)))]
        for name, of_run in by_run.items()
    ]
    means = ["**mean**"]
    for phase in PHASES:
        of_phase = [step for step in steps if step.phase == phase]
        means += ["", *(f"**{_percent(mean(one.share(kind) for one in of_phase))}**" for kind in SHOWN)]
    lines += table(heading, [*rows, means], "l" + "rrr" * len(PHASES))
    return "\n".join([*lines, "", *_between_gpus(by_run), *_missing(steps)]) + "\n"


#: The columns of a phase.
SHOWN = (Standing.VERIFIED, Standing.OTHER_SIZES)


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean; 0 of none."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def _cells(step: StepTime | None) -> list[str]:
    if step is None:
        return ["", "", ""]
    return [f"{step.microseconds / 1000:.1f}", *(_percent(step.share(kind)) for kind in SHOWN)]


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _between_gpus(by_run: Mapping[str, Mapping[str, StepTime]]) -> list[str]:
    """The time that runs on several GPUs take for their exchange."""
    rows = [
        [code(name), *(f"{of_run[phase].between_gpus / 1000:.1f}" if phase in of_run else "" for phase in PHASES)]
        for name, of_run in by_run.items()
        if any(step.between_gpus for step in of_run.values())
    ]
    heading = ["Configuration", *(f"{phase.capitalize()}, ms" for phase in PHASES)]
    return ["### Exchange between GPUs", "", *table(heading, rows, "lrr"), ""] if rows else []


def _missing(steps: Sequence[StepTime]) -> list[str]:
    """The gaps: the share of each kernel that is not verified, the largest first."""
    of_kernel: dict[str, list[StepTime]] = defaultdict(list)
    for step in steps:
        for kernel in step.missing:
            of_kernel[kernel].append(step)
    counts = Counter(step.phase for step in steps)
    rows: list[tuple[float, list[str]]] = []
    for kernel, found in of_kernel.items():
        shares = [step.missing[kernel] / step.microseconds for step in found]
        largest, worst = max(zip(shares, found, strict=True), key=lambda pair: pair[0])
        means = [
            sum(share for share, step in zip(shares, found, strict=True) if step.phase == phase) / max(counts[phase], 1)
            for phase in PHASES
        ]
        cells = [*(f"{share:.2%}" for share in (*means, largest)), f"{code(worst.run)}, {worst.phase}"]
        why = next((escape(step.reasons[kernel]) for step in found if step.reasons[kernel]), "")
        rows.append((-sum(means), [code(kernel), *cells, str(len({step.run for step in found})), why]))
    heading = ["Kernel (library)", *(f"Mean, {phase}" for phase in PHASES), "Largest", "Of", "Configurations", "Why"]
    return [GAPS, *table(heading, [row for _, row in sorted(rows)], "lrrrlrl")]
