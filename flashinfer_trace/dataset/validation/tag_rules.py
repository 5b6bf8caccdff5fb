"""Rules on tags that follow from models/, the family and its kernels: none is missing, and none is there besides."""

from __future__ import annotations

from collections.abc import Iterable

from flashinfer_trace.dataset.kernel_tags import KernelTags
from flashinfer_trace.dataset.model_claims import ModelClaims
from flashinfer_trace.dataset.validation.candidate import Candidate
from flashinfer_trace.dataset.validation.problems import Findings, pointer_of, quote_tag
from flashinfer_trace.format.naming import NamePattern, Naming
from flashinfer_trace.kernels.names import KINDS, KernelPaths

__all__ = ["check_calls", "check_family_tags"]

_CALLS = ("model", "tp", "ep")
_CURATED = "models/curated/claims.json"
_CALLED = f"models/needs/, models/recorded/calls.json or {_CURATED}"
_TAGS = "schema/naming.json"


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
    family: NamePattern,
    kernels: KernelTags,
    known: KernelPaths,
    naming: Naming,
    findings: Findings,
) -> None:
    """The kernels and the other tags, but for the status, are those of the family.

    Args:
        candidate: the Definition.
        family: its family, which has the other tags.
        kernels: what its tags may say of kernels: the rule tag-claim reports what they say otherwise.
        known: what exists in the pinned packages: the rule tag-path reports other paths.
        naming: the namespaces and flags: the rule tag-unknown reports others.
        findings: where problems go.
    """
    of_family = family.tags_of(str(candidate.name))
    expected = of_family | kernels.named
    present = set()
    for index, tag in candidate.tags:
        namespace, colon, value = tag.partition(":")
        if namespace in ("status", *_CALLS) or not (namespace in naming.namespaces if colon else tag in naming.flags):
            continue
        present.add(plain := _plain(tag))
        invented = namespace in KINDS and value.partition(".")[0] in known.versions and value not in known.paths
        if plain not in expected and not invented and plain not in kernels.refused:
            is_kernel = namespace in KINDS
            source = "the table of kernels (flashinfer_trace/kernels/)" if is_kernel else _TAGS
            message = f"{source} does not give the tag {quote_tag(tag)} to this Definition of the family {family.name}"
            hint = f"run `{_embed(candidate)}`, or add it to the {'kernel' if is_kernel else 'family'} there"
            findings.add("tag-unfounded", message, hint, pointer_of("tags", index))
    _check_missing(candidate, of_family - present, _TAGS, findings)
    missing = (tag for tag in kernels.tags if _plain(tag) not in present)
    _check_missing(candidate, missing, "the table of kernels", findings)


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
    return f"flashinfer-trace sync {candidate.name}"


def _listed(tags: Iterable[str]) -> str:
    return ", ".join(sorted(tags, key=lambda tag: (len(tag), tag)))
