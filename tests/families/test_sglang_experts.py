"""How the steps around grouped products of experts are called, on emulations that round where the kernels do."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from drawn_plans import drawn_plans

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.moe.reorder import EXPERTS
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.verify import Job, verify

MODULE = "sglang.srt.layers.moe.ep_moe.kernels"
ROUTING = "triton_kernels.routing"


def masked_quantiser(x, codes, scales, group, counts, scale_ue8m0=False):
    """Rows behind an expert's count are left alone."""
    assert x.is_contiguous()
    assert codes.is_contiguous()
    assert counts.dtype == torch.int32
    assert not scale_ue8m0
    for expert, count in enumerate(counts.tolist()):
        gate, up = x[expert, :count].chunk(2, dim=-1)
        gated = (gate.float() / (1 + torch.exp(-gate.float()))).to(torch.bfloat16) * up
        groups = gated.float().view(count, gated.shape[1] // group, group)
        found = groups.abs().amax(dim=-1).clamp_min(1e-10) / 448
        codes[expert, :count] = (groups / found.unsqueeze(-1)).clamp(-448, 448).flatten(1).to(codes.dtype)
        scales[expert, :count] = found


class FakeReorder:
    """Skips ids that are not positive, and adds up in bf16."""

    def __getitem__(self, grid):
        def launch(rows, output, places, ids, weights, top_k, size, BLOCK_SIZE):
            assert grid == (len(output),)
            assert rows.shape[1] == size
            assert places.shape == (len(output) * top_k,)
            output.zero_()
            for token, own in enumerate(ids.tolist()):
                for choice, expert in enumerate(own):
                    if expert > 0:
                        weight = weights[token, choice].to(torch.bfloat16)
                        output[token] += rows[int(places[token * top_k + choice])] * weight

        return launch


def routing(logits, chosen, sm_first):
    assert not sm_first
    ids = (-logits.float()).argsort(dim=1, stable=True)[:, :chosen].sort(dim=1).values
    weights = torch.softmax(logits.float().gather(1, ids), dim=1).to(logits.dtype)
    pairs = ids.flatten().argsort(stable=True)
    data = SimpleNamespace(
        gate_scal=weights.flatten()[pairs], expt_hist=torch.bincount(ids.flatten(), minlength=logits.shape[1]).int()
    )
    rows = pairs.argsort().int()
    return data, SimpleNamespace(src_indx=pairs.int()), SimpleNamespace(src_indx=rows)


FAKES = {
    f"{MODULE}.silu_and_mul_masked_post_quant_fwd": masked_quantiser,
    f"{MODULE}.post_reorder_triton_kernel": FakeReorder(),
    f"{ROUTING}.routing": routing,
}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("silu_and_mul_per_token_group_quant_fp8_i2048_g128", f"{MODULE}.silu_and_mul_masked_post_quant_fwd"),
        ("moe_post_reorder_topk9_h7168", f"{MODULE}.post_reorder_triton_kernel"),
        ("moe_topk_softmax_sorted_topk8_e128", f"{ROUTING}.routing"),
    ],
)
def test_kernels_are_called_as_sglang_calls_them(name, path, monkeypatch):
    module, _, attribute = path.rpartition(".")
    fake = ModuleType(module)
    setattr(fake, attribute, FAKES[path])
    parts = module.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
    monkeypatch.setitem(sys.modules, module, fake)
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    (kernel,) = family.kernels_of(definition)
    report = verify(Job(definition, family, kernel), examples=30)
    assert report.status == "passed", report.message
    assert report.cases >= 30


def test_a_token_that_chose_expert_0_counts_it():
    """SGLang's kernel would skip it, so that its cases have none."""
    definition = flashinfer_trace.load("moe_post_reorder_topk9_h7168").with_const_axes({"top_k": 2, "hidden_size": 1})
    output = definition.run(
        hidden_states=torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.bfloat16),
        src2dst=torch.tensor([[2, 0], [99, 1]], dtype=torch.int32),
        topk_ids=torch.tensor([[0, 5], [-1, 3]], dtype=torch.int32),
        topk_weights=torch.tensor([[0.5, 1.0], [1.0, 2.0]]),
    )
    assert output.tolist() == [[3.0], [4.0]]


@pytest.mark.parametrize("first", [True, False])
def test_a_kernel_that_skips_expert_0_is_not_given_it(first):
    definition = flashinfer_trace.load("moe_post_reorder_topk9_h7168")
    family = family_of(definition)
    (kernel,) = family.kernels
    lowest = 0 if first else 1
    assert {plan["lowest_id"] for plan in drawn_plans(family, definition, None if first else kernel, 20)} == {lowest}
    request = PlanRequest(definition, {}, False, None if first else kernel.plan_options)
    assert {plan["lowest_id"] for plan in family.corners(request)} == {lowest}
    assert any(plan["choice"] == "first" for plan in family.corners(request)) == first
    plan = {**family.plan_for_axes(definition, {}, None), "seq_len": 40 * EXPERTS // 9, "lowest_id": lowest}
    ids = family.inputs(definition.with_const_axes({"top_k": 9, "hidden_size": 8}), plan, 0, "cpu")["topk_ids"]
    assert bool((ids == 0).any()) == first


def test_rows_are_sorted_by_expert():
    """Token 0 chooses experts 2 and 0, token 1 chooses 1 and 2, whose logits are equal."""
    definition = flashinfer_trace.load("moe_topk_softmax_sorted_topk8_e128")
    small = definition.with_const_axes({"num_experts": 3, "top_k": 2})
    logits = torch.tensor([[0.0, -9.0, 0.0], [-9.0, 1.0, 1.0]], dtype=torch.bfloat16)
    found = small.name_outputs(small.run(routing_logits=logits))
    assert found["expert_counts"].tolist() == [1, 1, 2]
    assert found["row_pairs"].tolist() == [0, 2, 1, 3]
    assert found["positions"].tolist() == [[0, 2], [1, 3]]
    assert found["gammas"].tolist() == [0.5] * 4
