"""Source trees: which file defines a module, and the version and hash of each library.

Two layouts are supported: unpacked wheels (`sglang/srt/...`, `sgl_kernel/...`, `flashinfer/...`) and git
checkouts (`sglang/python/sglang/...`, `sglang/sgl-kernel/python/sgl_kernel/...`, `flashinfer/flashinfer/...`).
In both, `file` in a trace is the path below the directory that contains the package.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.shared.source_packages import package_hash, package_version

# Distribution name, its package, and where a checkout keeps it (below the directory that contains the checkouts).
DISTRIBUTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("sglang", "sglang", ("sglang/python/sglang",)),
    ("sgl-kernel", "sgl_kernel", ("sgl-kernel/python/sgl_kernel", "sglang/sgl-kernel/python/sgl_kernel")),
    ("flashinfer-python", "flashinfer", ("flashinfer/flashinfer", "flashinfer-python/flashinfer")),
)
# Packages that the wheel of another contains.
BUNDLED = {"sgl_kernel": ("deep_gemm", "triton_kernels")}
# What a complete package must have: a half-unpacked wheel lacks one of these.
REQUIRED = {"sglang": ("srt/models", "srt/layers"), "sgl_kernel": ("__init__.py",), "flashinfer": ("__init__.py",)}
# The file that `python -m tools.fetch_sources` writes next to the packages.
MANIFEST = "manifest.json"


class SourcesError(Exception):
    """The source tree is missing or incomplete; the message says what to do."""


@dataclass
class SourceTree:
    """The packages found below one directory, and the modules in them."""

    packages: dict[str, Path]
    modules: dict[str, Path] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # module -> file, as named in traces
    _texts: dict[str, str] = field(default_factory=dict, repr=False)
    _trees: dict[str, ast.Module] = field(default_factory=dict, repr=False)
    _lines: dict[str, list[bytes]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for package, root in sorted(self.packages.items()):
            for path in sorted(root.rglob("*.py")):
                parts = (package, *path.relative_to(root).parts)
                name = ".".join(parts)[: -len(".py")].removesuffix(".__init__")
                self.modules[name] = path
                self.files[name] = "/".join(parts)

    def is_package(self, module: str) -> bool:
        """Whether `module` is a directory with an __init__.py."""
        return self.modules[module].name == "__init__.py"

    def text(self, module: str) -> str:
        """The module's source text, without a byte order mark and with undecodable bytes replaced."""
        if module not in self._texts:
            self._texts[module] = self.modules[module].read_text(encoding="utf-8-sig", errors="replace")
        return self._texts[module]

    def lines(self, module: str) -> list[bytes]:
        """The module's lines in UTF-8, because syntax trees count columns in UTF-8 bytes."""
        if module not in self._lines:
            self._lines[module] = self.text(module).encode().splitlines()
        return self._lines[module]

    def tree(self, module: str) -> ast.Module:
        """The module's syntax tree. Raises SyntaxError for a file that does not parse."""
        if module not in self._trees:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in strings concern the sources' authors
                self._trees[module] = ast.parse(self.text(module))
        return self._trees[module]

    @property
    def parsed(self) -> int:
        """The number of modules parsed so far."""
        return len(self._trees)

    def describe(self) -> dict[str, dict[str, str]]:
        """Version and hash of each library, for the header of a trace."""
        described = {}
        for distribution, package, _ in DISTRIBUTIONS:
            if package in self.packages:
                root = self.packages[package]
                described[distribution] = {"version": package_version(root, distribution), "sha256": package_hash(root)}
        return described


def fetching(root: Path, release: str) -> str:
    """The command that brings the sources of one release of sglang to `root`."""
    return f"python -m tools.fetch_sources --release {release} --dest {root}"


def find_sources(root: Path, packages: Sequence[str] | None = None, release: str | None = None) -> SourceTree:
    """The source tree below `root`.

    Raises SourcesError if the directory, the sglang package or an essential part of a package is missing.
    `packages` names other top-level packages to trace instead (tests use it). `release` is the release of sglang that
    the caller needs, for the hint of that error; None for the default one.
    """
    hint = "fetch them with `python -m tools.fetch_sources --dest DIR`, then pass --sources DIR"
    if release is not None:
        hint = f"fetch them with `{fetching(root, release)}`"
    if not root.is_dir():
        raise SourcesError(f"{root}: no such directory; {hint}")
    if packages is not None:
        return SourceTree({name: root / name for name in packages})
    found = {}
    for _, package, checkouts in DISTRIBUTIONS:
        for place in (*checkouts, package):
            if (root / place / "__init__.py").is_file() or (root / place / REQUIRED[package][0]).exists():
                found[package] = root / place
                break
    if "sglang" not in found:
        raise SourcesError(f"{root}: no sglang package (neither sglang/srt nor sglang/python/sglang/srt); {hint}")
    for package, directory in found.items():
        for part in REQUIRED[package]:
            if not (directory / part).exists():
                raise SourcesError(f"{directory}: incomplete, {part} is missing; remove {directory} and {hint}")
    for package, bundled in BUNDLED.items():
        if package in found:
            beside = {name: found[package].parent / name for name in bundled}
            found |= {name: place for name, place in beside.items() if (place / "__init__.py").is_file()}
    return SourceTree(found)


def notices(root: Path, sources: SourceTree) -> Iterator[str]:
    """What a reader of the trace should know about its sources: libraries that are missing, and files that were changed
    or lost after `python -m tools.fetch_sources` fetched them.
    """
    described = sources.describe()
    fetched = {}
    if (root / MANIFEST).is_file():
        try:
            entries = json.loads((root / MANIFEST).read_text(encoding="utf-8"))["sources"]
            fetched = {name: entry["sha256"] for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            yield f"{root / MANIFEST}: damaged; fetch the sources again"
    for distribution, package, _ in DISTRIBUTIONS:
        expected = fetched.get(distribution)
        if distribution not in described:
            yield f"{root}: no {package}; calls into it are listed as unresolved"
        elif expected and expected != described[distribution]["sha256"]:
            yield (
                f"{sources.packages[package]}: not the files of {distribution} that were fetched: some were changed, "
                f"added or lost; unless you did this on purpose, remove the directory and fetch it again"
            )
