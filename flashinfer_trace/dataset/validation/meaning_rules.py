"""Rules on meanings: names that flashinfer-bench's dataset uses too, and tags that say what is computed."""

from __future__ import annotations

from flashinfer_trace.dataset.flashinfer_bench import Compatibility
from flashinfer_trace.dataset.validation.candidate import Candidate
from flashinfer_trace.dataset.validation.problems import Findings, pointer_of, quote

__all__ = ["check_meaning", "check_tag_meanings"]

_FIX = "use another name, or list the difference with its reason in schema/compatibility.json"


def check_meaning(candidate: Candidate, known: Compatibility, findings: Findings) -> None:
    """Checks that a Definition takes the workloads and solutions of the one of the same name there.

    Args:
        candidate: the Definition; a malformed one has problems of its own.
        known: facts and decisions.
        findings: where problems go.
    """
    if candidate.name not in known.definitions or candidate.definition is None:
        return
    for one in known.unexpected(candidate.data):
        message = (
            f"in flashinfer-bench's dataset, {one.place} of this name is {quote(one.theirs)}, not {quote(one.ours)}"
        )
        findings.add("name-meaning", message, _FIX, "/name")


#: dtypes of tensors that are computed with, or that hold indices, rather than codes of a quantised format.
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
        "quantization:": (not computes or not dtypes <= _NO_CODES, "no input or output holds quantised numbers"),
        "routing:": (candidate.op_type == "moe", "only the op_type moe chooses experts"),
    }
    for index, tag in candidate.tags:
        holds, reason = shown.get("".join(tag.partition(":")[:2]), (True, ""))
        if not holds:
            findings.add("tag-meaning", f"{tag}: {reason}", "remove the tag", pointer_of("tags", index))
