"""Which Definitions a model needs, by op; which of them exist, and which are verified. This module needs no torch.

The needs of a model are data in ``models/needs/<model>.json``, which `flashinfer-trace sync` derives from the
traces of the model's code and the constants in ``models/<model>.json``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.evidence import VERIFIED
from flashinfer_trace.dataset.store import DatasetError, definitions
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from flashinfer_trace.format.naming import MAX_NAME

__all__ = ["ModelCoverage", "OpCoverage", "load_needs", "matrix", "model_coverages", "op_table", "plain_name"]


#: Longest reason why no family covers an op: it lists the kernels.
MAX_REASON = 4000


@dataclass(frozen=True)
class OpCoverage:
    """The Definitions of one op_type that one op of a model needs.

    Attributes:
        name: the op's name in the model's code.
        op_type: their op_type.
        exists: names of those in the dataset, verified or not.
        verified: names of those that evidence verifies.
        missing: names of those that the dataset lacks.
    """

    name: str
    op_type: str
    exists: tuple[str, ...]
    verified: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class ModelCoverage:
    """One model: its ops that have Definitions, and its gaps.

    Attributes:
        model: name of the model.
        ops: ops with a family, in order of their names and op_types.
        unsupported: op -> why no Definition of it follows from the model.
    """

    model: str
    ops: tuple[OpCoverage, ...]
    unsupported: dict[str, str]


def model_coverages(
    root: Path, model: str | None = None, needs: Mapping[str, Mapping[str, Any]] | None = None
) -> list[ModelCoverage]:
    """Coverage of one model, or of every model under ``models/needs/``.

    Args:
        root: the dataset root.
        model: only this model.
        needs: the result of `load_needs`, if the caller already has it.

    Raises:
        DatasetError: there is no such model (the message suggests the closest name), or a file is malformed.
    """
    known = {one.name: one for one in definitions(root=root)}
    found = []
    for name, needed in (load_needs(root, model) if needs is None else needs).items():
        try:
            found.append(_coverage(name, needed, known))
        except (KeyError, TypeError, AttributeError) as error:
            place = f"models/needs/{name}.json: malformed ({error!r})"
            raise DatasetError(f"{place}; in a checkout, `flashinfer-trace sync` rewrites it") from None
    return found


def _coverage(name: str, needed: Mapping[str, Any], known: Mapping[str, Definition]) -> ModelCoverage:
    ops = []
    for op in needed["ops"]:
        for op_type, names in op["definitions"].items():
            if not all(isinstance(text, str) and len(text) <= MAX_NAME for text in (op["name"], op_type, *names)):
                raise TypeError(f"a name is not a string of at most {MAX_NAME} characters")
            exists = tuple(one for one in names if one in known)
            verified = tuple(one for one in exists if VERIFIED in known[one].tags)
            missing = tuple(one for one in names if one not in known)
            ops.append(OpCoverage(op["name"], op_type, exists, verified, missing))
    unsupported = {op["name"]: op["reason"] for op in needed["unsupported"]}
    if not all(isinstance(text, str) and len(text) <= MAX_REASON for pair in unsupported.items() for text in pair):
        raise TypeError(f"name or reason of an unsupported op is not a string of at most {MAX_REASON} characters")
    return ModelCoverage(name, tuple(ops), unsupported)


def load_needs(root: Path, model: str | None = None) -> dict[str, dict[str, Any]]:
    """The contents of ``models/needs/`` by model; schema/model_needs.schema.json describes them.

    Args:
        root: the dataset root.
        model: only this model; `_`, `.`, `-`, blanks and case in its name are ignored.

    Raises:
        DatasetError: there are no such files, the model is not among them, or a file cannot be read.
    """
    directory = root / "models" / "needs"
    paths = {path.stem: path for path in sorted(directory.glob("*.json"), key=lambda path: path.stem)}
    if not paths:
        raise DatasetError(f"no model needs in {directory}; in a checkout, `flashinfer-trace sync` writes them")
    if model is not None:
        names = {plain_name(name): name for name in paths}
        if plain_name(model) not in names:
            close = difflib.get_close_matches(plain_name(model), names, n=1, cutoff=0.3)
            hint = f"; did you mean {names[close[0]]}?" if close else "."
            raise DatasetError(f"no model named {model!r} in {directory}{hint} Available: {', '.join(paths)}")
        name = names[plain_name(model)]
        paths = {name: paths[name]}
    try:
        return {name: load_object(path) for name, path in paths.items()}
    except JsonSourceError as error:
        raise DatasetError(f"{directory}: cannot be read: {error}") from error


def matrix(found: Sequence[ModelCoverage], name: str = "Model") -> list[list[str]]:
    """Rows of a table, headings first: verified / existing / needed Definitions by model and op_type."""
    op_types = sorted({op.op_type for one in found for op in one.ops})
    rows = [[name, *op_types, "all", "gaps"]]
    for one in found:
        groups = [[op for op in one.ops if op.op_type == op_type] for op_type in op_types]
        cells = [_cell(group) for group in (*groups, list(one.ops))]
        rows.append([one.model, *cells, str(len(one.unsupported))])
    return rows


def op_table(one: ModelCoverage) -> list[list[str]]:
    """Rows of a table, headings first: the ops of one model, with what is missing."""
    rows = [["Op", "op_type", "Needed", "Exists", "Verified", "Missing"]]
    for op in one.ops:
        counts = [len(op.exists) + len(op.missing), len(op.exists), len(op.verified)]
        rows.append([op.name, op.op_type, *map(str, counts), ", ".join(op.missing) or "-"])
    return rows


def plain_name(name: str) -> str:
    """The name of a model without what people write differently: `qwen3_8b`, `Qwen3-8B` and `qwen3-8b` are one."""
    return re.sub(r"[-_.\s]", "", name).lower()


def _cell(ops: Sequence[OpCoverage]) -> str:
    verified = {name for op in ops for name in op.verified}
    exists = {name for op in ops for name in op.exists}
    needed = exists | {name for op in ops for name in op.missing}
    return f"{len(verified)}/{len(exists)}/{len(needed)}" if needed else "-"
