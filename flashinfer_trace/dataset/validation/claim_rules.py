"""Rules on kernels: those that tags name, and that there is one."""

from __future__ import annotations

import difflib

from flashinfer_trace.dataset.kernel_tags import KernelTags
from flashinfer_trace.dataset.validation.candidate import Candidate
from flashinfer_trace.dataset.validation.problems import Findings, quote_tag
from flashinfer_trace.kernels.names import CALLED, KINDS, KernelPaths

__all__ = ["check_claims", "check_no_kernel"]

_EMBED = "run `flashinfer-trace sync`"


def check_claims(candidate: Candidate, known: KernelPaths, kernels: KernelTags, findings: Findings) -> None:
    """Checks that each kernel that a tag names exists, takes the Definition, and is in the namespace of its state.

    Args:
        candidate: the Definition.
        known: what exists in the pinned packages.
        kernels: what its tags may say of kernels (`flashinfer_trace.dataset.kernel_tags.kernel_tags`).
        findings: where problems go.
    """
    for index, tag in candidate.tags:
        namespace, _, path = tag.partition(":")
        if namespace not in KINDS or "." not in path:
            continue
        pointer, package = f"/tags/{index}", path.partition(".")[0]
        if package in known.versions and path not in known.paths:
            close = difflib.get_close_matches(path, known.paths, 1)
            offer = f"did you mean {close[0]}? " if close else ""
            hint = f"{offer}if it does exist there, run python -m tools.kernel_paths in a checkout"
            findings.add("tag-path", f"{known.versions[package]} has no {quote_tag(path)}", hint, pointer)
        elif path in kernels.refused:
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
    """Reports a Definition that each kernel of its family refuses, so that it can never be verified."""
    message = f"by the table of kernels, no kernel of the family {family} computes this Definition"
    hint = (
        f"choose sizes that one takes: `flashinfer-trace verify {candidate.name} --against kernel` says what each "
        "needs; or correct the entry in flashinfer_trace/kernels/"
    )
    findings.add("no-kernel", message, hint, "/name")
