"""Outputs that are copies: compared by their bits, because no value tells -0 from 0, or one NaN from another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flashinfer_trace.verdict.compare import Comparison, ErrorBound, Exact, Expected, wrong_shape
from flashinfer_trace.verdict.tensors import as_integers


@dataclass(frozen=True)
class SameBits(Exact):
    """Every element must have the bits of the expected one, which the oracle gives in the output's own dtype."""

    reason: str = "copies, bit for bit"

    def differs(self, actual: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return as_integers(actual) != as_integers(value)


@dataclass(frozen=True)
class PartlyCopied(ErrorBound):
    """Elements that are copied must have the bits of their source; all others are within the bound.

    The oracle gives what `partly_copied` returns.
    """

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        copied, source = expected.parts["copied"], expected.parts["source"]
        if actual.shape != source.shape:
            return wrong_shape(actual, source)
        copies = SameBits().compare(torch.where(copied, actual, source), Expected(source))
        return super().compare(torch.where(copied, 0.0, actual), expected) if copies.passed else copies


def partly_copied(
    value: torch.Tensor,
    parts: Mapping[str, torch.Tensor],
    copied: torch.Tensor,
    source: torch.Tensor,
    exact: bool = False,
) -> Expected:
    """The expectation of an output in which some elements are copies.

    Args:
        value, parts, exact: as of `Expected`, for the others; a value that is copied counts as 0.
        copied: bool, which elements are copies.
        source: their bits, in the dtype of the output; any elsewhere.
    """
    return Expected(torch.where(copied, 0.0, value), {**parts, "copied": copied, "source": source}, exact)
