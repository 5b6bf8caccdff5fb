"""Compiles a Solution in C++ or CUDA, inside of the submission's process, and finds its function."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Languages, with the names of their compiler and the variables that may name another one.
COMPILED = {"cpp": ("c++", "CXX"), "cuda": ("nvcc", "CUDACXX")}
#: How a library is bound to Python, as Solutions name it; the first is the default.
BINDINGS = ("tvm-ffi", "torch")
#: Suffixes of the sources that are compiled, by language; others are headers.
SUFFIXES = {"cpp": (".cpp", ".cc", ".cxx", ".c"), "cuda": (".cu", ".cpp", ".cc", ".cxx", ".c")}
#: How many characters of the compiler's messages are shown: the first error is at their beginning.
MOST_SHOWN = 1500


class CompileError(Exception):
    """A Solution that cannot be compiled here. The message says why."""


def built(request: Mapping[str, Any], device: str) -> Any:
    """The function of a Solution in C++ or CUDA, from the directory of its sources (``root`` of the request).

    Raises:
        CompileError: no compiler was found, or it refuses the sources.
        RuntimeError: CUDA has no GPU to run on.
    """
    language, binding = request["language"], request["binding"]
    if language == "cuda" and not device.startswith("cuda"):
        raise RuntimeError("No CUDA GPUs are available: a Solution in cuda needs --device cuda")
    directory = Path(request["root"]) / "submission"
    sources = sorted(str(one) for one in directory.rglob("*") if one.suffix in SUFFIXES[language])
    library = directory / "compiled.so"
    includes, linked = _binding(binding)
    command = [
        *(_compiler(language), "-O3", "-std=c++17", "-shared", *_flags(language, device), f"-I{directory}"),
        *(f"-I{one}" for one in includes),
        *(*sources, "-o", str(library)),
        *linked,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory, check=False)
    if done.returncode:
        shown = (done.stderr or done.stdout).replace(f"{directory}/", "")[:MOST_SHOWN]
        raise CompileError(f"{Path(command[0]).name} refuses the sources: {shown}")
    return _function(binding, library, request["name"])


def _compiler(language: str) -> str:
    name, variable = COMPILED[language]
    homes = [os.path.join(os.environ[one], "bin") for one in ("CUDA_HOME", "CUDA_PATH") if one in os.environ]
    found = os.environ.get(variable) or shutil.which(name) or shutil.which(name, path=os.pathsep.join(homes))
    if not found:
        raise CompileError(f"there is no compiler for {language} here: install {name}, or name one in {variable}")
    return found


def _flags(language: str, device: str) -> Sequence[str]:
    if language == "cpp":
        return ("-fPIC",)
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return "-Xcompiler", "-fPIC", f"-arch=sm_{major}{minor}{'a' if major >= 9 else ''}"


def _binding(binding: str) -> tuple[Sequence[str], Sequence[str]]:
    """Directories of headers, and what is linked."""
    if binding == "torch":
        import sysconfig

        from torch.utils import cpp_extension

        includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
        places = [f"-L{one}" for one in cpp_extension.library_paths()]
        libraries = [f"-l{name}" for name in ("c10", "torch", "torch_cpu", "torch_python")]
        return includes, ["-DTORCH_EXTENSION_NAME=compiled", *places, *libraries]
    try:
        from tvm_ffi import libinfo
    except ImportError as error:
        raise CompileError(f"{error}: install apache-tvm-ffi, or bind the Solution with torch") from error
    place = os.path.dirname(libinfo.find_libtvm_ffi())
    return [libinfo.find_include_path(), libinfo.find_dlpack_include_path()], [f"-L{place}", "-ltvm_ffi"]


def _function(binding: str, library: Path, name: str) -> Any:
    if binding == "torch":
        spec = importlib.util.spec_from_file_location("compiled", library)
        assert spec is not None and spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        import tvm_ffi

        module = tvm_ffi.load_module(str(library))
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise CompileError(f"the compiled library has no function {name}: export it under that name") from error
