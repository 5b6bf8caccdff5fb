"""What an export contains, and what it leaves out with the reason."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashinfer_trace.definition import Definition

__all__ = ["LEFT_OUT", "Summary"]

#: The file of an export that says what is not in it.
LEFT_OUT = "left_out.json"


@dataclass
class Summary:
    """Counted while an export is written.

    Attributes:
        op_types: op_type -> Definitions.
        workloads, solutions: how many there are.
        definitions_left_out: Definition -> reason.
        workloads_left_out, solutions_left_out: Definition -> workload or kernel -> reason.
    """

    op_types: Counter[str] = field(default_factory=Counter)
    workloads: int = 0
    solutions: int = 0
    definitions_left_out: dict[str, str] = field(default_factory=dict)
    workloads_left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    solutions_left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def definitions(self) -> int:
        """How many Definitions the export has."""
        return self.op_types.total()

    def add(self, definition: Definition, workloads: int, solutions: int = 0) -> None:
        """Counts a Definition with what it has."""
        self.op_types[definition.op_type] += 1
        self.workloads += workloads
        self.solutions += solutions

    def leave_out(self, definition: str, reason: str) -> None:
        """A Definition that is not exported."""
        self.definitions_left_out[definition] = reason

    def leave_out_workload(self, definition: str, workload: str, reason: str) -> None:
        """A workload that is not exported."""
        self.workloads_left_out.setdefault(definition, {})[workload] = reason

    def leave_out_solution(self, definition: str, kernel: str, reason: str) -> None:
        """A kernel that is not exported."""
        self.solutions_left_out.setdefault(definition, {})[kernel] = reason

    @property
    def left_out(self) -> dict[str, Any]:
        """What is not exported, as JSON."""
        return {
            "definitions": self.definitions_left_out,
            "workloads": self.workloads_left_out,
            "solutions": self.solutions_left_out,
        }

    @property
    def reasons(self) -> list[tuple[int, str]]:
        """How many Definitions each reason leaves out, the most frequent first."""
        counts = Counter(self.definitions_left_out.values())
        return sorted(((count, reason) for reason, count in counts.items()), key=lambda one: (-one[0], one[1]))

    def write(self, directory: Path) -> None:
        """Writes `LEFT_OUT`."""
        text = json.dumps(self.left_out, indent=2, ensure_ascii=False) + "\n"
        (directory / LEFT_OUT).write_text(text, encoding="utf-8")
