"""Cross-validation notices when the op trace and the kernel traces disagree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from made_up_traces import chain, document

from tools.op_tracing.check import check

Documents = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture
def documents() -> Documents:
    """An op and a direct kernel; the call of each is a frame of its chain."""
    up = {"file": "sglang/srt/models/tiny.py", "line": 12, "function": "Tiny.forward", "call": "self.up(x)"}
    down = {**up, "line": 13, "call": "self.down(x)"}
    good = {"file": "sglang/srt/layers/linear.py", "line": 6, "function": "Linear.forward", "call": "good(x)"}
    other = {**up, "line": 14, "call": "other(x)"}
    kernels = [
        _kernel("good", [chain(good, down, op="down"), chain(good, up, op="up")]),
        _kernel("other", [chain(other, op="other")]),
    ]
    traces = document(kernels, SOURCES, "tiny")
    ops = {
        **{key: traces[key] for key in ("sources", "model", "platform")},
        "ops": [_op("down", down, kernels[0]), _op("other", other, kernels[1]), _op("up", up, kernels[0])],
        "graph": _node(
            "tiny", "container", _node("Tiny", "container", *(_node(n, "op") for n in ("up", "down", "other")))
        ),
        "direct_kernels": [],
        "non_model_ops": [],
    }
    return copy.deepcopy(ops), copy.deepcopy(traces)


SOURCES = {"sglang": {"version": "1.0", "sha256": "a" * 64}}


def _kernel(name: str, chains: list[Any]) -> dict[str, Any]:
    definition = {"file": "sgl_kernel/gemm.py", "line": 3}
    return {"name": name, "source": "sgl-kernel", "category": "gemm", "definition": definition, "chains": chains}


def _op(name: str, frame: dict[str, Any], kernel: dict[str, Any]) -> dict[str, Any]:
    site = {key: frame[key] for key in ("file", "line", "function")}
    used = {key: kernel[key] for key in ("name", "source", "definition")} | {"condition": "", "phases": ["prefill"]}
    return {"name": name, "call_sites": [site], "kernels": [used]}


def _node(name: str, kind: str, *children: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "kind": kind, "annotation": "", "call_sites": [], "children": list(children)}


def test_agreement(documents: Documents) -> None:
    assert check(*documents) == []


def _remove_kernel(ops: dict[str, Any], kernels: dict[str, Any]) -> None:
    del kernels["kernels"][0]


def _rename_op_in_traces(ops: dict[str, Any], kernels: dict[str, Any]) -> None:
    kernels["kernels"][0]["ops"][0] = "renamed"


def _rename_op(ops: dict[str, Any], kernels: dict[str, Any]) -> None:
    ops["ops"][0]["name"] = "renamed"


def _forget_kernel(ops: dict[str, Any], kernels: dict[str, Any]) -> None:
    ops["ops"][1]["kernels"].clear()


def _move_call_site(ops: dict[str, Any], kernels: dict[str, Any]) -> None:
    ops["ops"][0]["call_sites"][0]["line"] += 1


def _prune_graph(ops: dict[str, Any], kernels: dict[str, Any]) -> None:
    del ops["graph"]["children"][0]["children"][0]


def _empty_container(ops: dict[str, Any], kernels: dict[str, Any]) -> None:
    ops["graph"]["children"][0]["children"].clear()


def _twice(ops: dict[str, Any], kernels: dict[str, Any]) -> None:
    kernels["kernels"].append(copy.deepcopy(kernels["kernels"][0]))


def _other_sources(ops: dict[str, Any], kernels: dict[str, Any]) -> None:
    kernels["sources"]["sglang"]["sha256"] = "0" * 64


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (_remove_kernel, "kernel good: ops down, up use it, but the traces lack it"),
        (_rename_op_in_traces, "kernel good: its op renamed is not in the op trace"),
        (_rename_op, "graph: tiny > Tiny > down is an op without kernels"),
        (_forget_kernel, "op other: no kernel"),
        (_move_call_site, "op down: no chain of good passes through a call site of the op"),
        (_prune_graph, "op up: it is not in the graph"),
        (_empty_container, "graph: tiny > Tiny is an empty container"),
        (_twice, "kernels: good occur more than once"),
        (_other_sources, "sources: the op trace is of"),
    ],
)
def test_disagreement(documents: Documents, break_it: Callable[..., None], message: str) -> None:
    break_it(*documents)
    violations = check(*documents)
    assert any(message in violation for violation in violations), violations
    about_kernels = [one for one in violations if one.startswith(("kernel ", "op ")) and "graph" not in one]
    assert all("see" in one for one in about_kernels)
