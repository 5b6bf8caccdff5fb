"""Problems: every rule is documented, and only documented rules are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashinfer_trace.dataset.validation import RULES, Problem
from flashinfer_trace.dataset.validation.problems import Findings

pytestmark = pytest.mark.quick


def test_rules_are_documented() -> None:
    for rule, description in RULES.items():
        assert rule == rule.lower() and " " not in rule
        assert description.endswith(".") and len(description) > 10


def test_unknown_rule_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        Findings(tmp_path / "x.json", tmp_path).add("no-such-rule", "message")


def test_problem_is_immutable() -> None:
    problem = Problem("a.json", 1, "", "json-syntax", "error", "message", "hint")
    with pytest.raises(AttributeError):
        problem.line = 2  # type: ignore[misc]
