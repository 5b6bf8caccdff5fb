"""Writes schema/kernel_paths.json: the functions and classes of the pinned kernel libraries that tags may name.

python -m tools.kernel_paths DIRECTORY [DIRECTORY ...]

Each directory holds sources as `python -m tools.fetch_sources --release R --dest DIRECTORY` unpacks them. A package is
read from the one that has it at the version that schema/kernel_paths.json pins: the version that evidence is recorded
with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace import definitions, find_root
from flashinfer_trace.format.files import Lines, laid_out, write_text
from flashinfer_trace.format.json_source import load_object
from flashinfer_trace.kernels import TABLE
from flashinfer_trace.kernels.names import KINDS, kernel_paths_path, load_kernel_paths
from tools.kernel_paths.resolve import callers_of_ops, exists, public_names
from tools.shared.command import end_with
from tools.shared.source_packages import package_version

#: Packages whose modules are listed whole -> the part of the path that their modules share.
LISTED = {
    "flashinfer": "flashinfer",
    "sgl_kernel": "",
    "sglang": "sglang.jit_kernel",
    "triton_kernels": "triton_kernels.matmul_ogs",
}
#: Packages inside a wheel -> the package that names its version.
BUNDLED = {"triton_kernels": "sgl_kernel"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, help="unpacked sources, as many as have all packages")
    options = parser.parse_args(arguments)
    root = find_root()
    packages = load_object(kernel_paths_path(root))["packages"]
    found = {name: source_of(name, package, options.directories) for name, package in packages.items()}
    for name, directory in found.items():
        if directory is None:
            package = packages[name]
            print(
                f"{name}: none of the directories has {package['distribution']} {package['version']}; run "
                f"`python -m tools.fetch_sources --release {package['release']} --dest DIRECTORY`",
                file=sys.stderr,
            )
    sources = {name: directory for name, directory in found.items() if directory is not None}
    if len(sources) < len(packages):
        return 2
    named = sorted(named_paths(root))
    write_text(kernel_paths_path(root), document(packages, sources, named))
    tags = {tag.partition(":")[2] for one in definitions(root=root) for tag in one.tags}
    known = load_kernel_paths(root)
    missing = [path for path in named if path in tags and path.split(".")[0] in sources and path not in known.paths]
    for path in missing:
        print(f"{path}: not in the pinned package; correct the tag", file=sys.stderr)
    return 1 if missing else 0


def source_of(name: str, package: Mapping[str, str], directories: Sequence[Path]) -> Path | None:
    """The directory that has the package at the pinned version."""
    for directory in directories:
        # A package inside another one's wheel has no version of its own.
        versioned = directory / BUNDLED.get(name, name)
        if (directory / name).is_dir() and package_version(versioned, package["distribution"]) == package["version"]:
            return directory
    return None


def named_paths(root: Path) -> set[str]:
    """Every path that a tag or the table of kernels names, except ops, which are no Python."""
    tags = {
        tag.partition(":")[2] for one in definitions(root=root) for tag in one.tags if tag.partition(":")[0] in KINDS
    }
    return {path for path in tags | {entry.path for entry in TABLE} if not path.startswith("torch.")}


def document(packages: Mapping[str, Any], sources: Mapping[str, Path], named: Iterable[str]) -> str:
    """The text of schema/kernel_paths.json."""
    modules: dict[str, set[str]] = {}
    for package, directory in sources.items():
        for module in listed_modules(directory, package):
            modules.setdefault(module, set()).update(public_names(directory, module))
    for path in named:
        module, _, name = path.rpartition(".")
        if path.split(".")[0] in sources and exists(sources[path.split(".")[0]], path):
            modules.setdefault(module, set()).add(name)
    ops = callers_of_ops(sources["sgl_kernel"], "sgl_kernel")
    data = {
        "$schema": "kernel_paths.schema.json",
        "packages": dict(packages),
        "modules": {module: sorted(names) for module, names in sorted(modules.items()) if names},
        "ops": {op: sorted(functions) for op, functions in sorted(ops.items())},
    }
    return laid_out(
        data, lambda path, value: Lines(2 * len(path) + 2, closing=2 * len(path)) if len(path) < 2 else None
    )


def listed_modules(directory: Path, package: str) -> list[str]:
    """The package itself, or the modules directly below the part that is listed."""
    below = LISTED[package]
    if not below:
        return [package]
    base = directory.joinpath(*below.split("."))
    files = [path.stem for path in base.glob("*.py")] + [path.parent.name for path in base.glob("*/__init__.py")]
    return [f"{below}.{name}" for name in sorted(set(files)) if not name.startswith("_")]


if __name__ == "__main__":
    end_with(main)
