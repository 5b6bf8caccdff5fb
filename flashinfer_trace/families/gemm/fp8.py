"""Products of fp8 matrices, with scales of tokens and features, of whole operands, or of DeepSeek-V3's blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from flashinfer_trace.families.calls import calling
from flashinfer_trace.families.gemm import product_bound
from flashinfer_trace.families.gemm.truncation import TRUNCATED, no_loss, truncated_parts, truncated_product
from flashinfer_trace.families.quantized import BLOCK, CODE_SIGMA, normal_codes
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import ROWS_SPREAD, SCALES_SPREAD, Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected

#: ``integers``: codes -4..4 and scales that are powers of two, so every sum is exact; ``positive``: all terms of a
#: sum have the same sign, which shows an accumulator that truncates; ``any``: every finite code, also subnormal ones;
#: ``large`` and ``tiny``: scales 1000 times larger and smaller; ``spread``: scales of rows from 1e-9 to 1e2 in one
#: matrix, as in checkpoints.
KINDS = ("normal", "integers", "positive", "any", "large", "tiny", "spread")
FACTORS = {"large": 1000.0, "tiny": 0.001, "huge": 1e6, "minute": 1e-7}

PRODUCT = ErrorBound(
    product_bound, "one bf16 rounding, u = 2^-8, of a float32 sum: 8 sqrt(k) 2^-24 |A||B|; exact for integer codes"
)

#: The corners have sums of one sign, where a truncating accumulator loses most, and scales beyond the range of float16.
PLAN = RowPlans(
    {"m": Count(40, 256)},
    {"values": KINDS},
    special=[{"values": values} for values in ("positive", "huge", "minute", "any")],
    on_cpu=[{"values": "subnormal"}],
    many_rows=300,
)


def factor(kind: str) -> float:
    return FACTORS.get(kind, 1.0)


def codes(draws: Draws, shape: Sequence[int], kind: str) -> torch.Tensor:
    if kind == "integers":
        return draws.integers(shape, -4, 4, torch.int8).float().to(torch.float8_e4m3fn)
    if kind == "any":
        drawn = draws.integers(shape, 0, 253, torch.int32)
        # 0x7f and 0xff are NaN: 0..126 are the positive codes, 128..254 the negative ones.
        return (drawn + (drawn > 126)).to(torch.uint8).view(torch.float8_e4m3fn)
    if kind == "subnormal":
        drawn = draws.integers(shape, 0, 15, torch.uint8)
        return (drawn % 8 + drawn // 8 * 128).view(torch.float8_e4m3fn)
    drawn = normal_codes(draws, shape)
    return (drawn.view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn) if kind == "positive" else drawn


def scales(
    draws: Draws, shape: Sequence[int], kind: str, typical: float, spread: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """float32 scales within a factor of 4 of `typical` over the deviation of codes; 2^-2..2^2 for integers; spread ones
    also differ by powers of two."""
    if kind == "integers":
        return torch.exp2(draws.integers(shape, -2, 2).float())
    found = torch.exp2(draws.uniform(shape, -2.0, 2.0)).mul_(typical / CODE_SIGMA)
    if kind == "spread" and spread != (0, 0):
        found *= draws.powers(shape[0], *spread).view(-1, *[1] * (len(shape) - 1))
    return found


def powers_of_two(values: torch.Tensor) -> bool:
    return bool((torch.frexp(values).mantissa == 0.5).all())


def whole(values: torch.Tensor) -> bool:
    return bool((values == values.round()).all())


def make_inputs(
    shapes: Callable[[Mapping[str, int]], tuple[list[int], list[int]]], definition: Definition, plan: Plan, draws: Draws
) -> Inputs:
    """Codes, and scales of the shapes that are given for A and for B; a scale without axes is a number."""
    known, kind = {**definition.const_axes, "m": plan["m"]}, plan["values"]
    batch = [known["batch_size"]] if "batch_size" in known else []
    of_a, of_b = shapes(known)
    found = {
        "A": codes(draws, [*batch, known["m"], known["k"]], kind),
        "B": codes(draws, [*batch, known["n"], known["k"]], kind),
        "A_scale": scales(draws, of_a, kind, factor(kind), ROWS_SPREAD if of_a else (0, 0)),
        "B_scale": scales(draws, of_b, kind, known["k"] ** -0.5, SCALES_SPREAD if of_b else (0, 0)),
    }
    return {name: value if value.ndim else value.item() for name, value in found.items()}


def scaled_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    a, b = inputs["A_scale"], inputs["B_scale"]
    if isinstance(a, float):
        scale = torch.tensor(a * b, dtype=torch.float64, device=inputs["A"].device)
    else:
        scale = torch.outer(a.double(), b.double())
    return {"C": expected_product(inputs["A"], inputs["B"], scale)}


def expected_product(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> Expected:
    """The float64 product of codes a [..., m, k] and b [..., n, k], times scales, and the loss in a tensor core; with
    integer codes below 2^24 and scales that are powers of two, all is exact in float32."""
    a, b = a.double(), b.double()
    loss = truncated_product(a, b)
    magnitude = a.abs() @ b.abs().mT
    exact = magnitude.numel() > 0 and powers_of_two(scale) and whole(a) and whole(b) and bool(magnitude.max() < 2**24)
    parts = {**truncated_parts(loss, scale), "magnitude": magnitude * scale, "length": torch.tensor(float(a.shape[-1]))}
    return Expected(loss.product * scale, parts, exact)


ROWS = {"m": (1, 1 << 20)}
#: Arguments of the functions for codes with a scale for each row of A and of B.
SCALED_ARGUMENTS = "A B.T A_scale B_scale C.dtype None"
SCALED = (
    Family(
        name="fp8_scaled_mm",
        op_type="gemm",
        twin={"n": 48, "k": 160},
        plan=PLAN,
        make_inputs=functools.partial(make_inputs, lambda axes: ([axes["m"]], [axes["n"]])),
        isolated=("A",),
        oracle=scaled_oracle,
        compare={"C": PRODUCT},
        kernels=(calling("sgl_kernel.fp8_scaled_mm", SCALED_ARGUMENTS, limits=ROWS, compare={"C": TRUNCATED}),),
    ),
)


def run_bmm(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.gemm import bmm_fp8

    a, b = inputs["A"], inputs["B"]
    a_scale, b_scale = (torch.tensor([inputs[name]], device=a.device) for name in ("A_scale", "B_scale"))
    bmm_fp8(a, b.transpose(1, 2), a_scale, b_scale, torch.bfloat16, out=outputs["C"])
    return outputs


BATCHED = (
    Family(
        name="bmm_fp8",
        op_type="gemm",
        twin={"batch_size": 3, "n": 48, "k": 96},
        plan=PLAN,
        make_inputs=functools.partial(make_inputs, lambda axes: ([], [])),
        isolated=("A",),
        oracle=scaled_oracle,
        compare={"C": PRODUCT},
        kernels=(Kernel("sglang.kernels.ops.gemm.bmm_fp8", run_bmm, limits=ROWS, compare={"C": TRUNCATED}),),
    ),
)

#: Outputs of all blocks that the oracle computes at once: about 1 GB.
LARGEST_BATCH = 2**24

SGLANG = "sglang.kernels.ops.gemm.fp8_kernel"


def blockwise_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The float64 product: each block's codes are multiplied, then scaled, then added up."""
    a, b = inputs["A"].double(), inputs["B"].double()
    row_scales = inputs["A_scale"].double()
    column_scales = inputs["B_scale"].double().repeat_interleave(BLOCK, dim=0)[: len(b)]
    total = no_loss(a, b)
    magnitude = torch.zeros_like(total.product)
    # Blocks have accumulators of their own: many are computed at once, as memory allows.
    blocks_a, blocks_b = (x.unflatten(1, (-1, BLOCK)).transpose(0, 1) for x in (a, b))
    at_once = max(1, LARGEST_BATCH // max(1, magnitude.numel()))
    for first in range(0, len(blocks_a), at_once):
        part = slice(first, first + at_once)
        own_a, own_b = blocks_a[part], blocks_b[part]
        scale = row_scales.T[part].unsqueeze(2) * column_scales.T[part].unsqueeze(1)
        total.add(truncated_product(own_a, own_b), scale)
        magnitude += ((own_a.abs() @ own_b.abs().mT) * scale).sum(dim=0)
    exact = magnitude.numel() > 0 and all(map(powers_of_two, (row_scales, column_scales))) and whole(a) and whole(b)
    exact = exact and bool(magnitude.max() < 2**24 * row_scales.min() * column_scales.min())
    parts = truncated_parts(total, torch.ones_like(magnitude))
    length = torch.tensor(float(a.shape[1]))
    return {"C": Expected(total.product, {**parts, "magnitude": magnitude, "length": length}, exact)}


def columns_first(matrix: torch.Tensor, alignment: int = 1) -> torch.Tensor:
    """A copy whose columns are contiguous; they begin at multiples of `alignment` elements."""
    rows, columns = matrix.shape
    aligned = -(-rows // alignment) * alignment
    return matrix.new_zeros(columns, aligned).t()[:rows].copy_(matrix)


def run_blockwise(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    product = sgl_kernel.fp8_blockwise_scaled_mm(
        inputs["A"], inputs["B"].T, columns_first(inputs["A_scale"]), inputs["B_scale"].T, torch.bfloat16
    )
    return {"C": product}


def run_deep_gemm(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import deep_gemm

    activations = (inputs["A"], columns_first(inputs["A_scale"], 4))
    deep_gemm.fp8_gemm_nt(activations, (inputs["B"], inputs["B_scale"]), outputs["C"])
    return outputs


BLOCKWISE = (
    Family(
        name="fp8_blockwise_scaled_mm",
        op_type="gemm",
        twin={"n": 192, "k": 384, "num_n_blocks": 2, "num_k_blocks": 3},
        plan=PLAN,
        make_inputs=functools.partial(
            make_inputs, lambda axes: ([axes["m"], axes["num_k_blocks"]], [axes["num_n_blocks"], axes["num_k_blocks"]])
        ),
        isolated=("A",),
        oracle=blockwise_oracle,
        compare={"C": PRODUCT},
        kernels=(
            Kernel("sgl_kernel.fp8_blockwise_scaled_mm", run_blockwise, limits=ROWS, compare={"C": TRUNCATED}),
            Kernel("deep_gemm.fp8_gemm_nt", run_deep_gemm, limits=ROWS, compare={"C": TRUNCATED}),
            calling(
                f"{SGLANG}.w8a8_block_fp8_matmul_triton",
                f"A B A_scale B_scale [{BLOCK},{BLOCK}] C.dtype",
                limits=ROWS,
                compare={"C": TRUNCATED},
            ),
        ),
    ),
)
FAMILIES = (*SCALED, *BATCHED, *BLOCKWISE)
