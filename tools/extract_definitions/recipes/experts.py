"""Ops, kernels, axes and operands of the experts' feed-forward networks, which all mixtures of experts share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tools.extract_definitions.errors import ExtractionError
from tools.extract_definitions.needs import Request
from tools.extract_definitions.words import const, tensor, var
from tools.kernel_tracing.configuration.checks import expert_misfit

#: Ops of the experts.
OPS = ("experts",)
TOPK = "topk"
#: The topk_method with which experts are chosen by scores that include a correction bias.
BIASED = "noaux_tc"
#: Features that share one scale; for weights, in both directions.
BLOCK = 128
BLOCK_SCALED = frozenset({"flashinfer:trtllm_fp8_block_scale_moe", "sgl-kernel:fp8_blockwise_scaled_grouped_mm"})

TOKENS = "Number of tokens of the batch"
GATHERED = "after the all-to-all or all-gather that brought them to this rank"
_GATE_UP = "gemm1_out_size == 2 * intermediate_size"
_BLOCKS = (
    "num_hidden_blocks * 128 == hidden_size",
    "num_intermediate_blocks * 128 == intermediate_size",
    "num_gemm1_out_blocks * 128 == gemm1_out_size",
)
_LOCAL = ("0 <= local_expert_offset", "local_expert_offset + num_local_experts <= num_experts")
OUTPUTS = {
    "output": tensor(
        ["seq_len", "hidden_size"],
        "bfloat16",
        "Weighted sum of the results of the local experts; zeros for a token that chose none of them.",
    )
}


def router_stages(request: Request, gates: Iterable[str]) -> tuple[str, ...]:
    """When the router runs: in one of the kernels or, where no kernel takes its sizes, compiled by PyTorch."""
    found = request.usage.op(TOPK)
    request.expect(TOPK, "the choice of experts")
    return request.stages(TOPK, gates if found is not None and found.kernels else ())


def scoring(request: Request) -> str:
    """How the code scores experts: by a sigmoid where it chooses them with a correction bias, else by a softmax.

    Code that reads topk_method has a bias with one method only, whatever scoring_func says.

    Returns:
        "sigmoid" or "softmax"; "" if the configuration says another: the ops are then reported as not covered.
    """
    model, code = request.model, request.usage.code
    method, configured = model.config.get("topk_method"), model.config.get("scoring_func")
    takes_bias = any("correction_bias=" in text for text in code.modules.get(TOPK, ()))
    is_biased = takes_bias and ("topk_method" not in code.reads or method == BIASED)
    found, reason = "sigmoid" if is_biased else "softmax", ""
    if "topk_method" in code.reads and method is None:
        reason = "the code needs the field topk_method, which the configuration does not give"
    elif configured not in (None, found):
        decisive = f" with topk_method {method}" if "topk_method" in code.reads else ""
        reason = f"the code scores experts by a {found}{decisive}, and scoring_func is {configured}"
    elif is_biased and method not in (None, BIASED):
        reason = f"the code chooses experts with a correction bias, and topk_method is {method}"
    if reason:
        not_covered(request, reason)
    return "" if reason else found


def not_covered(request: Request, reason: str) -> None:
    """Reports routing and experts as not covered."""
    request.uncovered.update({op: reason for op in (*OPS, TOPK) if request.usage.op(op)})


def block_scaled(request: Request) -> tuple[bool, ...]:
    """In which numbers the experts are published: True for fp8 with block scales, False for bfloat16."""
    formats = [request.model.quantization, *request.model.quantised]
    return tuple(dict.fromkeys(one is not None and _is_block_scaled(one) for one in formats))


def _is_block_scaled(quantization: Any) -> bool:
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "fp8":
        return False
    return bool(quantization.get("weight_block_size") == [BLOCK, BLOCK])


def divides(request: Request, experts: int, size: int) -> bool:
    """Whether an expert-parallel size divides the experts. If a default size does not, a note in `left_out` says so.

    Raises:
        ExtractionError: a size that the user gave does not divide the number of experts.
    """
    if problem := expert_misfit(experts, size, request.model.name):
        if request.options.expert_parallel:
            raise ExtractionError(problem)
        request.left_out[problem.partition(";")[0]] = None
    return experts % size == 0


def layer_axes(
    tokens: str, axes: Mapping[str, int], routing: Mapping[str, Any], block_scaled: bool, shared: bool = False
) -> dict[str, Any]:
    """Axes of a layer.

    Args:
        tokens: describes the tokens of a call.
        axes: the sizes of the const axes.
        routing: the axes that the routing adds.
        block_scaled: whether the weights are fp8 with block scales.
        shared: whether the features inside an expert are split over ranks.
    """
    return {
        "seq_len": var(f"{tokens}."),
        **_expert_axes(axes),
        **routing,
        **_feature_axes(axes, shared),
        **(_block_axes(axes) if block_scaled else {}),
    }


def constraints(routing: str, block_scaled: bool) -> tuple[str, ...]:
    """Constraints of a layer; `routing` is the one that the routing adds."""
    return (_GATE_UP, *(_BLOCKS if block_scaled else ()), routing, *_LOCAL)


def _expert_axes(axes: Mapping[str, int]) -> dict[str, Any]:
    """Experts per layer and per rank."""
    return {
        "num_experts": const(axes["num_experts"], "Routed experts of the layer, on all ranks."),
        "num_local_experts": const(
            axes["num_local_experts"], "Experts whose weights are on this rank, consecutive from local_expert_offset."
        ),
    }


def _feature_axes(axes: Mapping[str, int], shared: bool) -> dict[str, Any]:
    """Features of a token and inside an expert; `shared`: whether the latter are split over ranks."""
    between = "Features between the two products of each expert"
    return {
        "hidden_size": const(axes["hidden_size"], "Features per token."),
        "intermediate_size": const(
            axes["intermediate_size"], f"{between}: the share of this rank." if shared else f"{between}."
        ),
        "gemm1_out_size": const(
            2 * axes["intermediate_size"],
            "Output features of the first product: the up and gate projections, 2 x intermediate_size.",
        ),
    }


def _block_axes(axes: Mapping[str, int]) -> dict[str, Any]:
    """Numbers of blocks that share one scale."""
    sizes = {
        "num_hidden_blocks": ("hidden_size", axes["hidden_size"]),
        "num_intermediate_blocks": ("intermediate_size", axes["intermediate_size"]),
        "num_gemm1_out_blocks": ("gemm1_out_size", 2 * axes["intermediate_size"]),
    }
    return {
        name: const(size // BLOCK, f"Blocks of 128 features along {axis}, one scale each.")
        for name, (axis, size) in sizes.items()
    }


def operands(block_scaled: bool) -> dict[str, Any]:
    """Activations and weights, in fp8 with scales or in bf16, and the offset of the first local expert."""
    dtype, codes = ("float8_e4m3fn", " as fp8 codes") if block_scaled else ("bfloat16", "")
    experts, float32 = "num_local_experts", "float32"
    first = (
        f"Weights of the first product{codes}: rows 0 to intermediate_size - 1 are the up projection; the rest are the "
        "gate, the half that silu is applied to. FlashInfer's kernels take this order; SGLang's take the gate first."
    )
    scale = "Scale of each 128x128 block of"
    found = {
        "hidden_states": tensor(["seq_len", "hidden_size"], dtype, f"Activations{codes}, one row per token."),
        "hidden_states_scale": tensor(
            ["num_hidden_blocks", "seq_len"],
            float32,
            "Scale of every 128 consecutive features of each token, stored block-major.",
        ),
        "gemm1_weights": tensor([experts, "gemm1_out_size", "hidden_size"], dtype, first),
        "gemm1_weights_scale": tensor(
            [experts, "num_gemm1_out_blocks", "num_hidden_blocks"], float32, f"{scale} gemm1_weights."
        ),
        "gemm2_weights": tensor(
            [experts, "hidden_size", "intermediate_size"],
            dtype,
            f"Weights of the second product (down projection){codes}.",
        ),
        "gemm2_weights_scale": tensor(
            [experts, "num_hidden_blocks", "num_intermediate_blocks"], float32, f"{scale} gemm2_weights."
        ),
        "local_expert_offset": tensor(None, "int32", "Index of the first expert on this rank among all experts."),
    }
    return {name: entry for name, entry in found.items() if block_scaled or not name.endswith("_scale")}
