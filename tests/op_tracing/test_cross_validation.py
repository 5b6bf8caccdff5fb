"""Cross-validation notices when the op trace and the kernel traces disagree."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic import write
from tools.kernel_tracing.report.analysis import analyse
from tools.kernel_tracing.report.trace import document

from tools.kernel_tracing.report.trace_files import dumps as dump_kernels
from tools.kernel_tracing.source.sources import find_sources
from tools.op_tracing.__main__ import main
from tools.op_tracing.check import check
from tools.op_tracing.trace import trace

LAYERS = """
from torch import nn
from sgl_kernel import good
class Linear(nn.Module):
    def forward(self, x):
        return good(x)
"""
MODEL = """
from torch import nn
from sgl_kernel import other
from sglang.srt.layers.linear import Linear
class Tiny(nn.Module):
    def __init__(self):
        self.up = Linear()
        self.down = Linear()
    def forward(self, x):
        return other(self.down(self.up(x)))
EntryClass = Tiny
"""
Documents = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write(tmp_path, {"layers/linear.py": LAYERS, "models/tiny.py": MODEL})


@pytest.fixture
def documents(sources: Path) -> Documents:
    analysis = analyse(find_sources(sources), "tiny")
    kernels = document(analysis)
    del kernels["problems"]
    return trace(analysis), kernels


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


def test_the_command_fails_and_writes_nothing(
    sources: Path, documents: Documents, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = documents[1]
    _rename_op_in_traces({}, kernels)
    traces, target = sources / "traces.json", sources / "ops.json"
    traces.write_text(dump_kernels(kernels))
    command = ["--model", "tiny", "--sources", str(sources), "--traces", str(traces), "--json", str(target)]
    assert main(command) == 1
    assert "python -m tools.kernel_tracing --kernel good" in capsys.readouterr().err
    assert not target.exists()


def test_the_command(sources: Path, documents: Documents, capsys: pytest.CaptureFixture[str]) -> None:
    traces, target, report = sources / "traces.json", sources / "ops.json", sources / "ops.md"
    html = sources / "ops.html"
    traces.write_text(dump_kernels(documents[1]))
    common = ["--sources", str(sources), "--traces", str(traces)]
    assert main([*common, "--model", "tiny", "--json", str(target), "--out", str(report)]) == 0
    assert not html.exists()
    assert main([*common, "--model", "tiny", "--html", str(html)]) == 0
    assert "<!doctype html>" in html.read_text().lower()
    assert json.loads(target.read_text()) == documents[0]
    assert "up()" in report.read_text()
    assert "3 ops, 0 outside the model, 2 kernels" in capsys.readouterr().err
    assert main([*common, "--model", "small", "--json", str(target)]) == 2
    assert "kernel traces of tiny on cuda, not of small on cuda" in capsys.readouterr().err
    traces.write_text("{")
    assert main([*common, "--model", "tiny"]) == 2
    assert "not JSON" in capsys.readouterr().err
    for text in ("[]", '{"model": "tiny", "platform": "cuda"}', target.read_text()):
        traces.write_text(text)
        reason = "line 1: is no JSON object" if text == "[]" else "not kernel traces: /"
        assert main([*common, "--model", "tiny"]) == 2
        assert reason in capsys.readouterr().err


def test_the_report_leads_to_the_sources(sources: Path) -> None:
    report = sources / "ops.md"
    command = ["--sources", str(sources), "--model", "tiny", "--out", str(report)]
    assert main([*command, "--json", str(sources / "no" / "ops.json")]) == 2
    assert not report.exists()
    assert main(command) == 0
    text = report.read_text()
    files = set(re.findall(r"\]\(([^)#]+)#L\d+\)", text))
    assert "sglang/srt/models/tiny.py" in {str(Path(file)) for file in files}
    assert all((report.parent / file).is_file() for file in files)
    assert "For the call chains, see `python -m tools.kernel_tracing --model tiny`." in text
    assert "kernel_traces.md" not in text
