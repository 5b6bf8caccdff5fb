"""Layouts of JSON: each committed form is written byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import flashinfer_trace
from flashinfer_trace.format.files import Lines, json_text, laid_out
from tools.extract import model_needs

ROOT = flashinfer_trace.find_root()


@pytest.mark.parametrize(
    ("pattern", "dumps"),
    [
        ("models/needs/*.json", model_needs.dumps),
    ],
)
def test_committed_files_have_their_layout(pattern: str, dumps: Callable[..., str]):
    paths = sorted(ROOT.glob(pattern))
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert dumps(json.loads(text)) == text, path


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
