"""Where evidence is, how it is read, and what *proven* means. Importing this imports no torch.

Evidence is what real kernels answered for one Definition: on which GPU, for which reference and contract, judged by
which code (see `evidence_run`). `harness.evidence` writes it; everything else reads it here, so validation,
embedding, documents and tests share one meaning.

A Definition is *proven* if its evidence has an entry for each kernel that computes it and runs on a GPU of
compute capability `RECORDED_ON`, and every entry fits the Definition and the record as they stand today. A kernel that
today's releases dropped need not have run. Where no other kernel runs there, an entry of one kernel is enough. An entry
that fits, but was judged by older code of the harness or of the family, is *stale*: it still proves, until a release.
"""

from __future__ import annotations

import functools
import importlib
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flashinfer_trace.dataset import digests, store
from flashinfer_trace.dataset.evidence_run import (
    DRAWN_CASES,
    REQUIRED_CASES,
    SEED,
    TIME_FORMAT,
    Entry,
    Objection,
    Run,
    fields_of,
)
from flashinfer_trace.format import json_source
from flashinfer_trace.format.naming import family_name, load_naming
from flashinfer_trace.kernels import kernels_of
from flashinfer_trace.kernels.table import KernelFacts

if TYPE_CHECKING:
    from flashinfer_trace.format.definition import Definition

#: Those of `evidence_run`, whose users find them here.
__all__ = ["DRAWN_CASES", "REQUIRED_CASES", "SEED", "TIME_FORMAT", "Entry", "Objection"]

VERIFIED, UNVERIFIED = "status:verified", "status:unverified"
#: Digests of code that judges as older code did, from the root of a dataset.
EQUIVALENT_CODE = "schema/equivalent_code.json"
#: Compute capability of the GPUs that evidence is recorded on: a proven Definition has run on every kernel of these.
RECORDED_ON = (9, 0)
_RESTORE = "restore it from version control or record it again"


class EvidenceError(ValueError):
    """An evidence file cannot be read or is not evidence. The message names the file and the fix."""


class Named(Protocol):
    """The attributes by which the evidence of a Definition is found."""

    @property
    def name(self) -> str: ...

    @property
    def op_type(self) -> str: ...


@dataclass(frozen=True)
class Evidence:
    """The evidence of one Definition."""

    entries: tuple[Entry, ...]

    def stale(
        self, definition: Definition, code: Mapping[str, Mapping[str, str]] | None = None
    ) -> list[tuple[Entry, list[str]]]:
        """The runs that older code judged, each with what of it has changed: "harness" and "family", or "plans".

        Where nothing else has changed and other code draws the plans, they are drawn again and compared. Imports torch.
        """
        known, found = code_today(definition) if code is None else code, []
        equivalent = _equivalent(definition.root or store.find_root())
        for entry in self.entries:
            today = known.get(entry.kernel_label, {})
            changed = [part for part in ("harness", "family") if today.get(part) not in equivalent(entry.digests[part])]
            redrawn = bool(today) and not changed and entry.digests["plans"] != today["plans"]
            if redrawn and not _same_plans(definition, entry):
                changed.append("plans")
            if changed:
                found.append((entry, changed))
        return found

    def outdated(self, definition: Definition, kernels: Mapping[str, KernelFacts]) -> list[tuple[str, str]]:
        """The gaps of a release: the kernels without a run of today's stack by today's code, each with the reason.

        Runs of kernels that today's releases dropped stay as they are. Kernels that need another GPU than one of
        `RECORDED_ON` need no run. Imports torch.
        """
        today = {label: kernel for label, kernel in kernels.items() if not kernel.last_in}
        fitting = [entry for entry in self.proofs(definition, kernels) if entry.kernel_label in today]
        ran = {entry.kernel_label for entry in fitting}
        needed = [label for label, kernel in today.items() if kernel.runs_on(RECORDED_ON)]
        found = [(label, "it has not been run") for label in needed if label not in ran]
        older = [(entry, f"the run on {entry.run.gpu} is of {entry.older_releases}") for entry in fitting]
        found += [(entry.kernel_label, why) for entry, why in older if entry.older_releases]
        of_today = Evidence(tuple(entry for entry in fitting if not entry.older_releases))
        for entry, changed in of_today.stale(definition) if of_today.entries else ():
            changes = f"the code of the {' and of the '.join(changed)} has changed since the run on {entry.run.gpu}"
            found.append((entry.kernel_label, changes))
        return found

    def repeated(self) -> list[str]:
        """Kernel and GPU of the runs that are there twice: each is recorded once."""
        counts = Counter((entry.kernel_label, entry.run.gpu) for entry in self.entries)
        return [f"{label} on {gpu}" for (label, gpu), count in counts.items() if count > 1]

    def proofs(self, definition: Definition, kernels: Mapping[str, KernelFacts]) -> tuple[Entry, ...]:
        """The runs that fit a Definition as it stands (see `Entry.objections`)."""
        return tuple(entry for entry in self.entries if not any(entry.objections(definition, kernels)))

    def objections(self, definition: Definition, kernels: Mapping[str, KernelFacts]) -> list[Objection]:
        """Why this does not prove the Definition as it stands; nothing if it does (see `Entry.objections`)."""
        found = [Objection(f"the run of {one} is there twice", failed=True) for one in self.repeated()]
        for entry in self.entries:
            found += [
                Objection(f"{entry.kernel_label}: {one.text}", one.failed)
                for one in entry.objections(definition, kernels)
            ]
        recorded = {entry.kernel_label for entry in self.entries}
        needed = [label for label, kernel in kernels.items() if kernel.runs_on(RECORDED_ON) and not kernel.last_in]
        if not kernels:
            found.append(Objection("the family's record has no kernel that could prove it"))
        elif not needed and recorded.isdisjoint(kernels):
            found.append(Objection(f"no run of {' or '.join(kernels)}"))
        missing = [label for label in needed if label not in recorded]
        return found + [Objection(f"no run of {label}, which computes it too") for label in missing]


