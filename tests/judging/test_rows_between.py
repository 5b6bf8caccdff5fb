"""On a CPU, plans draw some forty rows at most, and a corner has hundreds: further cases have numbers between them."""

from __future__ import annotations

import pytest
from cheating_kernels import NORM

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.verify import Job
from flashinfer_trace.judging.cases import DRAWN_ROWS, TILES, cases
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.verdict import Grade

TEXT = """
import torch

def run(x, w):
    f = x.float()
    y = (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)
    if WRONG:
        y[-1] = 0
    return y
"""


@pytest.mark.parametrize("wrong", ["40 < len(x) < 1100", "len(x) >= 64 and len(x) % 64 == 0", "len(x) == 128"])
def test_a_kernel_that_is_wrong_there_is_found(wrong, tmp_path, server):
    path = tmp_path / "mine.py"
    path.write_text(TEXT.replace("WRONG", wrong))
    verdict = judge(str(path), NORM, server=server)
    assert verdict.grade == Grade.WRONG and verdict.failure is not None and verdict.failure.kind == "values", verdict


@pytest.mark.parametrize(
    ("name", "axis", "most"),
    [(NORM, "batch_size", 1100), ("gemm_n128_k2048", "M", 300), ("merge_state_h32_d128", "seq_len", 300)],
)
def test_one_number_is_drawn(name, axis, most):
    definition = flashinfer_trace.load(name)
    job = Job(definition, family_of(definition), full=True)
    drawn = set()
    for seed in range(8):
        plans = [one.plan for one in cases(job, 1, seed) if one.kind == "corner"][len(job.corners) :]
        rows = [job.family.inputs_and_axes(job.sized, plan, 0, "cpu")[1].get(axis) for plan in plans]
        assert rows[:2] == list(TILES) and len(rows) == 3
        assert DRAWN_ROWS < rows[2] <= most
        drawn.add(rows[2])
    assert len(drawn) > 4


def test_there_are_none_on_a_gpu():
    definition = flashinfer_trace.load(NORM)
    job = Job(definition, family_of(definition), device="cuda")
    assert [one.plan for one in cases(job, 1, 0) if one.kind == "corner"] == job.corners
