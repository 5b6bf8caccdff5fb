"""docs/export.md on runs of flashinfer-bench and its validator: their figures, and why a right kernel is rejected."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from emulated_tensor_core import truncating_product
from record_flashinfer_bench import RESULTS, merged, summary
from record_flashinfer_bench_validator import RESULTS as VALIDATED
from record_flashinfer_bench_validator import summary as validator_summary

import flashinfer_trace
from flashinfer_trace import Definition
from flashinfer_trace.families import family_of
from flashinfer_trace.families.moe.expert_gemm import e4m3_groups
from flashinfer_trace.judging.export.cases import Case, Scales, cases
from flashinfer_trace.judging.export.judgeable import unjudged

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
RECORDED = json.loads(RESULTS.read_text())
RUNS = {name: found for one in RECORDED for name, found in one["runs"].items()}
REJECTED = "fp8_scaled_mm_n3072_k1536"
REJECTED_ATTENTION = "dsa_sparse_attention_fp8_cache_h128_ckv512_kpe64_topk2048_ps64"
#: Rows and tokens that are tried; their first workloads have 64.
ROWS, TOKENS = 24, 4


def rows(heading: str) -> list[list[str]]:
    """The cells of the table with that heading."""
    lines = TEXT.split(heading)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_figures_are_those_of_the_file():
    wanted = []
    for recording in RECORDED:
        runs, machine = recording["runs"], recording["environment"]
        workloads = {name.partition("__")[0]: len(found) for name, found in runs.items()}
        statuses = Counter(status for found in runs.values() for status in found)
        right, wrong = statuses.pop("PASSED"), statuses.pop("INCORRECT_NUMERICAL", 0)
        assert not statuses
        counts = [len(workloads), sum(workloads.values()), len(runs), right + wrong, right, wrong]
        where = [recording["date"], f"{machine['hardware']}, torch {machine['libs']['torch']}"]
        wanted.append([*where, *map(str, counts)])
    assert rows("| Date | GPU ") == wanted


def test_the_rejected_are_those_of_the_file():
    wanted = [
        [
            f"`{one['solution']}`",
            ", ".join(f"{axis} = {value}" for axis, value in one["axes"].items()),
            f"{one['absolute']:g}",
            f"{one['relative']:,.3g}" if one["relative"] < 1e3 else f"{round(one['relative'], -1):,.0f}",
        ]
        for recording in RECORDED
        for one in recording["rejected"]
    ]
    assert rows("| Solution | Axes ") == wanted
    assert {found[0].strip("`").partition("__")[0] for found in wanted} == {REJECTED, REJECTED_ATTENTION}


def test_the_definitions_of_the_file_exist():
    """All of them can be exported again."""
    known = {path.stem for path in (flashinfer_trace.find_root() / "definitions").glob("*/*.json")}
    assert {name.partition("__")[0] for name in RUNS} <= known


def test_the_runs_are_of_families_that_it_can_judge(one_each: dict[str, Definition]):
    ran = {family_of(flashinfer_trace.load(name.partition("__")[0])).name for name in RUNS}
    assert ran <= {family for family, one in one_each.items() if unjudged(one, family_of(one)) is None}
    assert f"one Definition of each of {len(ran)} families ran" in TEXT


def test_what_the_validator_says_is_what_was_recorded():
    found = json.loads(VALIDATED.read_text(encoding="utf-8"))
    assert found["errors"] == 0
    ((warning, count),) = found["warnings"].items()
    prose = " ".join(TEXT.split())
    assert f"On {found['date']}, at commit `{found['commit'][:12]}` of {found['of']}, it checked an" in prose
    assert f"export of {found['definitions']} Definitions" in prose
    assert f'found {found["errors"]} errors, and warned {count} times: "{warning}"' in prose
    assert found["checks"] == ["layout", "definition", "workload", "solution", "trace", "baseline"]


def test_a_report_of_the_validator_is_summed_up():
    def check(*messages: tuple[str, str]) -> dict[str, object]:
        return {"status": "", "messages": [{"level": level, "message": message} for level, message in messages]}

    first = {"status": "error", "layout": check(("error", "bad"), ("info", "2 valid")), "benchmark": None}
    second = {"status": "warning", "layout": check(("warning", "missing")), "trace": check(("warning", "missing"))}
    report = {"config": {"checks": ["layout", "trace"]}, "definitions": {"a": first, "b": second}}
    found = {"checks": ["layout", "trace"], "definitions": 2, "errors": 1, "warnings": {"missing": 2}}
    assert validator_summary(report) == found


def test_traces_are_summed_up(tmp_path):
    evaluation = {"timestamp": "2026-01-02T03:04:05", "environment": {"hardware": "GPU", "libs": {}}}
    for number, status in enumerate(["PASSED", "INCORRECT_NUMERICAL"]):
        errors = {"max_absolute_error": 0.5, "max_relative_error": 2.0}
        found = {
            **{"solution": "norm__mine", "workload": {"uuid": str(number), "axes": {"m": number}}},
            "evaluation": {**evaluation, "status": status, "correctness": errors},
        }
        path = tmp_path / "traces" / "norm" / f"{number}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found) + "\n")
    document = summary(tmp_path)
    assert document["runs"] == {"norm__mine": ["PASSED", "INCORRECT_NUMERICAL"]}
    assert document["date"] == "2026-01-02"
    assert [(one["axes"], one["absolute"]) for one in document["rejected"]] == [({"m": 1}, 0.5)]


def test_a_recording_replaces_the_runs_of_the_same_solutions_only():
    rejected = [{"solution": "norm__mine"}, {"solution": "gemm__mine"}]
    first = {"date": "2026-01-02", "rejected": rejected, "runs": {"norm__mine": ["a"], "gemm__mine": ["b"]}}
    second = {"date": "2026-01-03", "rejected": [], "runs": {"norm__mine": ["c"]}}
    kept = {**first, "rejected": rejected[1:], "runs": {"gemm__mine": ["b"]}}
    assert merged([], first) == [first] and merged([first], second) == [kept, second]
    third = {**second, "runs": {"norm__mine": ["d"], "gemm__mine": ["e"]}}
    assert merged([kept, second], third) == [third]


def test_a_right_kernel_is_rejected_for_a_few_elements_that_cancel():
    """Hopper's tensor core, emulated: flashinfer-bench rejects it, and each element is within its derived bound."""
    bench = pytest.importorskip("flashinfer_bench.bench", reason="pip install --no-deps flashinfer-bench==0.1.2")
    from flashinfer_bench.bench.utils import compute_error_stats

    definition = flashinfer_trace.load(REJECTED)
    case = next(one for one in cases(definition) if isinstance(one, Case))
    draws, torch_draws = case.draws(definition), torch.Generator().manual_seed(3)

    def codes(rows: int) -> torch.Tensor:  # as flashinfer-bench draws them
        drawn = torch.randn([rows, definition.const_axes["k"]], generator=torch_draws)
        return drawn.clamp_(-2, 2).to(torch.float8_e4m3fn)

    scales = {name: one.value(draws) for name, one in case.inputs.items() if isinstance(one, Scales)}
    inputs = {"A": codes(ROWS), "B": codes(len(scales["B_scale"])), **scales, "A_scale": scales["A_scale"][:ROWS]}
    reference = definition.run(**inputs)
    scale = inputs["A_scale"][:, None] * inputs["B_scale"]
    kernel = (truncating_product(inputs["A"], inputs["B"]) * scale).to(torch.bfloat16)
    *_, rejected, matched = compute_error_stats(kernel, reference, bench.BenchmarkConfig())
    assert rejected and 0.999 < matched < 1
    largest = (kernel.float() - reference.float()).abs().argmax()
    wrong = ((kernel - reference).abs() > 1e-2) & ((kernel - reference).abs() > 1e-2 * reference.abs())
    assert reference[wrong].abs().max() < 0.2 * reference.abs().max() and not wrong.flatten()[largest]

    family = family_of(definition)
    (real,) = family.kernels_of(definition)
    comparison = real.compare["C"].compare(kernel, family.oracle(definition, inputs)["C"])
    assert comparison.ratio <= 1, comparison


