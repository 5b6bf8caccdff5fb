"""The plan of an extraction: for every need, a Definition that is created, tagged, left unchanged or in conflict."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.kernel_tags import kernel_tags
from flashinfer_trace.dataset.model_claims import load_model_claims
from flashinfer_trace.dataset.validation.model_rules import untagged_models, untagged_sizes
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.files import json_text
from flashinfer_trace.format.naming import NamePattern, Naming, derive_name, load_naming, ordered
from flashinfer_trace.format.reference import render
from flashinfer_trace.kernels import family_kernels
from tools.extract_definitions.claimed import all_stages, describing, mark_claims
from tools.extract_definitions.errors import ExtractionError
from tools.extract_definitions.family_lists import FamilyLists
from tools.extract_definitions.gaps import OUTSIDE, PARTLY, UNSUPPORTED, gaps, not_traced, read_definition, reason_of
from tools.extract_definitions.needs import Need, Recipe, Request
from tools.extract_definitions.recipes import RECIPES
from tools.extract_definitions.tags import merged, status
from tools.extract_definitions.understanding import is_called_so, not_understood, refusals, unclassified

CREATED, TAGGED, SKIPPED, CONFLICT = "created", "tagged", "skipped", "conflict"
STATES = (CREATED, TAGGED, SKIPPED, PARTLY, OUTSIDE, UNSUPPORTED, CONFLICT)
#: Fields of a configuration that some recipe understands.
UNDERSTOOD = frozenset().union(*(recipe.fields for recipe in RECIPES)) | {"architectures"}
#: Sections of a Definition that decide what it computes. Descriptions within them do not count.
CONTRACT = ("op_type", "axes", "constraints", "inputs", "outputs", "reference")


@dataclass(frozen=True)
class Row:
    """One line of the plan.

    Attributes:
        state: one of `STATES`.
        name: the name of the Definition, or of the op if the row is about one.
        models: the names of the models that need it.
        detail: the reason, or what changes.
        path: the file to write; None if nothing is written.
        text: the content of that file.
    """

    state: str
    name: str
    models: tuple[str, ...]
    detail: str = ""
    path: Path | None = None
    text: str = ""


@dataclass(frozen=True)
class Plan:
    """All rows, grouped by state and sorted by file, notes on what was left out, and the lists of families."""

    rows: list[Row]
    notes: list[str]
    lists: FamilyLists

    def of(self, state: str) -> list[Row]:
        """The rows of one state."""
        return [row for row in self.rows if row.state == state]


class Planner:
    """Compares what models need with the existing Definitions.

    Args:
        root: the dataset root, from which references, evidence and conventions are read.
        definitions: the directory of the Definitions, `root / "definitions"` or another.
        deduplicate: whether an existing Definition meets a need; otherwise every copy is written for review.
        refresh: whether existing Definitions get the recipes' texts and order of tags; each keeps its description.
    """

    def __init__(self, root: Path, definitions: Path, deduplicate: bool = True, refresh: bool = False) -> None:
        self.root, self.definitions, self.deduplicate, self.refresh = root, definitions, deduplicate, refresh
        self.naming: Naming = load_naming(root)
        self.existing = {path.stem: path for path in sorted(definitions.glob("*/*.json"))}
        self.claims = load_model_claims(root)
        self.titles: Mapping[str, str] = self.claims.titles if self.claims else {}
        self.lists, self.all_stages = FamilyLists(root, self.claims), True
        self.reviews: dict[Path, dict[str, Any]] = {}

    def plan(self, requests: Sequence[Request]) -> Plan:
        """The plan for several models, which may share kernels.

        Raises:
            ExtractionError: a configuration lacks a field, or the user's sizes do not fit it.
        """
        groups: dict[Any, list[tuple[Recipe, Need]]] = defaultdict(list)
        review: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        unused: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.lists, self.all_stages, self.reviews = FamilyLists(self.root, self.claims), all_stages(requests), {}
        for request in requests:
            found = self.needs(request)
            if self.claims is not None:
                found = mark_claims(self.root, request, found, self.needs)
            for recipe, need in found:
                groups[need.key].append((recipe, need))
            met = {need.use.op for _, need in found}
            for state, op, detail in gaps(self.root, request, met):
                review[state, op, detail].append(request.model.name)
            for op, reason in request.unused.items():
                if request.usage.op(op) and op not in met:
                    unused[op, reason].append(request.model.name)
        rows = self._rows([(group[0][0], [need for _, need in group]) for group in groups.values()])
        rows.sort(key=lambda row: (STATES.index(row.state), row.path or Path(), row.name))
        rows += [
            Row(SKIPPED, op, tuple(models), f"never called: {reason}")
            for (op, reason), models in sorted(unused.items())
        ]
        rows += [Row(state, op, tuple(models), detail) for (state, op, detail), models in sorted(review.items())]
        notes = dict.fromkeys(note for request in requests for note in (*request.left_out, *_unclassified(request)))
        return Plan(rows, list(notes), self.lists)

    def needs_of(self, request: Request) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        """What one model needs, whether the Definitions exist or not.

        Returns:
            op -> name -> op_type of the Definitions that it needs; and op -> reason for the ops of the forward pass
            and the sampler that no family covers.
        """
        ops: dict[str, dict[str, str]] = defaultdict(dict)
        for recipe, need in self.needs(request):
            ops[need.use.op][self.name_of(need)] = recipe.op_type
        uncovered = {
            op.name: reason_of(self.root, request, op)
            for op in request.usage.ops
            if op.group in ("", "sampling")
            and (op.name in request.uncovered or (op.name not in ops and op.name not in request.unused))
        }
        return ops, uncovered | not_traced(request)

    def needs(self, request: Request) -> list[tuple[Recipe, Need]]:
        """Needs that both witnesses confirm and whose family the dataset has; the others are recorded as uncovered."""
        found = []
        reasons: dict[tuple[str, str, str], list[str]] = {}
        refused: dict[str, dict[str, None]] = defaultdict(dict)
        for recipe in RECIPES:
            seen = replace(request, model=request.model.restricted(recipe.fields, recipe.op_type))
            for need in recipe.needs(seen):
                key = (recipe.op_type, need.family, need.use.op)
                if key not in reasons:
                    reasons[key] = refusals(request, recipe.op_type, need, UNDERSTOOD)
                    if need.family not in self.naming.families:
                        reasons[key].append(f"schema/naming.json has no family {need.family}")
                if not is_called_so(request, need):
                    continue
                if reasons[key]:
                    refused[need.use.op].update(dict.fromkeys(reasons[key]))
                else:
                    found.append((recipe, need))
        if unknown := not_understood(request, UNDERSTOOD):
            # One of these fields may be why an op is called after all.
            refused |= {op: dict.fromkeys(unknown) for op in request.unused if request.usage.op(op)}
            request.unused.clear()
        for op, why in refused.items():
            known = [request.uncovered[op]] if op in request.uncovered else []
            request.uncovered[op] = "; ".join(dict.fromkeys([*known, *why]))
        return found

    def name_of(self, need: Need) -> str:
        """The name of the Definition that meets a need."""
        return _file_name(self.naming.families[need.family], need.axes)

    def _rows(self, groups: Sequence[tuple[Recipe, list[Need]]]) -> list[Row]:
        """One row per group of needs. If two groups have the same name, the second conflicts with the first."""
        rows: dict[str, Row] = {}
        clashes = []
        for recipe, needs in groups:
            data = self._definition(recipe, needs)
            name = data["name"]
            if name not in rows:
                rows[name] = self._row(recipe, needs, data)
                continue
            path = rows[name].path or self.existing[name]
            models = tuple(dict.fromkeys(need.use.model.name for need in needs))
            clashes.append(
                self._conflict(path.with_name(f"{name}.json"), data, models, "other constants in the same call")
            )
        return [*rows.values(), *clashes]

    def _row(self, recipe: Recipe, needs: list[Need], data: dict[str, Any]) -> Row:
        """What becomes of the Definition that these needs share."""
        name, models = data["name"], tuple(dict.fromkeys(need.use.model.name for need in needs))
        path = self.existing.get(name)
        if path is None:
            if reasons := _refusals(needs[0].family, data):
                return Row(UNSUPPORTED, name, models, f"no kernel takes it: {'; '.join(reasons)}")
            target = self.definitions / recipe.op_type / f"{name}.json"
            recorded = self.claims.recorded.get(name, frozenset()) if self.claims else ()
            data["tags"] = merged(self._listed(needs[0].family, data), sorted(recorded), self.naming)
            return Row(CREATED, name, models, "", target, json_text(data))
        existing = read_definition(path)
        differences = _differences(existing, data)
        if differences or not self.deduplicate:
            reason = f"other {', '.join(differences)}" if differences else "exists, and duplicates were requested"
            return self._conflict(path, data, models, reason)
        if not any(need.claimed for need in needs):
            return Row(SKIPPED, name, models, "exists, and gains no tags from what models/ does not hold")
        tags = self._merged(needs[0].family, existing, data)
        added = [tag for tag in tags if tag not in existing["tags"]]
        found = status(data, self.root)
        described = self._described(existing["description"], tags)
        note = "" if described else "; describes it again, as its description named other models or sizes"
        if self.refresh:
            if described:
                data["description"] = existing["description"]
            own = [tag for tag in tags if not tag.startswith("status:")]
            data["tags"] = ordered([found, *own], self.naming)
            if json_text(data) != path.read_text(encoding="utf-8"):
                detail = f"refreshed {' '.join(added)}".rstrip() + note
                return Row(TAGGED, name, models, detail, path, json_text(data))
        elif added:
            if not described:
                existing["description"] = data["description"]
            existing["tags"] = [found if tag.startswith("status:") else tag for tag in tags]
            return Row(TAGGED, name, models, f"adds {' '.join(added)}{note}", path, json_text(existing))
        return Row(SKIPPED, name, models, "exists")

    def _listed(self, family: str, data: dict[str, Any]) -> list[str]:
        """The tags of a new Definition, as the lists of its family give them from now on."""
        return ordered(self.lists.created(data["name"], family, data["tags"], self.all_stages), self.naming)

    def _merged(self, family: str, existing: dict[str, Any], data: dict[str, Any]) -> list[str]:
        """The tags of an existing Definition with the recipe's; the table decides on the kernels."""
        both = merged(list(existing["tags"]), data["tags"], self.naming)
        tags = kernel_tags(self.root, data).applied(both, self.naming)
        settled = self.lists.merged(data["name"], family, tags)
        return tags if settled == set(tags) else ordered(settled, self.naming)

    def _described(self, text: str, tags: list[str]) -> bool:
        """Whether a description may stay beside these tags.

        Without model: tags, people may name any model whose sizes these are. The first model: tag says who calls the
        kernel, and then the description must say the same.
        """
        return not untagged_models(text, tags, self.titles) and not untagged_sizes(text, tags)

    def _conflict(self, path: Path, data: dict[str, Any], models: tuple[str, ...], reason: str) -> Row:
        """A file for review next to the existing one; one of the same kernel that is already there is kept."""
        version = 2
        while (review := path.with_name(f"{path.stem}_v{version}.json.review")).exists() or review in self.reviews:
            with contextlib.suppress(ExtractionError):  # notes of a reviewer, for example
                if not _differences(self.reviews.get(review) or read_definition(review), data):
                    return Row(CONFLICT, path.stem, models, f"{reason}; see {review.name}, already there")
            version += 1
        self.reviews[review] = data
        text = json_text({**data, "name": f"{path.stem}_v{version}"})
        return Row(CONFLICT, path.stem, models, f"{reason}; see {review.name}", review, text)

    def _definition(self, recipe: Recipe, needs: list[Need]) -> dict[str, Any]:
        """The complete JSON of a Definition."""
        family, axes = self.naming.families[needs[0].family], needs[0].axes
        parts = recipe.document(family.name, axes, describing(needs))
        constants = {name: axis["value"] for name, axis in parts["axes"].items() if axis["type"] == "const"}
        reference = render(self.root, family.op_type, family.name, constants)
        data: dict[str, Any] = {
            "name": _file_name(family, constants),
            "op_type": family.op_type,
            "description": parts["description"],
            "tags": [],
            **{key: parts[key] for key in ("axes", "constraints", "inputs", "outputs")},
            "reference": reference,
        }
        tags = kernel_tags(self.root, data).applied([*parts["tags"]], self.naming)
        data["tags"] = ordered([status(data, self.root), *tags], self.naming)
        return data


