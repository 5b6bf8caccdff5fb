"""How SGLang's functions that run step by step in PyTorch are called, on emulations that round where they do."""

from __future__ import annotations

import contextlib

import pytest
import torch
from emulated_runs import assert_adapter_passes, install

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.verify import Job, verify

LAYERNORM = "sglang.srt.layers.layernorm"
INVARIANT = "sglang.srt.batch_invariant_ops"
TOPK = "sglang.srt.layers.moe.topk"
SAMPLER = "sglang.srt.layers.sampler"
HASH = "sglang.kernels.ops.sampling.murmur_hash"
ROTARY = "sglang.srt.layers.rotary_embedding.utils"
SUM = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
#: Whether the modes are on.
MODES = {"invariant": False, "eager": False}


class FakeNorm:
    def __init__(self, size, eps=1e-6):
        self.size, self.eps = size, eps

    def normal(self, x):
        assert x.dtype == torch.float32
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)


class FakeGemma(FakeNorm):
    def forward_native(self, x):
        assert self.weight.shape == (self.size,)
        return (self.normal(x.float()) * (1 + self.weight.float())).to(x.dtype)


class FakeRMSNorm(FakeNorm):
    def forward_native(self, x, residual):
        assert MODES["invariant"]
        total = x.float() + residual.float()
        return (self.normal(total) * self.weight).to(x.dtype), total.to(x.dtype)


def set_invariant(on, **options):
    assert not options or options == {"enable_bmm": False}
    MODES["invariant"] = on


def eager(function):
    def run(*arguments, **options):
        assert MODES["eager"], "the decorator torch.compile is off"
        return function(*arguments, **options)

    return run


@eager
def rotary(q, k, cos, sin, unsqueeze_dim=1):
    assert q.shape[0] == cos.shape[0] == 1

    def turned(x):
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    cos, sin = cos.unsqueeze(1).float(), sin.unsqueeze(1).float()
    return tuple((x.float() * cos + turned(x.float()) * sin).to(x.dtype) for x in (q, k))


@eager
def grouped_topk(hidden, logits, topk, renormalize, num_expert_group, topk_group):
    """Probabilities are rounded to bf16, and the chosen ones come in the order of their experts."""
    assert len(hidden) == len(logits)
    assert num_expert_group == topk_group == 1
    weights, ids = torch.softmax(logits, dim=-1).topk(topk, dim=-1)
    order = ids.argsort(dim=1)
    weights, ids = weights.gather(1, order), ids.gather(1, order)
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights.float(), ids.to(torch.int32)


@eager
def biased_topk(hidden, logits, bias, topk, renormalize, groups, kept, shared, factor, scaled):
    assert renormalize
    assert shared == 1
    scores = logits.sigmoid()
    choice = (scores + bias).view(len(logits), groups, -1)
    best = choice.topk(2, dim=-1).values.sum(dim=-1).topk(kept, dim=-1).indices
    mask = torch.zeros(len(logits), groups, dtype=torch.bool).scatter_(1, best, True)
    ids = choice.masked_fill(~mask.unsqueeze(2), -torch.inf).flatten(1).topk(topk, dim=-1).indices
    weights = scores.gather(1, ids)
    ids[:, -1] = logits.shape[1]
    weights[:, -1] = weights[:, :-1].sum(dim=-1) / factor
    weights = weights / weights[:, :-1].sum(dim=-1, keepdim=True)
    return (weights * factor if scaled else weights), ids.to(torch.int32)


@eager
def sum_reduce(x, out, factor):
    torch.sum(x, dim=1, out=out)
    out.mul_(factor)


def murmur_hash(seeds, positions, columns):
    """Odd seeds have the largest hash."""
    assert seeds.dtype == torch.uint64
    largest = seeds.to(torch.int64) % 2 == 1
    hashes = torch.where(largest.unsqueeze(1), -1, columns.to(torch.int32))
    return hashes.to(torch.int32).view(torch.uint32)


