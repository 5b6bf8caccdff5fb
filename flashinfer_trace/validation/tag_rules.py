"""Rules on tags that follow from models/: none is missing, and none is there that nothing gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flashinfer_trace.kernel_paths import KINDS, Claimable, KernelPaths, paths_of_tags
from flashinfer_trace.model_claims import ModelClaims
from flashinfer_trace.naming import Naming
from flashinfer_trace.records import Records
from flashinfer_trace.validation.candidate import Candidate
from flashinfer_trace.validation.problems import Findings, pointer_of, quote, quote_tag

__all__ = ["check_calls", "check_family_file", "check_family_tags"]

_CALLS = ("model", "tp", "ep")
_CURATED = "models/curated/claims.json"
_CALLED = f"models/needs/, models/recorded/calls.json or {_CURATED}"
_SHARED = "models/curated/family_tags.json"


def check_calls(candidate: Candidate, claims: ModelClaims, findings: Findings) -> None:
    """The model:, tp: and ep: tags are those of the models that call the Definition, and of the claims about it.

    A model: tag that nothing gives breaks the rule tag-model (`model_rules.check_models`).
    """
    given = claims.calls(str(candidate.name))
    of_calls = [(index, tag) for index, tag in candidate.tags if tag.partition(":")[0] in _CALLS]
    for index, tag in of_calls:
        if not tag.startswith("model:") and tag not in given:
            namespace = tag.partition(":")[0]
            known = _listed(one for one in given if one.startswith(f"{namespace}:"))
            others = f"the {namespace}: tags that follow from it are {known}" if known else f"no {namespace}: tag does"
            message = f"the tag {quote_tag(tag)} does not follow from models/; {others}"
            hint = f"run `{_embed(candidate)}`, or claim it with its source in {_CURATED}"
            findings.add("tag-unfounded", message, hint, pointer_of("tags", index))
    _check_missing(candidate, given - {tag for _, tag in of_calls}, _CALLED, findings)


def check_family_tags(
    candidate: Candidate,
    family: str,
    claims: ModelClaims,
    kernels: Claimable,
    known: KernelPaths,
    naming: Naming,
    findings: Findings,
) -> None:
    """The kernels and the other tags, but for the status, are those of the family.

    Args:
        candidate: the Definition.
        family: its family.
        claims: what models/ says of families.
        kernels: what its tags may say of kernels: the rule tag-claim reports what they say otherwise.
        known: what exists in the pinned packages: the rule tag-path reports other paths.
        naming: the namespaces and flags: the rule tag-unknown reports others.
        findings: where problems go.
    """
    given = claims.shares(str(candidate.name), family, kernels)
    if given is None:
        message = f"{_SHARED} has no family {family}"
        hint = "run `python -m tools.family_tags` in a checkout, which adds it from the tags of its Definitions"
        findings.add("tag-unfounded", message, hint, "/tags")
        return
    expected = {_plain(tag) for tag in given}
    present = set()
    for index, tag in candidate.tags:
        namespace, colon, value = tag.partition(":")
        if namespace in ("status", *_CALLS) or not (namespace in naming.namespaces if colon else tag in naming.flags):
            continue
        present.add(plain := _plain(tag))
        invented = namespace in KINDS and value.partition(".")[0] in known.versions and value not in known.paths
        if plain not in expected and not invented and plain not in kernels.refused:
            message = f"{_SHARED} does not give the tag {quote_tag(tag)} to this Definition of the family {family}"
            hint = f"run `{_embed(candidate)}`, or add it to the family there"
            findings.add("tag-unfounded", message, hint, pointer_of("tags", index))
    if expected - present:
        _check_missing(candidate, (tag for tag in given if _plain(tag) not in present), _SHARED, findings)


def check_family_file(
    data: Mapping[str, Any], known: KernelPaths, records: Records, naming: Naming, findings: Findings
) -> None:
    """Checks models/curated/family_tags.json by itself: each kernel is one that exists, each family a known one.

    Args:
        data: its JSON, which `flashinfer_trace.model_claims.load_model_claims` has accepted.
        known: what exists in the pinned packages.
        records: the kernels that the families' records run, which may be of other packages.
        naming: the families.
        findings: those of the file.
    """
    for family, groups in data["families"].items():
        if family not in naming.families:
            message = f"schema/naming.json has no family {quote(family)}"
            findings.add("tag-unfounded", message, "remove it, or correct its name", pointer_of("families", family))
        kernels = records.families.get(family, {}).values()
        run = {path for kernel in kernels for path in paths_of_tags(known, kernel)}
        for index, group in enumerate(groups):
            for place, path in enumerate(group.get("kernels", ())):
                if path in known.paths or path in run:
                    continue
                package = known.versions.get(path.partition(".")[0])
                where = f"{package} has no {quote_tag(path)}" if package else f"no pinned package has {quote_tag(path)}"
                message = f"{where}, and no kernel of the record of {family} is it"
                hint = "name what the library exports; see schema/kernel_paths.json"
                pointer = pointer_of("families", family, index, "kernels", place)
                findings.add("tag-path", message, hint, pointer)


def _plain(tag: str) -> str:
    """A kernel without its namespace, which the rule tag-claim checks; any other tag as it is."""
    namespace, _, value = tag.partition(":")
    return value if namespace in KINDS else tag


def _check_missing(candidate: Candidate, tags: Iterable[str], source: str, findings: Findings) -> None:
    if isinstance(candidate.data.get("tags"), list):
        for tag in sorted(tags):
            message = f"the tag {quote_tag(tag)} is missing, which {source} gives to this Definition"
            findings.add("tag-missing", message, f"run `{_embed(candidate)}`, or correct that file", "/tags")


def _embed(candidate: Candidate) -> str:
    return f"flashinfer-trace embed {candidate.name}"


def _listed(tags: Iterable[str]) -> str:
    return ", ".join(sorted(tags, key=lambda tag: (len(tag), tag)))
