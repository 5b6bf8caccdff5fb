"""Cases beyond those of verification: attention of more and of longer requests, and numbers of rows that plans have
not.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from cheating_kernels import NORM
from whole_dataset import FAMILIES, FIRST

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.power import stand_in
from flashinfer_trace.harness.verify import Job, verify
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.more_plans import (
    CASES,
    COPIES,
    CPU_WORK,
    DRAWN_ROWS,
    FEW_ROWS,
    FEWER_REQUESTS,
    GPU_BYTES,
    GPU_ROWS,
    KEYS,
    KEYS_A_ROW,
    MORE_KEYS,
    QUERIES,
    REQUESTS,
    SHARED,
    THRESHOLDS,
    TILES,
    judged_cases,
)
from flashinfer_trace.judging.twin_sizes import small_by_default
from flashinfer_trace.judging.verdict import Grade

DECODE, PREFILL = "gqa_paged_decode_h6_kv2_d128_ps64", "gqa_paged_prefill_causal_h6_kv2_d128_ps64"
SINGLE, EXTEND = "gqa_paged_prefill_causal_h6_kv2_d128_ps1", "gqa_extend_causal_h8_kv1_qk128_vo128"
OWN = "        own_pages = kv_indices[pages[b] : pages[b + 1]]\n"
STORED = "            output[start:stop], lse[start:stop] = attend(q[start:stop], k, v, sm_scale, last_key)\n"
RETURN = "    return output, lse\n"
#: Error -> Definition, a line of its reference, and what stands after it in a kernel that is right otherwise.
WRONG = {
    "pages that two requests share are read once": (
        DECODE,
        OWN,
        "        if b > 0 and set(own_pages.tolist()) & set(kv_indices[: pages[b]].tolist()):\n            continue\n",
    ),
    "pages of a second request follow each other": (
        DECODE,
        OWN,
        "        if b > 0 and len(own_pages):\n"
        "            own_pages = (own_pages[0] + torch.arange(len(own_pages))).clamp_max(len(k_cache) - 1)\n",
    ),
    "sixteen queries": (PREFILL, STORED, "            output[start + 16 : stop] = output[start + 15 : start + 16]\n"),
    "sixty-four queries": (PREFILL, STORED, "            output[queries[b] + 64 : stop] = 0\n"),
    "a multiple of 16 cached keys": (
        EXTEND,
        "        slots = kv_indices[cached[b] : cached[b + 1]]\n",
        "        slots = slots[:-1] if len(slots) > 40 and len(slots) % 16 == 0 else slots\n",
    ),
    "one key more than full tiles of 64, cached": (
        EXTEND,
        "        slots = kv_indices[cached[b] : cached[b + 1]]\n",
        "        slots = slots[:-1] if len(slots) > 64 and len(slots) % 64 == 1 else slots\n",
    ),
    "one key less than full tiles": (
        PREFILL,
        STORED,
        "            if kv_len > 64 and kv_len % 64 == 63:\n                output[start:stop] = 0\n",
    ),
    "sixty-four queries of pages with one token": (SINGLE, STORED, "            output[queries[b] + 64 : stop] = 0\n"),
    "a tile of queries": (PREFILL, STORED, "            output[queries[b] + 128 : stop] = 0\n"),
    "the offset of a second tile in the mask": (
        PREFILL,
        "            last_key = start - queries[b + 1] + k.shape[0]\n",
        "            last_key -= (start - queries[b]) // 128 * 128\n",
    ),
}
CUT = "        k, v = k[:kv_len], v[:kv_len]\n"
#: Keys of a long request that are left out -> a line after `CUT`.
LEFT_OUT = {
    "the last one from 1024 on": "        k, v = (k[:-1], v[:-1])\n",
    **{
        f"number {key}": f"        k, v = [torch.cat((each[:{key}], each[{key} + 1 :])) for each in (k, v)]\n"
        for key in (63, 64, 127, 128, 511, 512, 1023, 1024)
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_is_wrong_there_is_wrong(name, tmp_path, server):
    definition, line, more = WRONG[name]
    reference = flashinfer_trace.load(definition).reference
    assert reference.count(line) == 1
    (tmp_path / "wrong.py").write_text(reference.replace(line, line + more))
    verdict = judge(f"{tmp_path / 'wrong.py'}:run", definition, examples=3, server=server)
    assert verdict.grade == Grade.WRONG and verdict.failure.kind == "values"
    assert verdict.failure.plan["shared_prefix"] == SHARED, "corners, which come before it, do not show it"


@pytest.mark.parametrize("key", LEFT_OUT)
def test_a_key_at_an_edge_is_seen_in_a_long_request(key, tmp_path, server):
    """Without peaks, one key of a thousand has a weight that is lost in the bounds."""
    reference = flashinfer_trace.load(DECODE).reference
    assert reference.count(CUT) == 1
    own = LEFT_OUT[key].replace("        k, v =", "        k, v = (k, v) if kv_len < 1000 else")
    (tmp_path / "wrong.py").write_text(reference.replace(CUT, CUT + own))
    verdict = judge(f"{tmp_path / 'wrong.py'}:run", DECODE, examples=1, server=server)
    assert verdict.grade == Grade.WRONG and verdict.failure.kind == "values", verdict


def test_a_verdict_names_the_longest_request(tmp_path, server):
    (tmp_path / "right.py").write_text(flashinfer_trace.load(PREFILL).reference)
    verdict = judge(f"{tmp_path / 'right.py'}:run", PREFILL, examples=1, server=server)
    assert verdict.grade == Grade.REFERENCE and verdict.longest == {"queries": 310, "keys": 347}, verdict
    assert "; longest request queries 310, keys 347" in str(verdict) and "keys 347" in verdict.summary()


@pytest.mark.parametrize(
    ("name", "queries"),
    [
        ("gqa_paged_decode_h16_kv2_d64_ps1_sinks_window128", None),
        (DECODE, None),
        (PREFILL, QUERIES),
        (SINGLE, QUERIES),
        ("mla_paged_decode_page_table_h128_ckv512_kpe64_ps128", None),
        ("mla_paged_prefill_causal_h16_ckv512_kpe64_ps1", QUERIES),
        ("mla_ragged_prefill_causal_h16_qk192_vo128", QUERIES),
        (EXTEND, QUERIES),
        ("gqa_ragged_prefill_causal_h6_kv2_d128", QUERIES),
        ("gqa_paged_prefill_causal_h32_kv16_d128_ps64_window1024", QUERIES),
    ],
)
def test_there_is_one_such_case_which_the_reference_passes(name, queries):
    definition = flashinfer_trace.load(name)
    job = Job(definition, family_of(definition), full=not small_by_default(definition, "cpu"))
    corners = [one.plan for one in judged_cases(job, 0, lambda: 1) if one.kind == "corner"]
    assert corners[:-2] == job.corners
    plan = corners[-1]
    assert plan.get("q_lens") == (queries and [*queries])
    lengths = (
        [keys - new for keys, new in zip(plan["kv_lens"], queries, strict=True)] if name == EXTEND else plan["kv_lens"]
    )
    assert tuple(lengths) == (KEYS if queries else (*KEYS, *MORE_KEYS))
    inputs = job.family.inputs(job.sized, plan, 0, "cpu")
    if "kv_indices" in inputs:
        pages = inputs["kv_indices"].tolist()
        assert len(set(pages)) == len(pages) - SHARED * (len(plan["kv_lens"]) - 1)
    assert verify(job, plan=plan, seed=0).status == "passed"


@pytest.mark.parametrize("family", [name for name, one in FIRST.items() if "qo_indptr" in one.inputs])
def test_each_prefill_family_meets_a_second_tile_of_queries(family):
    """At the small twin, which has the plans of the Definition's own sizes."""

    def forgets(definition, inputs, outputs):
        found = reference_outputs(definition, inputs, 0)
        for start, stop in itertools.pairwise(inputs["qo_indptr"].tolist()):
            found["output"][start + 128 : stop] = found["output"][start : max(start, stop - 128)].clone()
        return found

    definition, record = FIRST[family], FAMILIES[family]
    job = Job(definition, record, dataclasses.replace(stand_in(None), call=forgets))
    every = [[one.plan for one in judged_cases(Job(definition, record, full=full), 0, lambda: 0)] for full in (0, 1)]
    assert all(max(plans[-1]["q_lens"]) == 310 for plans in every)
    report = verify(job, plan=every[0][-1], seed=0)
    assert report.status == "failed" and "output output" in report.message, report.message


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        (DECODE, (1, 16384)),
        ("gqa_paged_prefill_causal_h32_kv8_d128_ps1", (2000, 16384)),
        ("gqa_paged_prefill_causal_h6_kv2_d128_ps64", (2000, 16384)),
        ("mla_paged_prefill_causal_h128_ckv512_kpe64_ps64", (2000, 2300)),
    ],
)
def test_a_gpu_gets_a_request_as_long_as_a_chunk_of_a_prompt(name, longest):
    definition = flashinfer_trace.load(name)
    job = Job(definition, family_of(definition), device="cuda", full=True)
    plans = [one.plan for one in judged_cases(job, 0, lambda: 1) if one.kind == "corner"]
    assert plans[: len(job.corners)] == job.corners and len(plans) == len(job.corners) + 2
    lengths = zip(plans[-1].get("q_lens", [1] * len(plans[-1]["kv_lens"])), plans[-1]["kv_lens"], strict=True)
    assert max(lengths) == longest and (longest[1] - longest[0]) % 64


