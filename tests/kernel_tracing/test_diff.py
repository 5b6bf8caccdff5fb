"""Differences between hand-made traces."""

from __future__ import annotations

import copy

import pytest

from tools.kernel_tracing.report.diff import NO_DIFFERENCE, diff


def chain(line, function="Layer.forward", call="gemm(x)"):
    first = {"file": "sglang/l.py", "line": line, "function": function, "call": call}
    frames = [first, {"file": "sglang/m.py", "line": 9, "function": "M.forward", "call": "self.l(x)"}]
    return {"frames": frames, "configurations": {"small-bf16": ["prefill"]}}


def kernel(name, *lines, source="sgl-kernel"):
    chains = [chain(line) for line in lines]
    return {
        "name": name,
        "source": source,
        "category": "gemm",
        "definition": {"file": "sgl_kernel/gemm.py", "line": 7},
        "call_sites": [{part: one["frames"][0][part] for part in ("file", "line", "function")} for one in chains],
        "ops": ["mlp"],
        "chains": chains,
    }


@pytest.fixture
def old():
    return {
        "sources": {"sglang": {"version": "1.0", "sha256": "a" * 64}},
        "model": "deepseek",
        "platform": "cuda",
        "kernels": [kernel("gemm", 10, 20), kernel("norm", 30)],
        "not_evaluated": [{"text": "sglang/l.py:3: no attribute x", "configurations": ["small-bf16"]}],
    }


@pytest.fixture
def new(old):
    return copy.deepcopy(old)


def test_no_difference(old, new):
    assert diff(old, new) == NO_DIFFERENCE
    new["kernels"].reverse()
    assert diff(old, new) == NO_DIFFERENCE, "the order does not matter"


def test_new_and_gone_kernels(old, new):
    new["kernels"] = [kernel("gemm", 10, 20), kernel("norm", 30, source="triton"), kernel("rope", 5, 6)]
    assert diff(old, new) == (
        "New kernels (2)\n"
        "  + norm (triton), 1 chains, called at sglang/l.py:30\n"
        "  + rope (sgl-kernel), 2 chains, called at sglang/l.py:5, sglang/l.py:6\n"
        "Removed kernels (1)\n"
        "  - norm (sgl-kernel), 1 chains, called at sglang/l.py:30\n"
    )


def test_moved_call_sites(old, new):
    new["kernels"][0] = kernel("gemm", 10, 24)
    assert diff(old, new) == (
        "Changed kernels (1)\n"
        "  ~ gemm (sgl-kernel)\n"
        "      call site moved: sglang/l.py in Layer.forward, line 10, 20 -> 10, 24\n"
    )


def test_new_gone_and_fewer_call_sites(old, new):
    new["kernels"][0] = kernel("gemm", 10)
    assert "call sites changed: sglang/l.py in Layer.forward, lines 10, 20 -> 10\n" in diff(old, new)
    assert "chains: 2 -> 1\n" in diff(old, new)
    new["kernels"][0]["call_sites"][0]["function"] = "Other.forward"
    text = diff(old, new)
    assert "call site removed: sglang/l.py in Layer.forward, line 10, 20\n" in text
    assert "call site new: sglang/l.py in Other.forward, line 10\n" in text


def test_chains_that_changed_behind_the_same_call_sites(old, new):
    new["kernels"][0]["chains"][0]["configurations"] = {"small-fp8": ["prefill"]}
    assert "chains: 1 of 2 changed\n" in diff(old, new)
    new["kernels"][0]["chains"].append(chain(10, call="gemm(x, y)"))
    assert "chains: 2 -> 3\n" in diff(old, new)


def test_definition_category_and_ops(old, new):
    new["kernels"][0]["definition"]["line"] = 8
    new["kernels"][0]["category"] = "moe"
    new["kernels"][0]["ops"] = ["experts"]
    text = diff(old, new)
    for expected in (
        "definition: sgl_kernel/gemm.py:7 -> sgl_kernel/gemm.py:8",
        "category: gemm -> moe",
        "ops: + experts",
        "ops: - mlp",
    ):
        assert f"      {expected}\n" in text


def test_header(old, new):
    new["sources"]["sglang"] = {"version": "1.0", "sha256": "b" * 64}
    new["sources"]["sgl-kernel"] = {"version": "2.0", "sha256": "b" * 64}
    new["model"] = "llama"
    assert diff(old, new) == "model: deepseek -> llama\nsgl-kernel: absent -> 2.0\nsglang: 1.0 -> 1.0 (other content)\n"


def test_not_evaluated(old, new):
    new["not_evaluated"] = []
    assert diff(old, new) == "Not evaluated: 1 -> 0\n  - sglang/l.py:3: no attribute x\n"
    assert diff(new, old) == "Not evaluated: 0 -> 1\n  + sglang/l.py:3: no attribute x\n"


def test_two_kernels_of_one_name_are_kept_apart_by_their_definitions(old, new):
    twin = kernel("gemm", 40)
    twin["definition"] = {"file": "sgl_kernel/moe.py", "line": 3}
    new["kernels"].append(twin)
    assert "definition: sgl_kernel/gemm.py:7 -> sgl_kernel/gemm.py:7, sgl_kernel/moe.py:3\n" in diff(old, new)
