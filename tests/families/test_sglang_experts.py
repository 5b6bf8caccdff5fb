"""How the steps around grouped products of experts are called, on emulations that round where the kernels do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from drawn_plans import drawn_plans
from emulated_runs import assert_adapter_passes, install

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.moe.rows import EXPERTS
from flashinfer_trace.harness.family import PlanRequest

MODULE = "sglang.kernels.ops.moe.ep_moe_kernels"
BEFORE = "sglang.srt.layers.moe.ep_moe.kernels.post_reorder_triton_kernel"
ROUTING = "triton_kernels.topk.topk"


def masked_quantizer(x, codes, scales, group, counts, scale_ue8m0=False):
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


@dataclass
class FakeReorder:
    """Adds up in bf16 what `here` does not skip: (expert, place) -> whether a pair counts."""

    here: Callable[[int, int], bool]

    def __getitem__(self, grid):
        def launch(rows, output, places, ids, weights, top_k, size, factor=1.0, *, BLOCK_SIZE):
            assert grid == (len(output),)
            assert rows.shape[1] == size
            assert factor == 1.0
            output.copy_(self.added(rows, places, ids, weights, top_k, torch.bfloat16))

        return launch

    def added(self, rows, places, ids, weights, top_k, dtype):
        assert places.shape == (len(ids) * top_k,)
        output = torch.zeros(len(ids), rows.shape[1], dtype=dtype)
        for token, own in enumerate(ids.tolist()):
            for choice, expert in enumerate(own):
                place = int(places[token * top_k + choice])
                if self.here(expert, place):
                    output[token] += rows[place].to(dtype) * weights[token, choice].to(dtype)
        return output


BY_PLACE = FakeReorder(lambda expert, place: place >= 0)


def reorder(rows, output, places, ids, weights, top_k, tokens, size, factor, lora_delta=None):
    assert (tokens, size, factor, lora_delta) == (*output.shape, 1.0, None)
    output.copy_(BY_PLACE.added(rows, places, ids, weights, top_k, torch.float32))


def topk(logits, chosen, apply_softmax):
    """Choices best first, as int16; pairs are numbered in that order."""
    assert apply_softmax
    ids = (-logits.float()).argsort(dim=1, stable=True)[:, :chosen]
    pairs = ids.flatten().argsort(stable=True)
    metadata = SimpleNamespace(
        col_sum=torch.bincount(ids.flatten(), minlength=logits.shape[1]).int(),
        col_sorted_indx=pairs.int(),
        row_sorted_indx=pairs.argsort().int(),
    )
    weights = torch.softmax(logits.float().gather(1, ids), dim=1).to(logits.dtype)
    return SimpleNamespace(vals=weights, indx=ids.short(), mask_metadata=metadata)


FAKES = {
    f"{MODULE}.silu_and_mul_masked_post_quant_fwd": masked_quantizer,
    f"{MODULE}.post_reorder_deepgemm": reorder,
    f"{MODULE}.deepep_post_reorder_triton_kernel": BY_PLACE,
    BEFORE: FakeReorder(lambda expert, place: expert > 0),
    ROUTING: topk,
}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("silu_and_mul_per_token_group_quant_fp8_i2048_g128", f"{MODULE}.silu_and_mul_masked_post_quant_fwd"),
        ("moe_post_reorder_topk9_h7168", f"{MODULE}.post_reorder_deepgemm"),
        ("moe_post_reorder_topk9_h7168", f"{MODULE}.deepep_post_reorder_triton_kernel"),
        ("moe_post_reorder_topk9_h7168", BEFORE),
        ("moe_topk_softmax_sorted_topk8_e128", ROUTING),
    ],
)
def test_kernels_are_called_as_sglang_calls_them(name, path, monkeypatch):
    install(monkeypatch, {path: FAKES[path]})
    assert_adapter_passes(name, path)


def test_a_token_that_chose_expert_0_counts_it():
    """SGLang 0.5.11's kernel would skip it, so its cases have none."""
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
    (kernel,) = (one for one in family.kernels if one.path == BEFORE)
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
