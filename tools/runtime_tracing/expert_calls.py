"""Reads recorded arguments of triton_kernels' products of experts, apart from sizes."""

from __future__ import annotations

import re

from flashinfer_trace import Definition
from flashinfer_trace.kernels import launched_by
from tools.runtime_tracing.recording import RecordedCall

_MATMUL = "triton_kernels.matmul.matmul"
#: Arguments of the launch -> inputs of the Definitions that it computes.
_TAKEN = {
    "B": "bias",
    "WMxScale": "weights_scale",
    "GatherIndx": "row_tokens",
    "ScatterSrcIndx": "positions",
    "alpha": "alpha",
    "limit": "limit",
}
_SUM = "._reduce_grouped"


def sums_rows(call: RecordedCall) -> bool:
    """Whether a call sums the rows of each token, which another launch computed."""
    return launched_by().get(call.kernel) == _MATMUL and call.kernel.endswith(_SUM)


def same_experts(call: RecordedCall, definition: Definition) -> bool:
    """Whether a launch of matmul_ogs takes what a Definition takes: biases, an activation, rows to gather or to sum."""
    if launched_by().get(call.kernel) != _MATMUL:
        return True
    if sums_rows(call):
        return "positions" in definition.inputs
    given = set(re.findall(r"\b(\w+): ", call.arguments))
    return all((argument in given) == (name in definition.inputs) for argument, name in _TAKEN.items())
