"""A TraceSet: what ``flashinfer-bench run --local`` benchmarks, in the layout that its validator checks."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from flashinfer_trace.dataset.evidence import RECORDED_ON
from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Kernel
from flashinfer_trace.judging.export.cases import Case, Probabilities, Random, Scales, cases
from flashinfer_trace.judging.export.judgeable import incomparable_kernel, unjudged
from flashinfer_trace.judging.export.solutions import AUTHOR, solution
from flashinfer_trace.judging.export.summary import Summary, write_card
from flashinfer_trace.judging.traffic.plans import unfit
from flashinfer_trace.kernels.table import capability_range

#: Names of workloads are hashed in this namespace: two exports have the same identifiers.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "flashinfer-trace/workloads")
_TITLE = "flashinfer-trace as a TraceSet of flashinfer-bench"
_ABOUT = (
    "Each Definition has workloads that flashinfer-bench's evaluators can take, and the real kernels that compute it "
    "as solutions. Run them on a GPU with `flashinfer-bench run --local .` (version 0.1.2)."
)


def write_trace_set(
    directory: Path, definitions: Iterable[Definition], advance: Callable[[str], None], every: bool = False
) -> Summary:
    """Writes Definitions with workloads (`every`, or those of a short benchmark) and solutions into an empty directory,
    a dataset card, and ``left_out.json``."""
    summary = Summary()
    for definition in definitions:
        family = family_of(definition)
        reason = unjudged(definition, family) or _write(directory, definition, family, summary, every)
        if reason:
            summary.leave_out(definition.name, reason)
        advance(definition.name)
    summary.write(directory)
    write_card(directory, _TITLE, _ABOUT, summary)
    return summary


def _write(directory: Path, definition: Definition, family: Family, summary: Summary, every: bool) -> str | None:
    suitable = []
    for case in cases(definition, every):
        if isinstance(case, Case):
            suitable.append(case)
        else:
            summary.leave_out_part("workloads", definition.name, case.name, case.reason)
    if not suitable:
        return "it has no workload that flashinfer-bench can take"
    lines = [json.dumps(_workload(directory, definition, case), ensure_ascii=False) for case in suitable]
    own = Path(definition.op_type, definition.name)
    _write_text(directory / "definitions" / own.with_suffix(".json"), _json(definition.to_dict()))
    _write_text(directory / "workloads" / own.with_suffix(".jsonl"), "".join(f"{line}\n" for line in lines))
    written = 0
    for kernel in family.kernels:
        why = (
            kernel.unsupported(definition)
            or _elsewhere(kernel)
            or incomparable_kernel(definition, family, kernel)
            or next(filter(None, (unfit(kernel, case.axes) for case in suitable)), None)
        )
        if why:
            summary.leave_out_part("solutions", definition.name, kernel.label, why)
            continue
        document = solution(definition, family, kernel)
        _write_text(directory / "solutions" / AUTHOR / own / f"{document['name']}.json", _json(document))
        written += 1
    summary.add(definition, workloads=len(suitable), solutions=written)
    return None


def _elsewhere(kernel: Kernel) -> str | None:
    """Why a kernel does not run on the GPUs that solutions are exported for, or None: those of the evidence."""
    if kernel.unavailable(RECORDED_ON) is None:
        return None
    own = capability_range(RECORDED_ON, RECORDED_ON)
    return f"runs on compute capability {kernel.known.capabilities}, and solutions are exported for {own}"


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _workload(directory: Path, definition: Definition, case: Case) -> dict[str, Any]:
    """The JSON of a workload; tensors that are given go into a file of their own."""
    identifier = str(uuid.uuid5(_NAMESPACE, f"{definition.name}/{case.name}"))
    file = Path("blob", "workloads", definition.op_type, definition.name, f"{definition.name}_{identifier}.safetensors")
    inputs: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    draws = case.draws(definition)
    for name, given in case.inputs.items():
        value = given.value(draws) if isinstance(given, (Scales, Probabilities)) else given
        if isinstance(value, Random):
            inputs[name] = {"type": "random"}
        elif isinstance(value, torch.Tensor):
            tensors[name] = value.contiguous()
            inputs[name] = {"type": "safetensors", "path": file.as_posix(), "tensor_key": name}
        else:
            inputs[name] = {"type": "scalar", "value": value}
    if tensors:
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(tensors, directory / file)
    workload = {"axes": dict(case.axes), "inputs": inputs, "uuid": identifier}
    return {"definition": definition.name, "workload": workload, "solution": None, "evaluation": None}