def kernels_today(root: Path, definition: Definition) -> dict[str, KernelFacts]:
    """The kernels that compute a Definition, by label.

    Raises:
        NamingError: schema/naming.json is missing or malformed.
        PrivateKernelsError: another package's kernels cannot be loaded.
    """
    family = family_name(definition, load_naming(root))
    return kernels_of(family, definition) if family else {}


def code_today(definition: Definition) -> dict[str, dict[str, str]]:
    """Short digests of the code that judges the kernels of a Definition, by label (`harness.binding`). Imports torch.

    Raises:
        LookupError: no family has the Definition.
    """
    binding: Any = importlib.import_module("flashinfer_trace.harness.binding")
    family = family_today(definition)
    code = {kernel.label: binding.judging_code(family, kernel) for kernel in family.kernels}
    return {label: {part: digests.short(one) for part, one in parts.items()} for label, parts in code.items()}


def _equivalent(root: Path) -> Callable[[str], set[str]]:
    """Digest of code -> those of code that judges as it does, by EQUIVALENT_CODE (see tools/rejudge)."""
    path = root / EQUIVALENT_CODE
    equal = _load_object(path).get("equivalent", {}) if path.is_file() else {}
    known = {digests.short(old): digests.short(new) for old, new in equal.items()}

    def equivalent(digest: str | None) -> set[str]:
        found: set[str] = set()
        while digest is not None and digest not in found:
            found.add(digest)
            digest = known.get(digest)
        return found

    return equivalent


def _same_plans(definition: Definition, entry: Entry) -> bool:
    """Whether today's code draws the cases of a run: see `harness.binding.same_plans`."""
    binding: Any = importlib.import_module("flashinfer_trace.harness.binding")
    family = family_today(definition)
    kernels = (kernel for kernel in family.kernels if kernel.label == entry.kernel_label)
    ran = entry.plans and binding.PlansRun(**entry.plans)
    return bool(ran) and all(binding.same_plans(definition, family, one, entry.run.seed, ran) for one in kernels)


def family_today(definition: Definition) -> Any:
    """The `Family` of a Definition, from a floor above this one. Imports torch."""
    families: Any = importlib.import_module("flashinfer_trace.families")
    return families.family_of(definition)


def evidence_directory(root: Path) -> Path:
    """Where the evidence of a dataset lies."""
    return root / "evidence"


def evidence_path(root: Path, definition: Named) -> Path:
    """Where the evidence of a Definition lies, there or not."""
    return file_in(evidence_directory(root), definition.op_type, definition.name)


def file_in(directory: Path, op_type: str, name: str) -> Path:
    """The path of the evidence of a Definition in a directory of evidence."""
    return directory / op_type / f"{name}.jsonl"


