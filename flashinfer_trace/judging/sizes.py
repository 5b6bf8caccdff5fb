"""At which sizes a kernel is judged on a CPU if nobody says: its Definition's own, or those of a small twin."""

from __future__ import annotations

import dataclasses

from flashinfer_trace.format.constraints import parse
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family
from flashinfer_trace.harness.twins import has_real_size

__all__ = ["small_by_default", "unseen", "with_own_constants"]

#: The window of keys up to which the corners of attention take seconds on a CPU where a request has several queries:
#: each of them has keys of its own.
LARGEST_WINDOW = 512

#: Tokens of a page: a kernel for pages of one needs no length of the last page.
PAGE = "page_size"


def small_by_default(definition: Definition, device: str) -> bool:
    """Whether a Definition is judged at the sizes of its family's small twin if nobody says at which."""
    wide = "qo_indptr" in definition.inputs and definition.const_axes.get("window_size", 0) > LARGEST_WINDOW
    return device == "cpu" and (wide or not has_real_size(definition))


def with_own_constants(definition: Definition, family: Family) -> Family:
    """The family with a twin that keeps constants that kernels have built in although they take sizes from shapes."""
    own = unseen(definition) | {PAGE}
    return dataclasses.replace(family, twin={axis: value for axis, value in family.twin.items() if axis not in own})


def unseen(definition: Definition) -> set[str]:
    """The constant axes that no tensor's shape shows, such as a window."""
    tensors = [*definition.inputs.values(), *definition.outputs.values()]
    shown = {axis: definition.const_axes.get(axis, 1) for tensor in tensors for axis in tensor.shape or ()}
    for text in definition.constraints:
        shown |= parse(text).solve(shown)
    return definition.const_axes.keys() - shown.keys()
