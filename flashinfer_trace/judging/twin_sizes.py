"""Sizes of a judgment that nobody chose: a Definition's own, or on a CPU those of a twin that cuts no sum if it can.

The small twin of a family is made for verifying hundreds of references. A kernel that reads 64 of 16,384 features is
right there, so a judgment keeps the features that are summed, and has a few tiles of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flashinfer_trace.format.constraints import parse
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family
from flashinfer_trace.harness.plans import input_bytes
from flashinfer_trace.harness.twins import has_real_size

#: The window of keys up to which the corners of attention take seconds on a CPU where a request has several queries:
#: each of them has keys of its own.
LARGEST_WINDOW = 512

#: Tokens of a page: a kernel for pages of one needs no length of the last page.
PAGE = "page_size"

#: Axes that a product of attention sums over, or whose number of features is small anyway.
FEATURES_OF_HEADS = ("head_dim", "qk_dim", "vo_dim")
#: Axes that a product sums over, and those that follow from them.
SUMMED = ("k", "K", "k_bytes", "num_k_blocks", "padded_scales", "num_groups", "k_packed", "group_size")
#: Output features: two tiles of 128 or one, and a rest that is whole for every format of 16 or fewer elements.
WIDTHS = (2 * 128 + 48, 128 + 48)
#: How axes follow from the output features.
OF_WIDTH: Mapping[str, Callable[[int], int]] = {
    "n": lambda n: n,
    "N": lambda n: n,
    "half_n": lambda n: n // 2,
    "num_n_blocks": lambda n: -(-n // 128),
    "padded_n": lambda n: -(-n // 128) * 128,
}
#: The two sums of a layer of experts: only one at a time is as long as the Definition's.
HIDDEN = ("hidden_size", "hidden_bytes", "num_hidden_blocks")
INTERMEDIATE = (
    *("intermediate_size", "intermediate_bytes", "num_intermediate_blocks"),
    *("gemm1_out_size", "num_gemm1_out_blocks"),
)
EXPERTS = "num_local_experts"

#: Memory of the inputs up to which all cases are run at these sizes, and up to which a few are.
ALL_BYTES, FEW_BYTES = 40 * 2**20, 60 * 2**20


@dataclass(frozen=True)
class JudgedTwins:
    """At which sizes a Definition is judged that is too large for a CPU: those of the family's twin, in most cases.

    Attributes:
        longer: families with twins of a few more cases, each with a sum or a number of outputs that the first one cuts.
        cut: sums that are never as long as the Definition's.
    """

    family: Family
    longer: tuple[Family, ...] = ()
    cut: tuple[str, ...] = ()


def small_by_default(definition: Definition, device: str) -> bool:
    """Whether a Definition is judged at the sizes of a twin if nobody says at which."""
    wide = "qo_indptr" in definition.inputs and definition.const_axes.get("window_size", 0) > LARGEST_WINDOW
    return device == "cpu" and (wide or not has_real_size(definition))


def twins_of(definition: Definition, family: Family) -> JudgedTwins:
    """The sizes at which a Definition is judged by default that is too large for a CPU."""
    family = with_own_constants(definition, family)
    if "hidden_size" in family.twin and "intermediate_size" in family.twin:
        return _of_experts(definition, family)
    small = family.twin.get("n", family.twin.get("N", 0))
    own = definition.const_axes.get("n", definition.const_axes.get("N", 0))
    whole = family.twin.get("num_n_blocks", 0) * 128 == small  # weights are whole blocks
    for width in (*WIDTHS, small):
        width = min(own, OF_WIDTH["padded_n"](width) if whole else width)
        twin = {axis: value for axis, value in family.twin.items() if axis not in SUMMED}
        twin |= {axis: of(width) for axis, of in OF_WIDTH.items() if axis in twin}
        if input_bytes(definition.with_const_axes(twin)) <= ALL_BYTES:
            longer = (family,) if small > width else ()
            return JudgedTwins(dataclasses.replace(family, twin=twin), longer)
    return JudgedTwins(family, cut=tuple(axis for axis in ("k", "K") if axis in family.twin))


def _of_experts(definition: Definition, family: Family) -> JudgedTwins:
    """A layer of experts has two products: each is as long as the Definition's in a few cases, with few experts."""
    longer, cut = [], []
    for axes in (HIDDEN, INTERMEDIATE):
        experts = family.twin[EXPERTS]
        for count in (experts, 4, 2, 1):
            twin = {axis: value for axis, value in family.twin.items() if axis not in axes} | {EXPERTS: count}
            if input_bytes(definition.with_const_axes(twin)) <= FEW_BYTES:
                longer.append(dataclasses.replace(family, twin=twin))
                break
        else:
            cut.append(axes[0])
    return JudgedTwins(family, tuple(longer), tuple(cut))


def with_own_constants(definition: Definition, family: Family) -> Family:
    """The family with a twin that keeps constants that kernels have built in although they take sizes from shapes, and
    the features of heads."""
    own = unseen(definition) | {PAGE, *FEATURES_OF_HEADS}
    return dataclasses.replace(family, twin={axis: value for axis, value in family.twin.items() if axis not in own})


def unseen(definition: Definition) -> set[str]:
    """The constant axes that no tensor's shape shows, such as a window."""
    tensors = [*definition.inputs.values(), *definition.outputs.values()]
    shown = {axis: definition.const_axes.get(axis, 1) for tensor in tensors for axis in tensor.shape or ()}
    for text in definition.constraints:
        shown |= parse(text).solve(shown)
    return definition.const_axes.keys() - shown.keys()