def run_file(directory: Path, run: str) -> Path:
    """The path of the header of a run in a directory of evidence."""
    return directory / "runs" / f"{run}.json"


def read(root: Path, definition: Named) -> Evidence | None:
    """The evidence of a Definition, None if nothing was recorded.

    Raises:
        EvidenceError: the file or the header of a run cannot be read or is not evidence.
    """
    path = evidence_path(root, definition)
    state = _state(path)
    return None if state is None else Evidence(entries_of(path, _lines(path, *state)))


def entries_of(path: Path, lines: Sequence[Sequence[Any]]) -> tuple[Entry, ...]:
    """Reads the lines of the evidence file at `path`.

    Raises:
        EvidenceError: a line is not evidence, or its run has no header, or not a usable one.
    """
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(Entry.from_json(line, load_run(path.parent.parent, fields_of(line)["run"])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            told = str(error) if isinstance(error, EvidenceError) else f"is not evidence ({error!r}); record it again"
            raise EvidenceError(f"{path}: line {number}: {told}") from None
    return tuple(entries)


def proofs(root: Path, definition: Definition) -> tuple[Entry, ...]:
    """The recorded runs that fit a Definition and its family's record as they stand.

    Raises:
        EvidenceError: see `read`.
        NamingError, PrivateKernelsError: see `kernels_today`.
    """
    evidence = read(root, definition)
    return () if evidence is None else evidence.proofs(definition, kernels_today(root, definition))


def released(root: Path, definition: Definition) -> set[str]:
    """Labels of the kernels whose runs fit a Definition as it stands, and that a release accepts (`outdated`)."""
    evidence = read(root, definition)
    if evidence is None:
        return set()
    kernels = kernels_today(root, definition)
    outdated = {label for label, _ in evidence.outdated(definition, kernels)}
    return {entry.kernel_label for entry in evidence.proofs(definition, kernels)} - outdated


def proven(root: Path, definition: Definition) -> bool:
    """Whether a Definition is proven, as the module's text says."""
    evidence = read(root, definition)
    return evidence is not None and not evidence.objections(definition, kernels_today(root, definition))


def load_lines(path: Path) -> Sequence[Sequence[Any]]:
    """The lines of one evidence file, read with the limits of `json_source` and not yet checked.

    Raises:
        EvidenceError: it cannot be read, or a line is not a JSON list without duplicate keys.
    """
    try:
        document = json_source.load_lines(path)
        if document.problems:
            raise json_source.JsonSourceError(document.problems[0])
    except json_source.JsonSourceError as error:
        raise EvidenceError(f"{path}: {error}; {_RESTORE}") from None
    lines: list[Sequence[Any]] = document.data
    return lines


def load_run(directory: Path, name: str) -> Run:
    """The header of a run in a directory of evidence.

    Raises:
        EvidenceError: there is none, it cannot be read, is not a header, or is not the one of this name.
    """
    path = run_file(directory, str(name))
    state = _state(path) if name == path.stem else None  # no way out of the directory
    if state is None:
        raise EvidenceError(f"there is no header of the run {str(name)[:80]} in {path.parent}; {_RESTORE}")
    return _run(path, *state)


def _state(path: Path) -> tuple[int, int] | None:
    """Time and size of a file, None if there is none."""
    try:
        state = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    if stat.S_ISLNK(state.st_mode):
        raise EvidenceError(f"{path}: is a symbolic link; replace it by the file itself")
    return state.st_mtime_ns, state.st_size


@functools.lru_cache(maxsize=store.CACHED_FILES)
def _lines(path: Path, _modified: int, _size: int) -> Sequence[Sequence[Any]]:
    return load_lines(path)


@functools.lru_cache(maxsize=store.CACHED_FILES)
def _run(path: Path, _modified: int, _size: int) -> Run:
    data = _load_object(path)
    try:
        return Run.from_json(path.stem, data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        told = error if isinstance(error, ValueError) else f"not a run ({error!r})"
        raise EvidenceError(f"{path}: {told}; {_RESTORE}") from None


def _load_object(path: Path) -> dict[str, Any]:
    try:
        return json_source.load_object(path)
    except json_source.JsonSourceError as error:
        raise EvidenceError(f"{path}: {error}; {_RESTORE}") from None
