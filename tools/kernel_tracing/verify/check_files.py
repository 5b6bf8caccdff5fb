"""The files of a source tree, and which of them mention a name; for the checker."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tools.kernel_tracing.source.sources import BUNDLED, DISTRIBUTIONS
from tools.kernel_tracing.verify.check_source import SourceFile, read

WORD = re.compile(r"\w+")
# Regular expressions that begin with text are found several times faster.
_BASES = re.compile(r"class\s+\w+\s*\(([^:]*)"), re.compile(r"type\([^()]*,\s*\(([^()]*)")
_DECORATORS = re.compile(r"@([\w.]+)")
# Parts of the packages that a server never imports, where no evidence is looked for: SGLang's diffusion models, its
# tests, and the Python of CUTLASS.
_ASIDE = ("sglang/multimodal_gen/", "sglang/test/", "flashinfer/data/")


class _Scanned(NamedTuple):
    """What the texts of the files in which evidence may be contain: identifier -> files."""

    words: dict[str, list[str]]
    bases: dict[str, list[str]]
    decorators: dict[str, list[str]]


class _Outline(NamedTuple):
    """What stays of a file that is not kept: of its `SourceFile`, the names in three tables, and the classes."""

    attributes: Container[str]
    calls: Container[str]
    decorated: Container[str]
    bases: dict[str, list[str]]
    derived: dict[str, list[str]]


class Sources:
    """The files below a directory of sources, in either layout, parsed when they are needed.

    A parsed file takes about forty times the memory of its text. Most are parsed only to find out that they lack what
    is searched: of these, an outline stays, so that none is parsed again for the next search that finds nothing.
    """

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
        self._known: dict[str, SourceFile | _Outline | None] = {}
        self._mentions: dict[str, list[str]] = {}

    def path(self, file: str) -> Path | None:
        """The path of a file in a trace; None if no package has it."""
        return self._paths.get(file)

    def _text(self, file: str) -> str:
        return self._paths[file].read_text(encoding="utf-8-sig", errors="replace")

    def text(self, file: str) -> str | None:
        """The text of a file; None if it does not exist or is not Python."""
        return self._text(file) if self._outline(file) is not None else None

    def get(self, file: str) -> SourceFile | None:
        """The parsed file, which is kept; None if it does not exist or is not Python."""
        known = self._known.get(file)
        if isinstance(known, _Outline) or file not in self._known:
            known = self._known[file] = self._parsed(file)
        return known

    def _parsed(self, file: str) -> SourceFile | None:
        try:
            return read(file, self._text(file)) if file in self._paths else None
        except (SyntaxError, ValueError, RecursionError):
            return None

    def _outline(self, file: str, table: str = "", name: str = "") -> SourceFile | _Outline | None:
        """What is known of a file. If it is parsed for this, it is kept only if a table has a name."""
        if file not in self._known:
            source = self._parsed(file)
            if source is None or (table and name in getattr(source, table)):
                self._known[file] = source
            else:
                self._known[file] = _Outline(
                    frozenset(source.attributes),
                    frozenset(source.calls),
                    frozenset(source.decorated),
                    source.bases,
                    source.derived,
                )
        return self._known[file]

    def mentioning(self, name: str) -> list[SourceFile]:
        """The files in which evidence may be and whose text contains `name`, which has whole identifiers, in order."""
        return [source for file in self._mentioning(name) if (source := self.get(file)) is not None]

    def giving(self, name: str, mentioned: str = "") -> list[SourceFile]:
        """Those that give something to attributes, keywords or fields of that name, or define such methods.

        `mentioned` is what their text must contain, if not the name.
        """
        return self._with("attributes", name, self._mentioning(mentioned or name))

    def calling(self, name: str, mentioned: str = "") -> list[SourceFile]:
        """Those that call something of that name; `mentioned` is as for `giving`."""
        return self._with("calls", name, self._mentioning(mentioned or name))

    def decorating(self, name: str) -> list[SourceFile]:
        """Those that use a decorator of that name."""
        return self._with("decorated", name, self._scanned.decorators.get(name, ()))

    def _with(self, table: str, name: str, files: Iterable[str]) -> list[SourceFile]:
        """Those of some files whose table has a name."""
        having = (file for file in files if name in getattr(self._outline(file, table, name), table, ()))
        return [source for file in having if (source := self.get(file)) is not None]

    def bases(self, name: str) -> list[list[str]]:
        """For each file that defines a class of that name, the bare names of its bases."""
        outlines = (self._outline(file) for file in self._mentioning(f"class {name}"))
        return [outline.bases[name] for outline in outlines if outline is not None and name in outline.bases]

    def derived(self, name: str) -> set[str]:
        """The bare names of the classes that have a base of that name."""
        outlines = (self._outline(file) for file in self._scanned.bases.get(name, ()))
        return {derived for outline in outlines if outline is not None for derived in outline.derived.get(name, ())}

    def _mentioning(self, name: str) -> list[str]:
        if name not in self._mentions:
            files = self._with_words(name)
            exact = WORD.fullmatch(name) is not None
            self._mentions[name] = files if exact else [file for file in files if name in self._text(file)]
        return self._mentions[name]

    def texts_with(self, name: str) -> list[str]:
        """The texts of those that contain an identifier."""
        return [self._text(file) for file in self._with_words(name)]

    def mentions(self, name: str) -> int:
        """The number of those that contain an identifier."""
        return len(self._scanned.words.get(name, ()))

    def _with_words(self, name: str) -> list[str]:
        """The files that contain the rarest of some identifiers."""
        found = (self._scanned.words.get(word, []) for word in WORD.findall(name))
        return min(found, key=len, default=[])

    @cached_property
    def _scanned(self) -> _Scanned:
        found = _Scanned({}, {}, {})
        for file in (one for one in self._paths if not one.startswith(_ASIDE)):
            text = self._text(file)
            bases = " ".join(part for pattern in _BASES for part in pattern.findall(text))
            decorators = " ".join(_DECORATORS.findall(text))
            for table, part in zip(found, (text, bases, decorators), strict=True):
                for word in dict.fromkeys(WORD.findall(part)):
                    table.setdefault(word, []).append(file)
        return found

    def module_file(self, module: str) -> str | None:
        """The file of a dotted module."""
        stem = module.replace(".", "/")
        return next((file for file in (f"{stem}.py", f"{stem}/__init__.py") if self.path(file) is not None), None)
