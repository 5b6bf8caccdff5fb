"""Which Definitions cover a kernel of a trace: those for which it runs. Those that only name it do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashinfer_trace import Definition, find_root
from flashinfer_trace.kernel_coverage import definitions_with_kernel, key_of_traced

__all__ = ["Covered", "covered", "definitions_of"]

#: ``source:name`` of a kernel -> names of Definitions.
Covered = Mapping[str, Sequence[str]]


def covered(definitions: Iterable[Definition]) -> Covered:
    """The Definitions that cover each kernel."""
    return definitions_with_kernel(find_root(), definitions)


def definitions_of(kernel: Mapping[str, Any], known: Covered) -> Sequence[str]:
    """Names of the Definitions of a traced kernel."""
    return known.get(key_of_traced(kernel), ())
