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
        left_out: Definitions -> reason; workloads and solutions by Definition: workload or kernel -> reason.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"definitions": {}, "workloads": {}, "solutions": {}}
    )

    @property
    def counts(self) -> dict[str, int]:
        parts = {part: sum(row.get(part, 0) for row in self.rows) for part in ("workloads", "solutions")}
        return {"definitions": len(self.rows), **parts}

    def add(self, definition: Definition, **columns: float | str) -> None:
        """Adds a Definition; `columns` say what there is of it, such as the number of workloads."""
        tags = " ".join(definition.tags)
        own = {"name": definition.name, "op_type": definition.op_type, "description": definition.description}
        self.rows.append({**own, "tags": tags, **columns})

    def leave_out(self, definition: str, reason: str) -> None:
        """A Definition that is not exported."""
        self.left_out["definitions"][definition] = reason

    def leave_out_part(self, part: str, definition: str, name: str, reason: str) -> None:
        """A workload or kernel of a Definition that is not exported; `part` is ``workloads`` or ``solutions``."""
        self.left_out[part].setdefault(definition, {})[name] = reason

    @property
    def reasons(self) -> list[tuple[int, str]]:
        """How many Definitions each reason leaves out, the most frequent first."""
        counts = Counter(self.left_out["definitions"].values())
        return sorted(((count, reason) for reason, count in counts.items()), key=lambda one: (-one[0], one[1]))

    def write(self, directory: Path) -> None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows]
        (directory / INDEX).write_text("".join(lines), encoding="utf-8")
        text = json.dumps(self.left_out, indent=2, ensure_ascii=False) + "\n"
        (directory / LEFT_OUT).write_text(text, encoding="utf-8")


_TAGS = ("cuda", "flashinfer", "gpu-kernels", "kernel-generation", "llm-inference", "triton")
#: Upper limits of the hub's categories, as it writes them.
_CATEGORIES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"))
_ABOUT = (
    "A Definition says what one GPU kernel of an LLM computes: named axes, inputs and outputs with their dtypes, and a",
    "reference in PyTorch. The references are proven against float64 oracles and the real kernels.",
    f"`{INDEX}` has a line for each Definition.",
)


def size_category(rows: int) -> str:
    """The hub's category of a dataset with so many rows."""
    return next((name for limit, name in _CATEGORIES if rows < limit), "100K<n<1M")


def write_card(directory: Path, title: str, about: str, summary: Summary) -> None:
    """Writes README.md, with a title and a paragraph on what is here and how to run it; every number is counted."""
    counts = summary.counts
    op_types = sorted(Counter(row["op_type"] for row in summary.rows).items())
    lines = ["---", "license: apache-2.0", f"pretty_name: {title}", "tags:", *(f"- {tag}" for tag in _TAGS)]
    lines += ["size_categories:", f"- {size_category(counts['definitions'])}", "configs:", "- config_name: default"]
    lines += [f"  data_files: {INDEX}", "---", "", f"# {title}", "", about, "", *_ABOUT, ""]
    lines += ["| Part | Number |", "|---|---:|"]
    lines += [f"| {part.capitalize()} | {number} |" for part, number in counts.items() if number]
    lines += ["", "| op_type | Definitions |", "|---|---:|", *(f"| {name} | {count} |" for name, count in op_types)]
    if summary.reasons:
        told = f"`{LEFT_OUT}` says which Definitions, workloads and kernels could not be exported, and why."
        lines += ["", "## Left out", "", told, "", "| Definitions | Why they are not here |", "|---:|---|"]
        lines += [f"| {count} | {reason} |" for count, reason in summary.reasons]
    (directory / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
