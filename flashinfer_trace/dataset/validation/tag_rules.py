"""Rules on what tags and names claim: models, the family, kernels, what is computed, and what others mean by a name."""

from __future__ import annotations

from collections.abc import Iterable

from flashinfer_trace.dataset.flashinfer_bench import Compatibility
from flashinfer_trace.dataset.kernel_tags import KernelTags
from flashinfer_trace.dataset.model_claims import ModelClaims
from flashinfer_trace.dataset.validation.candidate import Candidate
from flashinfer_trace.dataset.validation.problems import Findings, pointer_of, quote, quote_tag
from flashinfer_trace.format.naming import NamePattern, Naming
from flashinfer_trace.kernels.names import CALLED, KINDS

_CALLS = ("model", "tp", "ep")
_CURATED = "models/curated/claims.json"
_CALLED = f"models/needs/, models/recorded/ or {_CURATED}"
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
    naming: Naming,
    findings: Findings,
) -> None:
    """The kernels and the other tags, but for the status, are those of the family."""
    of_family = family.tags_of(str(candidate.name))
    expected = of_family | kernels.named
    present = set()
    for index, tag in candidate.tags:
        namespace, colon, _ = tag.partition(":")
        if namespace in ("status", *_CALLS) or not (namespace in naming.namespaces if colon else tag in naming.flags):
            continue
        present.add(plain := _plain(tag))
        if plain not in expected and plain not in kernels.refused:
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


_EMBED = "run `flashinfer-trace sync`"


def check_claims(candidate: Candidate, kernels: KernelTags, findings: Findings) -> None:
    """Checks that each kernel that a tag names takes the Definition, and is in the namespace of its state."""
    for index, tag in candidate.tags:
        namespace, _, path = tag.partition(":")
        if namespace not in KINDS or "." not in path:
            continue
        pointer = f"/tags/{index}"
        if path in kernels.refused:
            refused = quote_tag(path)
            message = f"by the table of kernels, {refused} computes this Definition neither alone nor in a pipeline"
            hint = f"{_EMBED}, or correct what flashinfer_trace/kernels/ says that it needs"
            findings.add("tag-claim", message, hint, pointer)
        elif namespace == CALLED and path in kernels.proven:
            findings.add("tag-claim", f"{quote_tag(path)} ran for this, so {CALLED}: says too little", _EMBED, pointer)
        elif namespace != CALLED and path not in kernels.proven:
            message = (
                f"{namespace}: claims a run, but this Definition's evidence has none of {quote_tag(path)} that fits"
            )
            findings.add("tag-claim", message, f"record one, or {_EMBED}", pointer)


def check_no_kernel(candidate: Candidate, family: str, findings: Findings) -> None:
    """Reports a Definition that each kernel of its family refuses, so it can never be verified."""
    message = f"by the table of kernels, no kernel of the family {family} computes this Definition"
    hint = (
        f"choose sizes that one takes: `flashinfer-trace verify {candidate.name} --against kernel` says what each "
        "needs; or correct the entry in flashinfer_trace/kernels/"
    )
    findings.add("no-kernel", message, hint, "/name")


_FIX = "use another name, or list the difference with its reason in schema/compatibility.json"


def check_meaning(candidate: Candidate, known: Compatibility, findings: Findings) -> None:
    """Checks that a Definition takes the workloads and solutions of the one of the same name there."""
    if candidate.name not in known.definitions or candidate.definition is None:
        return
    for one in known.unexpected(candidate.data):
        message = (
            f"in flashinfer-bench's dataset, {one.place} of this name is {quote(one.theirs)}, not {quote(one.ours)}"
        )
        findings.add("name-meaning", message, _FIX, "/name")


#: dtypes of tensors that are computed with, or that hold indices, rather than codes of a quantized format.
_NO_CODES = {"bfloat16", "float16", "float32", "int32", "int64", "bool"}


def check_tag_meanings(candidate: Candidate, findings: Findings) -> None:
    """Tags that say what a Definition computes show in its name, op_type and tensors."""
    dtypes = {tensor.dtype for tensor in (*candidate.inputs.values(), *candidate.outputs.values())}
    if not candidate.has_all_tensors or candidate.name is None:
        return
    computes = any(dtype.startswith(("bfloat", "float")) for dtype in dtypes)
    shown = {
        "causal": ("causal" in candidate.name, "the name does not say causal"),
        "paged": (
            any("page" in one or "indices" in one for one in (*candidate.declared_axes, *candidate.inputs)),
            "no axis or input is about pages or indices",
        ),
        "quantization:": (not computes or not dtypes <= _NO_CODES, "no input or output holds quantized numbers"),
        "routing:": (candidate.op_type == "moe", "only the op_type moe chooses experts"),
    }
    for index, tag in candidate.tags:
        holds, reason = shown.get("".join(tag.partition(":")[:2]), (True, ""))
        if not holds:
            findings.add("tag-meaning", f"{tag}: {reason}", "remove the tag", pointer_of("tags", index))
