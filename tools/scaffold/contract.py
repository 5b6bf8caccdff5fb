"""The axes, inputs and outputs of a new family, as declared on the command line, and the pattern of its names."""

from __future__ import annotations

import itertools
import json
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

AXIS = re.compile(r"([a-z][a-z0-9_]*)(?:=([1-9][0-9]*)(?: ?\* ?([a-z][a-z0-9_]*))?)?")
TENSOR = re.compile(r"([A-Za-z][A-Za-z0-9_]*):([a-z0-9_]+)(?:\[([a-z0-9_, ]*)\])?")
#: The largest value of an axis that schema/definition.schema.json allows.
MAX_VALUE = 2**31 - 1
#: Names that must stay available in the reference: a parameter of run() cannot have them.
RESERVED = frozenset({"torch", "math", "run", "TODO"})


class ScaffoldError(Exception):
    """The files cannot be written; the message says why."""


@dataclass(frozen=True)
class Tensor:
    """One input or output; `shape` is None for a scalar."""

    name: str
    dtype: str
    shape: tuple[str, ...] | None


@dataclass(frozen=True)
class Contract:
    """Axes with their values (None for a variable axis), and inputs and outputs in order.

    `derived` gives the axes that are a multiple of another: name -> (factor, axis).
    """

    axes: Mapping[str, int | None]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    derived: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def const_axes(self) -> dict[str, int]:
        """The axes that have a value."""
        return {name: value for name, value in self.axes.items() if value is not None}

    @property
    def name_axes(self) -> list[str]:
        """The const axes that make up names: those that no constraint gives."""
        return [name for name in self.const_axes if name not in self.derived]

    @property
    def constraints(self) -> list[str]:
        """The constraints that determine the derived axes."""
        return [f"{name} == {factor} * {axis}" for name, (factor, axis) in self.derived.items()]


def read_contract(root: Path, axes: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]) -> Contract:
    """The contract that the arguments declare.

    Args:
        root: the checkout, whose schema lists the dtypes.
        axes: `NAME` for a variable axis, `NAME=VALUE` for a constant one, `NAME=FACTOR*AXIS` for a multiple of an
            earlier constant one.
        inputs, outputs: `NAME:DTYPE[AXIS,AXIS]`, or `NAME:DTYPE` for a scalar.

    Raises:
        ScaffoldError: an argument cannot be read, an axis is not declared or not used, or a name occurs twice.
    """
    declared, derived = _axes(axes)
    found_inputs = tuple(_tensor(text, "input") for text in inputs)
    found_outputs = tuple(_tensor(text, "output") for text in outputs)
    if not (declared and found_inputs and found_outputs):
        raise ScaffoldError(
            "give at least one --axis NAME[=VALUE], one --input NAME:DTYPE[AXIS,...] "
            "and one --output NAME:DTYPE[AXIS,...]"
        )
    names = [*(name for name, _ in declared), *(tensor.name for tensor in (*found_inputs, *found_outputs))]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ScaffoldError(f"{twice[0]!r} is declared twice; an axis, an input and an output need distinct names")
    contract = Contract(dict(declared), found_inputs, found_outputs, derived)
    _check(contract, _dtypes(root))
    return contract


def _axes(texts: Sequence[str]) -> tuple[list[tuple[str, int | None]], dict[str, tuple[int, str]]]:
    """The axes with their values, and those that are multiples of others."""
    declared: list[tuple[str, int | None]] = []
    derived: dict[str, tuple[int, str]] = {}
    for text in texts:
        match = AXIS.fullmatch(text.strip())
        if match is None:
            raise ScaffoldError(
                f"--axis {text!r}: write NAME, NAME=VALUE for a constant axis, or NAME=FACTOR*AXIS; names are lower "
                "case, digits and underscores and begin with a letter, VALUE and FACTOR are at least 1"
            )
        name, value, base = match[1], None if match[2] is None else _value(text, match[2]), match[3]
        if value is not None and base is not None:
            of_base = dict(declared).get(base)
            if of_base is None:
                raise ScaffoldError(f"--axis {text!r}: declare the constant axis first, with --axis {base}=VALUE")
            derived[name] = (value, base)
            value = _value(text, str(value * of_base))
        declared.append((name, value))
    return declared, derived


