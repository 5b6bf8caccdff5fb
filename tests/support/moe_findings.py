"""Probes of the kernels of mixtures of experts: see kernel_findings, which lists them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch


def raises(call: Callable[[], object]) -> bool:
    """Whether the call refuses its arguments. A module that cannot be built says nothing of it: that error goes on."""
    try:
        call()
        torch.cuda.synchronize()
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        if "build failed" in str(error):
            raise
        return True
    return False


def sum_reduce_last_columns() -> bool:
    import sgl_kernel

    rows = torch.ones(257, 2, 24, dtype=torch.bfloat16, device="cuda")
    output = torch.full((257, 24), -1.0, dtype=torch.bfloat16, device="cuda")
    sgl_kernel.moe_sum_reduce(rows, output, 1.0)
    return bool((output == 2).all())


def sum_reduce_without_factor() -> bool:
    import sgl_kernel

    rows = torch.ones(1, 2, 16, dtype=torch.bfloat16, device="cuda")
    output = torch.full((1, 16), -1.0, dtype=torch.bfloat16, device="cuda")
    sgl_kernel.moe_sum_reduce(rows, output)
    return bool((output == 2).all())


def sigmoid_repeats_an_expert() -> bool:
    import sgl_kernel

    logits = torch.linspace(-1, 1, 60, device="cuda").view(1, 60).contiguous()
    weights = torch.empty(1, 2, device="cuda")
    ids = torch.empty(1, 2, dtype=torch.int32, device="cuda")
    sgl_kernel.topk_sigmoid(weights, ids, logits, False, torch.full((60,), -3.0, device="cuda"))
    return ids.tolist() == [[59, 58]]


def shuffled_rows(columns: int, dtype: torch.dtype) -> bool:
    """Whether three rows of float32 are reversed, or the arguments refused."""
    import sgl_kernel

    rows = torch.arange(3 * columns, dtype=torch.float32, device="cuda").view(3, columns)
    found = []

    def reverse() -> None:
        order = torch.tensor([2, 1, 0], dtype=dtype, device="cuda")
        found.append(sgl_kernel.shuffle_rows(rows, order, (3, columns)))

    return raises(reverse) or torch.equal(found[0], rows.flip(0))


def w4a8_data(dtype: torch.dtype) -> tuple[bool, list[torch.Tensor]]:
    """Whether two tokens that choose experts 0 and 1 are refused, and the kernel's outputs."""
    import sgl_kernel

    ids = torch.tensor([[0], [1]], dtype=dtype, device="cuda")
    shapes = ((3,), (2, 3), (2, 3), (2,), (2,))
    found = [torch.full(shape, -7, dtype=torch.int32, device="cuda") for shape in shapes]
    return raises(lambda: sgl_kernel.get_cutlass_w4a8_moe_mm_data(ids, *found, 2, 256, 512)), found


def w4a8_wide_ids() -> bool:
    refused, found = w4a8_data(torch.int64)
    return refused or found[0].tolist() == [0, 1, 2]


def w4a8_permutations() -> bool:
    refused, found = w4a8_data(torch.int32)
    return refused or found[3].tolist() == found[4].tolist() == [0, 1]


