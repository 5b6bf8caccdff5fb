"""The validator: tells everything that is wrong with Definitions at once, with file, line and a hint.

    >>> from flashinfer_trace.dataset.validation import format_text, validate_paths
    >>> print(format_text(validate_paths([Path("definitions")], root=Path("."))))

It needs neither torch nor a GPU, runs nothing of what it reads, and survives hostile files.
`RULES` lists every rule by its stable id.
"""

from __future__ import annotations

from flashinfer_trace.dataset.validation.dataset_check import validate_paths
from flashinfer_trace.dataset.validation.problems import RULES, Problem, Result, format_json, format_text

__all__ = ["RULES", "Problem", "Result", "format_json", "format_text", "validate_paths"]
