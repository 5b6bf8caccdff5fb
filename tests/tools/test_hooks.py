"""The pre-commit hooks run when a file changes from which their answer follows."""

from __future__ import annotations

import re

import flashinfer_trace
from flashinfer_trace.dataset.sync import names_of_files
from flashinfer_trace.dataset.validation.dataset_check import DATA

ROOT = flashinfer_trace.find_root()
#: Files that decide references, the status and the other tags.
SYNCED = {
    "definitions/rmsnorm/rmsnorm_h7168.json",
    "reference/rmsnorm/rmsnorm.py",
    "evidence/rmsnorm/rmsnorm_h7168.jsonl",
    "models/curated/claims.json",
    "models/needs/qwen3-8b.json",
    "schema/naming.json",
    "flashinfer_trace/kernels/sglang.py",
    "flashinfer_trace/families/rmsnorm.py",
    "traces/runtime/deepseek_v3-bf16-triton.json",
}
#: Files that only `validate` reads, for the whole dataset.
VALIDATED = {"workloads/traffic.json", "models/curated/claims.json", "flashinfer_trace/families/rmsnorm.py", *DATA}


def hooks() -> dict[str, re.Pattern[str]]:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    found = re.findall(r"- id: (\S+)\n(?: {8}.*\n)*? {8}files: (.+)\n", text)
    return {name: re.compile(pattern) for name, pattern in found}


def test_every_input_of_sync_and_validate_runs_them() -> None:
    patterns = hooks()
    assert set(patterns) == {"sync", "validate"}
    assert [one for one in sorted(SYNCED) if not patterns["sync"].search(one)] == []
    assert [one for one in sorted(VALIDATED) if not patterns["validate"].search(one)] == []
    assert not any(pattern.search("docs/costs.md") for pattern in patterns.values())
    assert not patterns["validate"].search("definitions/rmsnorm/rmsnorm_h7168.json"), "sync validates what changed"


def test_only_the_definitions_that_follow_from_changed_files_are_checked() -> None:
    def chosen(*names: str) -> list[str]:
        return names_of_files(ROOT, [ROOT / name for name in names])

    assert chosen("definitions/rmsnorm/rmsnorm_h512.json", "evidence/rmsnorm/rmsnorm_h512.jsonl") == ["rmsnorm_h512"]
    assert set(chosen("reference/layernorm/layernorm.py")) == {
        path.stem for path in (ROOT / "definitions" / "layernorm").iterdir()
    }
    assert chosen("definitions/rmsnorm/rmsnorm_h512.json", "models/curated/claims.json") == [], "all may follow"
