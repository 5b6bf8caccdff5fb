"""The kernels that sort rows by expert, called as SGLang calls them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer_trace.families.moe.kernels import LAUNCHABLE
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs
from flashinfer_trace.verdict.unordered import Multiset


@dataclass(frozen=True)
class ListOptions:
    """What a kernel takes, where nothing behind its outputs may change.

    Attributes:
        multiple: of which number the length of its list must be a multiple. Plans draw any length, because PyTorch's
            allocator rounds the memory of an output up.
    """

    multiple: int = 1


ATOMICS = Multiset(
    "each expert has its pairs; atomics decide their order, and nothing is written where there is no pair"
)


def run_align(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang's wrapper calls it: one expert more, for id -1, and padding written to the end."""
    import sgl_kernel

    axes, ids = definition.const_axes, inputs["topk_ids"]
    sgl_kernel.moe_align_block_size(
        ids,
        axes["num_experts"] + 1,
        axes["block_size"],
        outputs["sorted_token_ids"],
        outputs["expert_ids"],
        outputs["num_tokens_post_pad"],
        torch.empty(axes["num_experts"] + 2, dtype=torch.int32, device=ids.device),
        True,
    )
    return outputs


def run_prepare(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    axes = definition.const_axes
    sgl_kernel.prepare_moe_input(
        inputs["topk_ids"],
        outputs["expert_offsets"],
        outputs["problem_sizes1"],
        outputs["problem_sizes2"],
        outputs["input_permutation"],
        outputs["output_permutation"],
        axes["num_experts"],
        axes["intermediate_size"],
        axes["hidden_size"],
        outputs["blockscale_offsets"],
    )
    return outputs


def run_w4a8_sizes(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The permutations are arguments that the kernel does not write."""
    import sgl_kernel

    axes, ids = definition.const_axes, inputs["topk_ids"]
    unused = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    sgl_kernel.get_cutlass_w4a8_moe_mm_data(
        ids,
        outputs["expert_offsets"],
        outputs["problem_sizes1"],
        outputs["problem_sizes2"],
        unused,
        unused.clone(),
        axes["num_experts"],
        axes["intermediate_size"],
        axes["hidden_size"],
    )
    return outputs


ALIGN = Kernel(
    "sgl_kernel.moe_align_block_size",
    run_align,
    limits=LAUNCHABLE,
    plan_options=ListOptions(multiple=4),
    compare={"sorted_token_ids": ATOMICS, "expert_ids": ATOMICS},
)
PREPARE = Kernel(
    "sgl_kernel.prepare_moe_input",
    run_prepare,
    limits=LAUNCHABLE,
    compare={"input_permutation": ATOMICS, "output_permutation": ATOMICS},
)
W4A8_SIZES = Kernel("sgl_kernel.get_cutlass_w4a8_moe_mm_data", run_w4a8_sizes, limits=LAUNCHABLE)
