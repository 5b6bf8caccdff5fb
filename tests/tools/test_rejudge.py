"""A refactoring that changes no figure makes nothing stale; anything else does."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import pytest

import flashinfer_trace
from flashinfer_trace.dataset.digests import short
from flashinfer_trace.dataset.evidence import EQUIVALENT_CODE, Entry, Evidence
from flashinfer_trace.dataset.evidence_run import Run
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.binding import judging_code
from tools.rejudge.__main__ import compare, main, transcripts

ROOT = flashinfer_trace.find_root()
DEFINITION = flashinfer_trace.load("layernorm_h128")
KERNEL = "flashinfer.norm.layernorm"
SCALED = "    scaled = (x - mean) / deviation * weight\n"
RUN = Run("2026-11-22-0a1b2c3d", "2026-11-22T03:04:05Z", "GPU", (9, 0), {"flashinfer-python": "1"}, 0, "")
ENTRY = Entry(KERNEL, RUN, "flashinfer-python", {}, 60, 0, {})


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with this code and one Definition."""
    root = tmp_path_factory.mktemp("checkout")
    for folder in ("flashinfer_trace", "schema"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    (root / "definitions" / "layernorm").mkdir(parents=True)
    shutil.copy(ROOT / "definitions" / "layernorm" / "layernorm_h128.json", root / "definitions" / "layernorm")
    person = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*person, "commit", "-qm", "base"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    return root


def edit(checkout: Path, old: str, new: str) -> None:
    subprocess.run(["git", "-C", str(checkout), "checkout", "-q", "."], check=True)
    path = checkout / "flashinfer_trace" / "families" / "layernorm.py"
    source = path.read_text(encoding="utf-8")
    assert source.count(old) == 1, old
    path.write_text(source.replace(old, new), encoding="utf-8")


def shortened(code: dict[str, str]) -> dict[str, str]:
    """Digests as evidence has them."""
    return {part: short(digest) for part, digest in code.items()}


def test_a_refactoring_makes_nothing_stale(checkout, monkeypatch, capsys):
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(checkout))
    edit(checkout, SCALED, "    centered = x - mean\n    scaled = centered / deviation * weight\n")
    assert main(["--base", "HEAD", "layernorm"]) == 0, capsys.readouterr()
    known, recorded = (json.loads((root / EQUIVALENT_CODE).read_text())["equivalent"] for root in (ROOT, checkout))
    before = judging_code(family_of(DEFINITION), family_of(DEFINITION).kernels[0])
    assert recorded.keys() - known.keys() == {before["family"]}
    after = {KERNEL: shortened({**before, "family": recorded[before["family"]]})}
    run = dataclasses.replace(ENTRY, digests=shortened(before))
    evidence = Evidence((run,))
    for root, changed in ((checkout, []), (ROOT, [(run, ["family"])])):
        assert evidence.stale(dataclasses.replace(DEFINITION, root=root), after) == changed


def test_another_figure_is_refused(checkout, monkeypatch, capsys):
    """A bound that is wider by a part in 256, which no verdict shows."""
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(checkout))
    edit(checkout, "torch.bfloat16) * (1 + 2**-8) + inside", "torch.bfloat16) * (1 + 2**-7) + inside")
    (checkout / EQUIVALENT_CODE).unlink(missing_ok=True)
    assert main(["--base", "HEAD", "layernorm"]) == 1
    assert f"layernorm: {KERNEL}: another verdict or figure" in capsys.readouterr().out
    assert not (checkout / EQUIVALENT_CODE).exists()


def test_what_runs_on_a_gpu_alone_or_was_not_judged_is_refused(checkout):
    edit(checkout, SCALED, SCALED.replace("/ deviation * weight", "/ deviation * weight + 0.0"))
    before, after = transcripts("HEAD", checkout, ["layernorm"])
    assert [one["layernorm"]["lines"] > 100 for one in (before, after)] == [True, True]
    old, new = (one["layernorm"]["code"][KERNEL]["family"] for one in (before, after))
    assert compare(before, after, everything=True) == ({old: new}, [])
    called = copy.deepcopy(after)
    called["layernorm"]["adapters"][KERNEL] = "0" * 64
    assert compare(before, called, everything=True)[0] == {}
    shared = copy.deepcopy(after)
    shared["layernorm"]["code"][KERNEL]["harness"] = "0" * 64
    harness = before["layernorm"]["code"][KERNEL]["harness"]
    assert compare(before, shared, everything=True) == ({old: new, harness: "0" * 64}, [])
    assert compare(before, shared, everything=False)[0] == {old: new}


def test_what_cannot_be_judged_is_named(checkout, monkeypatch, capsys):
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(checkout))
    assert main(["--base", "no-such-revision", "layernorm"]) == 2
    assert "no-such-revision" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--base", "HEAD", "layer_norm"])
    assert "no families ['layer_norm']" in capsys.readouterr().err
