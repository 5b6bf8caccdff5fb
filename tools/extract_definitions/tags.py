"""Merges tags, and changes as few lines as possible."""

from __future__ import annotations

from collections.abc import Iterable

from flashinfer_trace.naming import Naming, ordered


def merged(existing: list[str], new: Iterable[str], naming: Naming) -> list[str]:
    """`existing` unchanged if `new` adds nothing, otherwise both in order; the status comes from `existing`."""
    added = [tag for tag in new if tag not in existing and not tag.startswith("status:")]
    return ordered([*existing, *added], naming) if added else existing
