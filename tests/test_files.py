"""Layouts of JSON: each committed form is written byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import flashinfer_trace
from flashinfer_trace.files import COMPACT, SPACED, Lines, json_text, laid_out

ROOT = flashinfer_trace.find_root()

KERNEL_TRACES = {
    (): Lines(0, closing=0),
    ("kernels",): Lines(1, closing=0),
    ("kernels", "*"): Lines(2, closing=1),
    ("kernels", "*", "chains"): Lines(3),
    ("unresolved",): Lines(1, first=False),
}


def kernel_traces(path, value):
    return KERNEL_TRACES.get(path)


def op_traces(path, value):
    """A line for each item of the outer lists and each node of the graph."""
    if path and path[0] == "graph":
        if path[-1] == "children":
            return Lines(path.count("children"))
        return Lines(None) if path[-1] in ("graph", "*") else None
    if not path:
        return Lines(0, closing=0)
    return Lines(1) if len(path) == 1 and isinstance(value, list) else None


def digest(path, value):
    """A line for each op."""
    if not path:
        return Lines(1, closing=0)
    if path in (("ops",), ("outside",)):
        return Lines(2)
    return Lines(3) if len(path) == 2 and path[0] == "outside" else None


def needs(path, value):
    """A line for each op."""
    if not path:
        return Lines(2, closing=0)
    return Lines(4, closing=2) if len(path) == 1 and isinstance(value, list) else None


@pytest.mark.parametrize(
    ("pattern", "layout", "separators"),
    [
        ("tools/kernel_traces.json", kernel_traces, COMPACT),
        ("tools/op_traces.json", op_traces, COMPACT),
        ("tools/extract_definitions/traces/*.json", digest, SPACED),
        ("models/needs/*.json", needs, SPACED),
    ],
)
def test_committed_files_have_their_layout(pattern: str, layout: Callable[..., Lines | None], separators):
    paths = sorted(ROOT.glob(pattern))
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert laid_out(json.loads(text), layout, separators) == text, path


@pytest.mark.parametrize("document", [{"a": [1, {}, []], "b": {"c": "é"}}, [], {}, 7, "x"])
def test_every_layout_says_the_same(document):
    layouts = [
        lambda path, value: None,
        lambda path, value: Lines(len(path), closing=0),
        lambda path, value: Lines(None),
    ]
    for layout in layouts:
        assert json.loads(laid_out(document, layout)) == document
    assert json.loads(json_text(document)) == document


def test_no_layout_writes_what_json_has_not():
    for write in (json_text, lambda document: laid_out(document, lambda path, value: Lines(1))):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write({"a": [float("nan")]})
