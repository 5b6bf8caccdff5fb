"""An installed FlashInfer on a machine without a GPU: its modules are imported with stand-ins for what is missing.

Its trace machinery needs torch only. Its own ``TraceTemplate.build_fi_trace_fn`` writes the dumps: it looks at
inputs that the template's own ``init`` makes on torch's meta device, which has no data. No kernel is called.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import os
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tools.templates.record import Record
from tools.templates.sizes import Call, sized_calls

#: Packages that FlashInfer imports at once and that its templates do not use.
STAND_INS = frozenset({"einops", "filelock", "ninja", "pynvml", "requests", "tabulate", "tqdm", "tvm_ffi"})
#: Modules that are programs, or that load much and have no template.
NOT_IMPORTED = ("__main__", ".aot", ".experimental", ".jit.", ".cute_dsl.", ".testing")
#: Sizes of variable axes in the inputs that are only looked at, not computed with.
SMALL = 4


class InstalledError(RuntimeError):
    """FlashInfer cannot be imported from where it was said to be."""


@dataclass(frozen=True)
class Template:
    """A registered template.

    Attributes:
        name: prefix of the names of its dumps.
        api: the first function that has it.
        template: the object of FlashInfer.
    """

    name: str
    api: str
    template: Any


class _StandIn(types.ModuleType):
    """A module whose every attribute is a class that takes anything."""

    __path__: ClassVar[list[str]] = []  # type: ignore[misc]  # it has no directory

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(
            name, (), {"__init__": lambda self, *_, **__: None, "__class_getitem__": classmethod(lambda c, _: c)}
        )
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for missing packages, and for a `tvm_ffi` of another release."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def imported(site: Path | None) -> Any:
    """The package ``flashinfer``: of a directory that holds it, or the installed one. All its modules are imported.

    Raises:
        InstalledError: it is not there, or cannot be imported.
    """
    os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    if site is not None:
        if not (site / "flashinfer" / "trace").is_dir():
            raise InstalledError(
                f"{site}: there is no flashinfer with flashinfer/trace; give the directory that has it"
            )
        # The package alone: what else is installed there may not fit this Python.
        spec = importlib.machinery.PathFinder.find_spec("flashinfer", [str(site)])
        assert spec is not None and spec.loader is not None
    else:
        spec = importlib.util.find_spec("flashinfer")
        if spec is None or spec.loader is None:
            raise InstalledError("flashinfer is not installed; give the directory that has it: --flashinfer DIR")
    sys.meta_path.insert(0, _Finder())
    try:
        package = importlib.util.module_from_spec(spec)
        sys.modules["flashinfer"] = package
        spec.loader.exec_module(package)
    except Exception as error:
        raise InstalledError(f"{spec.origin}: cannot be imported: {type(error).__name__}: {error}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.walk_packages(package.__path__, "flashinfer.", onerror=lambda _: None):
            if not any(part in module.name for part in NOT_IMPORTED):
                with contextlib.suppress(Exception):  # it needs a package that is not here; its templates are not known
                    importlib.import_module(module.name)
    return package


def templates() -> list[Template]:
    """Every template that the imported modules register, or only define, by name; each once."""
    registry = importlib.import_module("flashinfer.api_logging")
    kind = importlib.import_module("flashinfer.trace.template").TraceTemplate
    found: dict[str, Template] = {}

    def add(template: Any, api: str) -> None:
        name = template.name_prefix or template.op_type
        if name not in found or (api and not found[name].api):
            found[name] = Template(name, api, template)

    for original, template, _ in registry._TRACE_REGISTRY:
        add(template, registry._trace_fi_api_for(original))
    for module in [one for name, one in sys.modules.items() if name.startswith("flashinfer.trace.templates.")]:
        for value in vars(module).values():
            if isinstance(value, kind):
                add(value, "")
    return [found[name] for name in sorted(found)]


def dumped(one: Template, sizes: Mapping[str, int], dtypes: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """The Definition that FlashInfer writes for a call; None for a template that needs a live object.

    Args:
        one: the template.
        sizes: of axes; without any, those of the template's `init`, on torch's meta device, which has no data. Inputs
            that `init` cannot make there have an unknown dtype.
        dtypes: of inputs, where they are others than those of `init`.
    """
    trace: Callable[..., dict[str, Any]] = one.template.build_fi_trace_fn(one.api or f"flashinfer.{one.name}")
    arguments: dict[str, Any] = {}
    if one.template.init is not None:
        with contextlib.suppress(Exception):  # it needs a GPU, or data
            arguments = _arguments(one.template)
    directory = os.environ.pop("FLASHINFER_TRACE_DUMP_DIR", None)
    try:
        made = trace(**arguments)
        if sizes:
            known = {name: entry["dtype"] for name, entry in made["inputs"].items() if entry["shape"] is not None}
            made = trace(**_tensors(one.template, sizes, {**known, **(dtypes or {})}))
        return made
    except TypeError:
        return None
    finally:
        if directory is not None:
            os.environ["FLASHINFER_TRACE_DUMP_DIR"] = directory


def _arguments(template: Any) -> dict[str, Any]:
    """The arguments that the template's `init` makes, with small variable axes."""
    taken: dict[str, Any] = {"device": "meta"}
    for name, parameter in inspect.signature(template.init).parameters.items():
        if parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            taken[name] = SMALL
    made = template.init(**taken)
    parts: Sequence[Mapping[str, Any]] = [made]
    if set(made) <= {"init", "plan", "run"}:
        parts = [part for part in made.values() if isinstance(part, Mapping)]
    return {name: value for part in parts for name, value in part.items()}


