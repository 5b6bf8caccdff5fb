"""Torch custom operators: the functions of a framework that register a Python function as one."""

from __future__ import annotations

_FUNCTIONS = frozenset({"direct_register_custom_op"})
# These return a torch operator that does what the given function does.
_WRAPPERS = frozenset({"register_custom_op", "register_custom_op_from_extern"})


def is_registration(name: str) -> bool:
    """Whether a function of this name registers one of its arguments with torch."""
    return name in _FUNCTIONS


def is_wrapper(name: str) -> bool:
    """Whether a function of this name returns an operator that does what its first argument does."""
    return name in _WRAPPERS
