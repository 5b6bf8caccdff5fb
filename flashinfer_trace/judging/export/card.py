"""A dataset card for the Hugging Face hub: YAML that its search reads, and a page for people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flashinfer_trace.judging.export.summary import INDEX, LEFT_OUT, Summary

__all__ = ["Card", "size_category", "write_card"]

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
    """What a card says of one form of the dataset.

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