def _value(text: str, digits: str) -> int:
    """The value of an axis; `text` is what was written."""
    if len(digits) > len(str(MAX_VALUE)) or int(digits) > MAX_VALUE:
        raise ScaffoldError(f"--axis {text[:60]!r}: the value is larger than {MAX_VALUE}, the largest of an axis")
    return int(digits)


def _tensor(text: str, what: str) -> Tensor:
    match = TENSOR.fullmatch(text.strip())
    if match is None:
        raise ScaffoldError(f"--{what} {text!r}: write NAME:DTYPE[AXIS,AXIS], or NAME:DTYPE for a scalar")
    shape = None if match[3] is None else tuple(axis.strip() for axis in match[3].split(","))
    if shape is not None and "" in shape:
        raise ScaffoldError(f"--{what} {text!r}: an axis in [] has no name; write NAME:DTYPE without [] for a scalar")
    return Tensor(match[1], match[2], shape)


def _check(contract: Contract, dtypes: Sequence[str]) -> None:
    used = set[str]()
    for tensor in (*contract.inputs, *contract.outputs):
        if keyword.iskeyword(tensor.name) or tensor.name in RESERVED:
            raise ScaffoldError(f"{tensor.name!r} cannot name an input or output: it is a keyword or reserved")
        if tensor.dtype not in dtypes:
            raise ScaffoldError(f"{tensor.name}: no dtype {tensor.dtype!r}; choose from {', '.join(dtypes)}")
        for axis in tensor.shape or ():
            if axis not in contract.axes:
                raise ScaffoldError(
                    f"{tensor.name}: no axis {axis!r}; declare it with --axis {axis} or --axis {axis}=VALUE"
                )
            used.add(axis)
    for axis, value in contract.axes.items():
        if keyword.iskeyword(axis) or axis in RESERVED:
            raise ScaffoldError(f"{axis!r} cannot name an axis: it is a keyword or reserved")
        if value is None and axis not in used:
            raise ScaffoldError(f"no shape uses the variable axis {axis}; use it or omit it")


def _dtypes(root: Path) -> list[str]:
    schema = json.loads((root / "schema" / "definition.schema.json").read_text(encoding="utf-8"))
    dtypes: list[str] = schema["$defs"]["tensor"]["properties"]["dtype"]["enum"]
    return dtypes


def pattern_of(
    family: str, axes: Iterable[str], known: Mapping[str, tuple[str, ...]]
) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The pattern `<family>_<abbreviation>{<axis>}...`, and the entries of `abbreviations` that it needs."""
    parts = [family]
    missing: dict[str, tuple[str, ...]] = {}
    taken = set[str]()
    for axis in axes:
        abbreviation = next((short for short, long in known.items() if axis in long and short not in taken), None)
        if abbreviation is None:
            abbreviation = next(short for short in _proposals(axis) if short not in taken and short not in known)
            missing[abbreviation] = (axis,)
        taken.add(abbreviation)
        parts.append(f"{abbreviation}{{{axis}}}")
    return "_".join(parts), missing


def _proposals(axis: str) -> Iterator[str]:
    """The axis if it is one letter, the initials of its words, increasingly long prefixes of it, then more letters."""
    words = ["".join(filter(str.isalpha, word)) for word in axis.split("_")]
    letters = "".join(words)
    yield "".join(word[:1] for word in words)
    yield from (letters[:length] for length in range(1, len(letters) + 1))
    yield from (f"{letters}{more}" for more in map("x".__mul__, itertools.count(1)))
