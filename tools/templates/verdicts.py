"""What the oracles here say of the references of a record, as data: `tests/dumps/flashinfer-0.7.2.verdicts.json`."""

from __future__ import annotations

import builtins
import dataclasses
import symtable
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from flashinfer_trace.dataset.dumps import TIES, Dump, aliases, differences, matches, normalized
from flashinfer_trace.format.naming import load_naming
from flashinfer_trace.judging.dumped import ANOTHER, Classified, References, classify
from flashinfer_trace.judging.verdict import Failure
from flashinfer_trace.sandbox.worker import ReferenceWorker
from tools.templates.probes import probed
from tools.templates.record import Record

VERDICTS = Path("tests/dumps/flashinfer-0.7.2.verdicts.json")
#: Another epsilon than the templates': the families that have it.
EPSILON = "_eps1e5"


def judged(record: Record) -> dict[str, Any]:
    """The verdicts, the same each time:

    - ``dumps``: of each dump whose template a family here may compute, its class and the Definition here.
    - ``templates``: of each such template, what is wrong with its reference (nothing, if it is right) and the smallest
      input that shows it; and on which inputs it is right. Helpers that its dumps lack are put before it.
    - ``silent``: arguments that dumps do not tell, and what a reference is at another epsilon.
    - ``probes``: what one call shows of templates without a family here.
    """
    torch.set_num_threads(1)
    with ReferenceWorker(waived=TIES) as worker:
        references = References(worker)
        found = [classify(dump, record.version, references) for dump in record.parsed()]
        whole = [_with_helpers(record, dump, references) for dump in _representatives(found)]
        return {
            "flashinfer": record.version,
            "dumps": [
                {"name": one.dump.name, "class": one.kind, "definition": one.match.definition.name}
                for one in found
                if one.match is not None
            ],
            "templates": [_row(one) for one in whole],
            "silent": list(_silent(whole, record.version, references)),
            "probes": probed(record, worker),
        }


def _representatives(found: Sequence[Classified]) -> list[Dump]:
    """Of each template with an alias, the first dump with the dtypes of a family here; or the first."""
    chosen: dict[str, Dump] = {}
    fits = set[str]()
    for one in found:
        if one.match is None:
            continue
        template = one.match.alias.template
        fit = not any(line.startswith("input ") for line in differences(one.dump, one.match))
        if template not in chosen or (fit and template not in fits):
            chosen[template] = one.dump
        if fit:
            fits.add(template)
    return [chosen[template] for template in sorted(chosen)]


def _with_helpers(record: Record, dump: Dump, references: References) -> Classified:
    """The class of a dump, with the helpers that its reference lacks put before it."""
    template = matches(dump, record.version)[0].alias.template
    helpers = record.helpers.get(template, "")
    if helpers and missing_names(dump.definition.reference):
        head, imports, rest = dump.definition.reference.partition("import torch.nn.functional as F\n")
        reference = f"{head}{imports}\n\n{helpers}\n\n{rest}" if imports else f"{helpers}\n\n{head}"
        dump = dataclasses.replace(dump, definition=dataclasses.replace(dump.definition, reference=reference))
    return classify(dump, record.version, references)


def missing_names(source: str) -> list[str]:
    """Names that a source reads and neither defines nor imports, sorted: running it raises NameError."""
    if not source:
        return []
    top = symtable.symtable(source, "source", "exec")
    own = [one for one in top.get_symbols() if one.is_assigned() or one.is_imported() or one.is_namespace()]
    missing, queue = set[str](), [top]
    while queue:
        scope = queue.pop()
        queue += scope.get_children()
        read = [one for one in scope.get_symbols() if one.is_referenced() and (scope is top or one.is_global())]
        missing |= {one.get_name() for one in read}
    return sorted(missing - {one.get_name() for one in own} - set(dir(builtins)))


def _row(one: Classified) -> dict[str, Any]:
    assert one.match is not None
    failure = one.verdict.failure if one.verdict else None
    what = list(one.reasons[: len(one.reasons) - (failure is not None)])
    right_on = one.verdict.right_on if one.verdict else ""
    return {
        "template": one.match.alias.template,
        "definition": one.match.definition.name,
        "kernel": one.match.alias.kernel,
        "wrong": [*what, *([_told(failure)] if failure else [])] if one.kind == ANOTHER else [],
        **({"right_on": right_on.partition(":")[0]} if right_on else {}),
        "axes": failure.axes if failure else {},
    }


def _told(failure: Failure) -> str:
    """A failure in few digits."""
    if failure.kind != "values" or not failure.index:
        return failure.message
    place = f"{failure.output}[{', '.join(map(str, failure.index))}]"
    got, wanted = failure.got + 0.0, failure.wanted + 0.0  # no negative zero
    return f"{place} is {got:.6g}, right is {wanted:.6g}: {failure.ratio:.3g} x the bound"


def _silent(found: Sequence[Classified], version: str, references: References) -> Iterator[dict[str, Any]]:
    """Of each template with silent arguments, what its reference is at another epsilon, if a family here has one."""
    naming = load_naming()
    dumps = {one.match.alias.template: one.dump for one in found if one.match}
    for template, alias in aliases(version).items():
        others = [family for family in alias.families if family.endswith(EPSILON) and family in naming.families]
        told = ""
        if template in dumps and others:
            match = next(one for one in matches(dumps[template], version) if one.family in others)
            failure = references.judge(normalized(dumps[template], match)).failure
            told = f"eps = 1e-5: {_told(failure) if failure else 'right'}"
        if alias.silent:
            yield {"template": template, "arguments": list(alias.silent), "judged": told}
