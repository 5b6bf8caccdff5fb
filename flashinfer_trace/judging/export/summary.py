"""Lists what an export contains and what it leaves out, with reasons, and writes a card for the Hugging Face hub."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashinfer_trace.format.definition import Definition

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

    def add(self, definition: Definition, **columns: float | str) -> None:
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
        """Lists what is not exported, as JSON."""
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


_TAGS = ("cuda", "flashinfer", "gpu-kernels", "kernel-generation", "llm-inference", "triton")
#: Upper limits of the hub's categories, as it writes them.
_CATEGORIES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"))
_ABOUT = (
    "A Definition is what one GPU kernel of an LLM computes: named axes, inputs and outputs with their dtypes, and a",
    "reference in PyTorch. The references are proven against float64 oracles and the real kernels.",
    f"`{INDEX}` has a line for each Definition.",
)


@dataclass(frozen=True)
class Card:
    """The texts of a card that depend on the form of the dataset.

    Attributes:
        title: of the page.
        about: one paragraph: what is here, and how to run it.
    """

    title: str
    about: str


def size_category(rows: int) -> str:
    """The hub's category of a dataset with so many rows."""
    return next((name for limit, name in _CATEGORIES if rows < limit), "100K<n<1M")


def write_card(directory: Path, card: Card, summary: Summary) -> None:
    """Writes README.md; every number in it is counted."""
    text = "\n".join([*_front_matter(card, summary), *_page(card, summary)]) + "\n"
    (directory / "README.md").write_text(text, encoding="utf-8")


def _front_matter(card: Card, summary: Summary) -> list[str]:
    lines = ["---", "license: apache-2.0", f"pretty_name: {card.title}", "tags:"]
    lines += [f"- {tag}" for tag in _TAGS]
    lines += ["size_categories:", f"- {size_category(summary.definitions)}"]
    return [*lines, "configs:", "- config_name: default", f"  data_files: {INDEX}", "---"]


def _page(card: Card, summary: Summary) -> list[str]:
    parts = {"Definitions": summary.definitions, "Workloads": summary.workloads, "Solutions": summary.solutions}
    lines = ["", f"# {card.title}", "", card.about, "", *_ABOUT, "", "| Part | Number |", "|---|---:|"]
    lines += [f"| {part} | {number} |" for part, number in parts.items() if number]
    lines += ["", "| op_type | Definitions |", "|---|---:|"]
    lines += [f"| {op_type} | {count} |" for op_type, count in sorted(summary.op_types.items())]
    if summary.definitions_left_out:
        lines += [
            "",
            "## Left out",
            "",
            f"`{LEFT_OUT}` says which Definitions, workloads and kernels could not be exported, and why.",
            "",
        ]
        lines += ["| Definitions | Why they are not here |", "|---:|---|"]
        lines += [f"| {count} | {reason} |" for count, reason in summary.reasons]
    return lines
