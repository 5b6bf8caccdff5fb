"""How the real quantizers are called."""

from __future__ import annotations

import functools

import torch

from flashinfer_trace.families.quantization.cases import SMALLEST_MAXIMUM, Rows
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, KernelCall, Outputs

#: No kernel launches for zero rows: an empty grid is an error in CUDA.
LAUNCHABLE = {"num_tokens": (1, 1 << 20)}
FP8 = (-448.0, 448.0)
INT8 = (-128.0, 127.0)
SGLANG_FP8 = "sglang.srt.layers.quantization.fp8_kernel"
SGLANG = "sglang.kernels.ops.quantization"
SGLANG_INT8 = f"{SGLANG}.int8_kernel"


def run_per_token(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    sgl_kernel.sgl_per_token_quant_fp8(inputs["x"], outputs["codes"], outputs["scales"])
    return outputs


def column_major_scales(rows: int, groups: int, device: torch.device) -> torch.Tensor:
    """float32 [rows, groups], NaN, a column at a time; columns begin at multiples of 16 bytes, as TMA needs."""
    aligned = -(-rows // 4) * 4
    return torch.full((groups, aligned), torch.nan, device=device).t()[:rows]


def run_group(
    name: str,
    limits: tuple[float, float],
    definition: Definition,
    inputs: Inputs,
    outputs: Outputs,
    *,
    enable_v2: bool = True,
    column_major: bool = False,
) -> Outputs:
    """One of sgl_kernel's three names of its group quantizer."""
    import sgl_kernel

    x, scales = inputs["x"], outputs["scales"]
    if column_major:
        scales = column_major_scales(scales.shape[0], scales.shape[1], x.device)
    group = definition.const_axes["group_size"]
    quantize = getattr(sgl_kernel, name)
    quantize(x, outputs["codes"], scales, group, SMALLEST_MAXIMUM, *limits, enable_v2=enable_v2)
    return {"codes": outputs["codes"], "scales": scales}


def run_group_ue8m0(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The layout that SGLang gives DeepGEMM on Blackwell: a column of words at a time, in multiples of 16 bytes."""
    import sgl_kernel

    x, codes = inputs["x"], outputs["codes"]
    scales = aligned_words(outputs["scales"])
    group = definition.const_axes["group_size"]
    sgl_kernel.sgl_per_token_group_quant_8bit(
        x, codes, scales, group, SMALLEST_MAXIMUM, *FP8, scale_ue8m0=True, enable_v2=True
    )
    return {"codes": codes, "scales": scales}


def run_group_of_sglang(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's own quantizer since 0.5.23: words of exponents in the layout of `run_group_ue8m0`, scales by rows."""
    from sglang.kernels.ops.quantization.per_token_group_quant import per_token_group_quant

    words = outputs["scales"].dtype == torch.int32
    scales = aligned_words(outputs["scales"]) if words else outputs["scales"]
    per_token_group_quant(inputs["x"], outputs["codes"], scales, definition.const_axes["group_size"], scale_ue8m0=words)
    return {"codes": outputs["codes"], "scales": scales}


def run_per_token_of_sglang(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.quantization.per_token_quant_fp8 import per_token_quant_fp8

    per_token_quant_fp8(inputs["x"], outputs["codes"], outputs["scales"])
    return outputs


def aligned_words(scales: torch.Tensor) -> torch.Tensor:
    """int32 of the shape of `scales`, poisoned, a column of words at a time, in multiples of 16 bytes."""
    rows, words = scales.shape
    poison = torch.iinfo(torch.int32).min
    return torch.full((words, -(-rows // 4) * 4), poison, dtype=torch.int32, device=scales.device).t()[:rows]


def run_group_jit(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.jit_kernel.per_token_group_quant_8bit import per_token_group_quant_8bit

    group = definition.const_axes["group_size"]
    per_token_group_quant_8bit(
        inputs["x"], outputs["codes"], outputs["scales"], group, SMALLEST_MAXIMUM, *FP8, scale_ue8m0=False
    )
    return outputs


def run_group_triton_fp8(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.srt.layers.quantization.fp8_kernel import per_token_group_quant_8bit

    codes, scales = per_token_group_quant_8bit(
        inputs["x"], definition.const_axes["group_size"], torch.float8_e4m3fn, eps=SMALLEST_MAXIMUM
    )
    return {"codes": codes, "scales": scales}


def run_group_triton_int8(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.quantization.int8_kernel import per_token_group_quant_int8

    codes, scales = per_token_group_quant_int8(inputs["x"], definition.const_axes["group_size"], SMALLEST_MAXIMUM)
    return {"codes": codes, "scales": scales}


def run_per_token_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.quantization.int8_kernel import per_token_quant_int8

    codes, scales = per_token_quant_int8(inputs["x"])
    return {"codes": codes, "scales": scales.squeeze(1)}


def group_kernel(
    name: str, limits: tuple[float, float], variant: str = "", *, enable_v2: bool = True, column_major: bool = False
) -> Kernel:
    call: KernelCall = functools.partial(run_group, name, limits, enable_v2=enable_v2, column_major=column_major)
    return Kernel(f"sgl_kernel.{name}", call, variant=variant, limits=LAUNCHABLE)


def sglang_kernel(module: str, function: str, call: KernelCall) -> Kernel:
    """A kernel that SGLang compiles when it is called."""
    return Kernel(f"{module}.{function}", call, limits=LAUNCHABLE)


GROUP = sglang_kernel(f"{SGLANG}.per_token_group_quant", "per_token_group_quant", run_group_of_sglang)
# A token of zeros gets codes of 448 from both (findings/kernels.json): they are given none.
PER_TOKEN_FP8 = tuple(
    Kernel(path, call, limits=LAUNCHABLE, plan_options=Rows(zeros=False))
    for path, call in (
        ("sgl_kernel.sgl_per_token_quant_fp8", run_per_token),
        (f"{SGLANG}.per_token_quant_fp8.per_token_quant_fp8", run_per_token_of_sglang),
    )
)
PER_TOKEN_INT8 = (sglang_kernel(SGLANG_INT8, "per_token_quant_int8", run_per_token_triton),)
GROUP_FP8 = (
    group_kernel("sgl_per_token_group_quant_fp8", FP8),
    group_kernel("sgl_per_token_group_quant_fp8", FP8, "v1", enable_v2=False),
    group_kernel("sgl_per_token_group_quant_8bit", FP8, "column-major scales", column_major=True),
    sglang_kernel("sglang.jit_kernel.per_token_group_quant_8bit", "per_token_group_quant_8bit", run_group_jit),
    sglang_kernel(SGLANG_FP8, "per_token_group_quant_8bit", run_group_triton_fp8),
    GROUP,
)
GROUP_UE8M0 = (
    Kernel("sgl_kernel.sgl_per_token_group_quant_8bit", run_group_ue8m0, variant="ue8m0", limits=LAUNCHABLE),
    GROUP,
)
GROUP_INT8 = (
    group_kernel("sgl_per_token_group_quant_int8", INT8),
    group_kernel("sgl_per_token_group_quant_int8", INT8, "v1", enable_v2=False),
    group_kernel("sgl_per_token_group_quant_8bit", INT8),
    sglang_kernel(SGLANG_INT8, "per_token_group_quant_int8", run_group_triton_int8),
    GROUP,
)
