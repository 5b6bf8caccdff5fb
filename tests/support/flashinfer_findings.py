"""Probes of FlashInfer's kernels: see kernel_findings, which lists them."""

from __future__ import annotations

import torch
from moe_findings import raises


def a_kept_token_is_lost() -> bool:
    """Five tokens: the first three hold the mass p; the second and third lie in one bin of the first pass."""
    import flashinfer.sampling

    tokens = ["0x1.bdfbf6p-2", "0x1.ad7ep-3", "0x1.ad376ep-3", "0x1.2952a4p-4", "0x1.2952a4p-4"]
    probs = torch.zeros(1, 4096, device="cuda")
    probs[0, :5] = torch.tensor([float.fromhex(token) for token in tokens])
    p = torch.tensor([float.fromhex("0x1.b5ab58p-1")], device="cuda")
    kept = flashinfer.sampling.top_p_renorm_probs(probs, p)[0] > 0
    return bool(kept[:3].all())


def only_positive_tokens() -> bool:
    """Six million draws of a row of 4096 tokens; about half have probability 0."""
    import flashinfer.sampling

    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(1, 4096, generator=generator) * (torch.rand(1, 4096, generator=generator) < 0.5)
    probs = (weights / weights.sum()).cuda()
    same_row = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    for seed in range(6):
        drawn = flashinfer.sampling.min_p_sampling_from_probs(probs, 0.0, indices=same_row, seed=seed, offset=0)
        if not bool((probs[0, drawn.long()] > 0).all()):
            return False
    return True


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


def wide_weight() -> bool:
    """Rows and a weight of ones: every output is 1. Each half of a 1 in float32, read as bf16, is 0 or 1."""
    import flashinfer.norm

    x = torch.ones(1, 256, dtype=torch.bfloat16, device="cuda")
    found: list[torch.Tensor] = []
    if raises(lambda: found.append(flashinfer.norm.rmsnorm(x, torch.ones(256, device="cuda")))):
        return True
    return bool((found[0] == 1).all())


def no_fp4_codes(name: str) -> bool:
    """128 rows of 64 ones: with a scale of 1/6 (11/64 in e4m3) a block, each code is that of 6, 7."""
    import flashinfer

    x = torch.ones(128, 64, dtype=torch.bfloat16, device="cuda")
    found: list[torch.Tensor] = []
    if raises(lambda: found.append(getattr(flashinfer, name)(x, torch.ones(1, device="cuda"))[0])):
        return True
    return bool((found[0].view(torch.uint8) == 0x77).all())


def long_products() -> bool:
    """Integers have one sum, whatever the order: eight tokens of 5,120 features, which fill 20 stages, a hundred
    times. Not every call is wrong."""
    from flashinfer.gemm import tinygemm_bf16

    x, weight = (torch.randint(-4, 5, [n, 5120], device="cuda").bfloat16() for n in (8, 7168))
    bias, out = torch.zeros(7168, dtype=torch.bfloat16, device="cuda"), x.new_empty([8, 7168])
    wanted = (x.double() @ weight.double().T).bfloat16()
    for _ in range(100):
        tinygemm_bf16(x, weight, out.fill_(torch.nan), bias)
        if not torch.equal(out, wanted):
            return False
    return True


def rows_without_top_k() -> bool:
    """20 times 2,048 rows of 128,256 tokens that top-k all keeps: each must add up to 1."""
    from flashinfer.sampling import top_k_renorm_probs

    probs = torch.rand(2048, 128256, device="cuda")
    probs /= probs.sum(-1, keepdim=True)
    all_of_them = torch.full((2048,), 1 << 30, dtype=torch.int32, device="cuda")
    sums = (top_k_renorm_probs(probs, all_of_them).sum(-1) for _ in range(20))
    return all(bool((each - 1).abs().max() < 1e-3) for each in sums)


def outputs_of_fa3(heads: int, key_heads: int, size: int) -> bool:
    """Eight requests, a thousand times, against one run of fa2. Outputs differ by roundings; an element that was read
    from memory of values is off by about 1."""
    from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

    q_lens, kv_lens = torch.tensor([[183, 11, 15, 19, 9, 15, 2, 2], [511, 129, 64, 1024, 1522, 63, 33, 1023]])
    offsets = [torch.nn.functional.pad(each.cumsum(0), (1, 0)).int().cuda() for each in (q_lens, kv_lens)]
    # Rows lie apart, as in a slice of a projection.
    q, k, v = (
        torch.randn(int(rows.sum()), count + 1, size, device="cuda").bfloat16()[:, :count]
        for rows, count in ((q_lens, heads), (kv_lens, key_heads), (kv_lens, key_heads))
    )
    wrappers = []
    for backend in ("fa2", "fa3"):
        memory = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
        wrappers.append(BatchPrefillWithRaggedKVCacheWrapper(memory, "NHD", backend=backend))
        types = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
        wrappers[-1].plan(*offsets, heads, key_heads, size, causal=True, **types)
    wanted = wrappers[0].run(q, k, v)
    worst = torch.stack([(wrappers[1].run(q, k, v, return_lse=True)[0] - wanted).abs().max() for _ in range(1000)])
    return bool((worst < 0.25).all())


def state_of_an_empty_sequence() -> bool:
    """Without tokens, the state that is returned is the one that is given."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    q, k, v = (torch.zeros(1, 1, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    state = torch.ones(2, 1, 128, 128, device="cuda")
    _, after = chunk_gated_delta_rule(
        q,
        k,
        v,
        g=torch.ones(1, 1, device="cuda"),
        beta=torch.ones(1, 1, device="cuda"),
        initial_state=state,
        output_final_state=True,
        cu_seqlens=torch.tensor([0, 0, 1], device="cuda"),
        output_state=torch.full_like(state, torch.nan),
        use_cp=False,
    )
    return torch.equal(after, state)


PROBES = (
    ("tinygemm_bf16: more than 4,096 features", long_products),
    ("top_k_renorm_probs: rows of which all tokens are kept", rows_without_top_k),
    ("fa3: outputs read before they are written, 128 features", lambda: outputs_of_fa3(32, 4, 128)),
    ("fa3: outputs read before they are written, 256 features", lambda: outputs_of_fa3(2, 1, 256)),
    ("gdn_prefill.chunk_gated_delta_rule: the state of a sequence without tokens", state_of_an_empty_sequence),
    ("top_p_renorm_probs: a token inside the mass p is dropped", a_kept_token_is_lost),
    ("min_p_sampling_from_probs: tokens of probability 0 are drawn", only_positive_tokens),
    ("fused_topk_deepseek: weights are off by more than 2e-6", approximate_sigmoids),
    ("flashinfer.norm.rmsnorm: a float32 weight is read as bf16", wide_weight),
    ("fp4_quantize: codes are not written on Hopper", lambda: no_fp4_codes("fp4_quantize")),
    ("nvfp4_quantize: codes are not written on Hopper", lambda: no_fp4_codes("nvfp4_quantize")),
)
