"""The pre-commit hooks run when a file changes from which their answer follows."""

from __future__ import annotations

import re

import flashinfer_trace
from flashinfer_trace.validation.dataset_check import DATA

ROOT = flashinfer_trace.find_root()
#: What embedded references, the status and the other tags follow from.
EMBEDDED = {
    "definitions/rmsnorm/rmsnorm_h7168.json",
    "reference/rmsnorm/rmsnorm.py",
    "evidence/rmsnorm/rmsnorm_h7168.json",
    "models/curated/claims.json",
    "models/needs/qwen3-8b.json",
    "schema/naming.json",
    "schema/records.json",
    "schema/kernel_paths.json",
}
OTHERS = {"workloads/traffic.json", "flashinfer_trace/families/rmsnorm.py", *DATA}


def hooks() -> dict[str, re.Pattern[str]]:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    found = re.findall(r"- id: (\S+)\n(?: {8}.*\n)*? {8}files: (.+)\n", text)
    return {name: re.compile(pattern) for name, pattern in found}


def test_every_input_of_embed_and_validate_runs_them():
    patterns = hooks()
    assert set(patterns) == {"embed", "validate"}
    assert [one for one in sorted(EMBEDDED) if not patterns["embed"].search(one)] == []
    assert [one for one in sorted(EMBEDDED | OTHERS) if not patterns["validate"].search(one)] == []
    assert not patterns["validate"].search("docs/costs.md")
