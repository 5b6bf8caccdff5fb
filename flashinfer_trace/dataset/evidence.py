"""The ledger: where evidence lies, how it is read, and what *proven* means. Importing this imports no torch.

Evidence is what real kernels answered for one Definition: on which GPU, for which reference and contract, judged by
which policies and which code. `harness.evidence` writes it; everything else reads it here, so that validation,
embedding, documents and tests share one meaning.

A Definition is *proven* if its evidence has an entry for each kernel that computes it and runs on a GPU of
compute capability `RECORDED_ON`, and every entry fits the Definition and the record as they stand today. Where no
kernel runs there, an entry of one kernel on a GPU of its own is enough. An entry that fits, but was judged by older
code of the harness or of the family, is *stale*: it still proves, until a release.
"""

from __future__ import annotations

import functools
import importlib
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flashinfer_trace.dataset import store
from flashinfer_trace.dataset.evidence_run import DRAWN_CASES, REQUIRED_CASES, SEED, TIME_FORMAT, Entry, Objection
from flashinfer_trace.format import json_source
from flashinfer_trace.format.naming import family_name, load_naming
from flashinfer_trace.kernels import kernels_of
from flashinfer_trace.kernels.table import KernelFacts

if TYPE_CHECKING:
    from flashinfer_trace.format.definition import Definition

__all__ = [
    "DRAWN_CASES",
    "RECORDED_ON",
    "REQUIRED_CASES",
    "SEED",
    "TIME_FORMAT",
    "UNVERIFIED",
    "VERIFIED",
    "Entry",
    "Ledger",
    "LedgerError",
    "Objection",
    "code_today",
    "evidence_directory",
    "evidence_path",
    "family_today",
    "file_in",
    "kernel_label",
    "kernels_today",
    "load_json",
    "proofs",
    "proven",
    "read",
    "released",
]

VERIFIED, UNVERIFIED = "status:verified", "status:unverified"
#: Compute capability of the GPUs that evidence is recorded on: a proven Definition has run on every kernel of these.
RECORDED_ON = (9, 0)


class LedgerError(ValueError):
    """An evidence file cannot be read or is not evidence. The message names the file and the fix."""


class Named(Protocol):
    """What a Definition must have for its evidence to be found."""

    @property
    def name(self) -> str: ...

    @property
    def op_type(self) -> str: ...


