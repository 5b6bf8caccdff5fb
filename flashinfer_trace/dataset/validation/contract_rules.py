"""The rule on contracts: Definitions of a family differ in the values of their const axes, and in nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashinfer_trace.dataset.validation.candidate import Candidate, Tensor
from flashinfer_trace.dataset.validation.problems import Findings, pointer_of, quote

__all__ = ["SIBLINGS", "Contract", "check_contract", "contract_of"]

#: How many other Definitions of its family a Definition is compared with: what most of them have counts, so that an odd
#: one among them is reported where it is.
SIBLINGS = 5
_FIX = "the Definitions of a family have one contract; a function with another one is another family"

#: What all Definitions of a family have in common: no values of axes, and no descriptions.
Contract = Mapping[str, Any]


def contract_of(candidate: Candidate) -> Contract | None:
    """The contract of a Definition; None if it is malformed, which other rules report."""
    if candidate.malformed_axes or not candidate.has_axes or not candidate.has_all_tensors:
        return None
    return {
        "axes": {**dict.fromkeys(candidate.const_axes, "const"), **dict.fromkeys(candidate.var_axes, "var")},
        "constraints": [text for _, text in candidate.constraints],
        "inputs": _tensors(candidate.inputs),
        "outputs": _tensors(candidate.outputs),
    }


def check_contract(candidate: Candidate, siblings: Sequence[Contract], findings: Findings) -> None:
    """Compares a Definition with others of its family.

    Args:
        candidate: the Definition; what is malformed has problems of its own.
        siblings: the contracts of some others, none of which may be malformed.
        findings: where problems go.
    """
    own = contract_of(candidate)
    if own is None or not siblings:
        return
    counted = [*siblings, own]
    contract = max(counted, key=counted.count)  # its own decides only between equals among others
    _compare("axes", _typed(own["axes"]), _typed(contract["axes"]), findings)
    for section in ("inputs", "outputs"):
        names, of_family = list(own[section]), list(contract[section])
        _compare(section, own[section], contract[section], findings)
        if set(names) == set(of_family) and names != of_family:
            message = f"the {section} are in the order {quote(names)}; in the family it is {quote(of_family)}"
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


def _tensors(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": None if one.shape is None else list(one.shape), "dtype": one.dtype}
        for name, one in tensors.items()
    }
