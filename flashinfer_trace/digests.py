"""Digests that evidence is bound to: of a Definition's contract, and of the code that judged. Imports no torch.

`content_sha256` is that of data whose numbers nobody can compute again from what is kept here: an edit is noticed.

The reference's own digest is `reference.sha256`. A digest of code covers the text of source files under their names in
the package, with line breaks normalised: it is the same for a checkout, a wheel and any path.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashinfer_trace.definition import Definition

__all__ = ["CodeDigests", "content_sha256", "contract_sha256", "current", "lengths_sha256"]

PACKAGE = Path(__file__).resolve().parent
#: Where the harness begins, and the modules outside of it that bind inputs and run a reference.
_HARNESS = ("harness.verify", "definition", "reference", "constraints", "constraint_values", "precision", "closeness")
#: Modules that run or judge; others (reading JSON, the command line) change no verdict.
_JUDGING = ("harness", "isolation", *_HARNESS[1:])

#: An import statement at the beginning of a line (a parser would take longer than all other checks of a dataset); that
#: a docstring may look like one only adds a module.
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<dots>\.*)(?P<module>[\w.]*)[ \t]+import[ \t]*(?P<names>\([^)]*\)|[^\n]*)"
    r"|import[ \t]+(?P<plain>[\w.]+))",
    re.MULTILINE,
)
_NAME = re.compile(r"\w+")


def contract_sha256(definition: Definition) -> str:
    """SHA-256 of what a Definition promises: name, op_type, axes, constraints, inputs and outputs with their dtypes.

    Descriptions and tags are no part of it; the order of inputs and outputs is.
    """
    contract = {
        "name": definition.name,
        "op_type": definition.op_type,
        "axes": [[axis.name, axis.value] for axis in definition.axes.values()],
        "constraints": list(definition.constraints),
        "inputs": [[one.name, one.shape, one.dtype] for one in definition.inputs.values()],
        "outputs": [[one.name, one.shape, one.dtype] for one in definition.outputs.values()],
    }
    return hashlib.sha256(json.dumps(contract, sort_keys=True).encode()).hexdigest()


def content_sha256(data: Mapping[str, Any], *without: str) -> str:
    """SHA-256 of a JSON object but for some of its fields, such as the one that holds this digest."""
    content = {name: value for name, value in data.items() if name not in without}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def lengths_sha256(profile: Mapping[str, Any]) -> str:
    """SHA-256 of all that a profile of workloads/traffic.json says, but for this digest itself."""
    return content_sha256(profile, "lengths_sha256")


class CodeDigests:
    """Digests of the code under one package directory, each computed once.

    Attributes:
        package: the directory of ``flashinfer_trace``.
    """

    def __init__(self, package: Path = PACKAGE) -> None:
        self.package = package
        self._family: dict[str, str] = {}

    @functools.cached_property
    def harness(self) -> str:
        """Of the harness, and of what binds inputs and runs a reference."""
        return self._digest(self.harness_modules)

    @functools.cached_property
    def harness_modules(self) -> frozenset[str]:
        """Names of the modules in `harness`, relative to the package."""
        return self._closure(_HARNESS, _JUDGING)

    def family(self, module: str) -> str:
        """Of the module that has a family's record, and of all that it imports from other families.

        Args:
            module: relative to the package, as schema/records.json names it, e.g. ``families.gemm.qserve``.
        """
        if module not in self._family:
            self._family[module] = self._digest(self.family_modules(module))
        return self._family[module]

    def family_modules(self, module: str) -> frozenset[str]:
        """Names of the modules in `family`, relative to the package; those of `harness_modules` are left to it.

        A package of an op_type only collects the records of its modules: it counts where its own record or an import
        asks for it, so that a new family leaves the digests of its siblings alone.
        """
        return self._closure((module,), ("families", *_JUDGING)) - self.harness_modules

    def _closure(self, start: Iterable[str], prefixes: tuple[str, ...]) -> frozenset[str]:
        found: set[str] = set()
        queue = [name for name in start if self._path(name) is not None]
        while queue:
            name = queue.pop()
            # These two __init__ files only export; importing a module runs those of the packages around it.
            if name in found or name in ("", "families"):
                continue
            if not any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes):
                continue
            found.add(name)
            queue += self._imports(name)
            if not name.startswith("families."):
                queue.append(name.rpartition(".")[0])
        return frozenset(found)

    def _path(self, name: str) -> Path | None:
        base = self.package.joinpath(*name.split("."))
        return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)

    def _imports(self, name: str) -> Iterator[str]:
        """Modules of the package that one imports anywhere, also inside of functions."""
        path = self._path(name)
        assert path is not None
        around = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for match in _IMPORT.finditer(path.read_text(encoding="utf-8")):
            dots, module, names = match["dots"] or "", match["module"] or match["plain"] or "", match["names"] or ""
            if dots:
                base = ["flashinfer_trace", *around][: len(around) + 2 - len(dots)]
                module = ".".join([*base, module] if module else base)
            for dotted in (module, *(f"{module}.{word}" for word in _NAME.findall(names))):
                inside = dotted.removeprefix("flashinfer_trace.")
                if inside != dotted and self._path(inside) is not None:
                    yield inside

    def _digest(self, modules: Iterable[str]) -> str:
        digest = hashlib.sha256()
        for name in sorted(modules):
            path = self._path(name)
            assert path is not None
            text = path.read_bytes().replace(b"\r\n", b"\n")
            digest.update(f"{name}\0{len(text)}\0".encode() + text)
        return digest.hexdigest()


@functools.cache
def current() -> CodeDigests:
    """Those of the package that runs."""
    return CodeDigests()