@dataclass(frozen=True)
class Ledger:
    """The evidence of one Definition.

    Attributes:
        definition, op_type: of which Definition.
        entries: every recorded run, proving or not.
    """

    definition: str
    op_type: str
    entries: tuple[Entry, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        """The content of an evidence file.

        Raises:
            LedgerError: it does not follow schema/evidence.schema.json.
        """
        try:
            entries = tuple(map(Entry.from_json, data["entries"]))
            for entry in entries:  # touches every field that is computed with
                _ = entry.shortcoming, entry.worst, [output["policy"] for output in entry.outputs.values()]
                if not all(isinstance(text, str) for text in entry.texts):
                    raise TypeError("a name, a version or a digest is not a string")
                if not all(isinstance(figure, (int, float)) for figure in entry.figures):
                    raise TypeError("an error is not a number")
            return cls(data["definition"], data["op_type"], entries)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LedgerError(f"not an evidence file ({error!r}); record it again on a GPU") from None

    def stale(self, today: Mapping[str, Mapping[str, str]]) -> list[tuple[Entry, list[str]]]:
        """The runs that were judged by older code, each with what of it has changed: "harness", "family".

        Args:
            today: digests of today's code by label of the kernel (see `code_today`).
        """
        parts = ("harness", "family")
        found = [(e, [p for p in parts if e.digests[p] != today.get(e.kernel_label, {}).get(p)]) for e in self.entries]
        return [(entry, changed) for entry, changed in found if changed]

    def repeated(self) -> list[str]:
        """Kernel and GPU of the runs that are there twice: each is recorded once."""
        counts = Counter((entry.kernel_label, entry.gpu) for entry in self.entries)
        return [f"{label} on {gpu}" for (label, gpu), count in counts.items() if count > 1]

    def proofs(self, definition: Definition, kernels: Mapping[str, KernelFacts]) -> tuple[Entry, ...]:
        """The runs that fit a Definition as it stands (see `Entry.objections`)."""
        return tuple(entry for entry in self.entries if not any(entry.objections(definition, kernels)))

    def objections(self, definition: Definition, kernels: Mapping[str, KernelFacts]) -> list[Objection]:
        """Why this does not prove the Definition as it stands; nothing if it does (see `Entry.objections`)."""
        if (self.op_type, self.definition) != (definition.op_type, definition.name):
            return [Objection(f"it is for {self.op_type}/{self.definition}")]
        found = [Objection(f"the run of {one} is there twice", failed=True) for one in self.repeated()]
        for entry in self.entries:
            found += [
                Objection(f"{entry.kernel_label}: {one.text}", one.failed)
                for one in entry.objections(definition, kernels)
            ]
        recorded = {entry.kernel_label for entry in self.entries}
        needed = [label for label, kernel in kernels.items() if kernel.runs_on(RECORDED_ON)]
        if not kernels:
            found.append(Objection("the family's record has no kernel that could prove it"))
        elif not needed and recorded.isdisjoint(kernels):
            found.append(Objection(f"no run of {' or '.join(kernels)}"))
        missing = [label for label in needed if label not in recorded]
        return found + [Objection(f"no run of {label}, which computes it too") for label in missing]


def kernel_label(path: str, variant: str) -> str:
    """Unique name of a kernel within a family: its dotted path, and the variant in brackets."""
    return f"{path}[{variant}]" if variant else path


def kernels_today(root: Path, definition: Definition) -> dict[str, KernelFacts]:
    """The kernels that compute a Definition, by label.

    Raises:
        NamingError: schema/naming.json is missing or malformed.
        PrivateKernelsError: another package's kernels cannot be loaded.
    """
    family = family_name(definition, load_naming(root))
    return kernels_of(family, definition) if family else {}


def code_today(definition: Definition) -> dict[str, dict[str, str]]:
    """Digests of the code that judges the kernels of a Definition, by label: see `harness.binding`. Imports torch.

    Raises:
        LookupError: no family has the Definition.
    """
    binding: Any = importlib.import_module("flashinfer_trace.harness.binding")
    family = family_today(definition)
    return {kernel.label: binding.judging_code(family, kernel) for kernel in family.kernels}


def family_today(definition: Definition) -> Any:
    """The `Family` of a Definition, from a floor above this one. Imports torch.

    Raises:
        LookupError: no family has the Definition.
    """
    families: Any = importlib.import_module("flashinfer_trace.families")
    return families.family_of(definition)


def evidence_directory(root: Path) -> Path:
    """Where the evidence of a dataset lies."""
    return root / "evidence"


def evidence_path(root: Path, definition: Named) -> Path:
    """Where the evidence of a Definition lies, there or not."""
    return file_in(evidence_directory(root), definition.op_type, definition.name)


def file_in(directory: Path, op_type: str, name: str) -> Path:
    """Where the evidence of a Definition lies in a directory of evidence."""
    return directory / op_type / f"{name}.json"


def read(root: Path, definition: Named) -> Ledger | None:
    """The evidence of a Definition, None if nothing was recorded.

    Raises:
        LedgerError: the file cannot be read, is not evidence, or is for a Definition of another name.
    """
    path = evidence_path(root, definition)
    try:
        state = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    if stat.S_ISLNK(state.st_mode):
        raise LedgerError(f"{path}: is a symbolic link; replace it by the file itself")
    return _read(path, state.st_mtime_ns, state.st_size)


def proofs(root: Path, definition: Definition) -> tuple[Entry, ...]:
    """The recorded runs that fit a Definition and its family's record as they stand.

    Raises:
        LedgerError: see `read`.
        NamingError, PrivateKernelsError: see `kernels_today`.
    """
    ledger = read(root, definition)
    return () if ledger is None else ledger.proofs(definition, kernels_today(root, definition))


def released(root: Path, definition: Definition) -> set[str]:
    """Labels of the kernels whose run on some GPU fits a Definition as it stands and was judged by today's code.

    Raises:
        LedgerError: see `read`.
        NamingError, PrivateKernelsError: see `kernels_today`; LookupError: see `code_today`.
    """
    ledger = read(root, definition)
    if ledger is None:
        return set()
    older = [entry for entry, _ in ledger.stale(code_today(definition))]
    return {entry.kernel_label for entry in proofs(root, definition) if entry not in older}


def proven(root: Path, definition: Definition) -> bool:
    """Whether a Definition is proven, as the module's text says.

    Raises:
        LedgerError: see `read`.
        NamingError, PrivateKernelsError: see `kernels_today`.
    """
    ledger = read(root, definition)
    return ledger is not None and not ledger.objections(definition, kernels_today(root, definition))


def load_json(path: Path) -> dict[str, Any]:
    """The JSON of one evidence file, read with the limits of `json_source` and not yet checked.

    Raises:
        LedgerError: it cannot be read, or is not one JSON object without duplicate keys.
    """
    try:
        return json_source.load_object(path)
    except json_source.JsonSourceError as error:
        raise LedgerError(f"{path}: {error}; restore it from version control or record it again") from None


@functools.lru_cache(maxsize=store.CACHED_FILES)
def _read(path: Path, _modified: int, _size: int) -> Ledger:
    data = load_json(path)
    try:
        ledger = Ledger.from_json(data)
    except LedgerError as error:
        raise LedgerError(f"{path}: {error}") from None
    if (ledger.op_type, ledger.definition) != (path.parent.name, path.stem):
        named = f"{ledger.op_type[:80]}/{ledger.definition[:160]}"
        raise LedgerError(f"{path}: is evidence for {named}; move it or record it again")
    return ledger