@eager
def sample(probs, top_ks, top_ps, min_ps, need_min_p, seeds, positions):
    assert not need_min_p
    assert len(positions) == len(probs)
    assert seeds is None or (seeds.shape == positions.shape and not (seeds % 2).any())
    ordered, tokens = probs.sort(dim=-1, descending=True)
    before = torch.cumsum(ordered, dim=-1) - ordered
    ordered[torch.arange(probs.shape[1]).view(1, -1) >= top_ks.view(-1, 1)] = 0.0
    ordered[before > top_ps.view(-1, 1)] = 0.0
    chosen = torch.multinomial(ordered, num_samples=1)
    return tokens.to(torch.int32).gather(1, chosen).view(-1)


FAKES = {
    f"{LAYERNORM}.Gemma3RMSNorm": FakeGemma,
    f"{LAYERNORM}.RMSNorm": FakeRMSNorm,
    f"{INVARIANT}.enable_batch_invariant_mode": lambda **options: set_invariant(True, **options),
    f"{INVARIANT}.disable_batch_invariant_mode": lambda: set_invariant(False),
    f"{ROTARY}.apply_rotary_pos_emb_native": rotary,
    f"{TOPK}.grouped_topk_gpu": grouped_topk,
    f"{TOPK}.biased_grouped_topk_impl": biased_topk,
    f"{SUM}.moe_sum_reduce_torch_compile": sum_reduce,
    f"{HASH}.murmur_hash32": murmur_hash,
    f"{SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch": sample,
}


@contextlib.contextmanager
def stance(name):
    assert name == "force_eager"
    MODES["eager"] = True
    yield
    MODES["eager"] = False


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(torch.compiler, "set_stance", stance)
    install(monkeypatch, FAKES)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gemma_rmsnorm_h256", f"{LAYERNORM}.Gemma3RMSNorm"),
        ("fused_add_rmsnorm_residual_out_h4096_eps1e5", f"{LAYERNORM}.RMSNorm"),
        ("rope_with_cos_sin_h8_kv4_d256", f"{ROTARY}.apply_rotary_pos_emb_native"),
        ("moe_topk_softmax_topk6_e64", f"{TOPK}.grouped_topk_gpu"),
        ("moe_topk_deepseek_shared_experts_topk9_ng1_kg1_e160_s1", f"{TOPK}.biased_grouped_topk_impl"),
        ("moe_topk_deepseek_shared_experts_topk9_ng8_kg4_e256_s1", f"{TOPK}.biased_grouped_topk_impl"),
        ("moe_sum_reduce_topk6_h2048", f"{SUM}.moe_sum_reduce_torch_compile"),
    ],
)
def test_functions_are_called_as_sglang_calls_them(name, path, kernels):
    assert_adapter_passes(name, path, full=name.endswith("_s1"))
    assert MODES == {"invariant": False, "eager": False}


def test_both_ways_of_sampling_in_pytorch(kernels):
    definition = flashinfer_trace.load("top_k_top_p_joint_sampling_from_probs_v128256")
    family = family_of(definition)
    own = [one for one in family.kernels_of(definition) if one.path.startswith(SAMPLER)]
    assert [one.variant for one in own] == ["", "with seeds"]
    for kernel in own:
        report = verify(Job(definition, family, kernel), examples=4)
        assert report.status == "passed", report.message
    other = flashinfer_trace.load("top_k_top_p_joint_sampling_from_probs_v32000")
    assert own[0].unsupported(other) == "is run for a vocabulary of 128256, as recorded, and no other"


def test_only_norms_that_return_the_sum_have_the_batch_invariant_one():
    named = (
        flashinfer_trace.load("fused_add_rmsnorm_residual_out_h4096"),
        flashinfer_trace.load("fused_add_rmsnorm_h4096"),
    )
    found = [any(one.path == f"{LAYERNORM}.RMSNorm" for one in family_of(each).kernels) for each in named]
    assert found == [True, False]
