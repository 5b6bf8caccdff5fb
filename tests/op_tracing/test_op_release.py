"""The committed op trace is what the sources give, agrees with the kernel traces, and shows what ran."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from digests import SOURCES as DIGEST_SOURCES
from digests import needs_digest_sources
from release import ROOT

from flashinfer_trace import definitions
from tools.extract_definitions.traces import COMMITTED as DIGESTS
from tools.extract_definitions.traces import digest
from tools.extract_definitions.traces import dumps as dumps_digest
from tools.kernel_tracing.report.arguments import chosen
from tools.kernel_tracing.report.evaluation import index_of
from tools.kernel_tracing.report.trace_files import load_traces, restricted
from tools.op_tracing.__main__ import MODEL
from tools.op_tracing.check import check
from tools.op_tracing.definitions import covered
from tools.op_tracing.render import render

TRACES = ROOT / "traces" / "op_traces.json"
ARCHITECTURES = sorted(path.stem for path in DIGESTS.glob("*.json"))
AGAIN = "write it again: python -m tools.op_tracing --traces traces/kernel_traces.json"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    ops: dict[str, Any] = json.loads(TRACES.read_text())
    return ops


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    names = [one.name for one in chosen(MODEL)]
    return restricted(load_traces(ROOT / "traces" / "kernel_traces.json"), names, MODEL)


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node["children"]:
        yield from _nodes(child)


def test_the_committed_op_trace_follows_its_schema_and_agrees_with_the_kernel_traces(
    committed: dict[str, Any], kernels: dict[str, Any]
) -> None:
    schema = json.loads((ROOT / "schema" / "op_traces.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(committed)
    assert check(committed, kernels) == []


def test_the_committed_report_is_that_of_the_committed_traces(
    committed: dict[str, Any], kernels: dict[str, Any]
) -> None:
    text = render(committed, kernels, covered(definitions()))
    assert "](https://github.com/sgl-project/sglang/blob/v0.5.11/" in text and "](../.sources" not in text


def test_the_report_marks_what_a_recorded_run_shows(committed: dict[str, Any], kernels: dict[str, Any]) -> None:
    """`run` of FlashInfer's MLA wrapper was seen at `attn_mqa`; CUTLASS's decode needs another GPU."""
    _, _, section = render(committed, kernels, covered(definitions())).partition("### attn_mqa\n")
    seen = {
        cells[1].strip(" `"): cells[4].strip() for line in section.splitlines() if len(cells := line.split("|")) > 5
    }
    runs = {
        name
        for kernel in kernels["kernels"]
        if kernel["name"] == "BatchMLAPagedAttentionWrapper.run"
        for chain in kernel["chains"]
        if chain["op"] == "attn_mqa"
        for name in chain["seen"]
    }
    assert seen["BatchMLAPagedAttentionWrapper.run"] == str(len(runs)) and len(runs) >= 5
    assert seen["cutlass_mla_decode"] == ""


def test_what_deepseek_is_known_for_is_in_its_graph(committed: dict[str, Any]) -> None:
    """Facts read from deepseek_v2.py: the paths of attention, dense layers and experts."""
    containers = {
        node["function"] for node in _nodes(committed["graph"]) if node["kind"] == "container" and node["name"] != MODEL
    }
    assert {
        "DeepseekV2MoE.forward",
        "DeepseekV2MLP.forward",
        "DeepseekMLAForwardMixin.forward_absorb_core",
    } <= containers
    ops = {op["name"]: {kernel["name"] for kernel in op["kernels"]} for op in committed["ops"]}
    assert {"dsv3_fused_a_gemm", "fp8_gemm_nt"} <= ops["fused_qkv_a_proj_with_mqa"]
    assert {"dsv3_router_gemm"} <= ops["gate"]
    assert {"cutlass_mla_decode", "BatchMLAPagedAttentionWrapper.run"} <= ops["attn_mqa"]
    assert {"moe_fused_gate", "fused_topk_deepseek"} <= ops["topk"]
    assert "sampler" in {op["name"] for op in committed["non_model_ops"] if op["group"] == "sampling"}


def test_a_kernel_is_not_always_run_where_its_op_is_plain_torch_otherwise(committed: dict[str, Any]) -> None:
    """What stands at the op in the graph is what its table says."""
    nodes = [node for node in _nodes(committed["graph"]) if node["name"] == "embed_tokens"]
    assert {node["kind"] for node in nodes} == {"op", "torch"}
    (stands,) = (node["annotation"] for node in nodes if node["kind"] == "op")
    (kernel,) = (op["kernels"][0] for op in committed["ops"] if op["name"] == "embed_tokens")
    assert kernel["condition"] == stands and "tp_size=2 or 4 or 8" in stands


def test_what_deepseek_calls_is_in_execution_order(committed: dict[str, Any]) -> None:
    """Read from the sources: a dense layer, and attention over chunks of the cached prefix."""
    called = {
        node["function"]: [child["name"] for child in node["children"]]
        for node in _nodes(committed["graph"])
        if node["kind"] == "container" and node["name"] != MODEL
    }
    assert list(dict.fromkeys(called["DeepseekV2MLP.forward"])) == ["gate_up_proj", "act_fn", "down_proj"]
    assert list(dict.fromkeys(called["DeepseekMHAForwardMixin.forward_normal_chunked_kv_core"])) == [
        "prepare_chunked_prefix_cache_info",
        "attn_mha",
        "_chunked_prefix_attn_mha",
        "o_proj",
    ]
    assert list(dict.fromkeys(called["DeepseekV2DecoderLayer.forward"])) == [
        "prepare_attn",
        "self_attn",
        "prepare_mlp",
        "mlp",
        "postprocess_layer",
    ]


@needs_digest_sources
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_architecture_has_its_digest(architecture: str) -> None:
    found = digest(architecture, index_of(DIGEST_SOURCES))
    assert dumps_digest(found) == (DIGESTS / f"{architecture}.json").read_text(), (
        f"out of date; run `python -m tools.extract_definitions.traces {architecture}`"
    )
    latent = architecture.startswith("Deepseek")
    assert {"rotary_emb", *(["attn_mqa"] if latent else ["attn"])} <= {name for name, of in found["ops"].items() if of}
