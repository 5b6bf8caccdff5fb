"""Problems in the form of KernelBench: they run on a CPU, and their inputs are valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer_trace
from flashinfer_trace import Definition
from flashinfer_trace.export.kernelbench import NoProblem, problem, write_problems


def run(code: str) -> tuple[list[Any], Any]:
    """As KernelBench runs a problem: the source in a namespace of its own, the model without arguments."""
    names: dict[str, Any] = {}
    exec(compile(code, "problem.py", "exec"), names)
    inputs = names["get_inputs"]()
    return inputs, names["Model"](*names["get_init_inputs"]())(*inputs)


@pytest.mark.parametrize(
    "name",
    [
        "rmsnorm_h128",
        "fp8_scaled_mm_n3072_k1536",
        "gqa_paged_decode_h2_kv1_d128_ps1",
        "moe_topk_softmax_topk2_e8",
        "top_p_renorm_probs_v32000",
        "verify_tree_greedy_s3_dt4",
    ],
)
def test_a_problem_runs_on_a_cpu(name: str, first_workload: None):
    torch.manual_seed(0)
    definition = flashinfer_trace.load(name)
    inputs, result = run(problem(definition))
    expected = definition.name_outputs(definition.run(*inputs))  # checks the inputs, constraints included
    actual = definition.name_outputs(result)
    assert all(torch.equal(actual[output], expected[output]) for output in definition.outputs)
    assert all(bool(one.isfinite().all()) for one in actual.values())


def test_all_are_written_or_left_out(one_each: dict[str, Definition], first_workload: None, tmp_path: Path):
    summary = write_problems(tmp_path, one_each.values(), lambda name: None)
    written = {file.stem: file for file in tmp_path.glob("*/*.py")}
    assert written.keys() | summary.definitions_left_out.keys() == {one.name for one in one_each.values()}
    rows = [json.loads(line) for line in (tmp_path / "index.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["name"]: row["code"] for row in rows} == {
        name: file.read_text(encoding="utf-8") for name, file in written.items()
    }
    for row in rows:
        compile(row["code"], row["name"], "exec")
        assert "flashinfer_trace" not in row["code"]


def test_samplers_are_no_problems():
    with pytest.raises(NoProblem, match="samples is drawn"):
        problem(flashinfer_trace.load("top_p_sampling_from_probs_v32000"))
