"""Tells which results element-by-element evaluators can judge, and why they cannot judge the rest.

flashinfer-bench 0.1.2 calls a reference and a solution once each and compares them element by element: each must have
the same dtype, be finite, and lie within 1e-2, absolutely or relatively. So the policies by which this dataset compares
a kernel say what they can judge: not a result of which several are right. For op_type sampling flashinfer-bench has
another evaluator: it reads an input `probs`, knows top-k and top-p, and takes the first output for token ids. A third
one lets 5 % of the elements of `moe_fp8_block_scale_*` differ.

KernelBench also compares elements, absolutely and relatively at once. Its evaluator takes one precision for a problem,
casts every tensor of `get_inputs()` to it, offsets and codes included, and reads the shape of the one output
(`_process_input_tensor` and `run_and_check_correctness` in its eval.py). Equal infinities are equal to it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Kernel

#: Policies of outputs whose order is free.
_ANY_ORDER = ("Multiset", "TopK")
#: Policies of outputs of which neighboring values can be right: codes of a quantizer, tokens that a sum decides on.
_NEIGHBORS = ("Interval", "PackedFp4")
_WHOLE = ("int8", "int16", "int32", "int64", "bool")

#: The dtypes to which KernelBench casts -> what it calls them.
PRECISIONS: Mapping[str, str] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

#: Of families for which flashinfer-bench is lenient: not enough where elements are of the order of 1.
_LENIENT = "and more elements can differ than the 5 % that flashinfer-bench lets pass"
#: Pattern of a family's name -> the rounding in a right kernel of it that makes elements differ by more than 1e-2.
_ROUNDED: Mapping[str, str] = {
    "moe_bf16_*_routing": "kernels round the results of the first product and the activation to bfloat16",
    "moe_fp8_block_scale_*_routing": f"kernels requantize the activation to fp8, {_LENIENT}",
    "moe_fp8_block_scale_expert_gemm": f"kernels may take either fp8 code for values halfway between, {_LENIENT}",
    "moe_post_reorder": "kernels add up in bfloat16",
    "moe_*_scatter_gemm*": "kernels round each row to bfloat16 before they add up",
    "gqa_paged_decode_fp8_cache": "kernels round the weights of the values to fp8",
}
#: Name of a family -> which elements of its results are infinite.
_INFINITE: Mapping[str, str] = {"fp8_mqa_logits": "the scores of keys that a token does not see"}


def unjudged(definition: Definition, family: Family) -> str | None:
    """Why flashinfer-bench cannot judge any kernel of a Definition, or None."""
    if definition.op_type != "sampling":
        if reason := incomparable(definition, family):
            return reason
        if name := _float8_output(definition):
            dtype = definition.outputs[name].dtype
            return f"elements of {name} cannot be compared: torch.isinf is not implemented for {dtype}"
        if family.name in _INFINITE:
            return f"elements must be finite, and {_INFINITE[family.name]} are not"
        return None
    if "probs" not in definition.inputs:
        return "the evaluator of op_type sampling reads an input `probs`, and takes the first output for token ids"
    if not {"top_k", "top_p"} & definition.inputs.keys():
        return "the evaluator of op_type sampling knows top-k and top-p only, and expects draws from the whole row here"
    return None


def unfit_for_kernelbench(definition: Definition, family: Family) -> str | None:
    """Why KernelBench cannot judge any kernel of a Definition, or None."""
    if len(definition.outputs) > 1:
        return "KernelBench compares one output, and it has several"
    dtypes = sorted({one.dtype for one in definition.inputs.values() if one.shape is not None})
    other = [dtype for dtype in dtypes if dtype not in PRECISIONS]
    if other:
        return f"KernelBench casts every input tensor to {', '.join(PRECISIONS)}, and some are {' and '.join(other)}"
    if len(dtypes) > 1:
        return f"KernelBench casts every input tensor to one dtype, and they are {' and '.join(dtypes)}"
    if name := _float8_output(definition):
        return f"KernelBench compares with torch.allclose, which does not take float8, the dtype of {name}"
    return incomparable(definition, family)


def incomparable(definition: Definition, family: Family) -> str | None:
    """Why nobody can judge the kernels of a Definition by comparing elements, or None."""
    if family.unverified:
        return f"no kernel has proven it here: {family.unverified}"
    for pattern, what in _ROUNDED.items():
        if fnmatch.fnmatchcase(family.name, pattern):
            return f"right elements differ by more than 1e-2, the tolerance: {what}"
    if found := _free_output(definition, family, None):
        return found
    reasons = [incomparable_kernel(definition, family, kernel) for kernel in family.kernels_of(definition)]
    return reasons[0] if reasons and all(reasons) else None


def incomparable_kernel(definition: Definition, family: Family, kernel: Kernel) -> str | None:
    return None if definition.op_type == "sampling" else _free_output(definition, family, kernel)


def _float8_output(definition: Definition) -> str | None:
    return next((name for name, spec in definition.outputs.items() if spec.dtype.startswith("float8")), None)


def _free_output(definition: Definition, family: Family, kernel: Kernel | None) -> str | None:
    for name, policy in family.policies(kernel).items():
        kind = type(policy).__name__
        if kind == "Distribution":
            return f"{name} is drawn, and elements of two draws cannot be compared"
        if kind in _ANY_ORDER:
            return f"several orders of {name} are right, and elements are compared in their places"
        if kind in _NEIGHBORS and definition.outputs[name].dtype in _WHOLE:
            return f"neighboring values of {name} can both be right, and whole numbers are compared within 1e-2"
    return None
