"""Rules on tags that name kernels."""

from __future__ import annotations

import difflib

from flashinfer_trace.kernel_paths import CALLED, KINDS, KernelPaths
from flashinfer_trace.validation.candidate import Candidate
from flashinfer_trace.validation.problems import Findings, pointer_of, quote

__all__ = ["check_claims"]

_EMBED = "run `flashinfer-trace embed`"


def check_claims(candidate: Candidate, known: KernelPaths, proven: set[str], findings: Findings) -> None:
    """Checks that each kernel that a tag names exists, and is in the namespace that its state demands.

    Args:
        candidate: the Definition.
        known: what exists in the pinned packages.
        proven: the kernels that run for the Definition (`flashinfer_trace.kernel_paths.claimable`).
        findings: where problems go.
    """
    for index, tag in candidate.tags:
        namespace, _, path = tag.partition(":")
        if namespace not in KINDS or "." not in path:
            continue
        pointer, package = pointer_of("tags", index), path.partition(".")[0]
        if package in known.versions and path not in known.paths:
            close = difflib.get_close_matches(path, known.paths, 1)
            offer = f"did you mean {close[0]}? " if close else ""
            hint = f"{offer}if it does exist there, run python -m tools.kernel_paths in a checkout"
            findings.add("tag-path", f"{known.versions[package]} has no {quote(path)}", hint, pointer)
        elif namespace == CALLED and path in proven:
            findings.add("tag-claim", f"{quote(path)} runs here, so {CALLED}: says too little", _EMBED, pointer)
        elif namespace != CALLED and path not in proven:
            message = f"{namespace}: claims a run, but no kernel of the record runs {quote(path)} for this Definition"
            findings.add("tag-claim", message, f"{_EMBED}, or add the kernel to the family's record", pointer)