def _tensors(template: Any, sizes: Mapping[str, int], dtypes: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of a call with these sizes: tensors without data."""
    import torch

    made: dict[str, Any] = {}
    for name, one in template.inputs.items():
        parameter = one.param or name
        if not hasattr(one, "dim_names"):
            if name in sizes:
                made[parameter] = sizes[name]
            continue
        if dtypes.get(name, "unknown") == "unknown":
            continue
        shape = [sizes.get(axis, SMALL) for axis in one.dim_names]
        tensor = torch.empty(shape, dtype=getattr(torch, dtypes[name]), device="meta")
        if one.tuple_idx is None:
            made[parameter] = tensor
        else:
            made[parameter] = (*made.get(parameter, ()), tensor)
    return made


def recorded(site: Path | None) -> Record:
    """Imports FlashInfer, and records what its templates write.

    Raises:
        InstalledError: see `imported`.
    """
    version = str(imported(site).__version__)
    found = {one.name: one for one in templates()}
    calls: list[Call] = [*((name, {}, {}) for name in found), *sized_calls()]
    dumps = []
    for name, sizes, dtypes in calls:
        made = dumped(found[name], sizes, dtypes) if name in found else None
        if made is not None and {"template": name, **made} not in dumps:
            dumps.append({"template": name, **made})
    helpers = {name: text for name, one in found.items() if (text := _helpers(one.template))}
    checks = {name: got for name, one in found.items() if (got := _accepted(one.template)) is not None}
    return Record(version, tuple(dumps), helpers, checks)


def _helpers(template: Any) -> str:
    """Source of the functions and numbers that a reference reads from its module, and that its dumps lack."""
    if template.reference is None:
        return ""
    entry = inspect.unwrap(template.reference)
    declared = {one.__name__ for one in getattr(template.reference, "_trace_reference_dependencies", ())}
    texts: dict[str, str] = {}
    queue = [entry]
    while queue:
        function = queue.pop()
        for name in function.__code__.co_names:
            value = inspect.unwrap(function.__globals__.get(name))
            if name in texts or name in declared or value is entry:
                continue
            if inspect.isfunction(value) and value.__module__.startswith("flashinfer.trace.templates"):
                texts[name] = inspect.getsource(value)
                queue.append(value)
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                texts[name] = f"{name} = {value!r}\n"
    return "\n\n".join(texts[name].rstrip() + "\n" for name in sorted(texts))


def _accepted(template: Any) -> tuple[str, ...] | None:
    """The wrong outputs that a template's comparison accepts, for rows of usual numbers; None for other outputs."""
    import torch

    generator = torch.Generator().manual_seed(0)
    right = [
        torch.randn(SMALL, 64, generator=generator).to(torch.bfloat16)
        for one in template.outputs.values()
        if hasattr(one, "dim_names") and not (one.dtype or "").startswith(("int", "uint", "float8"))
    ]
    if not right or len(right) != len(template.outputs):
        return None
    wrong = {
        "nan": [torch.full_like(one, float("nan")) for one in right],
        "x100": [one * 100 for one in right],
        "zeros": [torch.zeros_like(one) for one in right],
    }
    found = []
    for name, outputs in wrong.items():
        try:
            if template.check(right, outputs):
                found.append(name)
        except Exception:
            return ("raises",)
    return tuple(found)
