"""flashinfer-bench's evaluators on the CPU, with inputs from safetensors files."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import flashinfer_trace
from flashinfer_trace import Definition

#: A Definition of ours, or the JSON of any.
Given = Definition | Mapping[str, Any]


def inputs_of(definition: Definition, axes: Mapping[str, int]) -> dict[str, Any]:
    """Valid inputs on the CPU; without `axes`, of a small batch in which every query sees a key."""
    if axes or "sm_scale" not in definition.inputs:
        return dict(flashinfer_trace.make_inputs(definition, axes, seed=1, device="cpu"))
    small = {"batch_size": 3, "len_indptr": 4, "num_pages": 8, "num_kv_indices": 6, "total_q": 4, "total_kv": 9}
    chosen = {axis: size for axis, size in small.items() if axis in definition.var_axes}
    for seed in range(100):
        inputs = dict(flashinfer_trace.make_inputs(definition, chosen, seed=seed, device="cpu"))
        if all(bool(one.isfinite().all()) for one in definition.run(**inputs)):
            return inputs
    raise AssertionError(f"{definition.name}: no seed gives a batch in which every query sees a key")


class Bench:
    """Judges solutions as flashinfer-bench does; the caller has replaced `torch.cuda.synchronize`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def document(self, given: Given) -> dict[str, Any]:
        """The JSON of a Definition."""
        if isinstance(given, Mapping):
            return dict(given)
        assert given.path is not None
        loaded: dict[str, Any] = json.loads(given.path.read_text(encoding="utf-8"))
        return loaded

    def judge(self, given: Given, solution: str, inputs: Mapping[str, Any]) -> str | None:
        """The status of a rejected solution (the source of a ``run``); None if it is accepted."""
        from flashinfer_bench.bench.config import BenchmarkConfig
        from flashinfer_bench.bench.evaluators import resolve_evaluator
        from flashinfer_bench.compile import BuilderRegistry
        from flashinfer_bench.data import Definition as BenchDefinition

        definition = BenchDefinition(**self.document(given))
        evaluator = resolve_evaluator(definition)
        config = BenchmarkConfig(profile_baseline=False, num_trials=1, sampling_validation_trials=3)
        workload = self.workload(definition, inputs)
        baseline = evaluator.build_baseline(definition, workload, config, "cpu", self.directory)
        # Its builders cache by name and content.
        other = BenchDefinition(**{**self.document(given), "reference": solution})
        runnable = BuilderRegistry.get_instance().build_reference(other)
        with contextlib.redirect_stderr(io.StringIO()):
            _, evaluation = evaluator.check_correctness(
                definition, runnable, baseline.inputs, baseline.outputs, config, "", "cpu"
            )
        return None if evaluation is None else str(evaluation.status.value)

    def outputs(self, given: Given, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The outputs that flashinfer-bench allocates for a solution that writes into them."""
        from flashinfer_bench.bench.evaluators.utils import allocate_outputs
        from flashinfer_bench.data import Definition as BenchDefinition

        definition = BenchDefinition(**self.document(given))
        return list(allocate_outputs(definition, [inputs[name] for name in definition.inputs], "cpu"))

    def workload(self, definition: Any, inputs: Mapping[str, Any]) -> Any:
        """These inputs as a workload: tensors in a safetensors file, scalars in place."""
        import safetensors.torch
        from flashinfer_bench.data import Workload

        ordered = [inputs[name] for name in definition.inputs]
        axes = definition.get_axes_values_from_inputs(ordered)
        tensors = {name: value.contiguous() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        safetensors.torch.save_file(tensors, self.directory / "inputs.safetensors")
        described = {
            name: {"type": "safetensors", "path": "inputs.safetensors", "tensor_key": name}
            if name in tensors
            else {"type": "scalar", "value": value}
            for name, value in inputs.items()
        }
        return Workload(uuid="case", axes=axes, inputs=described)
