"""The page of an op trace as a file: what it contains, and which documents are refused."""

from __future__ import annotations

import copy
import json
import re

import pytest
from page_documents import HOSTILE_TEXT, ROOT, documents, large, rendered

from tools.kernel_tracing.report.trace_files import load_traces
from tools.op_tracing import page


def test_the_page_is_one_file_that_refers_to_nothing_else():
    text = rendered()
    assert text == rendered()
    assert re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]*)""", text.split('<script type="application/json"')[0]) == [
        "data:,"
    ]
    assert not re.search(r"https?://|@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert "{{" not in text
    assert not re.search(r"\son\w+=", re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S))


def test_the_data_cannot_end_their_element():
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', rendered(), re.S)[1]
    assert data.isascii() and not set("<>&\n") & set(data)
    assert HOSTILE_TEXT in json.loads(data)["texts"]


@pytest.mark.parametrize("make", [large, None], ids=["generated", "committed"])
def test_the_page_of_a_large_trace_is_small(make):
    if make:
        ops, kernels = make()
    else:
        ops = json.loads((ROOT / "traces/op_traces.json").read_text("utf-8"))
        kernels = {**load_traces(ROOT / "traces/kernel_traces.json"), "model": ops["model"]}
    assert len(page.render(ops, kernels, {})) < 4_000_000


def test_documents_that_do_not_belong_together_are_refused():
    ops, kernels = documents()
    with pytest.raises(ValueError, match=r"differ in model: small and other; make both from the same sources"):
        page.render(ops, {**kernels, "model": "other"}, {})
    with pytest.raises(
        ValueError, match=r"q_proj of the op trace names the kernel fp8_gemm\|sgl-kernel\|sgl_kernel/gemm"
    ):
        page.render(ops, {**kernels, "kernels": kernels["kernels"][1:]}, {})
    lacking = copy.deepcopy(ops)
    lacking["ops"] = [op for op in ops["ops"] if op["name"] != "attn"]
    with pytest.raises(ValueError, match=r"the graph of the op trace has an op attn, which its list of ops lacks"):
        page.render(lacking, kernels, {})
