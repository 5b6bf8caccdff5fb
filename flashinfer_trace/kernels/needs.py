"""Needs of kernels beyond the family of a Definition: each function says why one is not computed, or None.

The sizes for which a library compiles a kernel, the widths of its loads, and what was measured to go wrong beyond.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.kernels.table import Need

#: (n, k) of Llama-3.1-8B's layers, whose deterministic run is in traces/runtime.
DETERMINISTIC_RUN = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
#: The bounds of samplers hold up to this vocabulary, the largest of the dataset.
LARGEST_VOCABULARY = 262208
#: That of flashinfer's default top-p renormalization holds up to this one: it grows with the vocabulary, and beyond
#: would decide little.
LARGEST_HISTOGRAM = 163840
#: Threads of a block, at most.
BLOCK_THREADS = 1024
#: The vocabulary for which the samplers that sort every draw are recorded.
RECORDED_VOCABULARY = 128256


def exactly(**axes: int) -> Need:
    """Const axes of which a kernel takes one value."""
    return functools.partial(_misfit, operator.eq, "{} = {}", axes)


def multiples(**axes: int) -> Need:
    """Const axes that must be multiples, for whole loads or tiles."""
    return functools.partial(_misfit, _divides, "{} to be a multiple of {}", axes)


def at_most(**axes: int) -> Need:
    """Const axes with a largest value, for which a kernel is compiled or beyond which it goes wrong."""
    return functools.partial(_misfit, operator.le, "{} of at most {}", axes)


def _misfit(fits: Callable[[int, int], bool], text: str, axes: dict[str, int], definition: Definition) -> str | None:
    sizes = definition.const_axes
    wrong = (item for item in axes.items() if item[0] not in sizes or not fits(sizes[item[0]], item[1]))
    return next((f"needs {text.format(*item)}" for item in wrong), None)


def _divides(size: int, step: int) -> bool:
    return size % step == 0


def one_of(axis: str, *values: int) -> Need:
    """The values of a const axis for which a kernel is compiled."""
    return functools.partial(_one_of, axis, values)


def _one_of(axis: str, values: tuple[int, ...], definition: Definition) -> str | None:
    *others, last = map(str, values)
    return None if definition.const_axes[axis] in values else f"needs {axis} {', '.join(others)} or {last}"


def filters(definition: Definition) -> str | None:
    """SGLang's short convolutions have filters of 2 to 4 taps, and a state of one token less."""
    width, state = (definition.const_axes[axis] for axis in ("width", "state_len"))
    return None if width in (2, 3, 4) and state == width - 1 else "needs 2 to 4 taps and a state of one token less"


def heads_of_a_group(definition: Definition) -> str | None:
    """flashinfer.mamba.selective_state_update is compiled for these numbers of heads that share B and C."""
    heads = definition.const_axes["nheads"] // definition.const_axes["ngroups"]
    return None if heads in (1, 8, 16) else "needs groups of 1, 8 or 16 heads"


def powers_of_two(*axes: str) -> Need:
    """Const axes that must be powers of two, as Triton's ranges and its top-k are."""
    return functools.partial(_powers_of_two, axes)


def _powers_of_two(axes: tuple[str, ...], definition: Definition) -> str | None:
    wrong = {axis: size for axis in axes if (size := definition.const_axes[axis]) & (size - 1)}
    return f"needs powers of two, not {wrong}" if wrong else None


def sizes_of_one_model(definition: Definition) -> str | None:
    """DeepGEMM compiles a product for each n and k, which takes up to a minute: those of one model stand for all."""
    size = definition.const_axes["n"], definition.const_axes["k"]
    return None if size in DETERMINISTIC_RUN else f"is compiled for each size; run for (n, k) in {DETERMINISTIC_RUN}"


def compiled_group(definition: Definition) -> str | None:
    """flashinfer's decode on CUDA cores is compiled for some numbers of query heads per key-value head."""
    group, compiled = definition.const_axes["num_qo_heads"] // definition.const_axes["num_kv_heads"], (1, 2, 3, 4, 8)
    known = ", ".join(map(str, compiled))
    return None if group in compiled else f"is compiled for {known} query heads per key-value head, not {group}"


def grouped_heads(definition: Definition) -> str | None:
    """SGLang's Triton decode takes slots of one token; another of its kernels runs for heads that share nothing."""
    axes = definition.const_axes
    if axes["page_size"] != 1:
        return "takes slots: needs page_size 1"
    if axes.get("num_kv_heads") == axes["num_qo_heads"]:
        return "sums logits in bf16 where each query head has a key head of its own"
    return None


def cutlass_pages(definition: Definition) -> str | None:
    """CUTLASS' latent attention pads heads to 128, and rounds a table to 128 tokens."""
    axes = definition.const_axes
    if axes["num_qo_heads"] > 128:
        return "needs num_qo_heads of at most 128"
    return None if 128 % axes["page_size"] == 0 else "needs a page_size that divides 128"


def single_keys(definition: Definition) -> str | None:
    """FlashAttention 3 loads the pages of many queries whole if its tiles of 128 keys divide them, and multiplies what
    follows the last key by 0, which is NaN for NaN (see the findings). Other pages it loads key by key."""
    size = definition.const_axes.get("page_size", 1)
    return f"loads pages of {size} tokens whole, and a NaN after the last key comes out" if size % 128 == 0 else None


