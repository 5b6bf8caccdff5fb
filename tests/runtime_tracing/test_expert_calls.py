"""Which product of the experts a launch of triton_kernels' matmul computes, from its arguments."""

from __future__ import annotations

import pytest

from flashinfer_trace import load
from tools.runtime_tracing.composed_calls import composed
from tools.runtime_tracing.frames import Frame
from tools.runtime_tracing.matching import Evidence, Standing, computes
from tools.runtime_tracing.recording import RecordedCall

PLAIN = "matmul_ogs_dflt_dflt._p_matmul_ogs"
SWIGLU = "matmul_ogs_swiglu_dflt._p_matmul_ogs"
SUM = "matmul_ogs_dflt_dflt._reduce_grouped"
GATHER = "YPtr: bfloat16[1,64,1536], X: bfloat16[1,8,2048], WPtr: bfloat16[128,2048,1536], GatherIndx: int32[64]"
SCATTER = (
    "YPtr: bfloat16[1,64,2048], XPtr: bfloat16[1,64,768], WPtr: bfloat16[128,768,2048], Gammas: bfloat16[64], "
    "ScatterSrcIndx: int32[64]"
)
BIASED = (
    "YPtr: bfloat16[1,32,2880], X: bfloat16[1,8,2880], WPtr: bfloat16[128,2880,5760], B: float32[128,5760], "
    "GatherIndx: int32[32], alpha: 1.702, limit: 7.0"
)
MXFP4 = BIASED.replace("WPtr: bfloat16[128,2880,5760]", "W: uint8[128,5760,1440], WMxScale: uint8[128,90,5760]")
#: Of sglang-kernel 0.4.10: weights in a layout for Hopper, and rows that PyTorch sums.
TODAY = "matmuldflt_dflt._matmul"
LAID_OUT = MXFP4.replace("uint8[128,5760,1440]", "uint8[128,5888,1472]")
WRITTEN_BACK = (
    "YPtr: bfloat16[1,32,2880], XPtr: bfloat16[1,32,2880], W: uint8[128,5888,768], WMxScale: uint8[128,2944,96], "
    "B: float32[128,2880], Gammas: bfloat16[32], WriteBackIndx: int32[32]"
)
RUNNER = Frame("sglang/srt/layers/moe/moe_runner/triton_kernels.py", 147, "TritonKernelsRunnerCore.run", "sum")


def call(kernel: str, arguments: str) -> RecordedCall:
    return RecordedCall("decode", "triton", kernel, (), arguments, 1, (), ())


@pytest.mark.parametrize(
    ("name", "one", "computed"),
    [
        ("moe_bf16_gather_gemm_e128_n1536_k2048", call(PLAIN, GATHER), True),
        ("moe_bf16_gather_gemm_e128_n1536_k2048", call(PLAIN, f"{GATHER}, B: float32[128,1536]"), False),
        ("moe_bf16_gather_gemm_e128_n1536_k2048", call(PLAIN, GATHER.replace("GatherIndx", "Other")), False),
        ("moe_bf16_gather_gemm_e128_n1536_k2048", call(PLAIN, GATHER.replace("1536]", "1024]")), False),
        ("moe_bf16_gather_gemm_swiglu_e128_n5760_k2880", call(SWIGLU, BIASED), True),
        ("moe_bf16_gather_gemm_swiglu_e128_n5760_k2880", call(PLAIN, BIASED.partition(", alpha")[0]), False),
        ("moe_mxfp4_gather_gemm_swiglu_e128_n5760_k2880", call(SWIGLU, MXFP4), True),
        ("moe_mxfp4_gather_gemm_swiglu_e128_n5760_k2880", call(SWIGLU, MXFP4.replace("WMxScale", "Other")), False),
        ("moe_bf16_gather_gemm_swiglu_e128_n5760_k2880", call(SWIGLU, MXFP4), False),
        ("moe_mxfp4_gather_gemm_swiglu_e128_n5760_k2880", call("matmuldflt_swiglu._matmul", LAID_OUT), True),
        ("moe_mxfp4_scatter_gemm_bias_e128_n2880_k2880", call(TODAY, WRITTEN_BACK), True),
        ("moe_mxfp4_scatter_gemm_bias_e128_n2880_k2880", call(TODAY, WRITTEN_BACK.replace("WriteBack", "x")), False),
        ("moe_bf16_scatter_gemm_e128_n2048_k768", call(PLAIN, SCATTER), True),
        ("moe_bf16_scatter_gemm_e128_n2048_k768", call(PLAIN, GATHER), False),
        ("moe_bf16_scatter_gemm_e128_n2048_k768", call(SUM, "X: bfloat16[1,1,64,2048], Out: bfloat16[1,8,2048]"), True),
        ("moe_bf16_scatter_gemm_e128_n2048_k768", call(SUM, "X: bfloat16[1,1,64,768], Out: bfloat16[1,8,768]"), False),
        (
            "moe_bf16_gather_gemm_e128_n1536_k2048",
            call(SUM, "X: bfloat16[1,1,64,1536], Out: bfloat16[1,8,1536]"),
            False,
        ),
    ],
)
def test_a_launch_takes_what_its_definition_takes(name, one, computed):
    assert computes(one, load(name)) is computed


@pytest.mark.parametrize(
    ("rows", "stack", "name", "computed"),
    [
        ("8,4,2880", (RUNNER,), "moe_mxfp4_scatter_gemm_bias_e128_n2880_k2880", True),
        ("8,4,2048", (RUNNER,), "moe_mxfp4_scatter_gemm_bias_e128_n2880_k2880", False),
        ("8,4,2880", (), "moe_mxfp4_scatter_gemm_bias_e128_n2880_k2880", False),
        ("8,4,2880", (RUNNER,), "moe_mxfp4_gather_gemm_swiglu_e128_n5760_k2880", False),
    ],
)
def test_the_sum_of_rows_is_part_of_the_product_that_computed_them(rows, stack, name, computed):
    summed = RecordedCall("decode", "torch", "torch.Tensor.sum", stack, f"0: bfloat16[{rows}], dim: 1", 1, (), ())
    (one,) = composed([summed])
    found = Evidence([load(name)], {name: ["triton_kernels.matmul.matmul"]}).of(one)
    assert (found[0] is Standing.VERIFIED) is computed


def test_evidence_of_the_function_counts_for_its_launches():
    definition = load("moe_bf16_gather_gemm_e128_n1536_k2048")
    evidence = Evidence([definition], {definition.name: ["triton_kernels.matmul.matmul"]})
    assert evidence.of(call(PLAIN, GATHER))[0] is Standing.VERIFIED
    assert evidence.of(call("other_module._p_matmul_ogs", GATHER))[0] is Standing.UNKNOWN
