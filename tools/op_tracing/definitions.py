"""Which Definitions cover a kernel: those whose `fi_api:`, `sgl_api:` or `triton_api:` tag names it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from flashinfer_trace import Definition

#: Namespace of a tag -> the source of the kernels that it names, as spelled in kernel traces.
TAGS = {"fi_api": "flashinfer", "sgl_api": "sgl-kernel", "triton_api": "triton"}

Covered = dict[tuple[str, str], list[str]]


def covered(definitions: Iterable[Definition]) -> Covered:
    """(source, name of the function or class) -> sorted names of the Definitions."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for definition in definitions:
        for tag in definition.tags:
            namespace, _, path = tag.partition(":")
            if namespace in TAGS:
                found[TAGS[namespace], path.rpartition(".")[2]].add(definition.name)
    return {key: sorted(names) for key, names in found.items()}


def definitions_of(kernel: Mapping[str, Any], known: Covered) -> list[str]:
    """Names of the Definitions of a traced kernel. A method (`Wrapper.run`) is covered if its class is."""
    return known.get((kernel["source"], kernel["name"].partition(".")[0]), [])
