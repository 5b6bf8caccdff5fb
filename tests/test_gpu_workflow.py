"""The workflow that records evidence attests all of it; tests/test_gpu_kernels.py is what it runs."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The most files that actions/attest-build-provenance takes.
MOST_SUBJECTS = 1024


def test_every_evidence_file_is_attested_once_in_parts_that_the_action_takes():
    workflow = (ROOT / ".github" / "workflows" / "gpu.yml").read_text(encoding="utf-8")
    steps = [text.partition("- uses:")[0] for text in workflow.split("actions/attest-build-provenance")[1:]]
    parts = [re.findall(r"/evidence/([^/\s]+)/\*\.jsonl", step) for step in steps]
    files = [path.parent.name for path in (ROOT / "definitions").glob("*/*.json")]
    counts = [sum(fnmatchcase(op_type, one) for op_type in files for one in patterns) for patterns in parts]
    assert all(counts) and sum(counts) == len(files)
    assert max(counts) < MOST_SUBJECTS
    assert "/evidence/runs/*.json\n" in workflow, "the headers of runs are attested too"
    assert all("if: ${{ !canceled() }}" in step for step in steps), "what passed is attested if something failed"
