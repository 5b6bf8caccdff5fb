"""Reads recorded arguments of triton_kernels' products of experts, apart from sizes."""

from __future__ import annotations

import dataclasses
import re

from flashinfer_trace import Definition
from flashinfer_trace.kernels import launched_by
from tools.runtime_tracing.recording import COMPOSED, RecordedCall

_MATMUL = "triton_kernels.matmul.matmul"
#: Inputs of Definitions -> arguments of the launches that compute these, by any release.
_TAKEN = {
    "bias": {"B"},
    "weights_scale": {"WMxScale"},
    "row_tokens": {"GatherIndx"},
    "positions": {"ScatterSrcIndx", "WriteBackIndx"},
    "alpha": {"alpha"},
    "limit": {"limit"},
}
#: The sum of each token's rows: a launch of its own, or since sglang-kernel 0.4.3 PyTorch, called by a runner.
_SUM, _TORCH_SUM = "._reduce_grouped", "torch.Tensor.sum"
_RUNNER = "sglang/srt/layers/moe/moe_runner/triton_kernels.py"
_ROWS = re.compile(r"0: bfloat16\[(\d+),\d+,(\d+)\], dim: 1$")


def sums_rows(call: RecordedCall) -> bool:
    """Whether a call sums the rows of each token, which another launch computed."""
    launched = launched_by().get(call.kernel) == _MATMUL and call.kernel.endswith(_SUM)
    return launched or (call.library == COMPOSED and call.kernel == _MATMUL)


def sum_of_rows(call: RecordedCall) -> RecordedCall | None:
    """PyTorch's sum of the rows of each token as a call of the product that computed these; None of another call."""
    rows = _ROWS.match(call.arguments)
    if rows is None or call.kernel != _TORCH_SUM or [frame.file for frame in call.stack[:1]] != [_RUNNER]:
        return None
    output = f"output: bfloat16[{rows[1]},{rows[2]}]"
    return dataclasses.replace(call, library=COMPOSED, kernel=_MATMUL, arguments=output)


def same_experts(call: RecordedCall, definition: Definition) -> bool:
    """Whether a launch of matmul_ogs takes what a Definition takes: biases, an activation, rows to gather or to sum."""
    if sums_rows(call):
        return "positions" in definition.inputs
    if launched_by().get(call.kernel) != _MATMUL:
        return True
    given = set(re.findall(r"\b(\w+): ", call.arguments))
    return all(bool(names & given) == (name in definition.inputs) for name, names in _TAKEN.items())
