"""Costs of mixtures of experts: only experts that some token chose are read, and only chosen pairs are computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashinfer_trace.judging.costs.elementwise import NVFP4, QUANTIZE, SILU, rows_named
from flashinfer_trace.judging.costs.products import FLOAT4
from flashinfer_trace.judging.costs.work import CUDA_CORES, CostFunction, Elements, Sizes, Work, each

#: (sizes, inputs) -> the experts of each token.
Router = Callable[[Sizes, Mapping[str, Any]], torch.Tensor]

#: Of each expert and token, to choose some: a sigmoid or exponential (2), the bias, comparisons.
ROUTE = 4


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The indices [rows, count] of the largest values of each row; of equal ones the first, as references choose."""
    return values.argsort(dim=1, descending=True, stable=True)[:, :count]


def softmax_experts(sizes: Sizes, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The experts [seq_len, top_k] with the largest logits."""
    return largest(inputs["routing_logits"].float(), sizes["top_k"])


def deepseek_experts(dtype: torch.dtype) -> Router:
    """The experts [seq_len, top_k] that DeepSeek's router chooses: the best groups first, then the best in them.

    Args:
        dtype: of the scores in the reference, which decides between experts whose scores are almost 1.
    """

    def experts(sizes: Sizes, inputs: Mapping[str, Any]) -> torch.Tensor:
        choice = torch.sigmoid(inputs["routing_logits"].to(dtype)) + inputs["routing_bias"].to(dtype)
        groups = choice.unflatten(1, (sizes["n_group"], sizes["num_experts"] // sizes["n_group"]))
        best = largest(groups.topk(2, dim=2).values.sum(2), sizes["topk_group"])
        dropped = torch.ones(groups.shape[:2], dtype=torch.bool, device=choice.device).scatter(1, best, False)
        return largest(groups.masked_fill(dropped.unsqueeze(2), -math.inf).flatten(1), sizes["top_k"])

    return experts


def whole_experts(
    router: Router, dtype: str, token_scales: str = "", expert_scales: tuple[str, ...] = (), quantizing: int = 0
) -> CostFunction:
    """Routing, both products of the chosen experts that are on this GPU, and the weighted sum.

    Args:
        dtype: of the products' operands.
        token_scales: which dimension of the activations' scales are the tokens: ``rows`` or ``columns``; none if empty.
        expert_scales: inputs with scales of each expert.
        quantizing: operations for each element between the products, to give it the dtype of the second one's operand.
    """

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        ids = router(sizes, inputs) - int(inputs["local_expert_offset"])
        here = (ids >= 0) & (ids < sizes["num_local_experts"])
        pairs, hidden, inner = int(here.sum()), sizes["hidden_size"], sizes["intermediate_size"]
        hit, tokens = rows_named(torch.where(here, ids, -1), sizes["num_local_experts"]), here.any(dim=1)
        reads: dict[str, Elements] = dict.fromkeys(("gemm1_weights", "gemm2_weights", *expert_scales), hit)
        reads["hidden_states"] = tokens
        if token_scales:
            reads["hidden_states_scale"] = tokens.unsqueeze(0) if token_scales == "columns" else tokens
        products = 2 * pairs * (sizes["gemm1_out_size"] * hidden + hidden * inner)
        between = pairs * inner * (SILU + quantizing)
        others = ROUTE * ids.shape[0] * sizes["num_experts"] + between + 2 * pairs * hidden
        return Work({dtype: products, CUDA_CORES: others}, reads)

    return work


def chosen_product(dtype: str, scaled: bool) -> CostFunction:
    """One product of the chosen experts; activations are quantized on the way where weights have scales."""

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        ids = inputs["topk_ids"]
        here, n, k = ids >= 0, sizes["n"], sizes["k"]
        pairs, hit = int(here.sum()), rows_named(ids, sizes["num_experts"])
        rows = here if sizes["rows_per_token"] > 1 else here.any(dim=1, keepdim=True)
        weighed = here if inputs["mul_routed_weight"] else torch.zeros_like(here)
        reads: dict[str, Elements] = {"hidden_states": rows, "weights": hit, "topk_weights": weighed}
        others = int(weighed.sum()) * n + (QUANTIZE * int(rows.sum()) * k if scaled else 0)
        if scaled:
            reads["weights_scale"] = hit
        return Work({dtype: 2 * pairs * n * k, CUDA_CORES: others}, reads)

    return work


def packed_product(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """As one product of the chosen experts, with weights in words and their scales."""
    found = chosen_product("bfloat16", False)(sizes, inputs)
    reads = {name: rows for name, rows in found.reads.items() if name != "weights"}
    hit = found.reads["weights"]
    return Work(found.operations, {**reads, "qweight": hit, "scales": hit})


def grouped_product(dtype: str, scales: tuple[str, ...]) -> CostFunction:
    """The product of each expert with its rows, which are sorted by expert. `scales` are those of the rows of `a` and
    of each expert's `b`, or a number of each expert."""

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        offsets = inputs["expert_offsets"].long()
        rows, hit = rows_between(offsets, sizes["total_rows"]), offsets.diff() > 0
        of_tensor = {"a_scale": rows, "b_scale": hit, "alphas": hit}
        reads: dict[str, Elements] = {"a": rows, "b": hit, **{name: of_tensor[name] for name in scales}}
        results = int(rows.sum()) * sizes["n"]
        return Work({dtype: 2 * results * sizes["k"], CUDA_CORES: 2 * results}, reads)

    return work


def gathered_product(activation: int) -> CostFunction:
    """The product of each expert with the rows of tokens that chose it, and operations for each feature of a result."""

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        hit, results = inputs["expert_counts"] > 0, sizes["num_rows"] * sizes["n"]
        tokens = rows_named(inputs["row_tokens"], sizes["num_tokens"])
        reads: dict[str, Elements] = {"x": tokens, "weights": hit}
        reads |= dict.fromkeys({"bias", "weights_scale"} & inputs.keys(), hit)
        return Work({"bfloat16": 2 * results * sizes["k"], CUDA_CORES: activation * results}, reads)

    return work


def scattered_product(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """The product of each expert with its rows, times their weights, and their sum: with biases, 3 operations each."""
    hit, results = inputs["expert_counts"] > 0, sizes["num_rows"] * sizes["n"]
    reads: dict[str, Elements] = dict.fromkeys({"weights", "bias", "weights_scale"} & inputs.keys(), hit)
    return Work({"bfloat16": 2 * results * sizes["k"], CUDA_CORES: (3 if "bias" in inputs else 2) * results}, reads)


def rows_between(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    place = torch.arange(rows, device=offsets.device)
    return (place >= offsets[0]) & (place < offsets[-1])


def hashed(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """Scores of the experts that the table has for the tokens: only their rows, and their logits, are read."""
    ids, tokens = inputs["token_experts"].long(), inputs["input_ids"]
    logits = torch.zeros(inputs["routing_logits"].shape, dtype=torch.bool, device=tokens.device)
    reads: dict[str, Elements] = {
        "token_experts": rows_named(tokens, sizes["vocab_size"]),
        "routing_logits": logits.scatter(1, ids[tokens], True),
    }
    return Work({CUDA_CORES: ROUTE * sizes["seq_len"] * sizes["top_k"]}, reads)


def shuffled_sum(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """A product and an addition for each element of each gathered row."""
    count = 2 * sizes["seq_len"] * sizes["top_k"] * sizes["hidden_size"]
    return Work({CUDA_CORES: count}, {"hidden_states": rows_named(inputs["permutation"], sizes["num_rows"])})


def reordered_sum(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """A product and an addition for each feature of each pair that is on this rank; others are not looked at."""
    here = inputs["topk_ids"] >= 0
    rows = rows_named(inputs["src2dst"][here], sizes["num_rows"])
    count = 2 * int(here.sum()) * sizes["hidden_size"]
    return Work({CUDA_CORES: count}, {"hidden_states": rows, "src2dst": here, "topk_weights": here})


def shuffle(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    return Work({}, {"input": rows_named(inputs["dst2src_map"], sizes["num_rows"])})


_NVFP4_SCALES = (
    *("gemm1_weights_scale", "gemm2_weights_scale", "output1_scale_scalar", "output1_scale_gate_scalar"),
    "output2_scale_scalar",
)

_ROUTERS = (
    *("softmax", "softmax_sorted", "softmax_scaled"),
    *("sigmoid", "sqrtsoftplus", "deepseek", "deepseek_shared_experts"),
)
COSTS: dict[str, CostFunction] = {
    "moe_bf16_ds_routing": whole_experts(deepseek_experts(torch.float64), "bfloat16"),
    "moe_bf16_softmax_routing": whole_experts(softmax_experts, "bfloat16"),
    **{
        f"moe_fp8_block_scale_{kind}_routing": whole_experts(
            experts, "float8_e4m3fn", "columns", ("gemm1_weights_scale", "gemm2_weights_scale"), QUANTIZE
        )
        for kind, experts in (("ds", deepseek_experts(torch.float32)), ("softmax", softmax_experts))
    },
    "moe_nvfp4_ds_routing": whole_experts(deepseek_experts(torch.float64), FLOAT4, "rows", _NVFP4_SCALES, NVFP4),
    "moe_bf16_expert_gemm": chosen_product("bfloat16", False),
    "moe_wna16_expert_gemm": packed_product,
    "moe_fp8_block_scale_expert_gemm": chosen_product("float8_e4m3fn", True),
    "moe_bf16_gather_gemm": gathered_product(0),
    **{f"moe_{weights}_gather_gemm_swiglu": gathered_product(1 + SILU) for weights in ("bf16", "mxfp4")},
    "moe_bf16_scatter_gemm": scattered_product,
    **{f"moe_{weights}_scatter_gemm_bias": scattered_product for weights in ("bf16", "mxfp4")},
    "moe_fp8_block_scale_grouped_gemm": grouped_product("float8_e4m3fn", ("a_scale", "b_scale")),
    "moe_w4a8_grouped_gemm": grouped_product("float8_e4m3fn", ("b_scale",)),
    "moe_nvfp4_grouped_gemm": grouped_product(FLOAT4, ("a_scale", "b_scale", "alphas")),
    "moe_nvfp4_experts_quant": each(NVFP4, "total_rows", "k"),
    **{f"moe_topk_{kind}": each(ROUTE, "seq_len", "num_experts") for kind in _ROUTERS},
    "moe_topk_hash": hashed,
    "moe_append_shared_experts": lambda sizes, inputs: Work({}),
    **dict.fromkeys(
        ("moe_align_block_size", "moe_prepare_input", "moe_w4a8_problem_sizes"), each(2, "seq_len", "top_k")
    ),
    "moe_sum_reduce": each(1, "seq_len", "hidden_size", "top_k"),
    "moe_apply_shuffle_mul_sum": shuffled_sum,
    "moe_post_reorder": reordered_sum,
    **{f"moe_shuffle_rows{suffix}": shuffle for suffix in ("", "_fp8", "_fp32")},
}
