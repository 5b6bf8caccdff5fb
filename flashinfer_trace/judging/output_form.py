"""Reads the outputs of a Definition from what a call left, and tells how their form is wrong."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.case import device_of, poisoned_outputs
from flashinfer_trace.harness.family import Outputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.judging.process import Answer
from flashinfer_trace.judging.verdict import Failure
from flashinfer_trace.sandbox.limits import printable
from flashinfer_trace.sandbox.shared_memory import memory_of
from flashinfer_trace.verdict.outputs import misfits, numbers_as_tensors
from flashinfer_trace.verdict.tensors import as_integers, torch_dtype

#: Shares of the elements of an output that hold a usual number before a call, in turn: see `filled_outputs`.
USUAL = (0.0, 0.5, 1.0)
#: The bits of the NaN that outputs are filled with, by dtype. Those with one NaN of each sign have the negative one.
PAYLOADS = {
    torch.bfloat16: 0x7FD5,
    torch.float16: 0x7F55,
    torch.float32: 0x7FD55555,
    torch.float64: 0x7FFD555555555555,
    torch.float8_e4m3fn: 0xFF,
    torch.float8_e5m2: 0xFF,
}
#: Of usual integers: in the range of every dtype.
LARGEST = 127


def filled_outputs(definition: Definition, inputs: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The content of outputs before a call: all NaN (integers: their smallest), as `poisoned_outputs` has it, in one
    call of three; in the others, some or all elements are numbers such as a kernel before it could have left there. A
    kernel can tell none of them from memory that a program has used. NaN has a payload that no computed NaN has, which
    shows the elements that were never written."""
    filled = poisoned_outputs(definition, inputs, seed)
    for value in filled.values():
        if value.dtype in PAYLOADS:
            as_integers(value).fill_(PAYLOADS[value.dtype])
    share = USUAL[seed % len(USUAL)]
    draws = Draws(zlib.crc32(f"fill {seed}".encode()), device_of(inputs))
    for value in filled.values():
        if share and value.dtype != torch.bool:
            floating = value.dtype.is_floating_point
            usual = draws.normal(value.shape, value.dtype) if floating else draws.integers(value.shape, 0, LARGEST)
            chosen = draws.uniform(value.shape) < share
            as_integers(value).copy_(torch.where(chosen, as_integers(usual.to(value.dtype)), as_integers(value)))
    return filled


def outputs_of(definition: Definition, answer: Answer, device: torch.device) -> Outputs:
    """Outputs as they lay in memory; what was returned and did not fit there keeps its own form, without elements.

    Some of them may be stand-ins: only outputs without a `wrong_form` may be compared.
    """
    if not answer.returned:
        return answer.outputs
    strange = _strange(answer, device)
    found: dict[str, Any] = {
        name: _stand_in(described, device) if name in strange else answer.outputs[name]
        for name, described in answer.returned.items()
    }
    return numbers_as_tensors(definition, found, device)


def wrong_form(
    definition: Definition, axes: Mapping[str, int], answer: Answer, outputs: Outputs, device: torch.device
) -> Failure | None:
    """The error in the form of the `outputs_of` an answer; None if they match the Definition's declaration."""
    if outputs and all(value is None for value in outputs.values()):
        names = ", ".join(f"`{name}`" for name in definition.outputs)
        return Failure("outputs", f"returned None; it must return {names}, or take it to write into")
    lines = misfits(definition, axes, outputs, device)
    for name, described in _strange(answer, device).items():
        if name in definition.outputs and _is_tensor(described):
            # A stand-in is dense and on the device of the inputs, which the tensor itself need not be.
            lines += [f"output {name} {wrong}" for wrong in _elsewhere(described, device)]
            lines = lines or [f"output {name} has a form that its process described as {described}"]
    return Failure("outputs", printable("; ".join(lines))) if lines else None


def with_unwritten(failure: Failure, answer: Answer, poisoned: Mapping[str, torch.Tensor]) -> Failure:
    """A failure of values, which also names the outputs that the kernel takes, and into which it wrote nothing."""
    if failure.kind != "values" or answer.returned:
        return failure
    untouched = [
        f"`{name}`"
        for name, value in answer.outputs.items()
        if value.numel() and value.dtype != torch.bool and torch.equal(memory_of(value), memory_of(poisoned[name]))
    ]
    if not untouched:
        return failure
    return dataclasses.replace(failure, message=f"it wrote nothing into {', '.join(untouched)}; {failure.message}")


def _strange(answer: Answer, device: torch.device) -> dict[str, Any]:
    """Returned values that did not fit into the memory of an output, by name, as the process describes them."""
    return {
        name: described
        for name, described in answer.returned.items()
        if name not in answer.outputs or not _fits(answer.outputs[name], described, device)
    }


def _fits(slot: torch.Tensor, described: Any, device: torch.device) -> bool:
    if not isinstance(described, dict):
        return False
    form = described.get("dtype"), described.get("shape"), described.get("device"), described.get("layout")
    return form == (str(slot.dtype).removeprefix("torch."), list(slot.shape), str(device), str(torch.strided))


def _is_tensor(described: Any) -> bool:
    return isinstance(described, dict) and "dtype" in described and "number" not in described


def _elsewhere(described: Mapping[str, Any], device: torch.device) -> list[str]:
    """The error in the layout or the device of a tensor; a stand-in has neither."""
    lines = []
    if described.get("layout") != str(torch.strided):
        lines.append(f"has the layout {described.get('layout')}; it must be a dense tensor")
    if described.get("device") != str(device):
        lines.append(f"is on {described.get('device')}; the inputs are on {device}")
    return lines


def _stand_in(described: Any, device: torch.device) -> Any:
    """Something of the form that was described, for the message about what does not fit; a tensor has one element."""
    if not isinstance(described, dict) or described.get("type") == "NoneType":
        return None
    if "number" in described:
        return described["number"]
    try:
        dtype, shape = torch_dtype(described["dtype"]), [int(size) for size in described["shape"]]
        return torch.empty((), dtype=dtype, device=device).expand(shape)
    except Exception:  # of no tensor, or by a stranger
        return type(printable(str(described.get("type"))), (), {})()
