"""Dataset roots: the dataset, and private ones that are laid over it. Importing this imports no torch.

A private root has ``definitions/`` and what its Definitions need beyond the dataset: ``reference/``, ``evidence/``,
``workloads/``, and ``schema/naming.json`` with further families and abbreviations. Everything else is the dataset's.

An overlay holds Definitions that other programs wrote: a folder of FlashInfer's dumps, or a TraceSet of
flashinfer-bench. It is only read (`dataset.overlays`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from flashinfer_trace.format.files import UnreadableFile, read_text

#: Points the library at another dataset: a directory with definitions/, schema/, reference/ and evidence/.
ROOT_VARIABLE = "FLASHINFER_TRACE_ROOT"
#: Private roots, separated as in PATH.
PATH_VARIABLE = "FLASHINFER_TRACE_PATH"
#: The directory of the imported package.
PACKAGE = Path(__file__).resolve().parent.parent
#: Identifies the pyproject.toml of a checkout. A regular expression, because a TOML parser would slow down the import.
_PROJECT = re.compile(r'^name\s*=\s*"flashinfer-trace"\s*$', re.MULTILINE)


class DatasetError(LookupError):
    """The dataset or the Definition does not exist. The message names the place searched and the closest names."""


def find_root() -> Path:
    """The dataset root: a directory that contains ``definitions/``, ``schema/``, ``reference/`` and ``evidence/``.

    ``$FLASHINFER_TRACE_ROOT`` if it is set. Otherwise the first of these that exists: in an editable install, the
    checkout that contains the current directory; the checkout that the package is imported from; the copy in the wheel.

    Raises:
        DatasetError: none of them contains a dataset.
    """
    override = os.environ.get(ROOT_VARIABLE)
    candidates = [Path(os.path.realpath(override))] if override else [PACKAGE.parent, PACKAGE / "data"]
    for candidate in candidates:
        if _is_dataset(candidate):
            editable = candidate == PACKAGE.parent and not override
            return (enclosing_checkout() or candidate) if editable else candidate
    looked = ", ".join(str(c) for c in candidates)
    raise DatasetError(f"no dataset (definitions/ and schema/) in {looked}; set {ROOT_VARIABLE} or reinstall")


def find_roots() -> list[Path]:
    """The dataset's root, and those of ``$FLASHINFER_TRACE_PATH`` that are laid over it, without overlays.

    Raises:
        DatasetError: see `find_root`; or a private root has no Definitions.
    """
    return [find_root(), *_private_roots()]


def find_overlays() -> list[Path]:
    """The roots of ``$FLASHINFER_TRACE_PATH`` that hold Definitions of other programs.

    Raises:
        DatasetError: a private root has no Definitions.
    """
    return [root for root in _named_roots() if _is_overlay(root)]


def _private_roots() -> list[Path]:
    return [root for root in _named_roots() if not _is_overlay(root)]


def _named_roots() -> list[Path]:
    named = [part for part in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if part]
    roots = list(dict.fromkeys(Path(os.path.realpath(part)) for part in named))
    for root in roots:
        fix = ""
        if root.name == "definitions" and any((root.parent / part).is_dir() for part in ("schema", "reference")):
            fix = f"name the root {root.parent}"
        elif not (root / "definitions").is_dir() and not _is_overlay(root):
            fix = "correct the path, or name a folder with the .json files of FLASHINFER_TRACE_DUMP_DIR"
        if fix:
            raise DatasetError(f"{root}, a root of {PATH_VARIABLE} or --root, has no definitions/; {fix}")
    return roots


def _is_overlay(root: Path) -> bool:
    """Whether a root holds Definitions of others: files without definitions/ around them, or a TraceSet."""
    if (root / "definitions").is_dir():
        ours = (root / "schema").is_dir() or (root / "reference").is_dir()
        return not ours and any((root / part).is_dir() for part in ("solutions", "traces"))
    return any(next(root.glob(pattern), None) is not None for pattern in ("*.json", "*/*.json"))


def is_private(root: Path) -> bool:
    """Whether a root is laid over the dataset, which then has what it lacks."""
    if not os.environ.get(PATH_VARIABLE):
        return False
    return Path(os.path.realpath(root)) in _private_roots()


def shared(root: Path, *parts: str) -> Path:
    """A file or directory of a root; of the dataset, if the root is private and lacks it."""
    path = root.joinpath(*parts)
    return find_root().joinpath(*parts) if is_private(root) and not os.path.lexists(path) else path


def enclosing_checkout() -> Path | None:
    """The checkout of this project that contains the current directory, if any."""
    try:
        here = Path.cwd()
    except OSError:  # the current directory was removed
        return None
    return next((directory for directory in (here, *here.parents) if _is_checkout(directory)), None)


def _is_dataset(directory: Path) -> bool:
    return (directory / "definitions").is_dir() and (directory / "schema").is_dir()


def _is_checkout(directory: Path) -> bool:
    try:
        return _is_dataset(directory) and bool(_PROJECT.search(read_text(directory / "pyproject.toml")))
    except UnreadableFile:
        return False
