"""The ledger: where evidence lies, how it is read, and what *proven* means. Importing this imports no torch.

Evidence is what real kernels answered for one Definition, on which GPU, for which reference. `harness.evidence` writes
it; everything else reads it here, so that validation, embedding, documents and tests share one meaning.
"""

from __future__ import annotations

import functools
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flashinfer_trace import json_source

__all__ = [
    "DRAWN_CASES",
    "REQUIRED_CASES",
    "UNVERIFIED",
    "VERIFIED",
    "Entry",
    "Ledger",
    "LedgerError",
    "evidence_directory",
    "evidence_path",
    "file_in",
    "kernel_label",
    "load_json",
    "proofs",
    "proven",
    "read",
]

VERIFIED, UNVERIFIED = "status:verified", "status:unverified"
#: Real cases that one entry needs to prove anything. If a defect showed in a fraction p of all cases, 50 independent
#: ones would miss it with probability (1 - p)^50: at most 5 % for p = 6 % (the rule of three, 3 / 50).
REQUIRED_CASES = 50
#: Real cases that a run against a kernel draws unless told otherwise: a tenth above the requirement, so that recorded
#: evidence still suffices if a few of its cases are found to prove nothing.
DRAWN_CASES = REQUIRED_CASES * 11 // 10


class LedgerError(ValueError):
    """An evidence file cannot be read or is not evidence. The message names the file and the fix."""


class Named(Protocol):
    """What a Definition must have for its evidence to be found."""

    @property
    def name(self) -> str: ...

    @property
    def op_type(self) -> str: ...


class Provable(Named, Protocol):
    """What a Definition must have for its evidence to be judged."""

    @property
    def reference_sha256(self) -> str: ...


@dataclass(frozen=True)
class Entry:
    """One run of one kernel on one GPU.

    Attributes:
        path, variant: the kernel's dotted path, and which use of it ("" if there is only one).
        library, version: the distribution that ships it.
        gpu: name as CUDA reports it.
        capability: compute capability, major and minor.
        cases: real cases: distinct ones that prove something.
        vacuous: cases that prove nothing (an empty or all-zero expected output). They are counted apart from `cases`.
        passed: every output of every case met its bound.
        outputs: output -> policy (text) and figures: kernel_worst and reference_worst (error / bound), kernel_error and
            reference_error (relative norm).
        recorded_at: when the run ended, UTC, ISO 8601.
    """

    path: str
    variant: str
    library: str
    version: str
    gpu: str
    capability: tuple[int, int]
    cases: int
    vacuous: int
    passed: bool
    outputs: Mapping[str, Mapping[str, Any]]
    recorded_at: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Entry:
        """An entry of schema/evidence.schema.json (KeyError, TypeError or ValueError if it does not follow that)."""
        kernel, gpu = data["kernel"], data["gpu"]
        major, minor = gpu["compute_capability"].split(".")
        return cls(
            path=kernel["path"],
            variant=kernel["variant"],
            library=kernel["library"],
            version=kernel["version"],
            gpu=gpu["name"],
            capability=(int(major), int(minor)),
            cases=data["cases"],
            vacuous=data["vacuous"],
            passed=data["result"] == "passed",
            outputs=data["outputs"],
            recorded_at=data["recorded_at"],
        )

    @property
    def kernel_label(self) -> str:
        """The kernel as its family's record labels it: the path, and the variant in brackets."""
        return kernel_label(self.path, self.variant)

    @property
    def worst(self) -> float:
        """Largest error / bound of the kernel over all outputs."""
        return max(float(output["kernel_worst"]) for output in self.outputs.values())

    @property
    def shortcoming(self) -> str | None:
        """Why this run proves nothing, None if it does."""
        if not self.passed:
            return "the run failed"
        if self.cases < REQUIRED_CASES:
            return f"{self.cases} real cases are fewer than {REQUIRED_CASES}"
        for name, output in self.outputs.items():
            for figure in ("kernel_worst", "reference_worst"):
                if not 0 <= output[figure] <= 1:  # a NaN fails too
                    return f"{figure} of {name} is {output[figure]}, beyond its bound"
        return None


@dataclass(frozen=True)
class Ledger:
    """The evidence of one Definition.

    Attributes:
        definition, op_type: of which Definition.
        reference_sha256: hash of the reference that ran.
        entries: every recorded run, proving or not.
    """

    definition: str
    op_type: str
    reference_sha256: str
    entries: tuple[Entry, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        """The content of an evidence file.

        Raises:
            LedgerError: it does not follow schema/evidence.schema.json.
        """
        try:
            entries = tuple(map(Entry.from_json, data["entries"]))
            ledger = cls(data["definition"], data["op_type"], data["reference_sha256"], entries)
            for entry in entries:  # touches every field that is computed with
                _ = entry.shortcoming, entry.worst
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LedgerError(f"not an evidence file ({error!r}); record it again on a GPU") from None
        return ledger

    def mismatch(self, definition: Provable) -> str | None:
        """Why this is no evidence for the Definition as it stands, None if it is."""
        if (self.op_type, self.definition) != (definition.op_type, definition.name):
            return f"it is for {self.op_type}/{self.definition}"
        if self.reference_sha256 != definition.reference_sha256:
            return f"it is for another reference (its hash is not {definition.reference_sha256[:12]}...)"
        return None

    def proofs(self, definition: Provable) -> tuple[Entry, ...]:
        """The runs that prove the Definition as it stands."""
        if self.mismatch(definition) is not None:
            return ()
        return tuple(entry for entry in self.entries if entry.shortcoming is None)


def kernel_label(path: str, variant: str) -> str:
    """Unique name of a kernel within a family: its dotted path, and the variant in brackets."""
    return f"{path}[{variant}]" if variant else path


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


def proofs(root: Path, definition: Provable) -> tuple[Entry, ...]:
    """The recorded runs that prove a Definition as it stands.

    Raises:
        LedgerError: see `read`.
    """
    ledger = read(root, definition)
    return ledger.proofs(definition) if ledger else ()


def proven(root: Path, definition: Provable) -> bool:
    """Whether a Definition is proven: a real kernel's run stands in its evidence, for exactly this reference, that
    passed with at least `REQUIRED_CASES` real cases and every output within its bound.

    Raises:
        LedgerError: see `read`.
    """
    return bool(proofs(root, definition))


def load_json(path: Path) -> dict[str, Any]:
    """The JSON of one evidence file, read with the limits of `json_source` and not yet checked.

    Raises:
        LedgerError: it cannot be read, or is not one JSON object without duplicate keys.
    """
    try:
        document = json_source.load(path)
        if document.problems:
            raise json_source.JsonSourceError(document.problems[0])
    except json_source.JsonSourceError as error:
        raise LedgerError(f"{path}: {error}; restore it from version control or record it again") from None
    if not isinstance(document.data, dict):
        raise LedgerError(f"{path}: not an evidence file (no JSON object); record it again")
    return document.data


@functools.lru_cache(maxsize=1024)
def _read(path: Path, _modified: int, _size: int) -> Ledger:
    data = load_json(path)
    try:
        ledger = Ledger.from_json(data)
    except LedgerError as error:
        raise LedgerError(f"{path}: {error}") from None
    if (ledger.op_type, ledger.definition) != (path.parent.name, path.stem):
        raise LedgerError(f"{path}: is evidence for {ledger.op_type}/{ledger.definition}; move it or record it again")
    return ledger
