"""What an export contains, and what it leaves out with the reason."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashinfer_trace.format.definition import Definition

__all__ = ["INDEX", "LEFT_OUT", "Summary"]

#: The file of an export that says what is not in it, and the one with a line for each Definition that is.
LEFT_OUT = "left_out.json"
INDEX = "index.jsonl"


@dataclass
class Summary:
    """Counted while an export is written.

    Attributes:
        rows: what the index says of each Definition; all rows have the same keys, with strings and numbers as values.
        definitions_left_out: Definition -> reason.
        workloads_left_out, solutions_left_out: Definition -> workload or kernel -> reason.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    definitions_left_out: dict[str, str] = field(default_factory=dict)
    workloads_left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    solutions_left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def definitions(self) -> int:
        """How many Definitions the export has."""
        return len(self.rows)

    @property
    def workloads(self) -> int:
        """How many workloads the export has."""
        return sum(row["workloads"] for row in self.rows)

    @property
    def solutions(self) -> int:
        """How many solutions the export has."""
        return sum(row.get("solutions", 0) for row in self.rows)

    @property
    def op_types(self) -> Counter[str]:
        """How many Definitions each op_type has."""
        return Counter(row["op_type"] for row in self.rows)

    def add(self, definition: Definition, **columns: int | str) -> None:
        """Adds a Definition; `columns` say what there is of it, such as the number of workloads."""
        self.rows.append(
            {
                "name": definition.name,
                "op_type": definition.op_type,
                "description": definition.description,
                "tags": " ".join(definition.tags),
                **columns,
            }
        )

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
        """Writes `INDEX` and `LEFT_OUT`."""
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows]
        (directory / INDEX).write_text("".join(lines), encoding="utf-8")
        text = json.dumps(self.left_out, indent=2, ensure_ascii=False) + "\n"
        (directory / LEFT_OUT).write_text(text, encoding="utf-8")
