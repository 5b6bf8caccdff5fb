"""Problems as KernelBench has them: a Python file each, with a module to beat and functions that make its inputs."""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.export.card import Card, write_card
from flashinfer_trace.export.cases import Case, cases
from flashinfer_trace.export.judgeable import incomparable
from flashinfer_trace.export.sources import Probabilities, Random, Scales, Source
from flashinfer_trace.export.summary import Summary
from flashinfer_trace.families import family_of

__all__ = ["MOST_TEXT", "NoProblem", "problem", "write_problems"]

#: Most characters of tensors that a file of source contains.
MOST_TEXT = 1 << 16
#: Most elements of a tensor that is written as a list; longer ones are compressed.
_LITERAL = 64
_UNPACK = '''

def _tensor(text, dtype, shape):
    """A tensor of zlib-compressed bytes in base 85."""
    return torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(text))), dtype=dtype).reshape(shape)
'''
_MODULE = '''"""{heading}

Sizes: {sizes}.
Outputs: {outputs}.
"""

{imports}{reference}


class Model(torch.nn.Module):
    """What to compute: ``run`` above."""

    def forward(self, {names}):
        return run({names})
{unpack}

def get_inputs():
    """The arguments of ``forward``, on the CPU."""
    return [
{values}
    ]


def get_init_inputs():
    """``Model`` takes no arguments."""
    return []
'''
_CARD = Card(
    title="flashinfer-trace as problems of KernelBench",
    about=(
        "Each file has `class Model(torch.nn.Module)`, `get_inputs()` and `get_init_inputs()`, like the problems of "
        "KernelBench: write a `ModelNew` that returns the same, and faster. `Model.forward` returns a tuple where a "
        "Definition has several outputs."
    ),
)


class NoProblem(ValueError):
    """A Definition that cannot be a problem. The message says why."""


def write_problems(directory: Path, definitions: Iterable[Definition], advance: Callable[[str], None]) -> Summary:
    """Writes a problem for each Definition, a dataset card, and ``left_out.json``.

    Args:
        directory: an empty one.
        definitions: each is exported, or left out with the reason.
        advance: is told the name of each Definition that is done.
    """
    summary = Summary()
    for definition in definitions:
        try:
            code = problem(definition)
        except NoProblem as reason:
            summary.leave_out(definition.name, str(reason))
        else:
            place = directory / definition.op_type / f"{definition.name}.py"
            place.parent.mkdir(exist_ok=True)
            place.write_text(code, encoding="utf-8")
            summary.add(definition, workloads=1, code=code)
        advance(definition.name)
    summary.write(directory)
    write_card(directory, _CARD, summary)
    return summary


def problem(definition: Definition) -> str:
    """The source of a problem: a workload of a short benchmark, or else the first one whose tensors fit into it.

    Raises:
        NoProblem: results cannot be compared by elements, or no workload fits.
    """
    if reason := incomparable(definition, family_of(definition)):
        raise NoProblem(reason)
    reason = "it has no workload"
    for case in itertools.chain(cases(definition), cases(definition, every=True)):
        if not isinstance(case, Case):
            reason = case.reason
            continue
        values = {name: _value(given) for name, given in case.inputs.items()}
        if sum(map(len, values.values())) <= MOST_TEXT:
            return _module(definition, case, values)
        reason = f"the tensors of its workloads take more than {MOST_TEXT} characters of source"
    raise NoProblem(reason)


def _value(given: Source) -> str:
    """An expression for an input."""
    if isinstance(given, (Random, Scales, Probabilities)):
        return given.code
    if not isinstance(given, torch.Tensor):
        return repr(given)
    if given.numel() <= _LITERAL:
        return f"torch.tensor({given.tolist()}, dtype={given.dtype})"
    data = zlib.compress(given.contiguous().flatten().view(torch.uint8).numpy().tobytes(), 9)
    return f"_tensor({base64.b85encode(data).decode()!r}, {given.dtype}, {list(given.shape)})"


def _module(definition: Definition, case: Case, values: Mapping[str, str]) -> str:
    outputs = [f"{name} {spec.dtype}{list(spec.shape or ())}" for name, spec in definition.outputs.items()]
    packed = any(value.startswith("_tensor(") for value in values.values())
    return _MODULE.format(
        heading=f"{definition.name}: {definition.description}".replace("\\", "\\\\").replace('"', "'"),
        sizes=", ".join(f"{axis} = {size}" for axis, size in {**definition.const_axes, **case.axes}.items()),
        outputs=", ".join(outputs).replace("'", ""),
        imports="import base64\nimport zlib\n\n" if packed else "",
        reference=definition.reference.strip("\n"),
        names=", ".join(definition.inputs),
        unpack=_UNPACK if packed else "",
        values="\n".join(f"        {value},  # {name}" for name, value in values.items()),
    )
