"""Modules in the place of packages that SGLang requires and that are not installed: they can be imported, not used.

A package that is neither installed nor required stays missing, as on a machine with a GPU. Definitions may use a
stand-in: as a decorator, a base class, an annotation, a constant of a module. A call from a running function is a
finding (`findings.STAND_IN`), unless `findings.REVIEWED` says why it is harmless.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.dry_run import findings
from tools.runtime_tracing import frames
from tools.runtime_tracing.stand_ins import AnyAttribute, Finder, StandIn, StandInModule

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


class _AnyAttribute(AnyAttribute):
    """Any operation yields a stand-in as well, and a call from a running function is a finding."""

    def called(cls, path: str) -> None:
        """Notes a call by a running function; the code of modules and classes only defines."""
        frame = sys._getframe(2)
        while frame is not None and frames.package_path(frame.f_code.co_filename) is None:
            if frame.f_code.co_name == "<module>":
                return
            frame = frame.f_back  # type: ignore[assignment]
        defines = frame is None or not frame.f_code.co_flags & 0x2  # CO_NEWLOCALS: a function, not a module or class
        if not defines and not any(path.startswith(known) for known in findings.REVIEWED["stand_ins"]):
            findings.note(findings.STAND_IN, path)

    def _same(cls, *others: Any) -> Any:
        return cls

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __floordiv__ = __neg__ = _same
    __lshift__ = __rshift__ = __and__ = _same

    def __int__(cls) -> int:
        return 0

    __index__ = __int__


class NotedStandIn(StandIn, metaclass=_AnyAttribute):
    """A stand-in whose calls are noted."""

    _kind = True


class _Finder(Finder):
    kind, version = NotedStandIn, _VERSION

    def serves(self, fullname: str, asking: str) -> bool:
        top = fullname.partition(".")[0]
        inside_real = "." in fullname and not isinstance(sys.modules.get(top), StandInModule)
        return not inside_real and (top in _FOR_ALL or any(part in asking for part in _ASKING))


def install(site: Path, further: Mapping[str, str]) -> set[str]:
    """Serves what the installed SGLang requires and what is not there; returns the packages.

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
    return packages
