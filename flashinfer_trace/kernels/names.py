"""Names of a kernel: its path, the path in tags, ``source:name`` in traces, and its label in a family.

A tag ``fi_api:``, ``sgl_api:`` or ``triton_api:`` names a kernel of the table that ran for the Definition, on whatever
GPU: its evidence includes a run that fits. Every other kernel that the table has for the Definition is ``called_as:``.

Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.kernels.table import KernelFacts

#: Namespace of a kernel that runs -> how the paths begin for which `flashinfer-trace sync` chooses it.
RUN = {
    "fi_api": ("flashinfer.",),
    "sgl_api": ("sgl_kernel.", "sglang.kernels.", "sglang.jit_kernel."),
    "triton_api": ("sglang.srt.", "triton_kernels."),
}
#: Namespace of a kernel that has not been run for the Definition.
CALLED = "called_as"
KINDS = (*RUN, CALLED)
#: How the paths of a source begin. The traces call everything else in SGLang a Triton kernel.
SOURCES = {
    "torch.ops.sgl_kernel.": "sgl-kernel",
    "sgl_kernel.": "sgl-kernel",
    "flash_mla.": "sgl-kernel",
    "sglang.jit_kernel.": "jit",
    "sglang.": "triton",
    "flashinfer.": "flashinfer",
    "deep_gemm.": "deep-gemm",
    "triton_kernels.": "triton-kernels",
}


class HasFacts(Protocol):
    """A kernel of a family, as the harness has it."""

    @property
    def known(self) -> KernelFacts: ...


AnyKernel = TypeVar("AnyKernel", bound=HasFacts)


def namespace_of(path: str) -> str:
    """The namespace of the tag of a kernel that ran; `CALLED` if tags have none for its library."""
    return next((name for name, beginnings in RUN.items() if path.startswith(beginnings)), CALLED)


def key_of(path: str) -> str:
    """``source:name`` of a dotted path; empty for what no trace calls a kernel."""
    source = next((name for start, name in SOURCES.items() if path.startswith(start)), "")
    return f"{source}:{path.rpartition('.')[2]}" if source else ""


def kernels_named(name: str, kernels: Iterable[AnyKernel]) -> list[AnyKernel]:
    """The kernels that a name stands for: every variant if it is the path of several.

    Args:
        name: a label, a path in any release, or the path of a tag, which may be that of a function that calls an op.
        kernels: among which it is looked up.
    """
    kernels = list(kernels)
    exact = [one for one in kernels if one.known.label == name]  # a label may also be the path of other variants
    return exact or [one for one in kernels if name in _names(one)]


def no_kernel_named(name: str, who: str, kernels: Iterable[HasFacts], definitions: Sequence[Definition] = ()) -> str:
    """The message about a name that stands for no kernel, with the nearest ones.

    Args:
        name, kernels: as `kernels_named` takes them.
        who: has these kernels: the subject of the sentence, with its verb.
        definitions: whose tags may name a kernel that has not been run.
    """
    every = list(kernels)
    labels = list(dict.fromkeys(one.known.label for one in every))
    if any(f"{CALLED}:{name}" in one.tags for one in definitions):
        why = f"the tag {CALLED}:{name} says that libraries or models call it, but it has not been run here"
        return f"{who} no kernel {name!r} that can be run: {why}; {_there_are(labels)}"
    known = dict.fromkeys(known for one in every for known in sorted(_names(one)))
    return f"{who} no kernel {name!r}; {_closest(name, list(known)) or _there_are(labels)}"


def _names(kernel: HasFacts) -> set[str]:
    facts = kernel.known
    return {facts.label, facts.path, *facts.tags, *(place.path for place in facts.places)}


def _there_are(labels: Sequence[str]) -> str:
    return f"there {'is' if len(labels) == 1 else 'are'} {', '.join(labels) or 'none'}"


def _closest(name: str, known: Sequence[str]) -> str:
    """A question that suggests the closest names; a function may be given without its module."""
    bare = {one: _function(one) for one in known}
    alike = difflib.get_close_matches(_function(name), set(bare.values()), n=3, cutoff=0.6)
    found = [one for part in alike for one, function in bare.items() if function == part]
    found = found or difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(found[:3])}?" if found else ""


def _function(path: str) -> str:
    """The last part of a path, without a variant."""
    return re.sub(r"\[.*", "", path).rpartition(".")[2]
