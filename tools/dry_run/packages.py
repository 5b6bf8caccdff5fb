"""Modules in the place of packages that SGLang requires and that are not installed: they can be imported, not used.

A package that is neither installed nor required stays missing, as on a machine with a GPU. Definitions may use a
stand-in: as a decorator, a base class, an annotation, a constant of a module. A call from a running function is a
finding (`findings.STAND_IN`), unless `findings.REVIEWED` says why it is harmless.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.dry_run import findings
from tools.runtime_tracing import frames

#: Distributions whose package has another name.
_PACKAGE = {
    **{"nvidia-cutlass-dsl": "cutlass", "cuda-python": "cuda", "pillow": "PIL", "flash-attn-4": "flash_attn"},
    **{"quack-kernels": "quack", "sgl-deep-gemm": "deep_gemm", "sgl-flash-mla": "flash_mla", "sgl-deep-ep": "deep_ep"},
    **{"nvidia-ml-py": "pynvml", "py-spy": "py_spy", "sglang-kernel": "sgl_kernel", "flashinfer-python": "flashinfer"},
    **{"humming-kernels": "humming", "apache-tvm-ffi": "tvm_ffi", "python-dateutil": "dateutil", "decord2": "decord"},
    **{"nvshmem4py-cu13": "nvshmem", "nvidia-mathdx": "mathdx"},
}
_REQUIRES = re.compile(r"Requires-Dist: ([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*(?:[=><~!]=?\s*([0-9][0-9a-z.]*))?")
#: Only these ask for stand-ins; to others, such packages are not installed.
_ASKING = ("/sglang/", "/sgl_kernel/", "/flash_attn/", "/quack/", "/deep_gemm/", "/flash_mla/")
#: Everybody is told that these are there: transformers registers nothing that has to do with images without them.
_FOR_ALL = ("PIL", "torchvision")
_VERSION = "99.0.0"


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _AnyAttribute(type):
    """The metaclass of stand-ins: any attribute is another one, and any operation yields one."""

    def __getattr__(cls, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return stand_in(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_is_stand_in" not in cls.__dict__:  # a class that somebody derived
            return super().__call__(*args, **kwargs)
        if len(args) == 1 and not kwargs and isinstance(args[0], (type, types.FunctionType)):
            return args[0]
        _called(cls.__qualname__)
        return super().__call__()

    def _same(cls, *others: Any) -> Any:
        return cls

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __floordiv__ = __neg__ = _same
    __lshift__ = __rshift__ = __and__ = _same

    def __or__(cls, other: Any) -> Any:
        return object

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())

    def __int__(cls) -> int:
        return 0

    __index__ = __int__


class _Instance:
    """The instances of stand-ins: empty, false, and their own context and result."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what the real one takes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Takes what a typed dictionary takes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], (type, types.FunctionType)):
            return args[0]
        _called(f"{type(self).__qualname__}()")
        return self

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return stand_in(f"{type(self).__qualname__}.{name}")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, item: Any) -> Any:
        return self

    def __setitem__(self, item: Any, value: Any) -> None:
        return None

    @classmethod
    def __get_pydantic_core_schema__(cls, *args: Any) -> dict[str, str]:
        return {"type": "any"}


def stand_in(path: str) -> Any:
    """A class for an attribute of an absent package."""
    return _AnyAttribute(path.rpartition(".")[2], (_Instance,), {"__qualname__": path, "_is_stand_in": True})


def _called(path: str) -> None:
    """Notes a call by a running function; the code of modules and classes only defines."""
    frame = sys._getframe(2)
    while frame is not None and frames.package_path(frame.f_code.co_filename) is None:
        if frame.f_code.co_name == "<module>":
            return
        frame = frame.f_back  # type: ignore[assignment]
    defines = frame is None or not frame.f_code.co_flags & 0x2  # CO_NEWLOCALS: a function, not a module or class
    if not defines and not any(path.startswith(known) for known in findings.REVIEWED["stand_ins"]):
        findings.note(findings.STAND_IN, path)


class StandInModule(types.ModuleType):
    """An absent package, or a module of it."""

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        value = stand_in(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Iterable[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        inside_real = "." in fullname and not isinstance(sys.modules.get(top), StandInModule)
        if top not in self.packages or inside_real or not (top in _FOR_ALL or _asks()):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = StandInModule(spec.name)
        module.__path__ = []
        module.__dict__["__version__"] = _VERSION
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to execute."""


def _asks() -> bool:
    """Whether the file whose import statement is running is one of `_ASKING`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return any(part in frame.f_code.co_filename for part in _ASKING)


def install(site: Path, further: Mapping[str, str]) -> None:
    """Serves what the installed SGLang requires and what is not there.

    Args:
        further: name -> version of other distributions that a machine with a GPU has.
    """
    required: dict[str, str] = dict(further)
    packages = {"cutlass", "cuda", "starlette"}
    for line in next(site.glob("sglang-*.dist-info/METADATA")).read_text(encoding="utf-8").splitlines():
        found = _REQUIRES.match(line)
        if found and "extra ==" not in line:
            name = found[1].lower().replace("_", "-")
            required[name] = found[2] or _VERSION
            packages.add(_PACKAGE.get(name, found[1].replace("-", "_")))
    sys.meta_path.append(_Finder(packages))
    real_version, real_find = importlib.metadata.version, importlib.util.find_spec

    def version(name: str) -> str:
        try:
            return real_version(name)
        except importlib.metadata.PackageNotFoundError:
            key = name.lower().replace("_", "-")
            if key in required:
                return required[key]
            raise

    def find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        module = sys.modules.get(name)
        return module.__spec__ if isinstance(module, StandInModule) else real_find(name, package)

    importlib.metadata.version = version  # type: ignore[assignment]
    importlib.util.find_spec = find_spec
