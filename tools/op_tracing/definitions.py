"""Which Definitions cover a traced kernel: those whose record runs it, apart from those that only name it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flashinfer_trace import Definition, find_root
from flashinfer_trace.kernel_coverage import Standing, definitions_by_kernel

#: `source:name` of a kernel -> sorted names of Definitions.
Covered = Mapping[str, list[str]]


def covered(definitions: Iterable[Definition]) -> Covered:
    """The Definitions for which a kernel runs."""
    return definitions_by_kernel(find_root(), definitions, Standing.RUNS)


def only_named(definitions: Iterable[Definition]) -> Covered:
    """The Definitions that name a kernel that nobody runs for them."""
    return definitions_by_kernel(find_root(), definitions, Standing.NAMED)


def kernel_key(kernel: Mapping[str, Any]) -> str:
    """`source:name` of a traced kernel. A method (`Wrapper.run`) is covered if its class is."""
    return f"{kernel['source']}:{kernel['name'].partition('.')[0]}"


def definitions_of(kernel: Mapping[str, Any], known: Covered) -> list[str]:
    """Names of the Definitions of a traced kernel."""
    return known.get(kernel_key(kernel), [])
