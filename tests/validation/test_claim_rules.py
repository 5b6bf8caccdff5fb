"""The claims that were wrong once are refused in every Definition that made them."""

from __future__ import annotations

import dataclasses
import json
from fnmatch import fnmatchcase
from typing import Any

import pytest
from kernel_table import Change, change_kernels

from flashinfer_trace.dataset.kernel_tags import kernel_tags
from flashinfer_trace.dataset.store import definition_paths
from flashinfer_trace.dataset.validation import validate_paths
from flashinfer_trace.dataset.validation.candidate import Candidate
from flashinfer_trace.dataset.validation.problems import Findings
from flashinfer_trace.dataset.validation.tag_rules import check_claims
from flashinfer_trace.kernels import in_table
from flashinfer_trace.kernels.names import CALLED, RUN
from flashinfer_trace.kernels.table import KernelFacts

from .conftest import REPOSITORY, Dataset

PATHS = {path.stem: path for path in definition_paths(REPOSITORY)}
FUSED_MOE = "sglang.srt.layers.moe.fused_moe_triton.fused_moe"
#: The tag -> the Definitions that had it, how many there were, and the rule that refuses it.
WRONG = {
    "triton_api:sglang.srt.layers.moe.fused_moe_triton.fused_moe.fused_experts": (
        "moe_bf16_softmax_*",
        15,
        "tag-claim",
    ),
    "sgl_api:sgl_kernel.apply_rope_with_cos_sin_cache_inplace": ("rope_with_cos_sin_cache_*", 26, "tag-claim"),
    "sgl_api:sgl_kernel.top_k_renorm_probs": ("top_k_renorm_probs_*", 8, "tag-claim"),
    "sgl_api:sgl_kernel.top_p_renorm_probs": ("top_p_renorm_probs_*", 8, "tag-claim"),
}


def claims(data: dict[str, object]) -> list[str]:
    """The rules on kernels that a Definition breaks."""
    findings = Findings(REPOSITORY / "x.json", REPOSITORY)
    check_claims(Candidate(data), kernel_tags(REPOSITORY, data), findings)
    return [problem.rule for problem in findings.problems]


def with_claim(name: str, tag: str) -> dict[str, Any]:
    """A committed Definition with one more tag, which replaces what it says of the same kernel."""
    data: dict[str, Any] = json.loads(PATHS[name].read_text(encoding="utf-8"))
    path = tag.partition(":")[2]
    return {**data, "tags": [*(one for one in data["tags"] if one.partition(":")[2] != path), tag]}


@pytest.mark.parametrize("tag", WRONG)
def test_a_claim_that_was_wrong_is_refused_in_every_definition(tag: str) -> None:
    pattern, count, rule = WRONG[tag]
    names = [name for name in PATHS if fnmatchcase(name, pattern)]
    assert len(names) >= count
    assert {name: found for name in names if (found := claims(with_claim(name, tag))) != [rule]} == {}
    assert {name: found for name in names if (found := claims(json.loads(PATHS[name].read_text())))} == {}


@pytest.mark.parametrize("tag", WRONG)
def test_validate_refuses_it(tag: str) -> None:
    pattern, _, rule = WRONG[tag]
    path = next(PATHS[name] for name in sorted(PATHS) if fnmatchcase(name, pattern))
    data = with_claim(path.stem, tag)
    found = validate_paths([path], REPOSITORY, {path: json.dumps(data)}).problems
    assert rule in {problem.rule for problem in found}


def test_every_tag_of_the_dataset_has_the_state_of_its_proof() -> None:
    """A kernel that ran is never only called, and one that did not is never claimed: without exception."""
    stated = 0
    wrong = {}
    for name, path in PATHS.items():
        data = json.loads(path.read_text(encoding="utf-8"))
        stated += sum(tag.partition(":")[0] in (*RUN, CALLED) for tag in data["tags"])
        if found := claims(data):
            wrong[name] = found
    assert stated > 500 and wrong == {}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("fp8_blockwise_scaled_mm_n2112_k7168", "sgl_kernel.fp8_blockwise_scaled_mm"),
        ("moe_topk_deepseek_shared_experts_topk9_ng1_kg1_e160_s1", "sgl_kernel.moe_fused_gate"),
    ],
)
def test_a_call_that_the_record_refuses_is_reported_once(name: str, path: str) -> None:
    data = with_claim(name, f"{CALLED}:{path}")
    (problem,) = validate_paths([PATHS[name]], REPOSITORY, {PATHS[name]: json.dumps(data)}).problems
    assert problem.rule == "tag-claim" and problem.pointer == f"/tags/{len(data['tags']) - 1}"
    assert (
        problem.message == f'by the table of kernels, "{path}" computes this Definition neither alone nor in a pipeline'
    )


def refusing(kernel: KernelFacts) -> KernelFacts:
    return dataclasses.replace(kernel, needs=(lambda definition: "takes nothing",))


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda kernels: [refusing(kernels[0])], 1),
        (lambda kernels: [refusing(kernels[0]), dataclasses.replace(kernels[0], path="flashinfer.norm.other")], 0),
        (lambda kernels: [], 0),
    ],
)
def test_a_definition_that_every_kernel_refuses_is_a_problem(
    dataset: Dataset, minimal: dict[str, Any], monkeypatch: pytest.MonkeyPatch, change: Change, count: int
) -> None:
    """Without a kernel in the table, the family says nothing of sizes."""
    change_kernels(monkeypatch, "rmsnorm", change)
    found = dataset.problems(dataset.add(minimal))
    assert [(problem.rule, problem.pointer) for problem in found] == [("no-kernel", "/name")] * count
    for problem in found:
        assert f"flashinfer-trace verify {minimal['name']} --against kernel" in problem.hint


@pytest.mark.parametrize(
    ("namespace", "others", "rule"),
    [(CALLED, False, "no-kernel"), ("fi_api", False, "no-kernel"), (CALLED, True, "tag-claim")],
)
def test_what_a_tag_says_of_its_kernels_then_is_none(
    dataset: Dataset, minimal: dict[str, Any], monkeypatch: pytest.MonkeyPatch, namespace: str, others: bool, rule: str
) -> None:
    """`embed` would take such a tag away, but refuses a Definition that no kernel takes."""
    (kernel,) = in_table("rmsnorm").values()
    other = dataclasses.replace(kernel, path="flashinfer.norm.other", tags=("flashinfer.norm.other",))
    change_kernels(monkeypatch, "rmsnorm", lambda kernels: [refusing(kernel), *([other] if others else [])])
    path = dataset.add({**minimal, "tags": [*minimal["tags"], f"{namespace}:flashinfer.norm.rmsnorm"]})
    assert [problem.rule for problem in dataset.problems(path)] == [rule]
