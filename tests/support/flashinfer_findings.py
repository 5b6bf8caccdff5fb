"""Probes of FlashInfer's kernels: see kernel_findings, which lists them."""

from __future__ import annotations

import torch


def a_kept_token_is_lost() -> bool:
    """Five tokens, of which the first three hold the mass p; the second and third lie in one bin of the first pass."""
    import flashinfer.sampling

    tokens = ["0x1.bdfbf6p-2", "0x1.ad7ep-3", "0x1.ad376ep-3", "0x1.2952a4p-4", "0x1.2952a4p-4"]
    probs = torch.zeros(1, 4096, device="cuda")
    probs[0, :5] = torch.tensor([float.fromhex(token) for token in tokens])
    p = torch.tensor([float.fromhex("0x1.b5ab58p-1")], device="cuda")
    kept = flashinfer.sampling.top_p_renorm_probs(probs, p)[0] > 0
    return bool(kept[:3].all())


def approximate_sigmoids() -> bool:
    """The weights of 8 of 256 experts for 64 tokens, against float64."""
    from flashinfer.fused_moe import fused_topk_deepseek

    logits = torch.randn(64, 256, device="cuda")
    weights = torch.empty(64, 8, device="cuda")
    ids = torch.empty(64, 8, dtype=torch.int32, device="cuda")
    fused_topk_deepseek(logits, torch.zeros(256, device="cuda"), 8, 4, 8, 1.0, weights, ids)
    scores = torch.sigmoid(logits.double()).gather(1, ids.long())
    wanted = scores / scores.sum(dim=1, keepdim=True)
    return bool(((weights - wanted).abs() <= 2e-6 * wanted).all())


PROBES = (
    ("top_p_renorm_probs: a token inside the mass p is dropped", a_kept_token_is_lost),
    ("fused_topk_deepseek: weights are off by more than 2e-6", approximate_sigmoids),
)
