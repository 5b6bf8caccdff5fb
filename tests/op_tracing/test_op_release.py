"""The pinned release of sglang: the committed op trace matches the sources, and other models can be traced as well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from release import ROOT, SOURCES, analysis, needs_sources
from tools.kernel_tracing.report.analysis import deep
from tools.kernel_tracing.report.trace import document

from flashinfer_trace import definitions
from tools.extract_definitions.traces import COMMITTED as DIGESTS
from tools.extract_definitions.traces import analysed, condense
from tools.extract_definitions.traces import dumps as dumps_digest
from tools.kernel_tracing.source.sources import find_sources
from tools.op_tracing.__main__ import dumps
from tools.op_tracing.check import check
from tools.op_tracing.definitions import covered
from tools.op_tracing.render import render
from tools.op_tracing.trace import trace

TRACES = ROOT / "traces" / "op_traces.json"
REPORT = ROOT / "traces" / "op_traces.md"
KERNELS = ROOT / "traces" / "kernel_traces.json"
ARCHITECTURES = sorted(path.stem for path in DIGESTS.glob("*.json"))
AGAIN = (
    "write it again: python -m tools.op_tracing --model deepseek --sources .sources --traces traces/kernel_traces.json"
)


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    ops: dict[str, Any] = json.loads(TRACES.read_text())
    return ops


def _validate(ops: dict[str, Any]) -> None:
    schema = json.loads((ROOT / "schema" / "op_traces.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(ops)


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node["children"]:
        yield from _nodes(child)


def test_the_committed_op_trace_follows_its_schema_and_agrees_with_the_kernel_traces(committed: dict[str, Any]) -> None:
    _validate(committed)
    assert check(committed, json.loads(KERNELS.read_text())) == []


def test_the_committed_report_is_that_of_the_committed_traces(committed: dict[str, Any]) -> None:
    written = render(committed, json.loads(KERNELS.read_text()), covered(definitions()))
    assert written == REPORT.read_text(), "write it again: python -m tools.generate_docs"


@needs_sources
def test_the_committed_op_trace_is_what_the_sources_give() -> None:
    assert dumps(trace(analysis("deepseek"))) == TRACES.read_text(), AGAIN


def test_what_deepseek_is_known_for_is_in_its_graph(committed: dict[str, Any]) -> None:
    """Facts read from deepseek_v2.py: the two halves of a layer, the paths of attention, dense and MoE layers."""
    nodes = list(_nodes(committed["graph"]))
    paths = {node["name"]: node["annotation"] for node in nodes if node["kind"] == "container"}
    for name, member in {
        "forward_normal_core": "AttnForwardMethod.MHA",
        "forward_normal_chunked_kv_core": "AttnForwardMethod.MHA_CHUNKED_KV",
        "forward_absorb_core": "AttnForwardMethod.MLA",
        "forward_absorb_fused_mla_rope_core": "AttnForwardMethod.MLA_FUSED_ROPE",
    }.items():
        assert paths[name].partition(" and ")[0] == member, (name, paths[name])
    assert {node["annotation"] for node in nodes if node["name"] == "mlp"} == {"MoE layer", "dense layer"}
    assert {"forward_normal_dual_stream", "forward_normal", "forward_deepep"} <= paths.keys()
    ops = {op["name"]: {kernel["name"] for kernel in op["kernels"]} for op in committed["ops"]}
    assert {"dsv3_fused_a_gemm", "fp8_blockwise_scaled_mm"} <= ops["fused_qkv_a_proj_with_mqa"]
    assert {"dsv3_router_gemm"} <= ops["gate"]
    assert {"cutlass_mla_decode", "BatchMLAPagedAttentionWrapper.run"} <= ops["attn_mqa"]
    assert {"moe_fused_gate"} <= ops["topk"]
    outside = {op["group"]: op["name"] for op in committed["non_model_ops"]}
    assert outside["sampling"] == "sampler"


@needs_sources
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_architecture_has_its_digest_and_kernels_or_plain_torch_in_every_leaf(architecture: str) -> None:
    with deep():  # until the analysis is gone: see tools.extract_definitions.traces.digest
        solved = analysed(architecture, find_sources(SOURCES))
        ops, kernels = trace(solved), document(solved)
        del solved
    assert dumps_digest(condense(architecture, ops)) == (DIGESTS / f"{architecture}.json").read_text(), (
        f"out of date; run `python -m tools.extract_definitions.traces {architecture}`"
    )
    _validate(ops)
    assert check(ops, kernels) == []
    leaves = [node for node in _nodes(ops["graph"]) if not node["children"]]
    assert {node["kind"] for node in leaves} <= {"op", "torch", "again"}
    named = {op["name"] for op in ops["ops"] if op["kernels"]}
    assert named >= {node["name"] for node in leaves if node["kind"] == "op"}
    latent = architecture.startswith("Deepseek")
    assert {"o_proj", "rotary_emb", *(["attn_mqa", "attn_mha"] if latent else ["attn"])} <= named
    plain = {node["name"] for node in leaves if node["kind"] == "torch"}
    assert latent or "qkv_proj" in named | plain  # plain where the code never quantises it, as in gpt-oss
