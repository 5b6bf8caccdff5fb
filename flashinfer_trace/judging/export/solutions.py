"""Kernels of this dataset as Solutions of flashinfer-bench: one Python file each, which calls the real kernel."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from flashinfer_trace.format.definition import Definition, TensorSpec
from flashinfer_trace.harness.family import Family, Kernel
from flashinfer_trace.judging.export.standalone import Slice, SliceError

#: The author under which flashinfer-bench's validator looks for the solutions of a dataset itself.
AUTHOR = "baseline"
_ENTRY = "run"
#: Names that the module defines itself.
_RESERVED = (_ENTRY, "CALL", "DEFINITION", "SimpleNamespace", "torch")


def solution(definition: Definition, family: Family, kernel: Kernel) -> dict[str, Any]:
    """The JSON of a Solution.

    Raises:
        SliceError: its adapter cannot be written as a file of its own.
    """
    return {
        "name": f"{definition.name}__{_slug(kernel.label)}",
        "definition": definition.name,
        "author": AUTHOR,
        "spec": {
            "language": "python",
            "target_hardware": ["cuda"],
            "entry_point": f"main.py::{_ENTRY}",
            "dependencies": [kernel.library],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": main_source(definition, family, kernel)}],
        "description": _description(kernel),
    }


def _slug(label: str) -> str:
    """A label as a part of a file's name; what a pipeline consists of is left out."""
    return re.sub(r"\W+", "_", label.partition(":")[0]).strip("_").lower()


def _description(kernel: Kernel) -> str:
    over = f" It overwrites {' and '.join(kernel.in_place)}." if kernel.in_place else ""
    return f"{kernel.label} of {kernel.library}, for GPUs of compute capability {kernel.known.capabilities}.{over}"


def main_source(definition: Definition, family: Family, kernel: Kernel) -> str:
    """The Python module of a Solution: the kernel's adapter with its helpers, and ``run``.

    A kernel that draws gets a seed from torch's generator of the CPU with each call.

    Raises:
        SliceError: the adapter cannot be copied, or nothing gives the size of an output.
    """
    parts = Slice(_RESERVED)
    call = parts.expression(kernel.seeded or kernel.call)
    imports = ["from types import SimpleNamespace", "import torch"]
    body = parts.source
    own = {line for line in body.splitlines() if line.startswith(("import ", "from "))}
    heading = f'"""{definition.name}: {kernel.label} of {kernel.library}. Written by flashinfer-trace."""'
    head = "\n".join(sorted({*own, *imports}, key=lambda line: (line.startswith("from"), line)))
    rest = "\n".join(line for line in body.splitlines() if line not in own).strip("\n")
    blocks = [f"{heading}\n\n{head}", rest, _stand_in(definition), f"CALL = {call}"]
    text = "\n\n\n".join(block for block in [*blocks, _run(definition, kernel)] if block) + "\n"
    ast.parse(text)
    return text


def _stand_in(definition: Definition) -> str:
    """The code of a stand-in for a Definition, with the fields that adapters read."""

    def specs(of: Mapping[str, TensorSpec]) -> str:
        return "".join(
            f"        {name!r}: SimpleNamespace(shape={spec.shape!r}, dtype={spec.dtype!r}),\n"
            for name, spec in of.items()
        )

    own = "".join(f"    {name}={getattr(definition, name)!r},\n" for name in ("name", "op_type", "const_axes"))
    tensors = f"    inputs={{\n{specs(definition.inputs)}    }},\n    outputs={{\n{specs(definition.outputs)}    }},\n"
    return f"DEFINITION = SimpleNamespace(\n{own}{tensors})"


def _run(definition: Definition, kernel: Kernel) -> str:
    names = ", ".join(definition.inputs)
    given = ", ".join(f"{name!r}: {name}" for name in definition.inputs)
    results = ", ".join(f"results[{name!r}]" for name in definition.outputs)
    lines = [f"def {_ENTRY}({names}):", f"    inputs = {{{given}}}"]
    if kernel.seeded:
        lines.append("    results = CALL(DEFINITION, inputs, int(torch.randint(1 << 31, (), device='cpu')))")
    else:
        device = next(name for name, spec in definition.inputs.items() if spec.shape is not None)
        lines.append("    outputs = {")
        for name, spec in definition.outputs.items():
            shape = ", ".join(_size(definition, axis) for axis in spec.shape or ())
            lines.append(f"        {name!r}: torch.empty([{shape}], dtype=torch.{spec.dtype}, device={device}.device),")
        lines += ["    }", "    results = CALL(DEFINITION, inputs, outputs)"]
    return "\n".join([*lines, f"    return {results}"])


def _size(definition: Definition, axis: str) -> str:
    """Text that gives an axis's size from the inputs of ``run``."""
    if axis in definition.const_axes:
        return str(definition.const_axes[axis])
    for name, spec in definition.inputs.items():
        if axis in (spec.shape or ()):
            return f"{name}.shape[{(spec.shape or ()).index(axis)}]"
    for text in definition.constraints:
        tree = ast.parse(text, mode="eval").body
        if (
            isinstance(tree, ast.Compare)
            and isinstance(tree.left, ast.Name)
            and tree.left.id == axis
            and [type(operator) for operator in tree.ops] == [ast.Eq]
        ):
            return ast.unparse(_Sizes(definition).visit(tree.comparators[0]))
    raise SliceError(f"{definition.name}: no input and no constraint gives the axis {axis}")


class _Sizes(ast.NodeTransformer):
    """Puts the sizes of axes into the expression of a constraint; names of inputs stay."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.definition.axes:
            return node
        return ast.parse(_size(self.definition, node.id), mode="eval").body
