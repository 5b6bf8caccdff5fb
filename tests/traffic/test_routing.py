"""Workloads of experts, of sparse attention and of the indexer are what a server has: rows, slots and keys."""

from __future__ import annotations

import pytest
import torch

from flashinfer_trace import load
from flashinfer_trace.judging.traffic import Workload, drawn

SPARSE = (
    "dsa_sparse_attention_h128_ckv512_kpe64_topk2048_ps1",
    "dsa_sparse_attention_fp8_cache_h128_ckv512_kpe64_topk2048_ps64",
)
#: Products of gathered rows, and how many experts a token of their model chooses.
GATHERED = (("moe_bf16_gather_gemm_e128_n1536_k2048", 8), ("moe_mxfp4_gather_gemm_swiglu_e128_n5760_k2880", 4))


def workload(name: str, traffic: str) -> Workload:
    (found,) = (one for one in drawn(load(name)) if one.name == traffic)
    return found


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("moe_fp8_block_scale_grouped_gemm_e256_n7168_k256", 8 * 64),  # all experts of DeepSeek-V3
        ("moe_fp8_block_scale_grouped_gemm_e257_n7168_k2048", 9 * 64),  # and its shared one
        ("moe_fp8_block_scale_grouped_gemm_e32_n7168_k2048", 64),  # an eighth of them
        ("moe_nvfp4_experts_quant_e32_k7168", 64),
        ("moe_w4a8_grouped_gemm_e32_n7168_k2048", 64),
    ],
)
def test_rows_chose_their_experts_by_chance(name: str, rows: int) -> None:
    found = workload(name, "decode-64")
    counts = found.structure()["expert_offsets"].diff()
    experts = len(counts)
    assert found.axes["total_rows"] == counts.sum() == rows
    hit, expected = int((counts > 0).sum()), experts * (1 - (1 - 1 / experts) ** rows)
    assert abs(hit - expected) < 4 * expected**0.5 and counts.max() > rows / experts


@pytest.mark.parametrize(("name", "chosen"), GATHERED)
def test_a_token_chooses_different_experts(name: str, chosen: int) -> None:
    found = workload(name, "prefill-512")
    inputs = found.structure()
    owners, counts = inputs["row_tokens"].long(), inputs["expert_counts"].long()
    experts = torch.arange(len(counts)).repeat_interleave(counts)
    pairs = torch.stack([owners, experts], dim=1)
    assert len(pairs) == len(pairs.unique(dim=0)) == chosen * 512
    assert owners.bincount().tolist() == [chosen] * 512 and counts.unique().numel() > 5


def test_rows_are_copied_for_each_expert_of_their_token() -> None:
    found = workload("moe_shuffle_rows_h7168", "decode-64").structure()
    assert found["dst2src_map"].bincount().tolist() == [8] * 64


@pytest.mark.parametrize("name", SPARSE)
def test_requests_in_decode_have_slots_of_their_own(name: str) -> None:
    definition = load(name)
    decode, prefill = (workload(name, traffic) for traffic in ("decode-8", "prefill-512"))
    slots = {one.name: one.axes["num_pages"] * definition.const_axes["page_size"] for one in (decode, prefill)}
    assert slots == {"decode-8": 8 * 4096, "prefill-512": 4096}
    indices = decode.structure()["sparse_indices"]
    assert indices.unique().numel() == indices.numel() == 8 * 2048
    pages = [set((row // definition.const_axes["page_size"]).tolist()) for row in indices]
    assert sum(map(len, pages)) == len(set().union(*pages)), "no page is of two requests"


def test_the_indexer_has_more_keys_than_it_chooses() -> None:
    for one in drawn(load("fp8_mqa_logits_h64_d128")):
        inputs = one.structure()
        assert one.traffic.phase == "prefill" and int((inputs["k_end"] - inputs["k_start"]).min()) > 2048


def test_variants_have_other_routing() -> None:
    found = workload("moe_nvfp4_experts_quant_e32_k7168", "decode-64")
    first, other = (found.inputs(variant=number)["expert_offsets"] for number in (0, 1))
    assert not torch.equal(first, other)
