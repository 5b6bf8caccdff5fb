"""The kernels of the mixture of experts: sgl-kernel's pipeline on Hopper, trtllm-gen's single call on Blackwell."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.compare import CONFIDENCE, ErrorBound, Expected, rounding_error
from flashinfer_trace.harness.family import Kernel

#: A case fits one scale, but judges up to millions of elements: 2 exp(-5^2 / 2) is 7e-6, 2 exp(-8^2 / 2) is 3e-14.
GAIN_CONFIDENCE = 5.0
#: Dropped bits shrink a sum of products coherently: by half a unit of 2^-13 for each of at most sqrt(128) + 4 times the
#: sum's own size, below 2^-10 a product; up, gate and down each bring that.
TRUNCATION_GAIN = 3 * 2.0**-10
WORKSPACE_BYTES = 256 << 20


def bound(model: str, reason: str, shrink: float | None = None) -> ErrorBound:
    """Policy of an error model of the oracle; with `shrink`, the scale of the whole output is judged as well."""

    def elements(expected: Expected) -> torch.Tensor:
        inside = CONFIDENCE * expected.parts[f"{model}_variance"].sqrt()
        return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-7) + inside

    def gain(expected: Expected) -> float:
        return (shrink or 0.0) + GAIN_CONFIDENCE * float(expected.parts[f"{model}_gain"].sqrt())

    return ErrorBound(elements, reason, gain=None if shrink is None else gain)


REFERENCE = bound(
    "float32",
    "one bf16 rounding, u = 2^-8, and 8 standard deviations of float32 sums of n terms, n u sqrt(sum of squares) each, "
    "carried through silu and W2",
)
HOPPER = bound(
    "hopper",
    "8 standard deviations of what the pipeline rounds: gemm1, silu * up, results and weights to bf16, the activation "
    "to e4m3 in groups of 128, fp8 sums with 13 bits; the scale of all elements: 5, and 3 * 2^-10 of dropped bits",
    TRUNCATION_GAIN,
)
BLACKWELL = bound(
    "blackwell",
    "8 standard deviations of what trtllm-gen rounds: gemm1's output and the activation to e4m3 in groups of 128, "
    "results to bf16; the scale of all elements: 5, and 3 * 2^-10 of dropped bits",
    TRUNCATION_GAIN,
)


def run_sgl_pipeline(definition: Definition, inputs: Any, outputs: Any) -> dict[str, torch.Tensor]:
    """The order of SGLang's cutlass_fused_experts_fp8, with hidden states that are fp8 already.

    The gate is gemm1's second half here and silu_and_mul's first: the halves of gemm1's output change places. Ids of
    experts elsewhere become -1, which prepare_moe_input skips; their slots in the permutations keep what was there, so
    these are filled before: inputs with token 0, whose rows belong to no expert, outputs with the last row, which is
    written only if every id is local, and their factors are 0.
    """
    import sgl_kernel

    axes = definition.const_axes
    experts, hidden_size, size = axes["num_local_experts"], axes["hidden_size"], axes["intermediate_size"]
    hidden = inputs["hidden_states"]
    device, rows = hidden.device, hidden.shape[0] * axes["top_k"]

    def new(shape: tuple[int, ...], dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
        return torch.full(shape, fill, dtype=dtype, device=device)

    weights, ids = sgl_kernel.moe_fused_gate(
        inputs["routing_logits"],
        inputs["routing_bias"].float(),
        axes["n_group"],
        axes["topk_group"],
        axes["top_k"],
        routed_scaling_factor=float(inputs["routed_scaling_factor"]),
        apply_routed_scaling_factor_on_output=True,
    )
    local = ids - int(inputs["local_expert_offset"])
    here = (local >= 0) & (local < experts)
    local = torch.where(here, local, -1).to(torch.int32)
    factors = torch.where(here, weights, 0.0).to(torch.bfloat16)

    offsets = new((experts + 1,), torch.int32)
    sizes1, sizes2 = new((experts, 3), torch.int32), new((experts, 3), torch.int32)
    to_expert, to_token = new((rows,), torch.int32), new((rows,), torch.int32, rows - 1)
    sgl_kernel.prepare_moe_input(local, offsets, sizes1, sizes2, to_expert, to_token, experts, size, hidden_size)

    pointers = [new((experts,), torch.int64) for _ in range(5)]
    layouts = [new((experts, 5), torch.int32) for _ in range(2)]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def grouped_product(a: torch.Tensor, a_scales: torch.Tensor, name: str, shapes: torch.Tensor) -> torch.Tensor:
        w, w_scales = inputs[f"{name}_weights"], inputs[f"{name}_weights_scale"]
        product = torch.zeros(rows, w.shape[1], dtype=torch.bfloat16, device=device)
        stride_in = new((experts,), torch.int64, w.shape[2])
        stride_out = new((experts,), torch.int64, w.shape[1])
        sgl_kernel.fp8_blockwise_scaled_grouped_mm(
            product,
            *pointers,
            a,
            w.transpose(1, 2),
            a_scales,
            w_scales.transpose(1, 2),
            stride_in,
            stride_in,
            stride_out,
            *layouts,
            shapes,
            offsets[:-1],
            workspace,
        )
        return product

    a = sgl_kernel.shuffle_rows(hidden, to_expert, (rows, hidden_size))
    token_scales = inputs["hidden_states_scale"].T.contiguous()
    a_scales = sgl_kernel.shuffle_rows(token_scales, to_expert, (rows, token_scales.shape[1]))
    up_gate = grouped_product(a, a_scales, "gemm1", sizes1)
    activation = sgl_kernel.silu_and_mul(up_gate.roll(size, dims=1))
    codes = torch.empty_like(activation, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, size // 128, dtype=torch.float32, device=device)
    sgl_kernel.sgl_per_token_group_quant_fp8(activation, codes, scales, 128, 1e-10, -448.0, 448.0, enable_v2=True)
    results = grouped_product(codes, scales, "gemm2", sizes2)
    sgl_kernel.apply_shuffle_mul_sum(results, outputs["output"], to_token, factors)
    return outputs  # type: ignore[no-any-return]


def run_trtllm_gen(definition: Definition, inputs: Any, outputs: Any) -> dict[str, torch.Tensor]:
    """flashinfer's single call; weights neither shuffled nor blocked, so they are taken as the Definition has them."""
    from flashinfer.fused_moe import Fp8QuantizationType, RoutingMethodType, trtllm_fp8_block_scale_moe

    axes = definition.const_axes
    tensors = [name for name, spec in definition.inputs.items() if spec.shape is not None]
    output = trtllm_fp8_block_scale_moe(
        **{name: inputs[name] for name in tensors},
        num_experts=axes["num_experts"],
        top_k=axes["top_k"],
        n_group=axes["n_group"],
        topk_group=axes["topk_group"],
        intermediate_size=axes["intermediate_size"],
        local_expert_offset=int(inputs["local_expert_offset"]),
        local_num_experts=axes["num_local_experts"],
        routed_scaling_factor=float(inputs["routed_scaling_factor"]),
        routing_method_type=RoutingMethodType.DeepSeekV3.value,
        use_shuffled_weight=False,
        weight_layout=0,
        fp8_quantization_type=Fp8QuantizationType.DeepSeekFp8,
    )
    return {"output": output}


