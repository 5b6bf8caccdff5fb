"""Merges tags, changing as few lines as possible, and finds the one of the status."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset import evidence as proof
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.naming import Naming, ordered
from tools.extract_definitions.errors import ExtractionError


def merged(existing: list[str], new: Iterable[str], naming: Naming) -> list[str]:
    """`existing` unchanged if `new` adds nothing, otherwise both in order; the status comes from `existing`."""
    added = [tag for tag in new if tag not in existing and not tag.startswith("status:")]
    return ordered([*existing, *added], naming) if added else existing


def status(data: dict[str, Any], root: Path) -> str:
    """The status tag that the evidence of a dataset allows a Definition.

    Raises:
        ExtractionError: the conventions of its op_type make what is no Definition.
    """
    try:
        definition = Definition.from_dict(data)
    except ValueError as error:
        raise ExtractionError(f"conventions of {data['op_type']} make what is no Definition: {error}") from error
    return proof.VERIFIED if proof.proven(root, definition) else proof.UNVERIFIED