def _refusals(family: str, data: Mapping[str, Any]) -> list[str]:
    """Why no kernel of a family computes a Definition; empty if one does, or if none is known."""
    definition = Definition.from_dict(dict(data))
    found = [kernel.unsupported(definition) for kernel in family_kernels(family).values()]
    return [] if None in found else list(dict.fromkeys(filter(None, found)))


def _unclassified(request: Request) -> Iterator[str]:
    """A note on the fields that nobody has classified; those that the code reads make ops unsupported."""
    if fields := unclassified(request.model, UNDERSTOOD):
        yield (
            f"nobody has classified these fields of {request.model.name}: {', '.join(fields)} "
            "(tools/extract_definitions/config_fields.json)"
        )


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The sections in which two Definitions describe different kernels."""
    return [section for section in CONTRACT if _contract(one, section) != _contract(other, section)]


def _contract(data: Mapping[str, Any], section: str) -> Any:
    """A section without its descriptions, in order."""
    value = data.get(section) or ([] if section == "constraints" else None)
    if not isinstance(value, dict):
        return value
    return [(name, {key: what for key, what in entry.items() if key != "description"}) for name, entry in value.items()]


def _file_name(family: NamePattern, axes: Mapping[str, int]) -> str:
    """The name of a Definition.

    Raises:
        ExtractionError: the conventions give one that is no file name.
    """
    name = derive_name(family, axes)
    if "/" in name or "\0" in name:
        raise ExtractionError(
            f"schema/naming.json: a family names a Definition {name[:80]!r}, which is no file name; correct its pattern"
        )
    return name