@pytest.mark.parametrize("most", [128, 256])
def test_a_kernel_for_so_many_requests_is_wrong(most, tmp_path, server):
    reference = flashinfer_trace.load(DECODE).reference
    assert reference.count(RETURN) == 1
    (tmp_path / "wrong.py").write_text(reference.replace(RETURN, f"    output[{most}:] = 0\n{RETURN}"))
    verdict = judge(f"{tmp_path / 'wrong.py'}:run", DECODE, examples=3, server=server)
    assert verdict.grade == Grade.WRONG and verdict.failure.kind == "values"
    assert len(verdict.failure.plan["kv_lens"]) > most


@pytest.mark.parametrize(
    ("name", "device", "counts"),
    [
        ("gqa_paged_decode_h16_kv2_d64_ps1_sinks_window128", "cpu", REQUESTS),
        (EXTEND, "cpu", REQUESTS),
        ("gqa_ragged_prefill_causal_h6_kv2_d128", "cuda", REQUESTS),
        ("mla_paged_decode_page_table_h128_ckv512_kpe64_ps128", "cuda", REQUESTS),
        ("mla_paged_prefill_causal_h128_ckv512_kpe64_ps64", "cpu", FEWER_REQUESTS),
    ],
)
def test_the_number_of_requests_is_drawn(name, device, counts):
    definition = flashinfer_trace.load(name)
    job = Job(definition, family_of(definition), device=device, full=True)
    drawn = set()
    for seed in range(4):
        plan = [one.plan for one in judged_cases(job, seed, lambda: 1) if one.kind == "corner"][len(job.corners)]
        assert counts[0] <= len(plan["kv_lens"]) <= counts[1] and min(plan["kv_lens"]) >= 1
        drawn.add(len(plan["kv_lens"]))
    assert len(drawn) > 1
    on_a_cpu = Job(definition, job.family)  # at the sizes of the twin, which have the same plans
    assert verify(on_a_cpu, plan=plan, seed=0).status == "passed"


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


