"""Which Definitions cover a kernel, by their tags.

A Definition covers the kernels that run for it (`fi_api:`, `sgl_api:`, `triton_api:`). Those that it only names
(`called_as:`) are kept apart: nobody ran them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from flashinfer_trace import Definition, find_root
from flashinfer_trace.kernel_paths import CALLED, RUN, load_kernel_paths

#: Namespace of a tag -> the source of the kernels that it names, as spelled in kernel traces.
TAGS = {"fi_api": "flashinfer", "sgl_api": "sgl-kernel", "triton_api": "triton"}

Covered = dict[tuple[str, str], list[str]]


def covered(definitions: Iterable[Definition]) -> Covered:
    """(source, name of the function or class) -> sorted names of the Definitions for which that kernel runs."""
    return _by_kernel(definitions, False)


def only_named(definitions: Iterable[Definition]) -> Covered:
    """The same for kernels that a Definition names, but that nobody ran for it."""
    return _by_kernel(definitions, True)


def _by_kernel(definitions: Iterable[Definition], called: bool) -> Covered:
    # Traces name the function that is defined, tags the one that is exported: an op that both call connects them.
    ops = load_kernel_paths(find_root()).ops
    also = {function: op.rpartition(".")[2] for op, functions in ops.items() for function in functions}
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for definition in definitions:
        for tag in definition.tags:
            namespace, _, path = tag.partition(":")
            if namespace == CALLED and called:
                namespace = next((name for name, starts in RUN.items() if path.startswith(starts)), "")
            elif called:
                continue
            if namespace in TAGS:
                for name in {path.rpartition(".")[2], also.get(path, path.rpartition(".")[2])}:
                    found[TAGS[namespace], name].add(definition.name)
    return {key: sorted(names) for key, names in found.items()}


def definitions_of(kernel: Mapping[str, Any], known: Covered) -> list[str]:
    """Names of the Definitions of a traced kernel. A method (`Wrapper.run`) is covered if its class is."""
    return known.get((kernel["source"], kernel["name"].partition(".")[0]), [])
