"""The files of a source tree, and which of them mention a name; for the checker."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tools.kernel_tracing.source.sources import BUNDLED, DISTRIBUTIONS
from tools.kernel_tracing.verify.check_source import SourceFile, read

WORD = re.compile(r"\w+")
# Parts of the packages that a server never imports, where no evidence is looked for: SGLang's diffusion models, its
# tests, and the Python of CUTLASS.
_ASIDE = ("sglang/multimodal_gen/", "sglang/test/", "flashinfer/data/")


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
        self._words: dict[str, list[str]] = defaultdict(list)  # identifier -> the files that contain it
        self._mentions: dict[tuple[str, str], list[str]] = {}

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

    def mentioning(self, name: str, where: str = "") -> list[SourceFile]:
        """The files in which evidence may be and whose text contains `name`, in order.

        Args:
            name: whole identifiers, with what is between them.
            where: a regular expression of the places that matter, in which NAME stands for the name; "" for all.
        """
        key = (name, where)
        if key not in self._mentions:
            places = re.compile(where.replace("NAME", rf"\b{re.escape(name)}\b"))
            found = (file for file in self._with_words(name) if name in self._texts[file])
            self._mentions[key] = [file for file in found if not where or places.search(self._texts[file])]
        return [source for file in self._mentions[key] if (source := self.get(file)) is not None]

    def texts_with(self, name: str) -> list[str]:
        """The texts of the files in which evidence may be and that contain an identifier."""
        return [self._texts[file] for file in self._with_words(name)]

    def mentions(self, name: str) -> int:
        """The number of these files."""
        return len(self._with_words(name)) if name else 0

    def _with_words(self, name: str) -> list[str]:
        """The files that contain the rarest of some identifiers."""
        if not self._words:
            for file in (one for one in self._paths if not one.startswith(_ASIDE)):
                for word in dict.fromkeys(WORD.findall(self._text(file))):
                    self._words[word].append(file)
        return min((self._words.get(word, []) for word in WORD.findall(name)), key=len, default=[])

    def module_file(self, module: str) -> str | None:
        """The file of a dotted module."""
        stem = module.replace(".", "/")
        return next((file for file in (f"{stem}.py", f"{stem}/__init__.py") if self.path(file) is not None), None)
