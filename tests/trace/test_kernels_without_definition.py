"""Kernels of DeepSeek: all have Definitions but at most two, which have reasons, as has every kernel without one."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from built_pages import coverage_page
from click.testing import CliRunner

from flashinfer_trace import DatasetError, definitions, find_root
from flashinfer_trace.cli import main
from flashinfer_trace.dataset.coverage import (
    definitions_by_kernel,
    definitions_with_kernel,
    kernel_coverages,
    load_needs,
)
from flashinfer_trace.dataset.evidence import proofs
from flashinfer_trace.kernels import TABLE
from flashinfer_trace.kernels.names import CALLED, KINDS
from tools.shared.markdown import escape
from tools.site.coverage_page import why_not_run
from tools.trace.calls import TORCH, keys_of, traced
from tools.trace.records import committed

LISTED = json.loads((find_root() / "traces" / "kernels_without_definition.json").read_text(encoding="utf-8"))
WANTED = json.loads(Path(__file__).with_name("deepseek_kernels.json").read_text(encoding="utf-8"))
MOST = 2
#: How many kernels of DeepSeek models are listed, and for how many of them a GPU must have run the kernel itself.
WANTED_KERNELS, LEAST_RUN = 60, 48


@pytest.fixture(scope="module")
def tagged() -> dict[str, set[str]]:
    """Kernel of DeepSeek models -> the Definitions whose tags name it, by its last part."""
    found: dict[str, set[str]] = {name: set() for names in WANTED.values() for name in names}
    for one in definitions():
        for namespace, _, path in (tag.partition(":") for tag in one.tags):
            if namespace in KINDS and path.rpartition(".")[2] in found:
                found[path.rpartition(".")[2]].add(one.name)
    return found


def test_every_kernel_of_deepseek_has_a_definition_or_a_reason(tagged: dict[str, set[str]]):
    assert len(tagged) == WANTED_KERNELS
    assert {name for name, names in tagged.items() if not names} == {
        path.rpartition(".")[2] for path in LISTED["kernels"]
    }


def test_a_gpu_ran_nearly_every_kernel_of_deepseek_itself(tagged: dict[str, set[str]]):
    also = {one.path: one.launches for one in TABLE}
    ran: dict[str, set[str]] = defaultdict(set)
    for one in definitions():
        for entry in proofs(find_root(), one):
            for path in (entry.path, *also.get(entry.path, ())):
                ran[path.rpartition(".")[2]].add(one.name)
    assert len(ran.keys() & tagged.keys()) >= LEAST_RUN
    # An op counts as the function that calls it; one kernel of a pipeline does not count for the others.
    assert "top_k_renorm_probs_v129280" in ran["top_k_renorm_prob"]
    assert "moe_bf16_softmax_routing_topk2_e8_h4096_i14336" in tagged["topk_softmax"] - ran["topk_softmax"]
    assert "cutlass_mla_decode" not in ran and tagged["cutlass_mla_decode"]


def test_topk_softmax_has_the_sizes_of_deepseek_v3_and_not_its_tag(tagged: dict[str, set[str]]):
    """DeepSeek-V3 routes by sigmoid."""
    assert "moe_topk_softmax_topk8_e256" in tagged["topk_softmax"]
    tags = {tag for one in definitions() if one.name in tagged["topk_softmax"] for tag in one.tag_values("model")}
    assert "deepseek-v2-lite" in tags and not tags & {"deepseek-v3", "deepseek-r1", "deepseek-v3.2"}


def test_every_kernel_that_is_only_named_has_a_reason():
    """Other sizes are not a reason: `validate` refuses a tag of a kernel that does not take them."""
    dataset, root = list(definitions()), find_root()
    pairs = [(one, path) for one in dataset for path in one.tag_values(CALLED)]
    assert len(pairs) > 50
    assert not [(one.name, path) for one, path in pairs if not why_not_run(root, one, path)]
    document = coverage_page()
    names = {path for _, path in pairs}
    named = document.partition("## Kernels that are only named")[2].partition("\n## ")[0]
    assert all(f"| `{path}` |" in named for path in names) and "awaits a GPU run" in named
    decode = next(one for one in dataset if "sgl_kernel.cutlass_mla_decode" in one.tag_values(CALLED))
    assert why_not_run(root, decode, "sgl_kernel.cutlass_mla_decode") == "needs compute capability 10.0"
    assert why_not_run(root, decode, "flashinfer.mla.BatchMLAPagedAttentionWrapper") == "awaits a GPU run"
    assert why_not_run(root, decode, "sgl_kernel.no_such_kernel") == ""


def test_at_most_two_kernels_get_no_definition_each_for_a_reason():
    assert 0 < len(LISTED["kernels"]) <= MOST
    assert all(reason.endswith(".") and len(reason.split()) > 10 for reason in LISTED["kernels"].values())


def test_no_definition_names_a_kernel_that_is_said_to_have_none():
    tags = {tag.partition(":")[2] for definition in definitions() for tag in definition.tags}
    assert "sgl_kernel.cutlass_mla_decode" in tags
    assert not tags & set(LISTED["kernels"])


@pytest.fixture(scope="module")
def called() -> dict[str, list[str]]:
    """Every kernel that a run calls, on a GPU or dry -> the names by which it is looked up."""
    found: dict[str, list[str]] = {}
    for run in committed(find_root()):
        for call in traced(run):
            if call.kernel.source != TORCH:
                entry = {**dataclasses.asdict(call.kernel), "through": call.recorded.through}
                found.setdefault(call.kernel.path, []).extend(keys_of(entry))
    return found


def test_every_recorded_kernel_has_a_definition_or_a_reason(called: dict[str, list[str]]):
    listed, named = LISTED["not_yet"], definitions_by_kernel(find_root(), definitions())
    assert list(listed) == sorted(listed)
    assert [path for path, keys in called.items() if not {*keys} & (listed.keys() | named.keys())] == []
    assert not set(listed) & definitions_with_kernel(find_root(), definitions()).keys(), "these have Definitions now"
    found = kernel_coverages(find_root(), load_needs(find_root()).values())
    assert {one.kernel for one in found if one.reason == listed.get(one.kernel)} >= {"triton:try_small_copy"}


def test_kernels_that_are_said_not_to_be_called_are_in_no_run_and_no_tag(called: dict[str, list[str]]):
    tags = {tag for definition in definitions() for tag in definition.tags}
    names = {re.split("[:.]", one)[-1] for one in called.keys() | tags}
    assert "fp8_mqa_logits" in names
    assert not [one for one in names for kernel in LISTED["not_called"] if fnmatchcase(one, kernel)]


def test_a_kernel_has_the_definitions_that_tags_and_records_name():
    dataset = list(definitions())
    known = definitions_by_kernel(find_root(), dataset)
    assert "gemm_bf16_n256_k7168" in known["sgl-kernel:dsv3_router_gemm"]
    # A record alone names DeepGEMM's; a wrapper's tag stands for the Triton kernels that it launches.
    assert "fp8_blockwise_scaled_mm_n2112_k7168" in known["deep-gemm:fp8_gemm_nt"]
    assert "mla_paged_decode_h128_ckv512_kpe64_ps1" in known["triton:_fwd_grouped_kernel_stage1"]
    assert known["flashinfer:trtllm_fp4_block_scale_moe"] == [
        "moe_nvfp4_ds_routing_topk8_ng8_kg4_e256_h7168_i256",
        "moe_nvfp4_ds_routing_topk8_ng8_kg4_e32_h7168_i2048",
    ]
    assert "" not in known


def test_kernels_that_run_are_apart_from_those_that_are_only_named():
    dataset = list(definitions())
    runs, every = definitions_with_kernel(find_root(), dataset), definitions_by_kernel(find_root(), dataset)
    # Of each library: by a tag, by a record alone, and by the function that launches it.
    assert "store_cache_d1024" in runs["jit:store_cache"]
    assert runs["deep-gemm:fp8_mqa_logits"] == ["fp8_mqa_logits_h64_d128"]
    assert "moe_topk_softmax_sorted_topk4_e128" in runs["triton-kernels:routing"]
    assert "gqa_extend_causal_h32_kv4_qk128_vo128" in runs["triton:_fwd_kernel"]
    assert "silu_and_mul_i1024" in runs["jit:run_activation"]
    assert "gqa_paged_decode_h32_kv8_d128_ps1" in runs["sgl-kernel:flash_attn_with_kvcache"]
    assert "sgl-kernel:cutlass_mla_decode" in every and "sgl-kernel:cutlass_mla_decode" not in runs


def test_the_command_lists_kernels_definitions_and_evidence():
    result = CliRunner().invoke(main, ["coverage", "--model", "deepseek-v3", "--kernels", "--format", "json"])
    assert result.exit_code == 0, result.output
    rows = {row["kernel"]: row for row in json.loads(result.output)}
    assert len(rows) == len(load_needs(find_root(), "deepseek-v3")["deepseek-v3"]["kernels"])
    norm = rows["sgl-kernel:rmsnorm"]
    assert norm["definitions"][: norm["of_model"]]
    assert "rmsnorm_h7168" in norm["definitions"][: norm["of_model"]]
    reason = LISTED["not_yet"]["triton:try_small_copy"]
    assert rows["triton:try_small_copy"]["reason"] == reason
    text = CliRunner().invoke(main, ["coverage", "--model", "deepseek-v3", "--kernels"]).output
    assert text.splitlines()[0].split()[:2] == ["Kernel", "Definitions"]
    assert text.rstrip().endswith("with evidence from the kernel")
    refused = CliRunner().invoke(main, ["coverage", "--kernels"])
    assert refused.exit_code == 2
    assert "--model NAME" in refused.output


def test_the_command_agrees_with_the_pages_of_kernels():
    """Both name kernels of one release, and only Definitions for which a kernel ran."""
    runs = definitions_with_kernel(find_root(), definitions())
    needs = load_needs(find_root()).values()
    assert all(needed["kernel_sources"]["sglang"] for needed in needs)
    for one in kernel_coverages(find_root(), needs):
        assert sorted(one.definitions) == list(runs.get(one.kernel.partition(".")[0], ())), one.kernel
    result = CliRunner().invoke(main, ["coverage", "--model", "deepseek-v3", "--kernels"])
    lines = {line.split()[0]: line for line in result.output.splitlines() if line}
    assert lines["flashinfer:fused_topk_deepseek"].split()[1] != "0"
    result = CliRunner().invoke(main, ["coverage", "--model", "llama-3.1-8b", "--kernels"])
    lines = {line.split()[0]: line for line in result.output.splitlines() if line}
    for kernel in ("triton:store_cache", "sgl-kernel:rmsnorm", "flashinfer:top_k_top_p_sampling_from_probs"):
        assert lines[kernel].split()[1] != "0"
    assert "the kernels of llama-3.1-8b in sglang 0.5." in result.output


@pytest.mark.parametrize(
    "change",
    [
        {"kernels": [{"ops": []}]},
        {"kernels": [{"kernel": "x", "ops": 5}]},
        {"kernels": [{"kernel": 5, "ops": []}]},
        {"kernels": 5},
        {"kernel_sources": []},
        {"kernel_sources": {"sglang": 5}},
        {"model": ["x"]},
    ],
    ids=str,
)
def test_malformed_needs_are_refused(change):
    needed = load_needs(find_root(), "deepseek-v3")["deepseek-v3"] | change
    with pytest.raises(DatasetError, match="models/needs/ is malformed"):
        kernel_coverages(find_root(), [needed])


def test_the_document_gives_the_reasons():
    text = coverage_page().partition("## Kernels without a Definition")[2].partition("\n## ")[0]
    reasons = {**LISTED["kernels"], **LISTED["not_called"]}
    assert all(f"| `{name}` | {escape(reason)} |" in text for name, reason in reasons.items())
