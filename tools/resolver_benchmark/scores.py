"""Precision and recall of a resolver's answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tools.resolver_benchmark import peers
from tools.resolver_benchmark.labels import Label, Query

PACKAGES = ("sglang", "sgl_kernel", "flashinfer")  # only functions that these define are labelled and scored

Edges: TypeAlias = Mapping[Query, "set[str]"]
"""Query -> callees, as "package.module:Class.method"; an empty set or a missing key means no answer."""


def normal(callee: str) -> str:
    """One name for a class and its constructor."""
    return callee.removesuffix(".__init__")


def attribute(labels: Iterable[Label], graph: Mapping[str, set[str]]) -> dict[Query, set[str]]:
    """Assigns the edges of a tool that only knows callers to labelled calls, as favourably as possible.

    An edge is credited to every labelled call of its caller that expects it. An edge that no labelled call of the
    caller expects is held against a call with the same last name, if there is one. Other edges are assumed to belong
    to calls without a label.
    """
    by_caller: dict[str, list[Label]] = {}
    for label in labels:
        module = peers.module_name(Path(label.file))
        by_caller.setdefault(module if label.caller == "<module>" else f"{module}.{label.caller}", []).append(label)
    edges: dict[Query, set[str]] = {}
    for caller, asked in by_caller.items():
        found = {normal(callee) for callee in graph.get(caller, ()) if ":" in callee}
        expected = {normal(callee) for label in asked for callee in label.callees | label.also}
        for label in asked:
            wanted = {normal(callee) for callee in label.callees | label.also}
            last = label.call.split("[")[0].rpartition(".")[2]
            blamed = {callee for callee in found - expected if callee.replace(":", ".").rpartition(".")[2] == last}
            edges[label.query] = found & wanted | blamed
    return edges


@dataclass
class Tally:
    """Counts over labels of one kind."""

    labels: int = 0
    negatives: int = 0
    negatives_clean: int = 0
    exact: int = 0
    expected: int = 0
    predicted: int = 0
    correct: int = 0

    def add(self, expected: set[str], predicted: set[str]) -> None:
        self.labels += 1
        self.negatives += not expected
        self.negatives_clean += not expected and not predicted
        self.exact += expected == predicted
        self.expected += len(expected)
        self.predicted += len(predicted)
        self.correct += len(expected & predicted)

    def document(self) -> dict[str, Any]:
        """The counts as JSON; precision or recall is null if nothing was predicted or expected."""
        return {
            "precision": round(self.correct / self.predicted, 4) if self.predicted else None,
            "recall": round(self.correct / self.expected, 4) if self.expected else None,
            **vars(self),
        }


def score(labels: Iterable[Label], edges: Edges) -> dict[str, Any]:
    """Figures for all labels and for each kind; callees outside `PACKAGES` and those in `also` are not counted."""
    total = Tally()
    kinds: dict[str, Tally] = {}
    for label in labels:
        expected = {normal(callee) for callee in label.callees}
        ignored = {normal(callee) for callee in label.also}
        answers = {normal(callee) for callee in edges.get(label.query, ()) if callee.split(".")[0] in PACKAGES}
        for tally in (total, kinds.setdefault(label.kind, Tally())):
            tally.add(expected, answers - ignored)
    return {**total.document(), "by_kind": {kind: kinds[kind].document() for kind in sorted(kinds)}}


def text(entry: dict[str, Any]) -> str:
    """The figures of one tool as text."""
    title = f"{entry['tool']} {entry.get('version', '')}".rstrip()
    if "failed" in entry:
        return f"{title}: not measured: {entry['failed']}\n"

    def share(value: float | None) -> str:
        return "   -  " if value is None else f"{value:6.1%}"

    rows = [(kind, figures) for kind, figures in entry["by_kind"].items()] + [("all", entry)]
    lines = [f"{title:20} precision  recall  exact/labels  edges"]
    lines += [
        f"{kind:20}   {share(row['precision'])}  {share(row['recall'])}  {row['exact']:5}/{row['labels']:<6}"
        f"  {row['correct']} of {row['expected']} found, {row['predicted'] - row['correct']} wrong"
        for kind, row in rows
    ]
    lines.append(f"negatives without an answer: {entry['negatives_clean']} of {entry['negatives']}")
    return "\n".join([*lines, *(f"note: {note}" for note in entry.get("notes", [])), ""])
