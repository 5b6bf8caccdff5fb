"""A case that a submission failed, as tensors, and as files that repeat the failure without this package."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.roots import PACKAGE
from flashinfer_trace.harness.cases import Case
from flashinfer_trace.harness.far import far_rows
from flashinfer_trace.harness.job import Job
from flashinfer_trace.harness.layouts import FAR, LAYOUT
from flashinfer_trace.judging.process import Answer
from flashinfer_trace.judging.submission import Submission
from flashinfer_trace.verdict.errors import element_bound
from flashinfer_trace.verdict.tensors import torch_dtype

if TYPE_CHECKING:
    from flashinfer_trace.harness.family import Family


#: Modules that repeat a failure without the rest of this package: name in a saved case -> module.
PROGRAM = {
    "repeat.py": "judging/repeat_case.py",
    "loading.py": "judging/loading.py",
    "far_rows.py": "sandbox/far_rows.py",
}


@dataclass(frozen=True)
class FailingCase:
    """One case that a submission failed. All tensors are on the CPU; call_seed is that of torch's generators in the
    call.

    Attributes:
        definition: at the sizes at which it was judged.
        inputs: tensors and numbers by name, with their strides.
        expected: of each output, float64 or integers.
        bound: of each output whose elements are judged one by one, float64: the largest right error.
        got: what the call left; empty if it did not return.
        fill: what outputs held before it.
    """

    definition: Definition
    axes: Mapping[str, int]
    plan: Mapping[str, Any]
    seed: int
    call_seed: int
    kind: str
    inputs: Mapping[str, Any]
    expected: Mapping[str, torch.Tensor]
    bound: Mapping[str, torch.Tensor]
    got: Mapping[str, torch.Tensor] = field(default_factory=dict)
    fill: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def save(self, directory: Path, submission: Submission | None = None) -> None:
        """Writes ``{inputs,expected,bound,got,fill}.safetensors``, ``case.json``, `PROGRAM` and the kernel's files.

        ``python repeat.py`` calls the kernel on these inputs and compares: it needs torch, safetensors and what the
        kernel imports, and exits with 1 if the kernel is wrong again.

        Args:
            directory: an existing one.
            submission: whose files are copied; without it, the file of a kernel is the script's argument.

        Raises:
            ImportError: safetensors is not installed.
        """
        from safetensors.torch import save_file

        tensors = {name: value for name, value in self.inputs.items() if isinstance(value, torch.Tensor)}
        parts = {"inputs": tensors, "expected": self.expected, "bound": self.bound, "got": self.got, "fill": self.fill}
        for part, values in parts.items():
            dense = {name: value.detach().contiguous().clone() for name, value in values.items()}
            save_file(dense, str(directory / f"{part}.safetensors"))
        case = {
            **{"definition": self.definition.name, "failure": self.kind, "call_seed": self.call_seed},
            "inputs": {
                name: {"stride": list(value.stride())} if name in tensors else {"number": value}
                for name, value in self.inputs.items()
            },
            **{"axes": dict(self.axes), "plan": dict(self.plan), "seed": self.seed},
            **({"far": far_rows(self.definition).to_json()} if self.plan.get(LAYOUT) == FAR else {}),
            **_copied(submission, directory),
        }
        (directory / "case.json").write_text(json.dumps(case, indent=2, allow_nan=True) + "\n", encoding="utf-8")
        for name, module in PROGRAM.items():
            shutil.copyfile(PACKAGE / module, directory / name)


def _copied(submission: Submission | None, directory: Path) -> dict[str, Any]:
    """Copies a submission's files; its request, with the place of its function among them."""
    if submission is None or submission.kernel is not None or not submission.file:
        return {}
    with submission.on_disk() as request:
        path = Path(request["path"])
        if submission.sources:
            shutil.copytree(Path(request["root"]) / "submission", directory / "submission")
            place = path.relative_to(request["root"])
        else:
            place = Path("submission", path.name)
            (directory / "submission").mkdir()
            shutil.copyfile(path, directory / place)
    # The script calls Python.
    return {} if "language" in request else {"kernel": {**submission.request, "path": place.as_posix()}}


@dataclass(frozen=True)
class KeptCase:
    """The part of a case that a verdict keeps: only the results of the call cannot be made again. Other processes can
    have it.

    Attributes:
        definition: at the sizes to run, as JSON.
        seeds: of the case: of its elements, and of torch's generators during the call.
        left: what the call left, and what outputs held before it, as `torch.save` writes them.
    """

    definition: Mapping[str, Any]
    root: Path | None
    plan: dict[str, Any]
    seeds: tuple[int, int]
    kind: str
    standard: str
    left: bytes

    @classmethod
    def of(
        cls,
        job: Job,
        case: Case,
        failed: tuple[str, str],
        answer: Answer | None,
        filled: Mapping[str, torch.Tensor],
    ) -> KeptCase:
        """The case that a submission failed, with kind and standard; without an answer, it did not return."""
        left = {name: value.detach().cpu().contiguous() for name, value in (answer.outputs if answer else {}).items()}
        written = io.BytesIO()
        torch.save({"got": left, "fill": {name: value.cpu() for name, value in filled.items()}}, written)
        seeds = case.seed, case.call_seed
        sized, root = job.sized.to_dict(), job.definition.root
        return cls(sized, root, dict(case.plan), seeds, *failed, written.getvalue())

    def made_again(self) -> FailingCase:
        definition = Definition.from_dict(self.definition, root=self.root)
        family, (seed, call_seed) = family_of(definition), self.seeds
        inputs, axes = family.inputs_and_axes(definition, self.plan, seed, "cpu")
        with torch.no_grad():
            expected = family.expected(definition, inputs)
            policies = _policies(family, self.standard)
            bounds = {
                name: element_bound(policies[name], one, torch_dtype(definition.outputs[name].dtype))
                for name, one in expected.items()
            }
        return FailingCase(
            definition,
            *(axes, self.plan, seed, call_seed, self.kind, inputs),
            {name: one.value for name, one in expected.items()},
            {name: bound.clone() for name, bound in bounds.items() if bound is not None},
            **torch.load(io.BytesIO(self.left), weights_only=True),
        )


def _policies(family: Family, standard: str) -> Mapping[str, Any]:
    """The policies of a standard, by its label; those of the reference if no kernel has that label."""
    return family.policies(next((one for one in family.kernels if one.label == standard), None))
