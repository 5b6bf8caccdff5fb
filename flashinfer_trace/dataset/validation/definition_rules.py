"""Rules on the parts of a Definition besides its reference: names, descriptions, axes, tags, constraints, contracts.

Definitions of a family have one contract: they differ in the values of their const axes, and in nothing else.
"""

from __future__ import annotations

import difflib
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashinfer_trace.dataset.validation.candidate import Candidate, Tensor
from flashinfer_trace.dataset.validation.problems import Findings, pointer_of, quote, quote_tag
from flashinfer_trace.format.constraints import Constraint, ConstraintSyntaxError, ConstraintValueError, parse
from flashinfer_trace.format.naming import NamePattern, Naming, NamingError, TagNamespace, derive_name, family_name

#: Names that a parameter of run() would hide from the reference.
RESERVED = frozenset({"torch", "math", "run"})
#: `python -m tools.scaffold` marks with it what is left to be written.
_UNFINISHED = re.compile(r"\bTODO\b")


def check_name(candidate: Candidate, naming: Naming, findings: Findings) -> NamePattern | None:
    """Finds the family (rule name-family) and compares the name that it derives (name-derived)."""
    if candidate.name is None or candidate.op_type is None:
        return None
    found = family_name(candidate.data, naming)
    if found is None:
        of_op_type = [family.pattern for family in naming.families.values() if family.op_type == candidate.op_type]
        known = f"{candidate.op_type} has {', '.join(of_op_type)}; " if of_op_type else ""
        message = f"no family of op_type {candidate.op_type} matches the name {quote(candidate.name)}"
        findings.add("name-family", message, f"{known}new families go to schema/naming.json", "/name")
        return None
    family = naming.families[found]
    if not candidate.has_axes or candidate.malformed_axes.intersection(family.axes):
        return family
    try:
        derived = derive_name(family, candidate.const_axes)
    except NamingError as error:
        findings.add("name-derived", f"family {found}: {error}", "declare it in axes as const", "/name")
        return family
    if derived != candidate.name:
        message = f"the const axes give the name {quote(derived)}, not {quote(candidate.name)}"
        findings.add(
            "name-derived", message, f"the pattern is {family.pattern}; rename it or correct the axes", "/name"
        )
    return family


def check_identifiers(candidate: Candidate, findings: Findings) -> None:
    """Names of axes, inputs and outputs are usable in Python (name-identifier) and distinct (name-overlap)."""
    for section in ("axes", "inputs", "outputs"):
        names = candidate.data.get(section)
        for name in names if isinstance(names, dict) else ():
            # A name that is not an identifier at all violates the schema's pattern, and is reported there.
            if keyword.iskeyword(name):
                message = f"{quote(name)} is a Python keyword"
                findings.add("name-identifier", message, "rename it", pointer_of(section, name))
            elif name in RESERVED:
                message = f"{name} would hide what the reference calls {name}"
                findings.add("name-identifier", message, "rename it", pointer_of(section, name))
    for name in candidate.outputs:
        if name in candidate.inputs:
            hint = f"an input that is updated is an output of another name, for example {name}_out"
            findings.add("name-overlap", f"{name} is an input and an output", hint, pointer_of("outputs", name))
    for name in candidate.inputs:
        if name in candidate.declared_axes:
            hint = "a constraint could mean either; rename one"
            findings.add("name-overlap", f"{name} is an input and an axis", hint, pointer_of("inputs", name))


def check_descriptions(candidate: Candidate, findings: Findings) -> None:
    """Descriptions say something (description-trivial); their presence is the schema's matter."""
    described = [("", candidate.data.get("name"), candidate.data)]
    for section in ("axes", "inputs", "outputs"):
        entries = candidate.data.get(section)
        if isinstance(entries, dict):
            described += [(pointer_of(section, name), name, entry) for name, entry in entries.items()]
    for pointer, name, entry in described:
        text = entry.get("description") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text:
            continue
        hint = "say what it means: unit, layout, range"
        if not _words(text):
            findings.add("description-trivial", "the description is blank", hint, f"{pointer}/description")
        elif _UNFINISHED.search(text):
            findings.add("description-trivial", "the description is a TODO", hint, f"{pointer}/description")
        elif isinstance(name, str) and _words(text) == _words(name):
            message = f"the description repeats the name {quote(name)}"
            findings.add("description-trivial", message, hint, f"{pointer}/description")


