"""Kernels of DeepSeek that get no Definition: at most two, each with a reason, and none of them has a tag."""

from __future__ import annotations

import json

from flashinfer_trace import definitions, find_root
from tools.op_tracing.kernel_coverage import without_definition

LISTED = json.loads((find_root() / "traces" / "kernels_without_definition.json").read_text(encoding="utf-8"))
MOST = 2


def test_at_most_two_kernels_get_no_definition_each_for_a_reason():
    assert 0 < len(LISTED["kernels"]) <= MOST
    assert all(reason.endswith(".") and len(reason.split()) > 10 for reason in LISTED["kernels"].values())


def test_no_definition_names_a_kernel_that_is_said_to_have_none():
    tags = {tag.partition(":")[2] for definition in definitions() for tag in definition.tags}
    assert "sgl_kernel.cutlass_mla_decode" in tags
    assert not tags & set(LISTED["kernels"])


def test_the_document_gives_the_reasons():
    text = (find_root() / "docs" / "coverage.md").read_text(encoding="utf-8")
    assert without_definition(LISTED) in text
