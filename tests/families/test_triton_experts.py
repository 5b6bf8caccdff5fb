"""SGLang's fused experts, emulated: the adapter passes [gate, up], local ids, and what the wrapper asks a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from emulated_runs import assert_adapter_passes, install

from flashinfer_trace.families.moe.softmax import FUSED_EXPERTS, publish_settings

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
    def publish():
        STATE.published += 1

    publish_settings.cache_clear()
    monkeypatch.setattr(STATE, "published", 0)
    context = SimpleNamespace(override_server_args=lambda: SimpleNamespace(install=publish))
    groups = SimpleNamespace(override_permanently=STATE.groups.update)
    stand_ins = {
        "sglang.srt.runtime_context.get_context": lambda: context,
        "sglang.srt.runtime_context.get_parallel": lambda: groups,
        "sglang.srt.layers.moe.moe_runner.MoeRunnerConfig": SimpleNamespace,
        "sglang.srt.layers.moe.topk.StandardTopKOutput": StandardTopKOutput,
        f"{FUSED_EXPERTS}.fused_experts": fused_experts,
    }
    install(monkeypatch, stand_ins)


@pytest.mark.parametrize("name", ["moe_bf16_softmax_routing_topk6_e8_h2048_i1408"])
def test_the_adapter_of_fused_experts(name, sglang):
    assert_adapter_passes(name, f"{FUSED_EXPERTS}.fused_experts", examples=8)
    assert STATE.groups == {"tp_group": None}
