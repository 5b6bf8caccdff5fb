"""Which Definitions cover a kernel of a trace: those for which it runs. Those that only name it do not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashinfer_trace import Definition, find_root
from flashinfer_trace.dataset.coverage import definitions_with_kernel
from flashinfer_trace.format.naming import family_name, load_naming
from flashinfer_trace.kernels.names import key_of_traced
from tools.kernel_tracing.report.render import Cover

__all__ = ["Covered", "covered", "definitions_of", "first_sentence", "functions", "page_cover"]

#: ``source:name`` of a kernel -> names of Definitions.
Covered = Mapping[str, Sequence[str]]


def covered(definitions: Iterable[Definition]) -> Covered:
    """The Definitions that cover each kernel."""
    return definitions_with_kernel(find_root(), definitions)


def definitions_of(kernel: Mapping[str, Any], known: Covered) -> Sequence[str]:
    """Names of the Definitions of a traced kernel."""
    return known.get(key_of_traced(kernel), ())


def functions(definitions: Iterable[Definition], known: Covered) -> dict[str, str]:
    """What each covered kernel computes, in the words of a reference, and how many other families it computes.

    A kernel may be a step of what a Definition describes: the family with the fewest inputs says most of it.
    """
    dataset, naming, found = {one.name: one for one in definitions}, load_naming(find_root()), {}
    for key, names in known.items():
        families: dict[str | None, Definition] = {}
        for name in names:
            families.setdefault(family_name(dataset[name], naming), dataset[name])
        simplest = min(families.values(), key=lambda one: len(one.inputs))
        others = len(families) - 1
        more = f" (and functions of {others} other {'family' if others == 1 else 'families'})" if others else ""
        found[key] = first_sentence(simplest) + more
    return found


def page_cover(definitions: Iterable[Definition], known: Covered) -> Cover:
    """What the pages of a kernel trace say about kernels that have Definitions."""
    computed = functions(definitions, known)
    return Cover(lambda kernel: definitions_of(kernel, known), lambda kernel: computed.get(key_of_traced(kernel), ""))


def first_sentence(definition: Definition) -> str:
    """The first sentence of the reference's docstring, which gives no sizes."""
    paragraph = (ast.get_docstring(ast.parse(definition.reference)) or "").partition("\n\n")[0]
    text = " ".join(paragraph.split())
    end = re.match(r".*?\.(?=\s+[A-Z`]|$)", text)
    return end[0] if end else text
