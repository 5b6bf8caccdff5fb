"""A Definition that may be malformed: the parts that are well-formed, for checks that need only some of them."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flashinfer_trace.format.definition import Definition, InputError

#: Most entries of one section, as in schema/definition.schema.json.
MAX_ENTRIES = 64
INTEGER_DTYPES = frozenset({"int64", "int32", "int16", "int8"})


def is_identifier(name: str) -> bool:
    """Whether Python takes `name` as a variable (ASCII only, so it is the same text everywhere)."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def _is_axis_value(value: object) -> bool:
    return type(value) is int and 1 <= value < 2**31  # a bool is not a value


@dataclass(frozen=True)
class Tensor:
    """One well-formed input or output. `shape` is None for a scalar."""

    shape: tuple[str, ...] | None
    dtype: str

    @property
    def is_index_list(self) -> bool:
        """Whether a constraint may subscript it: one dimension of integers."""
        return self.shape is not None and len(self.shape) == 1 and self.dtype in INTEGER_DTYPES


class Candidate:
    """Reads the JSON of one Definition and leaves out what is malformed (the schema check reports that)."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    @cached_property
    def name(self) -> str | None:
        return self._identifier("name")

    @cached_property
    def op_type(self) -> str | None:
        return self._identifier("op_type")

    @cached_property
    def definition(self) -> Definition | None:
        """The Definition; None if it is malformed, which other rules report."""
        try:
            return Definition.from_dict(dict(self.data))
        except InputError:
            return None

    @property
    def has_axes(self) -> bool:
        """Whether ``axes`` is an object at all; if not, shapes and names cannot be checked."""
        return isinstance(self.data.get("axes"), dict)

    @cached_property
    def declared_axes(self) -> list[str]:
        """Keys of ``axes``, well-formed or not: a shape may name them without another problem."""
        return list(self._object("axes"))

    @cached_property
    def const_axes(self) -> dict[str, int]:
        """Well-formed const axes."""
        return {
            name: axis["value"]
            for name, axis in self._object("axes").items()
            if isinstance(axis, dict) and axis.get("type") == "const" and _is_axis_value(axis.get("value"))
        }

    @cached_property
    def var_axes(self) -> list[str]:
        """Well-formed var axes."""
        axes = self._object("axes")
        return [name for name, axis in axes.items() if isinstance(axis, dict) and axis.get("type") == "var"]

    @cached_property
    def malformed_axes(self) -> set[str]:
        """Declared axes that are neither: what needs their values is not worth checking."""
        return set(self.declared_axes) - set(self.const_axes) - set(self.var_axes)

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """Well-formed inputs."""
        return self._tensors("inputs")

    @cached_property
    def outputs(self) -> dict[str, Tensor]:
        """Well-formed outputs."""
        return self._tensors("outputs")

    @cached_property
    def has_sane_size(self) -> bool:
        """Whether it is small enough for checks that compare everything with everything (the schema's limits)."""
        sections = [self.data.get(key) for key in ("axes", "inputs", "outputs", "tags", "constraints")]
        shapes = [tensor.shape or () for tensor in (*self.inputs.values(), *self.outputs.values())]
        sizes = [len(section) for section in sections if isinstance(section, (dict, list))]
        return max([*sizes, *map(len, shapes)], default=0) <= MAX_ENTRIES

    @cached_property
    def has_all_tensors(self) -> bool:
        """Whether every input and output is well-formed."""
        return all(
            isinstance(self.data.get(section), dict) and len(tensors) == len(self.data[section])
            for section, tensors in (("inputs", self.inputs), ("outputs", self.outputs))
        )

    @cached_property
    def tags(self) -> list[tuple[int, str]]:
        """Index and text of each tag that is a string, and not too long."""
        return [(index, tag) for index, tag in self._strings("tags") if len(tag) <= 200]

    @cached_property
    def constraints(self) -> list[tuple[int, str]]:
        """Index and text of each constraint that is a string."""
        return self._strings("constraints")

    @cached_property
    def reference(self) -> str | None:
        """The reference, if the schema takes it."""
        reference = self.data.get("reference")
        return reference if isinstance(reference, str) and 0 < len(reference) <= 50_000 else None

    @property
    def is_verified(self) -> bool:
        """Whether it claims to be verified."""
        return any(tag == "status:verified" for _, tag in self.tags)

    def _identifier(self, key: str) -> str | None:
        value = self.data.get(key)
        # Stricter than str: what is not a plain name must never become part of a path.
        return value if isinstance(value, str) and len(value) <= 160 and is_identifier(value) else None

    def _object(self, key: str) -> dict[str, Any]:
        value = self.data.get(key)
        return value if isinstance(value, dict) else {}

    def _strings(self, key: str) -> list[tuple[int, str]]:
        value = self.data.get(key)
        return [(i, v) for i, v in enumerate(value) if isinstance(v, str)] if isinstance(value, list) else []

    def _tensors(self, key: str) -> dict[str, Tensor]:
        tensors = {}
        for name, tensor in self._object(key).items():
            if not isinstance(tensor, dict) or not isinstance(tensor.get("dtype"), str) or "shape" not in tensor:
                continue
            shape = tensor["shape"]
            if shape is None:
                tensors[name] = Tensor(None, tensor["dtype"])
            elif isinstance(shape, list) and all(isinstance(axis, str) for axis in shape):
                tensors[name] = Tensor(tuple(shape), tensor["dtype"])
        return tensors