@pytest.mark.parametrize(
    "wrong",
    [
        *("40 < len(x) < 1100", "40 < len(x) < 64", "len(x) >= 64 and len(x) % 64 == 0", "len(x) >= 2048"),
        *(f"len(x) == {rows}" for rows in TILES),
    ],
)
def test_a_kernel_that_is_wrong_there_is_found(wrong, tmp_path, server):
    path = tmp_path / "mine.py"
    path.write_text(TEXT.replace("WRONG", wrong))
    verdict = judge(str(path), NORM, server=server)
    assert verdict.grade == Grade.WRONG and verdict.failure is not None and verdict.failure.kind == "values", verdict


@pytest.mark.parametrize(
    ("name", "axis", "most"),
    [
        (NORM, "batch_size", 2100),
        ("gemm_n128_k2048", "M", 2100),
        ("merge_state_h32_d128", "seq_len", 2100),
        ("moe_shuffle_rows_h2048", "num_copies", 300),
        ("fp8_mqa_logits_h64_d128", "num_keys", 300),
        ("concat_mla_absorb_q_h128_ckv512_kpe64", "num_tokens", 300),
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
        first, one, few, *others = [count // BESIDE.get(axis, 1) for count in rows]
        assert first == TILES[0] and FEW_ROWS[0] <= few <= FEW_ROWS[1]
        assert others[0] == TILES[1] and set(others) & set(THRESHOLDS)
        assert (DRAWN_ROWS < one <= most and set(TILES) <= {first, *others}) or most == 300
        drawn.add(one)
    assert len(drawn) > 4


def test_products_with_large_weights_have_fewer_rows():
    definition = flashinfer_trace.load("fp8_blockwise_scaled_mm_n12288_k1536")
    job = Job(definition, family_of(definition), full=True)
    for seed in range(8):
        plans = [one.plan for one in judged_cases(job, seed, lambda: 1) if one.kind == "corner"][len(job.corners) :]
        rows = [plan["m"] for plan in plans]
        assert rows[0] == TILES[0] and rows[1] > DRAWN_ROWS and max(rows) * 12288 * 1536 <= CPU_WORK
        assert sum(rows) * 12288 * 1536 <= CASES * CPU_WORK


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
        twin, (most, *others) = Job(definition, job.family), corners[len(job.corners) :]
        assert corners[: len(job.corners)] == job.corners and len(others) == 3
        drawn.add(rows_of(twin.family.inputs_and_axes(twin.sized, most, 0, "cpu")[1]))
    assert GPU_ROWS[0] <= min(drawn) < max(drawn) <= GPU_ROWS[1]
    assert verify(twin, plan=most, seed=0).status == "passed"


def test_there_are_fewer_where_a_row_has_a_vocabulary_and_none_for_kernels_that_take_few():
    definition = flashinfer_trace.load("softmax_temperature_v129280")
    job = Job(definition, family_of(definition), device="cuda")
    rows = [one.plan for one in judged_cases(job, 0, lambda: 1) if one.kind == "corner"][len(job.corners)]["batch_size"]
    assert GPU_BYTES * 0.99 < rows * 2 * 4 * 129280 <= GPU_BYTES
    definition = flashinfer_trace.load("gemm_bf16_n256_k7168")
    router = next(one for one in family_of(definition).kernels if one.label == "sgl_kernel.dsv3_router_gemm")
    job = Job(definition, family_of(definition), router, device="cuda")
    assert [one.plan for one in judged_cases(job, 0, lambda: 1) if one.kind == "corner"] == job.corners
