"""The sizes of a recorded call that a family describes and the dataset lacks."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flashinfer_trace import Definition, TensorSpec
from flashinfer_trace.format.constraints import parse
from flashinfer_trace.format.naming import NamePattern, NamingError, derive_name
from tools.runtime_tracing.attention_calls import read_inputs, settings_of_attention
from tools.runtime_tracing.matching import Shape, computes, is_sized, numbers, settings, tensors
from tools.runtime_tracing.recording import RecordedCall
from tools.runtime_tracing.recurrent_calls import sizes_of

#: The most axes of a family that no tensor of a call has: each is looked for among the numbers of the call.
MOST_UNKNOWN = 2
#: The most ways in which a call's tensors are tried as a family's inputs.
MOST_WAYS = 200
_NAMED = re.compile(r"\b(\w+): [a-z]+\d\w*\[(\d+(?:,\d+)*)\]")


def new_sizes(
    call: RecordedCall, pattern: NamePattern, siblings: Sequence[Definition], window: int | None
) -> dict[str, dict[str, int]]:
    """The const axes of each Definition of a family that the call would compute, by the name it would have.

    If several would do, those are left that fit the names of the call's tensors, and its outputs, best.

    Args:
        call: the call.
        pattern: the family.
        siblings: its Definitions.
        window: as `matching.computes` takes it.
    """
    found: dict[str, dict[str, int]] = {}
    fits: dict[str, int] = {}
    # References hold the differences between Definitions of a family besides sizes, such as an epsilon.
    templates = {(one.reference.count("\n"), _fixed(one)): one for one in reversed(siblings)}
    for template in templates.values():
        for axes in _candidates(call, template, window):
            if min(axes.values(), default=1) < 1 or any(axes.get(axis) != value for axis, value in pattern.where):
                continue
            try:
                name = derive_name(pattern, axes)
            except NamingError:
                continue
            made = _with_axes(template, name, axes)
            if name not in found and computes(call, made, window):
                found[name], fits[name] = axes, _fit(call, made)
    best = max(fits.values(), default=0)
    return {name: axes for name, axes in found.items() if fits[name] == best}


def _fit(call: RecordedCall, definition: Definition) -> int:
    """How many tensors of a Definition a call has, by name or as an output, less those of other sizes."""
    const, fit = definition.const_axes, 0
    named = {
        name.removesuffix("_ptr"): tuple(map(int, sizes.split(","))) for name, sizes in _NAMED.findall(call.arguments)
    }
    for name, one in definition.inputs.items():
        if name in named and one.shape is not None:
            fit += 1 if _same(one.shape, named[name], const) else -1
    given = tensors(call.arguments)
    for one in definition.outputs.values():
        fit += any(dtype == one.dtype and _same(one.shape or (), shape, const) for dtype, shape in given)
    return fit


def _same(axes: Sequence[str], shape: Shape, const: Mapping[str, int]) -> bool:
    sizes = [size for size in shape if size != 1] if len(shape) > len(axes) else shape
    return len(sizes) == len(axes) and all(
        const.get(axis, size) == size for axis, size in zip(axes, sizes, strict=True)
    )


def _fixed(definition: Definition) -> tuple[str, ...]:
    """The constants of a reference that are not sizes."""
    lines = (line for line in definition.reference.splitlines() if line[:1].isupper() and " = " in line)
    return tuple(line for line in lines if not line.rpartition(" = ")[2].strip().isdigit())


def _with_axes(template: Definition, name: str, values: Mapping[str, int]) -> Definition:
    axes = {key: dataclasses.replace(axis, value=values.get(key, axis.value)) for key, axis in template.axes.items()}
    return dataclasses.replace(template, name=name, axes=axes)


def _candidates(call: RecordedCall, template: Definition, window: int | None) -> Iterator[dict[str, int]]:
    """Const axes that fit the tensors, settings and constraints; whether the call computes them is not checked."""
    names = list(template.const_axes)
    if (named_sizes := sizes_of(call, template)) is not None:
        yield from [{name: named_sizes[name] for name in names}] if named_sizes else []
        return
    given = tensors(call.arguments)
    inputs = [one for one in read_inputs(call, template.inputs) if is_sized(one, template.const_axes, given)]
    inputs.sort(key=lambda one: one.dtype == "float32")
    ordered = sorted(given, key=lambda one: one[0] == "float32")
    codes = next((one.dtype for one in inputs if one.dtype.startswith("float8")), None)
    named = {name: int(value) for name, value in settings(call.arguments).items() if name in names and value.isdigit()}
    of_attention = settings_of_attention(call.arguments, window)
    named |= {name: int(value) for name, value in of_attention.items() if name in names}
    seen: set[tuple[tuple[str, int], ...]] = set()
    for bound in itertools.islice(_assigned(inputs, ordered, set(names), named, codes), MOST_WAYS):
        known = {name: value for name, value in bound.items() if name in names}
        if (key := tuple(sorted(known.items()))) not in seen:
            seen.add(key)
            # A group's size may be no number of the call: that of the family's other Definitions is tried too.
            among = numbers(call.arguments) | set(template.const_axes.values())
            yield from _completed(known, names, template.constraints, among)


def _completed(
    known: Mapping[str, int], names: Sequence[str], constraints: Iterable[str], among: Iterable[int]
) -> Iterator[dict[str, int]]:
    """The axes with those that no tensor has: by constraints, or among the numbers of the call."""
    rules = [parse(text) for text in constraints]
    axes = _solved(known, names, rules)
    missing = [name for name in names if name not in axes]
    if len(missing) > MOST_UNKNOWN:
        return
    for values in itertools.product(sorted(among), repeat=len(missing)):
        complete = _solved({**axes, **dict(zip(missing, values, strict=True))}, names, rules)
        if all(rule.evaluate(complete) for rule in rules if rule.names <= complete.keys()):
            yield {name: complete[name] for name in names}


def _solved(known: Mapping[str, int], names: Sequence[str], rules: Sequence[Any]) -> dict[str, int]:
    axes, before = dict(known), -1
    while before != len(axes):
        before = len(axes)
        for rule in rules:
            axes |= {name: value for name, value in rule.solve(axes).items() if name in names and name not in axes}
    return axes


def _assigned(
    inputs: Sequence[TensorSpec],
    given: Sequence[tuple[str, Shape]],
    const: set[str],
    bound: Mapping[str, int],
    codes: str | None,
) -> Iterator[dict[str, int]]:
    """The sizes for each way to give every input a tensor of its dtype, in the order of both."""
    if not inputs:
        yield dict(bound)
        return
    first, *rest = inputs
    dtypes = {first.dtype, codes} if first.dtype == "bfloat16" else {first.dtype}
    for index, (dtype, shape) in enumerate(given):
        if dtype in dtypes:
            for sizes in _fits(first.shape or (), shape, const, bound):
                yield from _assigned(rest, given[index + 1 :], const, {**bound, **sizes}, codes)


def _fits(axes: Sequence[str], shape: Shape, const: set[str], bound: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The sizes of a tensor's axes for each way in which its shape fits (see `matching`)."""
    if len(shape) > len(axes):
        shape = tuple(size for size in shape if size != 1)
    ways = [tuple(axes)]
    if len(axes) >= 2 and const.issuperset(axes):
        ways.append((*axes[:-2], axes[-1], axes[-2]))
    for way in ways:
        pairs = dict(zip(way, shape, strict=False))
        if len(way) == len(shape) and all(bound.get(axis, size) == size for axis, size in pairs.items()):
            repeated = len(pairs) == len(way) or all(pairs[axis] == size for axis, size in zip(way, shape, strict=True))
            if repeated:
                yield pairs
    extra = len(shape) - len(axes)
    if extra > 0 and axes and axes[0] not in const:  # rows in several axes
        pairs = dict(zip(axes[1:], shape[extra + 1 :], strict=True))
        if all(bound.get(axis, size) == size for axis, size in pairs.items()):
            yield pairs
    if (
        len(axes) == 3 and len(shape) == 2 and axes[0] not in const and (heads := bound.get(axes[1]))
    ):  # heads in one axis
        width, rest = divmod(shape[1], heads)
        if rest == 0 and bound.get(axes[2], width) == width:
            yield {axes[2]: width}
