"""Definitions whose reference is changed, and thereby wrong."""

from __future__ import annotations

import dataclasses

import flashinfer_trace
from flashinfer_trace.format.definition import Definition

__all__ = ["changed"]


def changed(name: str, old: str, new: str) -> Definition:
    """The Definition with a change of its reference."""
    definition = flashinfer_trace.load(name)
    assert definition.reference.count(old) == 1, f"{name} has {old!r} {definition.reference.count(old)} times"
    return dataclasses.replace(definition, reference=definition.reference.replace(old, new))