def merge_threads(definition: Definition) -> str | None:
    """flashinfer merges all heads of a token in one block, for the feature counts that it is compiled for."""
    heads, dim = (definition.const_axes[axis] for axis in ("num_heads", "head_dim"))
    if dim not in (64, 128, 256, 512):
        return f"is compiled for 64, 128, 256 and 512 features, not {dim}"
    threads = heads * dim // max(8, dim // 32)
    return f"needs {threads} threads per block, more than {BLOCK_THREADS}" if threads > BLOCK_THREADS else None


def fused_gate(definition: Definition) -> str | None:
    """sgl_kernel.moe_fused_gate gives a thread to each group of up to 32 experts."""
    experts, groups = definition.const_axes["num_experts"], definition.const_axes["n_group"]
    if experts & (experts - 1):
        return f"moe_fused_gate needs a power of two as the number of experts, not {experts}"
    if experts > 32 * groups:
        return f"moe_fused_gate takes up to 32 experts per group, not {experts // groups}"
    return None


def kimi_gate(definition: Definition) -> str | None:
    """sgl_kernel.kimi_k2_moe_fused_gate is written for one model."""
    experts, groups = definition.const_axes["num_experts"], definition.const_axes["n_group"]
    if (experts, groups) == (384, 1):
        return None
    return f"kimi_k2_moe_fused_gate takes 384 experts in one group, not {experts} in {groups}"


def expert_groups(definition: Definition) -> str | None:
    """SGLang's just-in-time grouped_topk takes a single group."""
    axes = definition.const_axes
    if axes["n_group"] > 1 or axes["num_experts"] > 512 or axes["top_k"] > 8:
        return "takes one group of up to 512 experts, and chooses up to 8"
    return None


def fused_topk(definition: Definition) -> str | None:
    """flashinfer's fused_topk_deepseek, and what its wrapper refuses."""
    axes = definition.const_axes
    if axes["n_group"] * axes["topk_group"] < axes["top_k"]:
        return "its wrapper refuses top_k above n_group x topk_group"
    inside = axes["num_experts"] // axes["n_group"]
    most = 384 if axes["n_group"] == 1 else 256
    if axes["num_experts"] > most or axes["top_k"] > 8:
        return f"takes up to {most} experts in {axes['n_group']} groups, and chooses up to 8"
    if axes["n_group"] > 1 and (inside > 32 or inside * axes["topk_group"] > 128 or axes["topk_group"] > 4):
        return "takes groups of up to 32 experts, and keeps up to 4 groups with up to 128"
    return None


def tie_order(definition: Definition) -> str | None:
    """sgl_kernel.topk_softmax may choose other experts than the reference. The order of ties was measured."""
    experts = definition.const_axes["num_experts"]
    if experts > 256 or experts & (experts - 1):
        return f"topk_softmax prefers the lower index of ties for powers of two up to 256 experts, not for {experts}"
    return None


def sorted_choices(definition: Definition) -> str | None:
    """SGLang's router hands sizes of one model to route_radix, which lists the choices in the order of experts."""
    axes = definition.const_axes
    if (axes["num_experts"], axes["top_k"], axes["n_group"]) == (896, 16, 1):
        return "lists 16 of 896 experts in another order"
    return None


def unrepeated_expert(definition: Definition) -> str | None:
    """sgl_kernel.topk_sigmoid is not trusted with other numbers of experts."""
    experts = definition.const_axes["num_experts"]
    if experts & (experts - 1):
        return f"may repeat expert 0 where all s + bias are below -1, unless experts are a power of two, not {experts}"
    return None


def row_bytes(definition: Definition) -> str | None:
    """sgl_kernel.shuffle_rows copies 16 bytes at a time, and drops what is left."""
    width = {"float32": 4, "bfloat16": 2, "float16": 2}.get(definition.inputs["input"].dtype, 1)
    row = definition.const_axes["hidden_size"] * width
    return None if row % 16 == 0 else f"needs rows of a multiple of 16 bytes, not {row}"


def reduced_columns(definition: Definition) -> str | None:
    """sgl_kernel.moe_sum_reduce leaves the last 8 columns unwritten if the rest are vectors of 16 bf16 numbers."""
    size = definition.const_axes["hidden_size"]
    return f"does not write the last 8 of {size} columns for more than 256 tokens" if size % 16 == 8 else None


def vocabulary(largest: int = LARGEST_VOCABULARY) -> Need:
    """The vocabulary up to which the bounds of a kernel's sums were derived."""
    return functools.partial(_vocabulary, largest)


def _vocabulary(largest: int, definition: Definition) -> str | None:
    if definition.const_axes["vocab_size"] <= largest:
        return None
    return f"bounds hold up to vocab_size {largest}; derive LARGEST_VOCABULARY and SUM anew"


def recorded_vocabulary(definition: Definition) -> str | None:
    """A sampler that sorts every draw takes a GPU longer than all others, so it is run for one vocabulary."""
    size = definition.const_axes["vocab_size"]
    if size == RECORDED_VOCABULARY:
        return None
    return f"is run for a vocabulary of {RECORDED_VOCABULARY}, as recorded, and no other"
