"""Problems as KernelBench has them: a Python file each, with a module to beat and functions that make its inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.judging.bench.results import of_today, read
from flashinfer_trace.judging.export.cases import KERNELBENCH, Case, Probabilities, Random, Scales, Source, cases
from flashinfer_trace.judging.export.judgeable import PRECISIONS, unfit_for_kernelbench
from flashinfer_trace.judging.export.summary import Summary, write_card

#: Most characters of tensors that a file of source contains.
MOST_TEXT = 1 << 16
_MODULE = '''"""{heading}

Sizes: {sizes}.
Output: {output}.
Precision: {precision}, to be given to KernelBench's evaluator, which casts every tensor to it.
Baseline: a reference that computes in float32 or better, which no model is served with. A speedup over it says nothing
about real kernels{fastest}.
"""

{reference}
{settings}

class Model(torch.nn.Module):
    """What to compute: ``run`` above."""

    def forward(self, {names}):
        return run({names})


def get_inputs():
    """The arguments of ``forward``, on the CPU."""
    return [
{values}
    ]


def get_init_inputs():
    """``Model`` takes no arguments."""
    return []
'''
#: The setting in flashinfer-trace while a reference runs on a GPU, where torch has another default.
_SETTINGS = {
    "fp16": """

# Parts of a long sum are not rounded to float16.
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
"""
}
_TITLE = "flashinfer-trace as problems of KernelBench"
_ABOUT = (
    "Each file has `class Model(torch.nn.Module)`, `get_inputs()` and `get_init_inputs()`, like the problems of "
    "KernelBench: write a `ModelNew` that returns the same, and faster. KernelBench's evaluator casts all tensors "
    "to one precision: give it the problem's, which is in `index.jsonl` and in the first lines of each file. "
    "A problem has the sizes of one workload: the first of a short benchmark, or else of all, that fits into the "
    "file. "
    "The baseline, `Model`, is a reference in PyTorch that computes in float32 or better. A speedup over it says "
    "nothing about the kernels that serve models. `index.jsonl` names the fastest of these that was measured "
    "(`fastest`), with its GPU and seconds, where there is a time for the problem's workload; "
    "`flashinfer-trace bench` times a kernel next to all of them. "
    "Tensors are drawn anew for each seed; numbers, and the `top_p` of each row, stay as they are."
)


class NoProblem(ValueError):
    """A Definition that cannot be a problem. The message says why."""


def write_problems(directory: Path, definitions: Iterable[Definition], advance: Callable[[str], None]) -> Summary:
    """Writes a problem for each Definition into an empty directory, a dataset card, and ``left_out.json``."""
    summary = Summary()
    for definition in definitions:
        try:
            code, best = problem(definition, functools.partial(summary.leave_out_part, "workloads", definition.name))
        except NoProblem as reason:
            summary.leave_out(definition.name, str(reason))
        else:
            place = directory / definition.op_type / f"{definition.name}.py"
            place.parent.mkdir(exist_ok=True)
            place.write_text(code, encoding="utf-8")
            columns: dict[str, float | str] = {"fastest": best[0], "fastest_gpu": best[1], "fastest_seconds": best[2]}
            summary.add(definition, workloads=1, precision=precision(definition), **columns, code=code)
        advance(definition.name)
    summary.write(directory)
    write_card(directory, _TITLE, _ABOUT, summary)
    return summary


def problem(
    definition: Definition, skip: Callable[[str, str], None] = lambda workload, reason: None
) -> tuple[str, tuple[str, str, float]]:
    """The source of a problem, and the `fastest` real kernel at its sizes.

    It has a workload of a short benchmark, or else the first one whose tensors fit into it. `skip` is told the name of
    each workload that comes earlier and cannot be used, and the reason.

    Raises:
        NoProblem: KernelBench cannot judge it, or no workload fits.
    """
    if reason := unfit_for_kernelbench(definition, family_of(definition)):
        raise NoProblem(reason)
    reason = "it has no workload"
    for every in (False, True):
        for case in cases(definition, every, KERNELBENCH):
            if isinstance(case, Case):
                values = {name: _value(given) for name, given in case.inputs.items()}
                if sum(map(len, values.values())) <= MOST_TEXT:
                    best = fastest(definition, case.name)
                    return _module(definition, case, values, best), best
                reason = f"its tensors take more than {MOST_TEXT} characters of source"
            else:
                reason = case.reason
            skip(case.name, reason)
    raise NoProblem(reason)


def fastest(definition: Definition, workload: str) -> tuple[str, str, float]:
    """The real kernel with the least recorded time on a workload, its GPU, and seconds; empty, and 0, without one."""
    root = definition.root
    found = _recorded(root).get((definition.name, workload), []) if root is not None else []
    own = [one for one in found if root is not None and of_today(one, definition, root)]
    best = min(own, key=lambda one: float(one["seconds"]), default=None)
    return ("", "", 0.0) if best is None else (best["kernel"], best["environment"]["gpu"], float(best["seconds"]))


@functools.cache
def _recorded(root: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in read(root / "results"):
        found.setdefault((one["definition"], one["workload"]), []).append(one)
    return found


def precision(definition: Definition) -> str:
    """KernelBench's name for the dtype of the input tensors."""
    return next(PRECISIONS[one.dtype] for one in definition.inputs.values() if one.shape is not None)


def _value(given: Source) -> str:
    if isinstance(given, (Random, Scales, Probabilities)):
        return given.code
    if not isinstance(given, torch.Tensor):
        return repr(given)
    return f"torch.tensor({given.tolist()}, dtype={given.dtype})"


def _module(definition: Definition, case: Case, values: Mapping[str, str], best: tuple[str, str, float]) -> str:
    ((output, spec),) = definition.outputs.items()
    return _MODULE.format(
        heading=f"{definition.name}: {definition.description}".replace("\\", "\\\\").replace('"', "'"),
        sizes=", ".join(f"{axis} = {size}" for axis, size in {**definition.const_axes, **case.axes}.items()),
        output=f"{output} {spec.dtype}{list(spec.shape or ())}".replace("'", ""),
        precision=precision(definition),
        fastest=f". Of these, {best[0]} was the fastest here: {best[2] * 1e6:.1f} us on {best[1]}" if best[0] else "",
        reference=definition.reference.strip("\n"),
        settings=_SETTINGS.get(precision(definition), ""),
        names=", ".join(definition.inputs),
        values="\n".join(f"        {value},  # {name}" for name, value in values.items()),
    )