def test_one_family_has_a_lenient_evaluator(one_each: dict[str, Definition]):
    evaluators = pytest.importorskip("flashinfer_bench.bench.evaluators", reason="pip install flashinfer-bench==0.1.2")
    lenient = {one for one, each in one_each.items() if evaluators.LowBitEvaluator.can_evaluate(each)}
    assert lenient == {one for one in one_each if one.startswith("moe_fp8_block_scale_")}
    exported = {one for one in lenient if unjudged(one_each[one], family_of(one_each[one])) is None}
    assert exported == {"moe_fp8_block_scale_grouped_gemm"} and "`moe_fp8_block_scale_grouped_gemm_*`" in TEXT
    for one in lenient - exported:
        assert "more elements can differ than the 5 %" in str(unjudged(one_each[one], family_of(one_each[one])))


def test_right_products_of_fp8_rows_are_too_different_for_it():
    """Values halfway between two codes, rounded to the even one, as by torch, and away from zero."""
    bench = pytest.importorskip("flashinfer_bench.bench", reason="pip install --no-deps flashinfer-bench==0.1.2")
    from flashinfer_bench.bench.utils import compute_error_stats

    generator = torch.Generator().manual_seed(3)
    rows = torch.randn([64, 768], generator=generator).bfloat16()
    weights = torch.randn([768, 512], generator=generator).double() * 768**-0.5
    codes, half = e4m3_groups(rows)
    scales = rows.float().unflatten(1, (-1, 128)).abs().amax(dim=2).repeat_interleave(128, dim=1) / 448
    even = (rows.float() / scales).to(torch.float8_e4m3fn).double() * scales
    reference, kernel = ((found @ weights).bfloat16() for found in (even, codes + half * codes.sign()))
    *_, rejected, matched = compute_error_stats(kernel, reference, bench.BenchmarkConfig(required_matched_ratio=0.95))
    assert rejected and 0.5 < matched < 0.95


