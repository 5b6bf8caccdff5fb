"""Problems in the form of KernelBench: they run on a CPU, and their inputs are valid."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer_trace
from flashinfer_trace import Definition
from flashinfer_trace.families import family_of
from flashinfer_trace.format.precision import float32_sums
from flashinfer_trace.judging.export import kernelbench
from flashinfer_trace.judging.export.judgeable import PRECISIONS, unfit_for_kernelbench
from flashinfer_trace.judging.export.kernelbench import NoProblem, precision, problem, write_problems


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """Problems set defaults for the whole process; they end with the test."""
    with float32_sums():
        yield


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
    inputs, result = run(problem(definition)[0])
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
        exec(compile(problem(definition)[0], "problem.py", "exec"), names)
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


@pytest.mark.parametrize("name", ["softmax_temperature_v32000", "top_p_renorm_probs_v102400"])
def test_rows_are_those_of_a_quick_workload(name: str):
    """flashinfer-bench has no time for so many draws, and no room for so many probabilities; KernelBench needs none."""
    assert "batch_size = 64." in problem(flashinfer_trace.load(name))[0]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_sum_after_the_other_is_a_right_product(seed: int):
    """A plain kernel in float32, with one product added after the other, is within KernelBench's tolerance."""
    torch.manual_seed(seed)
    (a, b), expected = run(problem(flashinfer_trace.load("gemm_float32_n160_k5120"))[0])
    rows = slice(0, 16)
    sums = torch.zeros_like(expected[rows])
    for left, right in zip(a[rows].double().T, b.double().T, strict=True):
        sums = (sums.double() + left[:, None] * right).float()
    assert torch.allclose(expected[rows], sums, atol=1e-4, rtol=1e-4)


def test_all_products_are_of_the_order_of_1(one_each: dict[str, Definition]):
    products = [one for one in one_each.values() if one.op_type == "gemm"]
    judged = [one for one in products if not unfit_for_kernelbench(one, family_of(one))]
    assert len(judged) > 4
    for definition in judged:
        sigma = float(re.findall(r"\* (\S+),  # B$", problem(definition)[0], re.M)[0])
        k = next(size for axis, size in definition.const_axes.items() if axis.lower() == "k")
        assert sigma == pytest.approx(k**-0.5, rel=1e-5), definition.name


@pytest.mark.parametrize(("name", "sums"), [("gemm_n128_k2048", False), ("gemm_bf16_n128_k2048", True)])
def test_products_of_float16_are_summed_in_float32(name: str, sums: bool):
    """As their references ask for on a GPU; other problems leave torch's setting."""
    options = torch.backends.cuda.matmul
    options.allow_fp16_reduced_precision_reduction = True
    exec(compile(problem(flashinfer_trace.load(name))[0], "problem.py", "exec"), {})
    assert options.allow_fp16_reduced_precision_reduction == sums


def test_workloads_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    definition = flashinfer_trace.load("top_p_renorm_probs_v32000")
    monkeypatch.setattr(kernelbench, "MOST_TEXT", 500)
    summary = write_problems(tmp_path, [definition], lambda name: None)
    (row,) = summary.rows
    assert "batch_size = 1." in row["code"]
    left_out = json.loads((tmp_path / "left_out.json").read_text(encoding="utf-8"))["workloads"]
    assert left_out == summary.left_out["workloads"] and definition.name in left_out
    assert set(left_out[definition.name].values()) == {"its tensors take more than 500 characters of source"}


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
        ("per_token_quant_fp8_h14336", "KernelBench compares one output, and it has several"),
        ("fp8_mqa_logits_h64_d128", "casts every input tensor to float32, float16, bfloat16, and some are"),
        ("moe_bf16_softmax_routing_topk2_e8_h4096_i1792", "right elements differ by more than 1e-2"),
    ],
)
def test_what_kernelbench_cannot_judge_is_no_problem(name: str, reason: str):
    with pytest.raises(NoProblem, match=reason):
        problem(flashinfer_trace.load(name))


def test_results_in_fp8_are_no_problem():
    definition = flashinfer_trace.load("rmsnorm_h128")
    output = dataclasses.replace(definition.outputs["output"], dtype="float8_e4m3fn")
    codes = dataclasses.replace(definition, outputs={"output": output})
    assert "torch.allclose, which does not take float8" in str(unfit_for_kernelbench(codes, family_of(definition)))
    one = torch.ones(1).to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="not implemented for 'Float8_e4m3fn'"):  # what torch says
        torch.allclose(one, one)


def test_all_are_written_or_left_out(one_each: dict[str, Definition], first_workload: None, tmp_path: Path):
    summary = write_problems(tmp_path, one_each.values(), lambda name: None)
    written = {file.stem: file for file in tmp_path.glob("*/*.py")}
    assert written.keys() | summary.left_out["definitions"].keys() == {one.name for one in one_each.values()}
    rows = [json.loads(line) for line in (tmp_path / "index.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["name"]: row["code"] for row in rows} == {
        name: file.read_text(encoding="utf-8") for name, file in written.items()
    }
    for row in rows:
        compile(row["code"], row["name"], "exec")
        assert f"\nPrecision: {row['precision']}, " in row["code"]
        assert "flashinfer_trace" not in row["code"]
        assert "\nBaseline: a reference that computes in float32 or better" in row["code"]
        assert bool(row["fastest"]) == (row["fastest_seconds"] > 0) and row["fastest"] in row["code"]