def _words(text: str) -> str:
    """Letters and digits of a text, lower case: ``Hidden size.`` and ``hidden_size`` say the same."""
    return re.sub(r"[\W_]+", " ", text).strip().lower()


def check_axes(candidate: Candidate, family: NamePattern | None, constants: Iterable[str], findings: Findings) -> None:
    """Shapes use declared axes, every axis is used, every var axis is bound.

    Args:
        candidate: the Definition.
        family: its family, if known: axes in the pattern of its name are used.
        constants: names of module constants of the reference: a const axis may be used there alone.
        findings: where problems go.
    """
    if not candidate.has_axes:
        return
    for section, tensors in (("inputs", candidate.inputs), ("outputs", candidate.outputs)):
        for name, tensor in tensors.items():
            for index, axis in enumerate(tensor.shape or ()):
                if axis not in candidate.declared_axes:
                    close = difflib.get_close_matches(axis[:80], candidate.declared_axes, 1)
                    hint = f"did you mean {close[0]}?" if close else "declare it in axes"
                    pointer = pointer_of(section, name, "shape", index)
                    findings.add("axis-undeclared", f"{name} has the undeclared axis {quote(axis)}", hint, pointer)
    if not candidate.has_all_tensors:
        return
    parsed = _parsed_constraints(candidate)
    in_inputs = {axis for tensor in candidate.inputs.values() for axis in tensor.shape or ()}
    in_outputs = {axis for tensor in candidate.outputs.values() for axis in tensor.shape or ()}
    used = in_inputs | in_outputs | {name for constraint in parsed for name in constraint.names}
    used |= set(family.axes) if family else set()
    upper = set(constants)
    for axis in candidate.declared_axes:
        if axis not in used and not (axis in candidate.const_axes and axis.upper() in upper):
            hint = "remove it, or use it in a shape, a constraint or the reference"
            findings.add("axis-unused", f"nothing uses the axis {axis}", hint, pointer_of("axes", axis))
            used.add(axis)
            in_inputs.add(axis)  # that it is unbound as well would be the same problem twice
    bound = in_inputs | set(candidate.const_axes) | set(candidate.inputs)
    equations = [equation for constraint in parsed for equation in constraint.solutions]
    # Each round binds at least one axis, so there are at most as many rounds as axes.
    while solved := {name for name, needed in equations if name not in bound and needed <= bound}:
        bound |= solved
    for axis in candidate.var_axes:
        if axis not in bound:
            hint = "use it in an input's shape, or add a constraint `axis == expression` over bound axes"
            message = f"nothing determines the var axis {axis}"
            findings.add("axis-unbound", message, hint, pointer_of("axes", axis))


def _parsed_constraints(candidate: Candidate) -> list[Constraint]:
    parsed = []
    for _, text in candidate.constraints:
        try:
            parsed.append(parse(text))
        except ConstraintSyntaxError:
            continue  # check_constraints reports it
    return parsed


def check_constraints(candidate: Candidate, findings: Findings) -> None:
    """Constraints parse, name axes and inputs, use them as what they are, and hold where they are constant."""
    for index, text in candidate.constraints:
        pointer = pointer_of("constraints", index)
        try:
            constraint = parse(text)
        except ConstraintSyntaxError as error:
            if text and len(text) <= 300:  # otherwise the schema reports its length
                findings.add("constraint-syntax", f"column {error.column}: {error.message}", error.hint, pointer)
            continue
        _check_names(constraint, candidate, findings, pointer)
        if candidate.has_all_tensors:
            _check_uses(constraint, candidate, findings, pointer)
        if constraint.names <= set(candidate.const_axes):
            try:
                holds = constraint.evaluate(candidate.const_axes)
            except ConstraintValueError:
                holds = False
            if not holds:
                explanation = constraint.explain(candidate.const_axes)
                findings.add("constraint-false", explanation, "correct the constraint or the axes", pointer)


