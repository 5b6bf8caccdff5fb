"""SGLang's fused experts, emulated: the adapter passes [gate, up], local ids, and what the wrapper asks a server."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import emulated_moe
import pytest
import torch

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.moe.softmax import FUSED_EXPERTS, publish_settings
from flashinfer_trace.harness.verify import Job, verify

#: How many times settings were published, and what processes share.
STATE = SimpleNamespace(published=0, groups={})


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


def fused_experts(hidden_states, w1, w2, topk_output, moe_runner_config):
    """Each product rounded to bfloat16, the weight applied before the second rounding, sums in float32."""
    assert STATE.published == 1 and not moe_runner_config.inplace
    weights, ids, _ = topk_output
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert ((ids >= -1) & (ids < len(w1))).all() and len(w1) == moe_runner_config.num_local_experts
    total = torch.zeros(hidden_states.shape)
    for row, column in (ids >= 0).nonzero().tolist():
        expert = int(ids[row, column])
        gate, up = (w1[expert].float() @ hidden_states[row].float()).bfloat16().float().chunk(2)
        inner = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        total[row] += (w2[expert].float() @ inner * weights[row, column]).bfloat16().float()
    return total.bfloat16()


@pytest.fixture
def sglang(monkeypatch, sgl_kernel):
    def module(name, **members):
        found = ModuleType(name)
        found.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, found)
        return found

    for name in (*emulated_moe.parents(FUSED_EXPERTS), *emulated_moe.parents("sglang.srt.layers.moe.topk")):
        module(name)

    def install():
        STATE.published += 1

    publish_settings.cache_clear()
    monkeypatch.setattr(STATE, "published", 0)
    context = SimpleNamespace(override_server_args=lambda: SimpleNamespace(install=install))
    groups = SimpleNamespace(override_permanently=STATE.groups.update)
    module("sglang.srt.runtime_context", get_context=lambda: context, get_parallel=lambda: groups)
    sys.modules["sglang.srt.layers.moe.moe_runner"].MoeRunnerConfig = SimpleNamespace
    sys.modules["sglang.srt.layers.moe.topk"].StandardTopKOutput = StandardTopKOutput
    fused = module(FUSED_EXPERTS, fused_experts=fused_experts)
    sys.modules[FUSED_EXPERTS.rpartition(".")[0]].fused_moe = fused


@pytest.mark.parametrize("name", ["moe_bf16_softmax_routing_topk6_e8_h2048_i1408"])
def test_the_adapter_of_fused_experts(name, sglang):
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    (kernel,) = (one for one in family.kernels if one.path == f"{FUSED_EXPERTS}.fused_experts")
    report = verify(Job(definition, family, kernel), examples=8)
    assert report.status == "passed", report.message
    assert report.cases >= 8
    assert STATE.groups == {"tp_group": None}
