"""The files of a source tree, and which of them mention a name; for the checker."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tools.kernel_tracing.source.sources import BUNDLED, DISTRIBUTIONS
from tools.kernel_tracing.verify.check_source import SourceFile, read

WORD = re.compile(r"\w+")
_BASES = re.compile(r"\bclass\s+\w+\s*\(([^:]*)|\btype\([^()]*,\s*\(([^()]*)")
_DECORATORS = re.compile(r"@([\w.]+)")
# Parts of the packages that a server never imports, where no evidence is looked for: SGLang's diffusion models, its
# tests, and the Python of CUTLASS.
_ASIDE = ("sglang/multimodal_gen/", "sglang/test/", "flashinfer/data/")


class _Scanned(NamedTuple):
    """What the texts of the files in which evidence may be contain: identifier -> files."""

    words: dict[str, list[str]]
    bases: dict[str, list[str]]
    decorators: dict[str, list[str]]


class Sources:
    """The files below a directory of sources, in either layout, parsed when they are needed."""

    def __init__(self, root: Path) -> None:
        self.packages: dict[str, Path] = {}
        for _, package, checkouts in DISTRIBUTIONS:
            for place in (*checkouts, package):
                if (root / place / "__init__.py").is_file() or (root / place / "srt").is_dir():
                    self.packages[package] = root / place
                    break
        for package, bundled in BUNDLED.items():
            if package in self.packages:
                beside = {name: self.packages[package].parent / name for name in bundled}
                self.packages |= {name: place for name, place in beside.items() if place.is_dir()}
        self._paths = {
            f"{package}/{path.relative_to(root).as_posix()}": path
            for package, root in sorted(self.packages.items())
            for path in sorted(root.rglob("*.py"))
        }
        self._files: dict[str, SourceFile | None] = {}
        self._texts: dict[str, str] = {}
        self._mentions: dict[str, list[str]] = {}

    def path(self, file: str) -> Path | None:
        """The path of a file in a trace; None if no package has it."""
        return self._paths.get(file)

    def _text(self, file: str) -> str:
        if file not in self._texts:
            self._texts[file] = self._paths[file].read_text(encoding="utf-8-sig", errors="replace")
        return self._texts[file]

    def get(self, file: str) -> SourceFile | None:
        """The parsed file; None if it does not exist or is not Python."""
        if file not in self._files:
            try:
                self._files[file] = read(file, self._text(file)) if file in self._paths else None
            except (SyntaxError, ValueError, RecursionError):
                self._files[file] = None
        return self._files[file]

    def mentioning(self, name: str) -> list[SourceFile]:
        """The files in which evidence may be and whose text contains `name`, which has whole identifiers, in order."""
        if name not in self._mentions:
            self._mentions[name] = [file for file in self._with_words(name) if name in self._texts[file]]
        return self._read(self._mentions[name])

    def deriving(self, name: str) -> list[SourceFile]:
        """Those that may derive a class from one of that name: among the bases of a class, or in a call of `type`."""
        return self._read(self._scanned.bases.get(name, ()))

    def decorating(self, name: str) -> list[SourceFile]:
        """Those that may use a decorator of that name."""
        return self._read(self._scanned.decorators.get(name, ()))

    def texts_with(self, name: str) -> list[str]:
        """The texts of those that contain an identifier."""
        return [self._texts[file] for file in self._with_words(name)]

    def mentions(self, name: str) -> int:
        """The number of those that contain an identifier."""
        return len(self._scanned.words.get(name, ()))

    def _read(self, files: Iterable[str]) -> list[SourceFile]:
        return [source for file in files if (source := self.get(file)) is not None]

    def _with_words(self, name: str) -> list[str]:
        """The files that contain the rarest of some identifiers."""
        found = (self._scanned.words.get(word, []) for word in WORD.findall(name))
        return min(found, key=len, default=[])

    @cached_property
    def _scanned(self) -> _Scanned:
        found = _Scanned({}, {}, {})
        for file in (one for one in self._paths if not one.startswith(_ASIDE)):
            text = self._text(file)
            bases, decorators = " ".join(map(" ".join, _BASES.findall(text))), " ".join(_DECORATORS.findall(text))
            for table, part in zip(found, (text, bases, decorators), strict=True):
                for word in dict.fromkeys(WORD.findall(part)):
                    table.setdefault(word, []).append(file)
        return found

    def module_file(self, module: str) -> str | None:
        """The file of a dotted module."""
        stem = module.replace(".", "/")
        return next((file for file in (f"{stem}.py", f"{stem}/__init__.py") if self.path(file) is not None), None)
