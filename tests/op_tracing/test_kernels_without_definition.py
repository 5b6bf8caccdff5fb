"""Kernels of DeepSeek: all have Definitions but at most two, which have reasons, as has every kernel without one."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase

import jsonschema
import pytest
from built_pages import pages
from click.testing import CliRunner

from flashinfer_trace import DatasetError, definitions, find_root
from flashinfer_trace.cli import main
from flashinfer_trace.dataset.coverage import definitions_by_kernel, kernel_coverages, load_needs
from flashinfer_trace.format.json_source import TRACES, load_object
from flashinfer_trace.kernels.names import CALLED, key_of_traced
from tools.op_tracing.asked_for import (
    ASKED,
    AWAITS,
    DEEPSEEK,
    PLANS,
    AskedKernel,
    asked_for,
    asked_kernels,
    models_not_claimed,
)
from tools.op_tracing.definitions import covered, functions
from tools.op_tracing.kernel_coverage import without_definition
from tools.op_tracing.only_named import only_named, why_not_run

TRACE = find_root() / "traces" / "kernel_traces.json"
LISTED = json.loads((find_root() / "traces" / "kernels_without_definition.json").read_text(encoding="utf-8"))
WANTED = json.loads((find_root() / ASKED).read_text(encoding="utf-8"))
MOST = 2
#: How many kernels were asked for, and for how many of them a GPU must have run the kernel itself.
ASKED_KERNELS, LEAST_RUN = 60, 48


@pytest.fixture(scope="module")
def asked() -> dict[str, AskedKernel]:
    return {one.name: one for one in asked_kernels(find_root(), list(definitions()), WANTED, LISTED)}


def test_every_kernel_that_was_asked_for_has_a_tag_or_a_reason(asked):
    assert len(asked) == ASKED_KERNELS == sum(map(len, WANTED["kernels"].values()))
    untagged = {name for name, one in asked.items() if not one.tagged}
    assert len(untagged) <= MOST and all(asked[name].reason for name in untagged)
    assert untagged == {path.rpartition(".")[2] for path in LISTED["kernels"]}


def of_a_run(kernel: AskedKernel) -> set[str]:
    """The Definitions for which a GPU ran it."""
    return set().union(*kernel.runs.values())


def test_a_gpu_ran_nearly_every_kernel_itself(asked):
    ran = {name for name, one in asked.items() if of_a_run(one)}
    assert len(ran) >= LEAST_RUN
    assert all(asked[name].ran for name in ran), "what ran is named by its library"
    assert all(one.reason for name, one in asked.items() if name not in ran)
    # An op counts as the function that calls it; one kernel of a pipeline does not count for the others.
    assert "top_k_renorm_probs_v129280" in of_a_run(asked["top_k_renorm_prob"])
    assert "moe_bf16_softmax_routing_topk2_e8_h4096_i14336" in asked["topk_softmax"].tagged
    assert "moe_bf16_softmax_routing_topk2_e8_h4096_i14336" not in of_a_run(asked["topk_softmax"])


def test_topk_softmax_has_the_sizes_of_deepseek_v3_and_not_its_tag(asked):
    """DeepSeek-V3 routes by sigmoid."""
    assert "moe_topk_softmax_topk8_e256" in asked["topk_softmax"].tagged
    tags = {tag for one in definitions() if one.name in asked["topk_softmax"].tagged for tag in one.tag_values("model")}
    assert "deepseek-v2-lite" in tags and not tags & {"deepseek-v3", "deepseek-r1", "deepseek-v3.2"}


def sizes_of_deepseek_v3():
    """What names give of DeepSeek-V3's layers: sizes of its configuration and of its projections, on 1 to 8 GPUs."""
    config = load_object(find_root() / "models" / "deepseek-v3.json")["config"]
    heads, rank, latent = (config[name] for name in ("num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rotated, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    whole = {size for size in config.values() if type(size) is int}
    whole |= {rank + latent + rotated, heads * (nope + rotated), heads * (nope + value), heads * value}
    whole |= {2 * config[name] for name in ("intermediate_size", "moe_intermediate_size")}
    return {size // gpus for size in whole for gpus in (1, 2, 4, 8)}


def test_kernels_without_a_tag_of_deepseek_have_its_sizes(asked):
    others = [one for one in asked.values() if one.tagged and not one.models & DEEPSEEK]
    assert {"topk_softmax", "merge_state", "int8_scaled_mm"} <= {one.name for one in others}
    assert not {"moe_fused_gate", "merge_state_v2", "rmsnorm"} & {one.name for one in others}
    known = sizes_of_deepseek_v3()
    for one in others:
        named = [re.findall(r"(?<=_)(?!fp|nvfp)[a-z]+(\d+)(?=_|$)", name) for name in one.tagged]
        assert any(sizes and {int(size) for size in sizes} <= known for sizes in named), one.name
    text = asked_for(asked.values())
    assert f"\n{len(others)} of the kernels have no Definition that is tagged with DeepSeek-V3" in text


def test_the_total_tells_kernels_that_ran_from_those_that_are_only_named(asked):
    ran = AskedKernel("a", ["x"], {"deepseek-v3"}, True, {"NVIDIA H200": {"x"}})
    named = [AskedKernel(name, ["x"], reason="Needs compute capability 10.0.") for name in "bc"]
    total = asked_for([ran, *named, AskedKernel("d", reason="Only a number.")]).splitlines()[-1]
    missing = "2 need compute capability 10.0, 1 without a Definition"
    awaiting = asked_for([ran, AskedKernel("b", ["x"], reason=AWAITS)]).splitlines()[-1]
    assert awaiting.endswith("| 1 awaits a GPU run, 0 without a Definition |")
    assert total == f"| **all 4 kernels** | 1 that ran, 2 that are only named | 1 on NVIDIA H200 | {missing} |"
    assert asked_for(asked.values()).splitlines()[-1].startswith(f"| **all {ASKED_KERNELS} kernels** |")


def test_a_kernel_of_another_gpu_is_only_named(asked):
    assert asked["cutlass_mla_decode"].reason == "Needs compute capability 10.0."
    assert asked["cutlass_mla_decode"].tagged and not asked["cutlass_mla_decode"].ran
    assert not asked["cutlass_mla_decode"].runs


def test_every_kernel_that_is_only_named_has_a_reason():
    """Other sizes are no reason: `validate` refuses a tag of a kernel that does not take them."""
    dataset, root = list(definitions()), find_root()
    pairs = [(one, path) for one in dataset for path in one.tag_values(CALLED)]
    assert len(pairs) > 100
    assert not [(one.name, path) for one, path in pairs if not why_not_run(root, one, path)]
    document = pages()["docs/coverage.md"]
    assert only_named(root, dataset) in document and "awaits a GPU run" in document
    decode = next(one for one in dataset if "sgl_kernel.cutlass_mla_decode" in one.tag_values(CALLED))
    assert why_not_run(root, decode, "sgl_kernel.cutlass_mla_decode") == "needs compute capability 10.0"
    assert why_not_run(root, decode, "flashinfer.mla.BatchMLAPagedAttentionWrapper") == "awaits a GPU run"
    assert why_not_run(root, decode, "sgl_kernel.no_such_kernel") == ""


def test_what_was_asked_for_follows_its_schema_and_is_in_the_document(asked):
    root = find_root()
    schema = json.loads((root / "schema" / "asked_for.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(WANTED)
    document = pages()["docs/coverage.md"]
    assert asked_for(asked.values()) in document
    assert models_not_claimed(root, WANTED, definitions()) in document


def test_models_that_are_not_claimed_are_not_in_models():
    root = find_root()
    assert not {path.stem for path in (root / "models").glob("*.json")} & WANTED["models"].keys()
    assert {path.stem for path in (root / PLANS).glob("*.json")} < WANTED["models"].keys()
    assert not {model for one in definitions() for model in one.tag_values("model")} & WANTED["models"].keys()


def test_at_most_two_kernels_get_no_definition_each_for_a_reason():
    assert 0 < len(LISTED["kernels"]) <= MOST
    assert all(reason.endswith(".") and len(reason.split()) > 10 for reason in LISTED["kernels"].values())


def test_no_definition_names_a_kernel_that_is_said_to_have_none():
    tags = {tag.partition(":")[2] for definition in definitions() for tag in definition.tags}
    assert "sgl_kernel.cutlass_mla_decode" in tags
    assert not tags & set(LISTED["kernels"])


def test_every_traced_kernel_has_a_definition_or_a_reason():
    """What `not_yet` lists is called by a model's code and has no Definition."""
    found = [one for needed in load_needs(find_root()).values() for one in kernel_coverages(find_root(), needed)]
    assert not {one.kernel for one in found if not one.definitions and not one.reason}
    listed = LISTED["not_yet"]
    assert list(listed) == sorted(listed)
    called = {key_of_traced(kernel) for kernel in load_object(TRACE, TRACES)["kernels"]}
    defined = {one.kernel for one in found if one.definitions} | covered(definitions()).keys()
    named = definitions_by_kernel(find_root(), definitions()).keys()
    assert not called - defined - named - set(listed)
    assert not set(listed) - called, "no model's code calls these any more"
    assert not set(listed) & defined, "these have Definitions now: remove them"
    assert all(one.reason == listed[one.kernel] for one in found if one.kernel in listed)


def test_kernels_that_are_said_not_to_be_called_are_in_no_trace_and_no_tag():
    called = {key_of_traced(kernel) for kernel in load_object(TRACE, TRACES)["kernels"]}
    tags = {tag for definition in definitions() for tag in definition.tags}
    names = {re.split("[:.]", one)[-1] for one in called | tags}
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
    runs, every = covered(dataset), definitions_by_kernel(find_root(), dataset)
    # Of each library: by a tag, by a record alone, and by the function that launches it.
    assert "store_cache_d1024" in runs["jit:store_cache"]
    assert runs["deep-gemm:fp8_mqa_logits"] == ["fp8_mqa_logits_h64_d128"]
    assert "moe_topk_softmax_sorted_topk4_e128" in runs["triton-kernels:routing"]
    assert "gqa_extend_causal_h32_kv4_qk128_vo128" in runs["triton:_fwd_kernel"]
    assert "silu_and_mul_i1024" in runs["jit:run_activation"]
    assert "gqa_paged_decode_h32_kv8_d128_ps1" in runs["sgl-kernel:flash_attn_with_kvcache"]
    assert "sgl-kernel:cutlass_mla_decode" in every and "sgl-kernel:cutlass_mla_decode" not in runs


def test_a_reference_says_what_a_kernel_computes():
    dataset = list(definitions())
    found = functions(dataset, covered(dataset))
    assert (
        found["jit:hadamard_transform"] == "Walsh-Hadamard transform of each row, times a scale: output = scale * x H."
    )
    # A router is a step of a whole layer, too; it is the router that describes it.
    assert "expert router" in found["sgl-kernel:moe_fused_gate"]
    assert all(text.partition(" (and ")[0].endswith(".") for text in found.values())


def test_the_command_lists_kernels_definitions_and_evidence():
    result = CliRunner().invoke(main, ["coverage", "--model", "deepseek-v3", "--kernels", "--format", "json"])
    assert result.exit_code == 0, result.output
    rows = {row["kernel"]: row for row in json.loads(result.output)}
    assert len(rows) == len(load_needs(find_root(), "deepseek-v3")["deepseek-v3"]["kernels"])
    norm = rows["sgl-kernel:rmsnorm"]
    assert norm["definitions"][: norm["of_model"]]
    assert "rmsnorm_h7168" in norm["definitions"][: norm["of_model"]]
    assert rows["flashinfer:mm_fp4"]["reason"] == LISTED["not_yet"]["flashinfer:mm_fp4"]
    text = CliRunner().invoke(main, ["coverage", "--model", "deepseek-v3", "--kernels"]).output
    assert text.splitlines()[0].split()[:2] == ["Kernel", "Definitions"]
    assert text.rstrip().endswith("with evidence from the kernel")
    refused = CliRunner().invoke(main, ["coverage", "--kernels"])
    assert refused.exit_code == 2
    assert "--model NAME" in refused.output


def test_the_command_agrees_with_the_pages_of_kernels():
    """Of the same release, and only with Definitions for which a kernel ran."""
    runs = covered(definitions())
    for needed in load_needs(find_root()).values():
        assert needed["kernel_sources"]["sglang"] == "0.5.11"
        for one in kernel_coverages(find_root(), needed):
            assert sorted(one.definitions) == list(runs.get(one.kernel.partition(".")[0], ())), one.kernel
    result = CliRunner().invoke(main, ["coverage", "--model", "deepseek-v3", "--kernels"])
    lines = {line.split()[0]: line for line in result.output.splitlines() if line}
    assert "it did not run for the" in lines["sgl-kernel:cutlass_mla_decode"]
    result = CliRunner().invoke(main, ["coverage", "--model", "llama-3.1-8b", "--kernels"])
    lines = {line.split()[0]: line for line in result.output.splitlines() if line}
    for kernel in (
        "sgl-kernel:flash_attn_with_kvcache",
        "jit:run_rope",
        "flashinfer:top_k_top_p_sampling_from_probs",
        "flashinfer:min_p_sampling_from_probs",
    ):
        assert lines[kernel].split()[1] != "0"
    assert "the kernels of llama-3.1-8b in sglang 0.5.11, " in result.output


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
        kernel_coverages(find_root(), needed)


def test_the_document_gives_the_reasons():
    text = pages()["docs/coverage.md"]
    assert without_definition(LISTED) in text
