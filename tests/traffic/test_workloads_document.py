"""docs/workloads.md: which workloads have no digests, and why."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from flashinfer_trace import load
from tools.record_workloads import MOST_BYTES, bytes_of

ROOT = Path(__file__).resolve().parents[2]
TEXT = " ".join((ROOT / "docs" / "workloads.md").read_text(encoding="utf-8").split())
FILES = sorted((ROOT / "workloads").glob("*/*.json"))
WORKLOADS = {path: json.loads(path.read_text(encoding="utf-8"))["workloads"] for path in FILES}


def test_files_without_any_digest_are_those_that_the_document_names():
    none_at_all = [path for path, found in WORKLOADS.items() if not any(one["inputs"] for one in found.values())]
    assert {path.parent.name for path in none_at_all} == {"moe"} and "In some files, all of op_type `moe`," in TEXT


def test_those_without_digests_are_the_large_ones():
    for path, found in WORKLOADS.items():
        definition = load(path.stem)
        for name, one in found.items():
            size = bytes_of(SimpleNamespace(definition=definition, axes=one["axes"]))
            assert (size > MOST_BYTES) == (not one["inputs"]), f"{path.stem}: {name} has {size} bytes"


def test_the_recorded_profile_has_the_lengths_of_the_table():
    traffic = json.loads((ROOT / "workloads" / "traffic.json").read_text(encoding="utf-8"))
    lengths = traffic["profiles"]["recorded"]["lengths"]
    assert len(lengths) == 8 and f"{min(lengths)} to {max(lengths)} tokens" in TEXT
