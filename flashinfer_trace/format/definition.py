"""A Definition: what one kernel computes, as data. Importing this module imports neither torch nor a CUDA package."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashinfer_trace.format import constraints as constraint_language
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from flashinfer_trace.format.naming import MAX_NAME
from flashinfer_trace.format.reference import compile_reference, sha256, substitute_constants
from flashinfer_trace.format.roots import is_private

#: Longest constraint or tag; schema/definition.schema.json allows less.
MAX_LINE = 1000


def field_errors(data: object) -> Iterator[str]:
    """Names what is missing, has another type than `definition.Definition` says, or is too long to be shown in a line.

    Names and lines from a file that nobody validated may have any length; messages and tables show them.
    """
    if not isinstance(data, Mapping):
        yield "it is not an object"
        return
    missing = [name for name in ("name", "op_type", "axes", "inputs", "outputs", "reference") if name not in data]
    if missing:
        yield f"{missing[0]} is missing"
        return
    for name in ("name", "op_type"):
        if not _is_text(data[name], MAX_NAME) or not data[name] or not data[name].isprintable():
            yield f"{name} is not a name of at most {MAX_NAME} characters"
    if not _is_text(data["reference"]):
        yield "reference is not a string"
    if not _is_text(data.get("description") or ""):
        yield "description is not a string"
    for key in ("constraints", "tags"):
        lines = data.get(key) or []
        if not isinstance(lines, (list, tuple)) or not all(_is_text(line, MAX_LINE) for line in lines):
            yield f"{key} is not a list of strings of at most {MAX_LINE} characters"
    for section, misfits_of in (("axes", _of_axis), ("inputs", _of_tensor), ("outputs", _of_tensor)):
        entries = data[section]
        if not isinstance(entries, Mapping):
            yield f"{section} is not an object"
            continue
        for name, entry in entries.items():
            if not _is_text(name, MAX_NAME):
                yield f"{section} has a name that is not a string of at most {MAX_NAME} characters"
            elif not isinstance(entry, Mapping):
                yield f"{name} in {section} is not an object"
            else:
                yield from misfits_of(name, entry)
                if not _is_text(entry.get("description") or ""):
                    yield f"the description of {name} in {section} is not a string"


def _of_axis(name: str, axis: Mapping[str, Any]) -> Iterator[str]:
    value = axis.get("value")
    if value is not None and type(value) is not int:  # a bool is not a size
        yield f"the value of axis {name} is not an integer"


def _of_tensor(name: str, tensor: Mapping[str, Any]) -> Iterator[str]:
    if "shape" not in tensor or "dtype" not in tensor:
        yield f"{name} has no {'dtype' if 'shape' in tensor else 'shape'}"
        return
    shape = tensor["shape"]
    axes = [] if shape is None else shape
    if not isinstance(axes, (list, tuple)) or not all(_is_text(text, MAX_NAME) for text in (tensor["dtype"], *axes)):
        yield f"shape or dtype of {name} is not of names of at most {MAX_NAME} characters"


def _is_text(value: object, longest: float = math.inf) -> bool:
    return isinstance(value, str) and len(value) <= longest


class InputError(ValueError):
    """Inputs or axis values that do not fit a Definition. The message names the Definition, the input and the fix."""


@dataclass(frozen=True)
class Axis:
    """One axis: constant (`value` is an int) or variable (`value` is None)."""

    name: str
    value: int | None
    description: str = ""

    @property
    def is_const(self) -> bool:
        return self.value is not None


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. `shape` holds names of axes; None means a scalar (a Python number or a 0-d tensor)."""

    name: str
    shape: tuple[str, ...] | None
    dtype: str
    description: str = ""