def unsupported_by_fused_gate(definition: Definition) -> str | None:
    """Why sgl_kernel.moe_fused_gate does not route this one, or None."""
    experts, groups = definition.const_axes["num_experts"], definition.const_axes["n_group"]
    if experts & (experts - 1):
        return f"moe_fused_gate needs a power of two of experts, not {experts}"
    return f"moe_fused_gate takes up to 32 experts a group, not {experts // groups}" if experts > 32 * groups else None


# No kernel launches for zero tokens: an empty grid is an error in CUDA.
LAUNCHABLE = {"seq_len": (1, 8192)}

KERNELS = (
    Kernel(
        "sgl_kernel.fp8_blockwise_scaled_grouped_mm",
        "sglang-kernel",
        run_sgl_pipeline,
        variant="pipeline: moe_fused_gate, prepare_moe_input, shuffle_rows, silu_and_mul, group_quant, shuffle_mul_sum",
        min_capability=(9, 0),
        max_capability=(9, 0),
        limits=LAUNCHABLE,
        supports=unsupported_by_fused_gate,
        compare={"output": HOPPER},
    ),
    Kernel(
        "flashinfer.fused_moe.trtllm_fp8_block_scale_moe",
        "flashinfer-python",
        run_trtllm_gen,
        min_capability=(10, 0),
        max_capability=(10, 3),
        limits=LAUNCHABLE,
        compare={"output": BLACKWELL},
    ),
)
