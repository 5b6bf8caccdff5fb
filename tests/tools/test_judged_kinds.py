"""The table of what the cases of a judgment can show has no empty cell without a reason, and no reason without one."""

from __future__ import annotations

import pytest

import flashinfer_trace
from tools.site import judged_kinds


@pytest.fixture(scope="module")
def cells():
    return judged_kinds.cells(flashinfer_trace.definitions())


def test_each_empty_cell_has_a_reason(cells):
    empty = [(family, kind) for family, own in cells.items() for kind, cell in own.items() if not cell]
    assert [pair for pair in empty if not judged_kinds.reason(pair[1], pair[0])] == []
    needed = {(kind, judged_kinds.reason(kind, family)) for family, kind in empty}
    assert [(kind, why) for kind, _, why in judged_kinds.REASONS if (kind, why) not in needed] == []
    assert judged_kinds.reason("Most rows", "a_family_that_is_new") == ""


def test_kinds_are_where_they_must_be(cells):
    assert {own["Sums on a CPU"] for own in cells.values()} == {"own sizes", "a twin with own sums"}
    prefill = cells["gqa_paged_prefill_causal"]
    assert prefill["Longest request"].endswith("GPU 2000 on 16384") and prefill["Peaks at edges"]
    assert cells["min_p_sampling_from_probs"]["Pooled statistics"] == "yes"
    assert cells["rmsnorm"]["Most rows"].startswith("CPU 2100, GPU 8")


def test_the_page_explains_its_letters():
    some = [flashinfer_trace.load(name) for name in ("rmsnorm_h512", "gqa_paged_decode_h6_kv2_d128_ps64")]
    text = judged_kinds.judged_kinds(some)
    assert "| `rmsnorm` | own sizes | (" in text
    assert "): there are no requests with keys." in text
