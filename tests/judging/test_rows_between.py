"""Further cases have numbers of rows that plans have not: on a CPU, between those that are drawn (40 at most) and the
corner of many rows; on a GPU, as many as prefill has."""

from __future__ import annotations

import pytest
from cheating_kernels import NORM

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.verify import Job, verify
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.more_plans import (
    COPIES,
    CPU_WORK,
    DRAWN_ROWS,
    GPU_BYTES,
    GPU_ROWS,
    KEYS_A_ROW,
    TILES,
    judged_cases,
)
from flashinfer_trace.judging.verdict import Grade

#: Axes that count several for each row.
BESIDE = {"num_copies": COPIES, "num_keys": KEYS_A_ROW}
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
    [
        (NORM, "batch_size", 1100),
        ("gemm_n128_k2048", "M", 300),
        ("merge_state_h32_d128", "seq_len", 1100),
        ("moe_shuffle_rows_h2048", "num_copies", 300),
        ("fp8_mqa_logits_h64_d128", "num_keys", 300),
        ("concat_mla_absorb_q_h128_ckv512_kpe64", "num_tokens", 1100),
        ("fast_topk_transform_fused_topk2048", "num_tokens", 300),
    ],
)
def test_one_number_is_drawn(name, axis, most):
    definition = flashinfer_trace.load(name)
    job = Job(definition, family_of(definition), full=True)
    drawn = set()
    for seed in range(8):
        plans = [one.plan for one in judged_cases(job, seed, lambda: 1) if one.kind == "corner"][len(job.corners) :]
        rows = [job.family.inputs_and_axes(job.sized, plan, 0, "cpu")[1].get(axis) for plan in plans]
        rows = [count // BESIDE.get(axis, 1) for count in rows]
        assert rows[:2] == list(TILES) and len(rows) == 3
        assert DRAWN_ROWS < rows[2] <= most
        drawn.add(rows[2])
    assert len(drawn) > 4


def test_products_with_large_weights_have_fewer_rows():
    definition = flashinfer_trace.load("fp8_blockwise_scaled_mm_n12288_k1536")
    job = Job(definition, family_of(definition), full=True)
    for seed in range(8):
        plans = [one.plan for one in judged_cases(job, seed, lambda: 1) if one.kind == "corner"][len(job.corners) :]
        rows = [plan["m"] for plan in plans]
        assert rows[0] == TILES[0] and len(rows) == 2 and rows[1] > DRAWN_ROWS
        assert max(rows) * 12288 * 1536 <= CPU_WORK


@pytest.mark.parametrize(
    ("name", "rows_of"),
    [
        (NORM, lambda axes: axes["batch_size"]),
        ("gemm_bf16_n256_k7168", lambda axes: axes["m"]),
        ("moe_shuffle_rows_h2048", lambda axes: axes["num_copies"] // 2),
        ("moe_topk_softmax_topk2_e8", lambda axes: axes["seq_len"]),
    ],
)
def test_a_gpu_gets_as_many_rows_as_prefill_has(name, rows_of):
    definition = flashinfer_trace.load(name)
    job = Job(definition, family_of(definition), device="cuda")
    drawn = set()
    for seed in range(4):
        corners = [one.plan for one in judged_cases(job, seed, lambda: 1) if one.kind == "corner"]
        assert corners[:-1] == job.corners
        twin = Job(definition, job.family)
        drawn.add(rows_of(twin.family.inputs_and_axes(twin.sized, corners[-1], 0, "cpu")[1]))
    assert GPU_ROWS[0] <= min(drawn) < max(drawn) <= GPU_ROWS[1]
    assert verify(twin, plan=corners[-1], seed=0).status == "passed"


def test_there_are_fewer_where_a_row_has_a_vocabulary_and_none_for_kernels_that_take_few():
    definition = flashinfer_trace.load("softmax_temperature_v129280")
    job = Job(definition, family_of(definition), device="cuda")
    rows = [one.plan for one in judged_cases(job, 0, lambda: 1) if one.kind == "corner"][-1]["batch_size"]
    assert rows > DRAWN_ROWS and GPU_BYTES * 0.99 < rows * 2 * 4 * 129280 <= GPU_BYTES
    definition = flashinfer_trace.load("gemm_bf16_n256_k7168")
    router = next(one for one in family_of(definition).kernels if one.label == "sgl_kernel.dsv3_router_gemm")
    job = Job(definition, family_of(definition), router, device="cuda")
    assert [one.plan for one in judged_cases(job, 0, lambda: 1) if one.kind == "corner"] == job.corners
