"""The verdict of the ordinary harness on one mutant: rejected, and by what, or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flashinfer_trace.harness.case import judge_reference, reference_outputs, reference_run
from flashinfer_trace.harness.inputs import clone_inputs
from flashinfer_trace.harness.refusals import accepted_wrong_sizes
from flashinfer_trace.verdict.tensors import same_bits
from tools.mutate.cases import Bench, Case


@dataclass(frozen=True)
class Verdict:
    """The outcome for one mutant.

    Attributes:
        how: ``compared`` (an output differs from the oracle), ``raised``, ``accepted a wrong size``, ``time`` or
            ``crashed`` for rejected ones; empty if it survived.
        cases: how many cases it took; all of them if it survived.
        detail: the harness's first line.
        identical: of a survivor, whether its outputs have the same bits as the reference's in every case.
    """

    how: str
    cases: int
    detail: str = ""
    identical: bool = False

    @property
    def rejected(self) -> bool:
        return bool(self.how)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(bench: Bench, source: str) -> Verdict:
    """Runs a mutant on the bench's cases until one rejects it, then on inputs of a wrong size."""
    sized = {size: bench.sized(source, size) for size in dict.fromkeys(case.size for case in bench.cases)}
    identical = True
    for number, case in enumerate(bench.cases, 1):
        definition = sized[case.size]
        try:
            inputs = clone_inputs(dict(case.inputs))
            outputs, _, failures = judge_reference(
                definition, bench.family, inputs, case.axes, case.expected, case.seed
            )
        except Exception as error:
            return Verdict("raised", number, f"{type(error).__name__}: {error}"[:200])
        if failures:
            return Verdict("compared", number, failures[0][:200])
        identical = identical and same_outputs(outputs, case)
    twin = next(case for case in bench.cases if case.size == "twin" and case.elements)
    accepted = accepted_wrong_sizes(
        sized["twin"], clone_inputs(dict(twin.inputs)), lambda wrong: reference_outputs(sized["twin"], wrong, twin.seed)
    )
    if accepted:
        return Verdict("accepted a wrong size", len(bench.cases), accepted[0][:200])
    for check in bench.family.checks:
        try:
            lines = check(sized["twin"], reference_run())
        except Exception as error:
            lines = [f"{type(error).__name__}: {error}"]
        if lines:
            return Verdict("compared", len(bench.cases), lines[0][:200])
    return Verdict("", len(bench.cases), identical=identical)


def same_outputs(outputs: Mapping[str, torch.Tensor], case: Case) -> bool:
    return all(
        outputs[name].dtype == original.dtype
        and outputs[name].shape == original.shape
        and same_bits(outputs[name], original)
        for name, original in case.original.items()
    )
