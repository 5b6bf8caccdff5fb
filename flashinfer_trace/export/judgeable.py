"""What flashinfer-bench 0.1.2 can judge, and why not the rest.

Its default evaluator calls a reference and a solution once each and compares them element by element: every one must
have the same dtype, be finite, and lie within 1e-2, absolutely or relatively. Its sampling evaluator takes over for
op_type sampling: it reads an input `probs`, knows top-k and top-p, and takes the first output for token ids. So the
policies by which this dataset compares a kernel say what can be judged there: not a result of which several are right.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.family import Family, Kernel

__all__ = ["unjudged", "unjudged_kernel"]

#: Policies of outputs whose order is free.
_ANY_ORDER = ("Multiset", "TopK")
#: Policies of outputs of which neighbouring values can be right: codes of a quantiser, tokens that a sum decides on.
_NEIGHBOURS = ("Interval", "PackedFp4")
_WHOLE = ("int8", "int16", "int32", "int64", "bool")

#: Pattern of a family's name -> why a right kernel of it is rejected.
_REJECTED: Mapping[str, str] = {
    "moe_bf16_*_routing": (
        "the default evaluator wants every element within 1e-2, and the kernels round the results of the first product "
        "and of the activation to bfloat16, which moves the sums of the second product by more"
    ),
    "moe_fp8_block_scale_*_routing": (
        "the low-bit evaluator wants 95 % of the elements within 1e-2, and the kernels requantise the activation to "
        "fp8, which moves more of them by more"
    ),
    "moe_fp8_block_scale_expert_gemm": (
        "the low-bit evaluator wants 95 % of the elements within 1e-2, and the kernels quantise their bfloat16 rows to "
        "fp8, which moves more of them by more"
    ),
}


def unjudged(definition: Definition, family: Family) -> str | None:
    """Why its evaluators cannot judge any kernel of a Definition, or None."""
    if family.unverified:
        return f"no kernel has proven it here: {family.unverified}"
    for name, spec in definition.outputs.items():
        if spec.dtype.startswith("float8"):
            return f"its evaluators ask torch.isinf of every output, which float8 ({name}) does not have"
    if definition.op_type == "sampling":
        return _unjudged_sampler(definition)
    for pattern, reason in _REJECTED.items():
        if fnmatch.fnmatchcase(family.name, pattern):
            return reason
    if found := _free_output(definition, family, None):
        return found
    reasons = [_free_output(definition, family, kernel) for kernel in family.kernels_of(definition)]
    return reasons[0] if reasons and all(reasons) else None


def unjudged_kernel(definition: Definition, family: Family, kernel: Kernel) -> str | None:
    """Why its evaluators cannot judge one kernel, although they can judge others of the Definition, or None."""
    return None if definition.op_type == "sampling" else _free_output(definition, family, kernel)


def _unjudged_sampler(definition: Definition) -> str | None:
    if "probs" not in definition.inputs:
        return "the evaluator of op_type sampling reads an input `probs`, and takes the first output for token ids"
    if not {"top_k", "top_p"} & definition.inputs.keys():
        return "the sampling evaluator knows top-k and top-p only, and expects draws from the whole row here"
    return None


def _free_output(definition: Definition, family: Family, kernel: Kernel | None) -> str | None:
    for name, policy in family.policies(kernel).items():
        kind = type(policy).__name__
        if kind in _ANY_ORDER:
            return f"several orders of {name} are right, and the default evaluator compares place by place"
        if kind in _NEIGHBOURS and definition.outputs[name].dtype in _WHOLE:
            return f"neighbouring values of {name} can both be right, and the default evaluator permits one"
    return None