def _check_names(constraint: Constraint, candidate: Candidate, findings: Findings, pointer: str) -> None:
    inputs, outputs = candidate.data.get("inputs"), candidate.data.get("outputs")
    known = [*candidate.declared_axes, *(inputs if isinstance(inputs, dict) else ())]
    for name in sorted(constraint.names - set(known)):
        if isinstance(outputs, dict) and name in outputs:
            message, hint = f"the constraint names the output {name}", "it may name axes and inputs"
        else:
            close = difflib.get_close_matches(name, known, 1)
            message = f"the constraint names {quote(name)}, which is neither axis nor input"
            hint = f"did you mean {close[0]}?" if close else "declare it"
        findings.add("constraint-name", message, hint, pointer)


def _check_uses(constraint: Constraint, candidate: Candidate, findings: Findings, pointer: str) -> None:
    def kind(name: str) -> str:
        if name in candidate.declared_axes:
            return "an axis"
        tensor = candidate.inputs[name]
        if tensor.shape is None:
            return "a scalar input"
        return f"a {tensor.dtype} input of {len(tensor.shape)} dimensions"

    known = {*candidate.declared_axes, *candidate.inputs}
    inputs = candidate.inputs
    for name in sorted(constraint.subscripted & known):
        if name not in inputs or not inputs[name].is_index_list:
            message = f"the constraint subscripts {name}, which is {kind(name)}"
            findings.add("constraint-type", message, "only 1-D integer inputs", pointer)
    for name in sorted(constraint.scalars & known):
        if name in inputs and inputs[name].shape is not None:
            message = f"the constraint uses {name} as a number, but it is {kind(name)}"
            findings.add("constraint-type", message, f"subscript it, for example {name}[-1]", pointer)


def check_tags(candidate: Candidate, naming: Naming, findings: Findings) -> None:
    """Tags follow schema/naming.json."""
    seen: set[str] = set()
    counts: Counter[str] = Counter()
    for index, tag in candidate.tags:
        pointer = f"/tags/{index}"
        if tag in seen:
            findings.add("tag-duplicate", f"the tag {quote_tag(tag)} appears twice", "remove one", pointer)
            continue
        seen.add(tag)
        name, colon, value = tag.partition(":")
        namespace = naming.namespaces.get(name) if colon else None
        if namespace is None and not (not colon and tag in naming.flags):
            _report_unknown_tag(tag, naming, findings, pointer)
        elif namespace is not None:
            counts[name] += 1
            if not namespace.accepts(value):
                findings.add("tag-value", f"{name}: cannot be {quote(value)}", _tag_help(namespace), pointer)
            if counts[name] > 1 and not namespace.repeatable:
                findings.add("tag-count", f"a second {name}: tag", f"only one {name}: is allowed", pointer)
    if isinstance(candidate.data.get("tags"), list):
        for namespace in naming.namespaces.values():
            if namespace.required and not counts[namespace.name]:
                findings.add("tag-count", f"there is no {namespace.name}: tag", _tag_help(namespace), "/tags")


def _report_unknown_tag(tag: str, naming: Naming, findings: Findings, pointer: str) -> None:
    spaces = [f"{name}:" for name in naming.namespaces]
    name, colon, _ = tag.partition(":")
    close = difflib.get_close_matches((name + colon)[:80], [*spaces, *naming.flags], 1)
    offer = f"did you mean {close[0]}? " if close else ""
    hint = f"{offer}namespaces {' '.join(spaces)} flags {' '.join(naming.flags)}, from schema/naming.json"
    findings.add("tag-unknown", f"the tag {quote_tag(tag)} is unknown", hint, pointer)


def _tag_help(namespace: TagNamespace) -> str:
    if namespace.values:
        return "one of " + ", ".join(f"{namespace.name}:{value}" for value in namespace.values)
    example = f", for example {namespace.examples[0]}" if namespace.examples else ""
    return f"must match {namespace.pattern}{example}"


#: How many other Definitions of its family a Definition is compared with: the majority counts, so an odd one among them
#: is reported where it is.
SIBLINGS = 5
_FIX = "the Definitions of a family have one contract; a function with another one is another family"

#: The common part of all Definitions of a family: no values of axes, and no descriptions.
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
    """Compares a Definition with others of its family."""
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
