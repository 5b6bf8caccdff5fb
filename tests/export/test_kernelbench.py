"""Problems in the form of KernelBench: they run on a CPU, and their inputs are valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer_trace
from flashinfer_trace import Definition
from flashinfer_trace.export.judgeable import PRECISIONS, unfit_for_kernelbench
from flashinfer_trace.export.kernelbench import NoProblem, precision, problem, write_problems
from flashinfer_trace.families import family_of


def run(code: str) -> tuple[list[Any], Any]:
    """As KernelBench runs a problem: the source in a namespace of its own, the model without arguments."""
    names: dict[str, Any] = {}
    exec(compile(code, "problem.py", "exec"), names)
    inputs = names["get_inputs"]()
    return inputs, names["Model"](*names["get_init_inputs"]())(*inputs)


@pytest.mark.parametrize(
    "name",
    ["rmsnorm_h128", "gemm_float32_out_n256_k7168", "moe_sum_reduce_topk6_h2048", "top_p_renorm_probs_v32000"],
)
def test_a_problem_runs_on_a_cpu(name: str, first_workload: None):
    torch.manual_seed(0)
    definition = flashinfer_trace.load(name)
    inputs, result = run(problem(definition))
    expected = definition.name_outputs(definition.run(*inputs))  # checks the inputs, constraints included
    actual = definition.name_outputs(result)
    assert all(torch.equal(actual[output], expected[output]) for output in definition.outputs)
    assert all(bool(one.isfinite().all()) for one in actual.values())


def test_no_stored_answer_passes(one_each: dict[str, Definition], first_workload: None):
    """As KernelBench judges, in the precision of a problem: each seed gives other results, and none are zeros."""
    dtypes = {called: getattr(torch, dtype) for dtype, called in PRECISIONS.items()}
    judged = [one for one in one_each.values() if not unfit_for_kernelbench(one, family_of(one))]
    assert len(judged) > 15
    for definition in judged:
        names: dict[str, Any] = {}
        exec(compile(problem(definition), "problem.py", "exec"), names)
        dtype = dtypes[precision(definition)]
        results = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            inputs = [one.to(dtype) if isinstance(one, torch.Tensor) else one for one in names["get_inputs"]()]
            results.append(names["Model"]()(*inputs))
        first, second = results
        tolerance = 1e-4 if dtype == torch.float32 else 1e-2
        for stored in (second, torch.zeros_like(first)):
            assert not torch.allclose(first, stored, atol=tolerance, rtol=tolerance), definition.name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("moe_topk_softmax_topk2_e8", "KernelBench compares one output, and it has several"),
        ("gqa_paged_decode_h2_kv1_d128_ps1", "KernelBench compares one output, and it has several"),
        ("moe_shuffle_rows_h2048", "and some are int32"),
        (
            "fp8_scaled_mm_n3072_k1536",
            "casts every input tensor to float32, float16, bfloat16, and some are float8_e4m3fn",
        ),
        ("layernorm_h128", "casts every input tensor to one dtype, and they are bfloat16 and float32"),
        ("top_p_sampling_from_probs_v32000", "samples is drawn"),
    ],
)
def test_what_kernelbench_cannot_judge_is_no_problem(name: str, reason: str):
    with pytest.raises(NoProblem, match=reason):
        problem(flashinfer_trace.load(name))


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
        assert f"\nPrecision: {row['precision']}, " in row["code"]
        assert "flashinfer_trace" not in row["code"]
