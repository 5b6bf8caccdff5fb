"""The rule on contracts: Definitions of a family differ in the values of their const axes, and in nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashinfer_trace.definition import Definition, TensorSpec
from flashinfer_trace.validation.candidate import Candidate, Tensor
from flashinfer_trace.validation.problems import Findings, pointer_of, quote

__all__ = ["check_contract", "contract_of"]

_FIX = "the Definitions of a family have one contract; a function with another one is another family"


def contract_of(definition: Definition) -> dict[str, Any]:
    """What all Definitions of a family have in common, of one of them: no values of axes, and no descriptions."""
    return {
        "axes": {name: "const" if name in definition.const_axes else "var" for name in definition.axes},
        "constraints": list(definition.constraints),
        "inputs": _tensors(definition.inputs),
        "outputs": _tensors(definition.outputs),
    }


def check_contract(candidate: Candidate, contract: Mapping[str, Any], findings: Findings) -> None:
    """Compares a Definition with its family.

    Args:
        candidate: the Definition; what is malformed has problems of its own.
        contract: of its family, as `contract_of` gives it.
        findings: where problems go.
    """
    if candidate.malformed_axes or not candidate.has_axes or not candidate.has_all_tensors:
        return
    kinds = {**dict.fromkeys(candidate.const_axes, "const"), **dict.fromkeys(candidate.var_axes, "var")}
    _compare("axes", _typed(kinds), _typed(contract["axes"]), findings)
    for section, tensors in (("inputs", candidate.inputs), ("outputs", candidate.outputs)):
        _compare(section, _tensors(tensors), contract[section], findings)
        if tensors.keys() == contract[section].keys() and [*tensors] != [*contract[section]]:
            message = (
                f"the {section} are in the order {quote([*tensors])}; in the family it is {quote([*contract[section]])}"
            )
            findings.add("contract-family", message, _FIX, f"/{section}")
    own_constraints = {text: index for index, text in candidate.constraints}
    for text in sorted(own_constraints.keys() - contract["constraints"]):
        message = f"no other Definition of the family has the constraint {quote(text)}"
        findings.add("contract-family", message, _FIX, pointer_of("constraints", own_constraints[text]))
    for text in contract["constraints"]:
        if text not in own_constraints:
            message = f"the constraint {quote(text)} is missing, which the others of the family have"
            findings.add("contract-family", message, _FIX, "/constraints" if "constraints" in candidate.data else "")


def _compare(
    section: str, own: Mapping[str, Mapping[str, Any]], family: Mapping[str, Mapping[str, Any]], findings: Findings
) -> None:
    """One problem for each entry that the family does not have, or that it has otherwise, and for each missing one."""
    for name in sorted(own.keys() - family.keys()):
        message = f"{name} is none of the {section} of the family, which are {quote(sorted(family))}"
        findings.add("contract-family", message, _FIX, pointer_of(section, name))
    for name, entry in family.items():
        if name not in own:
            message = f"{name} is missing, which the others of the family have"
            findings.add("contract-family", message, _FIX, f"/{section}")
            continue
        for field, value in entry.items():
            if own[name][field] != value:
                message = f"the {field} of {name} is {quote(own[name][field])}; in the family it is {quote(value)}"
                findings.add("contract-family", message, _FIX, pointer_of(section, name, field))


def _typed(axes: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {name: {"type": kind} for name, kind in axes.items()}


def _tensors(tensors: Mapping[str, Tensor] | Mapping[str, TensorSpec]) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": None if one.shape is None else list(one.shape), "dtype": one.dtype}
        for name, one in tensors.items()
    }