def rounded_keys(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [slots, ckv] and rotary features [slots, kpe] as FlashMLA reads them: scales and products in bfloat16."""
    rows = kv_cache.flatten(0, 1).view(torch.uint8)
    codes, scales, rotary = (part.contiguous() for part in rows.tensor_split((512, 528), dim=1))
    groups = codes.view(torch.float8_e4m3fn).float().view(len(rows), 4, 128)
    values = groups * scales.view(torch.float32).bfloat16().float().unsqueeze(2)
    return values.bfloat16().float().flatten(1), rotary.view(torch.bfloat16).float()


def test_a_right_kernel_is_rejected_for_keys_in_bfloat16():
    """FlashMLA's roundings, emulated: flashinfer-bench rejects them, and each element is within its derived bound."""
    bench = pytest.importorskip("flashinfer_bench.bench", reason="pip install --no-deps flashinfer-bench==0.1.2")
    from flashinfer_bench.bench.utils import compute_error_stats

    definition = flashinfer_trace.load(REJECTED_ATTENTION)
    given = next(one for one in cases(definition) if isinstance(one, Case)).inputs
    generator = torch.Generator().manual_seed(3)
    inputs = {name: given[name] for name in ("kv_cache", "sparse_indices", "sm_scale")}
    inputs["sparse_indices"] = inputs["sparse_indices"][:1].repeat(TOKENS, 1)
    for name, size in (("q_nope", 512), ("q_pe", 64)):  # as flashinfer-bench draws them
        inputs[name] = torch.randn([TOKENS, 128, size], generator=generator).to(torch.bfloat16)
    values, rotary = (part[inputs["sparse_indices"].long()] for part in rounded_keys(inputs["kv_cache"]))
    logits = inputs["q_nope"].float() @ values.mT + inputs["q_pe"].float() @ rotary.mT
    weights = torch.softmax(logits * inputs["sm_scale"], dim=-1)
    kernel = (weights.bfloat16().float() @ values).to(torch.bfloat16)
    reference, _ = definition.run(*(inputs[name] for name in definition.inputs))
    *_, rejected, matched = compute_error_stats(kernel, reference, bench.BenchmarkConfig())
    assert rejected and 0.999 < matched < 1

    family = family_of(definition)
    (real,) = family.kernels_of(definition)
    comparison = real.compare["output"].compare(kernel, family.expected(definition, inputs)["output"])
    assert comparison.ratio <= 1, comparison