def w4a8_half_output() -> bool:
    """One expert with weights of 1, and one row of ones: each sum is 512."""
    import sgl_kernel

    k, n = 512, 128

    def tensor(shape: tuple[int, ...], value: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, value, device="cuda").to(dtype)

    output = tensor((1, n), 0, torch.float16)
    stride_in, stride_out = tensor((1, 3), k, torch.int64), tensor((1, 3), n, torch.int64)
    sizes = torch.tensor([[n, 1, k]], dtype=torch.int32, device="cuda")
    refused = raises(
        lambda: sgl_kernel.cutlass_w4a8_moe_mm(
            output,
            tensor((1, k), 1, torch.float8_e4m3fn),
            tensor((1, n, k // 2), 0x11, torch.int8),
            tensor((1,), 1, torch.float32),
            tensor((1, k // 512, n * 4), 1, torch.bfloat16),
            tensor((1,), 0, torch.int32),
            sizes,
            stride_in,
            stride_in,
            stride_out,
            stride_out,
        )
    )
    return refused or bool((output == 512).all())


def align_pads_too_far() -> bool:
    """1991 tokens with 2 of 8 experts each, blocks of 128, and as much memory as SGLang's wrapper gives: 5125 ids."""
    import sgl_kernel

    ids = torch.randint(0, 8, (1991, 2), dtype=torch.int32, device="cuda")
    length = ids.numel() + 9 * 127
    memory, blocks, total, sums = (
        torch.full((n,), -7, dtype=torch.int32, device="cuda") for n in (length + 3, -(-length // 128), 1, 10)
    )
    arguments = (ids, 9, 128, memory[:length], blocks, total, sums, True)
    return raises(lambda: sgl_kernel.moe_align_block_size(*arguments)) or memory[length:].tolist() == [-7] * 3


def softmax_repeats_an_expert(value: float) -> bool:
    """One token, 8 experts, 2 of them chosen; the logit of expert 3 is `value`, the others are 0."""
    import sgl_kernel

    logits = torch.zeros(1, 8, device="cuda")
    logits[0, 3] = value
    weights = torch.full((1, 2), -7.0, device="cuda")
    ids = torch.full((1, 2), -7, dtype=torch.int32, device="cuda")
    if raises(lambda: sgl_kernel.topk_softmax(weights, ids, logits, False)):
        return True
    first, second = ids[0].tolist()
    return first != second and {first, second} <= set(range(8))


def gate_without_weight() -> bool:
    """DeepSeek-V3's gate, whose logits are all -200: each sigmoid is 0 in float32, and so is their sum."""
    import sgl_kernel

    logits = torch.full((1, 256), -200.0, device="cuda")
    found = []
    call = functools.partial(sgl_kernel.moe_fused_gate, logits, torch.zeros(256, device="cuda"), 8, 4, 8)
    refused = raises(lambda: found.append(call(routed_scaling_factor=2.5, apply_routed_scaling_factor_on_output=True)))
    return refused or bool(found[0][0].isfinite().all())


def gate_of_bf16_logits() -> bool:
    """64 tokens of random logits in bf16: the experts are those of the same logits in float32."""
    import sgl_kernel

    logits, bias = torch.randn(64, 256, device="cuda").bfloat16(), torch.zeros(256, device="cuda")
    call = functools.partial(sgl_kernel.moe_fused_gate, num_expert_group=8, topk_group=4, topk=8)
    chosen: list[torch.Tensor] = []
    if raises(lambda: chosen.append(call(logits, bias.bfloat16())[1])):
        return True
    _, wanted = call(logits.float(), bias)
    return torch.equal(chosen[0].sort(dim=1).values, wanted.sort(dim=1).values)


#: The name of each in findings/kernels.json, and its probe.
PROBES: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("moe_sum_reduce: the last 8 columns are not written", sum_reduce_last_columns),
    ("moe_align_block_size: up to 3 ids are written past the end", align_pads_too_far),
    ("topk_sigmoid: an expert is chosen twice", sigmoid_repeats_an_expert),
    ("shuffle_rows: rows that are not a multiple of 16 bytes", lambda: shuffled_rows(6, torch.int32)),
    ("shuffle_rows: an int64 map is misread", lambda: shuffled_rows(8, torch.int64)),
    ("get_cutlass_w4a8_moe_mm_data: int64 ids are misread", w4a8_wide_ids),
    ("get_cutlass_w4a8_moe_mm_data: permutations are not written", w4a8_permutations),
    ("cutlass_w4a8_moe_mm: a float16 output receives bfloat16 bits", w4a8_half_output),
    ("topk_softmax: a NaN makes it choose an expert twice", lambda: softmax_repeats_an_expert(math.nan)),
    ("topk_softmax: an infinity makes it choose an expert twice", lambda: softmax_repeats_an_expert(math.inf)),
    ("moe_fused_gate: weights are NaN where all sigmoids are 0", gate_without_weight),
    ("moe_fused_gate: bf16 logits choose other experts", gate_of_bf16_logits),
    ("moe_sum_reduce: without a factor, everything is 0", sum_reduce_without_factor),
)