@dataclass(frozen=True)
class Definition:
    """One Definition in the FlashInfer-Trace format.

    Attributes:
        name, op_type, description, tags, constraints: as in the JSON.
        axes: name -> `Axis`, in declared order.
        inputs, outputs: name -> `TensorSpec`, in declared order (the order of ``run``'s arguments and results).
        reference: source code of a module whose ``run(*inputs)`` computes the outputs with torch.
        path: the file that it was read from, if any.
        root: the dataset root that contains `path`, if any. Its family and its reference source come from that root.
    """

    name: str
    op_type: str
    description: str
    axes: Mapping[str, Axis]
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    reference: str
    constraints: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    path: Path | None = field(default=None, compare=False)
    root: Path | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """The pickled state: every field, but not the compiled reference, which each process compiles again."""
        return {name: value for name, value in self.__dict__.items() if name != "compiled"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], path: Path | None = None, root: Path | None = None) -> Definition:
        """Builds a Definition from parsed JSON, whose types it checks; `flashinfer-trace validate` checks the rest.

        Raises:
            InputError: a required field is missing or has the wrong type.
        """
        for wrong in field_errors(data):
            where = path or "Definition"
            raise InputError(
                f"{where}: not a Definition ({wrong}); `flashinfer-trace validate {path or 'FILE'}` shows why"
            )
        return cls(
            name=data["name"],
            op_type=data["op_type"],
            description=data.get("description") or "",
            axes={n: Axis(n, a.get("value"), a.get("description") or "") for n, a in data["axes"].items()},
            inputs=_tensor_specs(data["inputs"]),
            outputs=_tensor_specs(data["outputs"]),
            reference=data["reference"],
            constraints=tuple(data.get("constraints") or ()),
            tags=tuple(data.get("tags") or ()),
            path=path,
            root=root,
        )

    @classmethod
    def from_file(cls, path: Path | str) -> Definition:
        """Reads one JSON file.

        Its `root` is the directory above ``definitions/<op_type>/`` if that directory also contains ``schema/``.

        Raises:
            InputError: the file cannot be read, or is not a Definition.
        """
        path = Path(path)
        try:
            data = load_object(path)
        except JsonSourceError as error:
            raise InputError(
                f"{path}: cannot be read: {error}; `flashinfer-trace validate {path}` shows details"
            ) from error
        return cls.from_dict(data, path, _root_above(path))

    # Axes and shapes

    @property
    def const_axes(self) -> dict[str, int]:
        """Constant axes and their values."""
        return {a.name: a.value for a in self.axes.values() if a.value is not None}

    @property
    def var_axes(self) -> list[str]:
        """Names of the variable axes, in declared order."""
        return [a.name for a in self.axes.values() if a.value is None]

    def input_shapes(self, axes: Mapping[str, int]) -> dict[str, tuple[int, ...] | None]:
        """Shape of each input for these values of the variable axes; None for scalars."""
        return self._shapes(self.inputs, axes)

    def output_shapes(self, axes: Mapping[str, int]) -> dict[str, tuple[int, ...] | None]:
        """Shape of each output for these values of the variable axes; None for scalars."""
        return self._shapes(self.outputs, axes)

    def _shapes(self, specs: Mapping[str, TensorSpec], axes: Mapping[str, int]) -> dict[str, tuple[int, ...] | None]:
        known = {**axes, **self.const_axes}
        shapes: dict[str, tuple[int, ...] | None] = {}
        for spec in specs.values():
            missing = [a for a in spec.shape or () if a not in known]
            if missing:
                raise InputError(
                    f"{self.name}: {spec.name} needs a value for axis {missing[0]}; variable axes are {self.var_axes}"
                )
            shapes[spec.name] = None if spec.shape is None else tuple(known[a] for a in spec.shape)
        return shapes

    # Checking actual inputs

    def bind_axes(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        """Values of the variable axes, read from the shapes of actual inputs.

        Args:
            inputs: every declared input by name: tensors (anything with ``.shape``), and numbers for scalars.

        Raises:
            InputError: an input is missing, is unknown, has the wrong number of dimensions, or contradicts a const
                axis or another input's size of an axis; or nothing determines an axis.
        """
        self._check_names(inputs)
        values: dict[str, int] = {}
        source: dict[str, str] = {}
        for spec in self.inputs.values():
            if spec.shape is None:
                continue
            actual = tuple(inputs[spec.name].shape)
            if len(actual) != len(spec.shape):
                raise InputError(
                    f"{self.name}: input {spec.name} has shape {actual}; "
                    f"expected {len(spec.shape)} dimensions {list(spec.shape)}"
                )
            for dimension, (axis, size) in enumerate(zip(spec.shape, actual, strict=True)):
                const = self.axes[axis].value
                expected, origin = (
                    (const, "a constant") if const is not None else (values.get(axis), source.get(axis, ""))
                )
                if expected is not None and size != expected:
                    raise InputError(
                        f"{self.name}: input {spec.name} has {size} in dimension {dimension}; "
                        f"axis {axis} is {expected} ({origin})"
                    )
                values[axis], source[axis] = size, f"from input {spec.name}"
        values = {axis: size for axis, size in values.items() if not self.axes[axis].is_const}
        return self._solve_constraints(values)

    def check_inputs(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        """Checks shapes, dtypes and every constraint on actual inputs; returns the variable axes.

        Constraints may read values (``kv_indptr[-1]``); for inputs on a GPU, this waits for the GPU.

        Raises:
            InputError: an input does not fit. For a constraint, the message has the constraint and the values it read.
        """
        axes = self.bind_axes(inputs)
        for spec in self.inputs.values():
            actual = dtype_name(inputs[spec.name])
            if actual is not None and actual != spec.dtype:
                raise InputError(f"{self.name}: input {spec.name} is {actual}; the Definition says {spec.dtype}")
        environment = {**self.const_axes, **axes, **inputs}
        for text in self.constraints:
            constraint = constraint_language.parse(text)
            if not constraint.evaluate(environment):
                raise InputError(f"{self.name}: {constraint.explain(environment)}")
        return axes

    def _check_names(self, inputs: Mapping[str, Any]) -> None:
        missing = [name for name in self.inputs if name not in inputs]
        unknown = [name for name in inputs if name not in self.inputs]
        if missing or unknown:
            raise InputError(
                f"{self.name}: missing inputs {missing}, unknown inputs {unknown}; it takes {list(self.inputs)}"
            )

    def _solve_constraints(self, values: dict[str, int]) -> dict[str, int]:
        for text in self.constraints:
            if any(axis not in values for axis in self.var_axes):
                values = {**values, **constraint_language.parse(text).solve({**self.const_axes, **values})}
        undetermined = [axis for axis in self.var_axes if axis not in values]
        if undetermined:
            raise InputError(
                f"{self.name}: nothing determines the axes {undetermined}; use them in an input's shape or a constraint"
            )
        return {axis: values[axis] for axis in self.var_axes}

    # Running

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        """The embedded ``run``, compiled once (imports torch)."""
        return compile_reference(self.reference, self.name, self.op_type)

    def run(self, *args: Any, **inputs: Any) -> Any:
        """Checks the inputs, then calls the embedded reference on them (imports torch).

        Products are as precise as in a verification, whatever the process was set to (see `precision`).

        Args:
            inputs: all declared inputs, by position or by name.

        Returns:
            The result of ``run``: a tensor, or a tuple in declared order if there are several outputs.

        Raises:
            InputError: the inputs do not fit (see `check_inputs`).
        """
        if len(args) > len(self.inputs):
            raise InputError(f"{self.name}: {len(args)} inputs given; it takes {list(self.inputs)}")
        named = {**dict(zip(self.inputs, args, strict=False)), **inputs}
        self.check_inputs(named)
        from flashinfer_trace.format.precision import full_precision_products

        with full_precision_products():
            return self.compiled(*(named[name] for name in self.inputs))

    def name_outputs(self, result: Any) -> dict[str, Any]:
        """Pairs what ``run`` returned with the output names.

        Raises:
            InputError: the number of results differs from the number of outputs.
        """
        results = result if isinstance(result, (tuple, list)) else (result,)
        if len(results) != len(self.outputs):
            raise InputError(f"{self.name}: {len(results)} results for the outputs {list(self.outputs)}")
        return dict(zip(self.outputs, results, strict=True))

    # Derived Definitions

    @property
    def reference_sha256(self) -> str:
        """SHA-256 of the embedded reference without its docstrings; evidence and times are bound to it."""
        return sha256(self.reference)

    def tag_values(self, namespace: str) -> list[str]:
        """Values of the tags in a namespace: ``deepseek-v3`` for the tag ``model:deepseek-v3`` in ``model``."""
        return [tag.split(":", 1)[1] for tag in self.tags if tag.startswith(f"{namespace}:")]

    def with_const_axes(self, values: Mapping[str, int]) -> Definition:
        """The same kernel at other sizes, with const axes and the constants of the reference replaced.

        CPU tests use it to run a family's small twin.

        Raises:
            InputError: a name is not a const axis.
        """
        unknown = [name for name in values if name not in self.const_axes]
        if unknown:
            raise InputError(f"{self.name}: {unknown} are not const axes; the const axes are {list(self.const_axes)}")
        axes = {n: replace(a, value=values.get(n, a.value)) for n, a in self.axes.items()}
        return replace(self, axes=axes, reference=substitute_constants(self.reference, values, self.name))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, with keys in the order of the schema."""

        def spec(tensor: TensorSpec) -> dict[str, Any]:
            shape = None if tensor.shape is None else list(tensor.shape)
            return {"shape": shape, "dtype": tensor.dtype, "description": tensor.description}

        def axis(a: Axis) -> dict[str, Any]:
            head: dict[str, Any] = {"type": "var"} if a.value is None else {"type": "const", "value": a.value}
            return {**head, "description": a.description}

        return {
            "name": self.name,
            "op_type": self.op_type,
            "description": self.description,
            "tags": list(self.tags),
            "axes": {n: axis(a) for n, a in self.axes.items()},
            "constraints": list(self.constraints),
            "inputs": {n: spec(t) for n, t in self.inputs.items()},
            "outputs": {n: spec(t) for n, t in self.outputs.items()},
            "reference": self.reference,
        }


def dtype_name(value: Any) -> str | None:
    """The format's name for a tensor's dtype (``bfloat16``); None for Python numbers."""
    if isinstance(value, numbers.Number) or not hasattr(value, "dtype"):
        return None
    return str(value.dtype).removeprefix("torch.")


def _root_above(path: Path) -> Path | None:
    """The dataset root of ``<root>/definitions/<op_type>/<name>.json``; None for a file elsewhere."""
    folders = path.absolute().parents
    if len(folders) > 2 and folders[1].name == "definitions":
        return folders[2] if (folders[2] / "schema").is_dir() or is_private(folders[2]) else None
    return None


def _tensor_specs(data: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(
            name,
            None if spec["shape"] is None else tuple(spec["shape"]),
            spec["dtype"],
            spec.get("description") or "",
        )
        for name, spec in data.items()
    }
