"""Inputs of a wrong size, which a reference must refuse: it asserts every const axis that its inputs show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.sandbox.limits import ReferenceFailed


def wrong_sizes(definition: Definition, inputs: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """`inputs` with one const axis of one tensor one too large, then one too small, each with a line that says so.

    The added elements repeat the last ones: every value stays valid.
    """
    for spec in definition.inputs.values():
        for dimension, axis in enumerate(spec.shape or ()):
            size = definition.axes[axis].value
            value = inputs[spec.name]
            if size is None or value.shape[dimension] != size:
                continue
            last = torch.tensor([*range(size), size - 1], device=value.device)
            wrong = {size + 1: take(value, dimension, last)}
            if size > 1:
                wrong[size - 1] = take(value, dimension, last[: size - 1])
            for other, tensor in wrong.items():
                line = f"input {spec.name} with {other} in dimension {dimension}, where axis {axis} is {size}"
                yield line, {**inputs, spec.name: tensor}


def take(value: torch.Tensor, dimension: int, index: torch.Tensor) -> torch.Tensor:
    """`index_select` of any dtype: fp8 has none of its own on a CPU."""
    if value.dtype.itemsize == 1:
        return value.view(torch.uint8).index_select(dimension, index).view(value.dtype)
    return value.index_select(dimension, index)


def accepted_wrong_sizes(
    definition: Definition, inputs: Mapping[str, Any], run: Callable[[Mapping[str, Any]], object]
) -> list[str]:
    """One line for each input of a wrong size that the reference does not refuse with an AssertionError.

    `run` calls the reference on inputs, and raises what the reference raised, or a `ReferenceFailed` that names it.
    """
    lines = []
    for line, wrong in wrong_sizes(definition, inputs):
        raised = raised_by(functools.partial(run, wrong))
        if raised is None:
            lines.append(f"reference: {line}: was accepted; assert the axis")
        elif raised != AssertionError.__name__:
            lines.append(f"reference: {line}: raised {raised} instead of AssertionError; assert the axis")
    return lines


def raised_by(run: Callable[[], object]) -> str | None:
    """The type of what a reference raises here or in a worker, or how else it failed there; None if it returns.

    Raises:
        ReferenceFailed: it has no time left.
    """
    try:
        run()
    except ReferenceFailed as error:
        if error.kind == "too-slow":
            raise
        return error.error or error.kind
    except Exception as error:
        return type(error).__name__
    return None
