"""The claims that were wrong once are refused in every Definition that made them."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import Any

import pytest

from flashinfer_trace.dataset import definition_paths
from flashinfer_trace.kernel_paths import CALLED, RUN, claimable, load_kernel_paths
from flashinfer_trace.validation import validate_paths
from flashinfer_trace.validation.candidate import Candidate
from flashinfer_trace.validation.claim_rules import check_claims
from flashinfer_trace.validation.problems import Findings

from .conftest import REPOSITORY, Dataset

PATHS = {path.stem: path for path in definition_paths(REPOSITORY)}
FLASH_ATTENTION = "sgl_kernel.flash_attn.flash_attn"
#: The tag -> the Definitions that had it, how many there were, and the rule that refuses it.
WRONG = {
    f"sgl_api:{FLASH_ATTENTION}_with_kvcache": ("gqa_paged_*", 76, "tag-claim"),
    f"sgl_api:{FLASH_ATTENTION}_varlen_func": ("*_ragged_prefill_causal_*", 26, "tag-claim"),
    "triton_api:sglang.srt.layers.moe.fused_moe_triton.fused_moe.fused_experts": ("moe_bf16_softmax_*", 15, "tag-path"),
    "sgl_api:sgl_kernel.apply_rope_with_cos_sin_cache_inplace": ("rope_with_cos_sin_cache_*", 26, "tag-path"),
    "sgl_api:sgl_kernel.top_k_renorm_probs": ("top_k_renorm_probs_*", 8, "tag-path"),
    "sgl_api:sgl_kernel.top_p_renorm_probs": ("top_p_renorm_probs_*", 8, "tag-path"),
}


def claims(data: dict[str, object]) -> list[str]:
    """The rules on kernels that a Definition breaks."""
    findings = Findings(REPOSITORY / "x.json", REPOSITORY)
    check_claims(Candidate(data), load_kernel_paths(REPOSITORY), claimable(REPOSITORY, data), findings)
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
        problem.message == f'by the family\'s record, "{path}" computes this Definition neither alone nor in a pipeline'
    )


def test_a_definition_that_every_kernel_refuses_is_a_problem(dataset: Dataset, minimal: dict[str, Any]) -> None:
    """Without a kernel in the record, the family says nothing of sizes."""
    path, records = dataset.add(minimal), dataset.root / "schema" / "records.json"
    document = json.loads(records.read_text(encoding="utf-8"))
    (kernel,) = document["families"]["rmsnorm"]["kernels"]
    refuses = {**kernel, "unsupported": [minimal["name"]]}
    other = {**kernel, "label": "other", "path": "flashinfer.norm.other"}
    for kernels, count in (
        ([refuses], 1),
        ([refuses, {**refuses, "label": "other"}], 1),
        ([refuses, other], 0),
        ([], 0),
    ):
        document["families"]["rmsnorm"]["kernels"] = kernels
        dataset.write("schema/records.json", document)
        found = dataset.problems(path)
        assert [(problem.rule, problem.pointer) for problem in found] == [("no-kernel", "/name")] * count
        for problem in found:
            assert f"flashinfer-trace verify {minimal['name']} --against kernel" in problem.hint


def test_what_a_tag_says_of_its_kernels_then_is_none(dataset: Dataset, minimal: dict[str, Any]) -> None:
    """`embed` would take such a tag away, but refuses a Definition that no kernel takes."""
    records = dataset.root / "schema" / "records.json"
    document = json.loads(records.read_text(encoding="utf-8"))
    (kernel,) = document["families"]["rmsnorm"]["kernels"]
    refuses = {**kernel, "unsupported": [minimal["name"]]}
    other = {**kernel, "label": "other", "path": "flashinfer.norm.other"}
    for namespace, kernels, rule in (
        (CALLED, [refuses], "no-kernel"),
        ("fi_api", [refuses], "no-kernel"),
        (CALLED, [refuses, other], "tag-claim"),
    ):
        path = dataset.add({**minimal, "tags": [*minimal["tags"], f"{namespace}:{kernel['path']}"]})
        document["families"]["rmsnorm"]["kernels"] = kernels
        dataset.write("schema/records.json", document)
        assert [problem.rule for problem in dataset.problems(path)] == [rule]
