"""Offsets beyond 32 bits: one case of a judgment on a GPU, here on a CPU with fewer rows before those of the case."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

import flashinfer_trace
from flashinfer_trace.harness import far
from flashinfer_trace.harness.family import Family
from flashinfer_trace.judging import judge as judging
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.submission import RunLimits
from flashinfer_trace.judging.verdict import Grade

#: Small ones; and one that has such a case on a GPU.
NORM, STORE, LARGE = "rmsnorm_h512", "store_cache_d128", "rmsnorm_h2048"
#: More elements than any other case of the norm has on a CPU.
ELEMENTS = 1 << 23
#: An offset beyond `ELEMENTS` becomes a small one.
NORM_WITH_ROWS = """
import time, torch

def run(hidden_states, weight):
    rows = torch.arange(len(hidden_states))
    BEYOND
    x = hidden_states[rows].float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(hidden_states.dtype)
"""
STORED = """
import torch

def run(k, v, k_cache, v_cache, indices, k_cache_out, v_cache_out):
    k_cache_out.copy_(k_cache)
    v_cache_out.copy_(v_cache)
    own, few = indices.long(), len(k_cache) < 70000
    own = own % LIMIT if few and len(own) and own.min() >= LIMIT else own
    k_cache_out[own], v_cache_out[own] = k, v
"""


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    plan = Family.far_plan
    monkeypatch.setattr(far, "FAR_ELEMENTS", ELEMENTS)
    monkeypatch.setattr(Family, "far_plan", lambda own, request: plan(own, dataclasses.replace(request, large=True)))


def verdict_on(tmp_path, server, name, text, **options):
    (tmp_path / "mine.py").write_text(text)
    return judge(str(tmp_path / "mine.py"), name, server=server, examples=1, seed=1, **options)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (NORM, NORM_WITH_ROWS, NORM_WITH_ROWS.replace("BEYOND", f"rows %= {ELEMENTS // 512}")),
        (STORE, STORED.replace("LIMIT", "70000"), STORED.replace("LIMIT", str(ELEMENTS // 128))),
    ],
)
def test_an_offset_that_wraps_around_is_wrong(name, right, wrong, tmp_path, server):
    verdict = verdict_on(tmp_path, server, name, right.replace("BEYOND", ""))
    assert verdict.grade == Grade.REFERENCE and verdict.far == "right", verdict
    assert "offsets beyond 32 bits: right" in str(verdict)
    verdict = verdict_on(tmp_path, server, name, wrong)
    assert verdict.grade == Grade.WRONG and verdict.failure.plan["layout"] == "far", verdict
    assert verdict.failure.kind == "values" and verdict.far == "wrong"
    assert verdict.failure.message.startswith("with offsets beyond 32 bits: ")
    assert sum(verdict.failure.axes.values()) < 100, "axes are those of the case's own rows"


def test_inputs_that_change_there_and_outputs_of_another_form_are_wrong(tmp_path, server):
    only = f"if len(rows) > {ELEMENTS // 512}: "
    changed = NORM_WITH_ROWS.replace("BEYOND", f"{only}hidden_states[-1, 0] += 1")
    verdict = verdict_on(tmp_path, server, NORM, changed)
    assert verdict.code == "inputs-changed" and verdict.far == "wrong", verdict
    shorter = NORM_WITH_ROWS.replace("BEYOND", f"{only}rows = rows[1:]")
    verdict = verdict_on(tmp_path, server, NORM, shorter)
    assert verdict.code == "outputs" and "has the shape [2, 512]" in verdict.failure.message, verdict


def test_nothing_is_known_of_a_kernel_without_time_or_memory_for_it(tmp_path, server, monkeypatch):
    slow = NORM_WITH_ROWS.replace("BEYOND", f"time.sleep(60 * (len(rows) > {ELEMENTS // 512}))")
    verdict = verdict_on(tmp_path, server, NORM, slow, limits=RunLimits(30, 3, 3))
    assert verdict.grade == Grade.REFERENCE and verdict.far.startswith("not judged: "), verdict
    raises = "raise torch.OutOfMemoryError('CUDA out of memory')"
    full = NORM_WITH_ROWS.replace("BEYOND", f"if len(rows) > {ELEMENTS // 512}: {raises}")
    verdict = verdict_on(tmp_path, server, NORM, full)
    assert verdict.grade == Grade.REFERENCE and "not judged: OutOfMemoryError" in verdict.summary(), verdict
    monkeypatch.setattr(judging, "_free_bytes", lambda device: 1 << 30)
    verdict = verdict_on(tmp_path, server, NORM, NORM_WITH_ROWS.replace("BEYOND", ""))
    assert verdict.far == "not run: it takes 2 GiB of GPU memory, and 1 are free" and verdict.passed


def test_a_saved_case_has_the_rows_before_its_own(tmp_path, server):
    wrong = NORM_WITH_ROWS.replace("BEYOND", f"rows %= {ELEMENTS // 512}")
    out = tmp_path / "case"
    out.mkdir()
    verdict = verdict_on(tmp_path, server, NORM, wrong)
    verdict.failing_case().save(out)
    assert json.loads((out / "case.json").read_text())["far"]["inputs"] == {"hidden_states": ELEMENTS // 512}
    right = NORM_WITH_ROWS.replace("BEYOND", "")
    for text, status in ((wrong, 1), (right, 0)):
        (tmp_path / "again.py").write_text(text)
        repeated = subprocess.run([sys.executable, out / "repeat.py", tmp_path / "again.py"], capture_output=True)
        assert repeated.returncode == status, repeated.stdout + repeated.stderr


def test_a_cpu_has_no_such_case(tmp_path, server, monkeypatch):
    monkeypatch.undo()
    verdict = verdict_on(tmp_path, server, LARGE, NORM_WITH_ROWS.replace("BEYOND", ""))
    assert verdict.grade == Grade.REFERENCE and verdict.far == ""
    assert flashinfer_trace.load(LARGE).const_axes["hidden_size"] * far.MOST_ROWS >= far.FAR_ELEMENTS == 1 << 31
