"""Calls of fake libraries by a fake SGLang: what is logged, from where, and which CUDA kernels belong to it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashinfer_trace.dataset.digests import content_sha256
from tools.runtime_tracing import recording, timeline
from tools.runtime_tracing.call_log import CallLog
from tools.runtime_tracing.wrapping import Wrapping, torch_functions

#: The description of a run, apart from its name and its model.
TEXTS: dict[str, Any] = {
    **{"model": "m", "stand_ins": [], "environment": {}, "versions": {"sglang": "0"}},
    **{"server": {}, "resolved": {}},
}
FILES = {
    "sgl_kernel/__init__.py": "from sgl_kernel.elementwise import rmsnorm, Wrapper\n",
    "sgl_kernel/elementwise.py": """\
import torch

def rmsnorm(x, weight, eps=1e-6):
    return torch.relu(x)

class Wrapper:
    def run(self, x):
        return rmsnorm(x, None)
""",
    "sglang/__init__.py": "",
    "sglang/jit_kernel/__init__.py": "",
    "sglang/jit_kernel/rope.py": """\
module = None

def apply(q):
    return _apply(q)

def _apply(q):
    return module.run(q)
""",
    "sglang/model.py": """\
import torch
from sgl_kernel import Wrapper, rmsnorm
from sglang.jit_kernel import rope

class Model:
    def forward(self, x):
        y = rmsnorm(
            x,
            weight=x[0],
        )
        z = (Wrapper()
             .run(y))
        return rope.apply(torch.mm(z, z))
""",
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("sglang.model")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("sgl_kernel", "sglang")]:
        del sys.modules[name]


def wrapped(log: CallLog) -> Wrapping:
    wrapping = Wrapping(log)
    wrapping.packages(["sgl_kernel"])
    rope = sys.modules["sglang.jit_kernel.rope"]
    rope.module = wrapping.compiled_module(SimpleNamespace(run=lambda q: q + 1, version=3), "rope_bf16")  # type: ignore[attr-defined]
    assert rope.module.version == 3
    assert wrapping.rewire() >= 2
    return wrapping


def test_calls_are_logged_with_their_places_and_arguments(model: Any):
    log = CallLog()
    wrapped(log)
    model.Model().forward(torch.ones(4, 4))
    assert log.calls == []  # nothing is recorded outside of a phase
    log.phase = "prefill"
    with torch_functions(log):
        model.Model().forward(torch.ones(4, 4))
        model.Model().forward(torch.ones(4, 4))
    log.phase = None
    launched = [call.number for call in log.calls if call.kernel.endswith(".mm")]
    launch = timeline.Launch(
        "void gemm<float, 4>(float*, (anonymous namespace)::P)", launched[0], 1, "aten::mm", 2, 3.5
    )
    calls = recording.recorded_calls(log, {"prefill": "prefill"}, {"prefill": [launch]})
    by_kernel = {call.kernel: call for call in calls}
    assert [*by_kernel] == [
        "sgl_kernel.elementwise.rmsnorm",
        "sgl_kernel.elementwise.Wrapper.run",
        "torch.mm",
        "sglang.jit_kernel.rope.apply",
    ]
    norm = by_kernel["sgl_kernel.elementwise.rmsnorm"]
    # The line on which the call begins, although its arguments stand on others.
    assert norm.stack == (("sglang/model.py", 7, "Model.forward", "rmsnorm"),)
    assert (norm.count, norm.arguments) == (2, "x: float32[4,4], weight: float32[4]")
    run = by_kernel["sgl_kernel.elementwise.Wrapper.run"]
    assert run.stack[0].function == "Model.forward"
    assert run.through == ("sgl_kernel.elementwise.rmsnorm",)
    if sys.version_info >= (3, 11):  # before, the line of the method's name
        assert run.stack[0].line == 11
    rope = by_kernel["sglang.jit_kernel.rope.apply"]
    assert (rope.library, rope.stack[0].line, rope.through) == ("jit", 13, ("rope_bf16.run",))
    (found,) = by_kernel["torch.mm"].launches
    assert found == recording.RecordedLaunch("gemm<float, 4>", 1, 2, 3.5)


def test_kernels_of_the_timeline_belong_to_the_innermost_call(model: Any, tmp_path: Path):
    log = CallLog(phase="prefill", marker=torch._C._profiler._RecordFunctionFast, layer=5)
    wrapped(log)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, torch_functions(log):
        model.Model().forward(torch.ones(4, 4))
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_bytes())["traceEvents"]
    (product,) = (event for event in events if event.get("name") == "aten::mm" and event.get("cat") == "cpu_op")
    end = product["ts"] + product["dur"]
    inside = [
        event["ts"] + event["dur"]
        for event in events
        if event.get("cat") == "cpu_op" and product["ts"] < event["ts"] and event["ts"] + event["dur"] <= end
    ]
    at = (max(inside, default=product["ts"]) + end) / 2  # after the operators that the product itself calls

    def device(name: str, correlation: int) -> dict[str, Any]:
        return {"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": 3.0, "args": {"correlation": correlation}}

    runtime = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 0.001}
    events += [{**runtime, "tid": product["tid"], "args": {"correlation": 7}}, device("gemm", 7), device("gemm", 7)]
    events += [device("graph", 8)]
    linked, lost = timeline.launches(events)
    assert (linked.cuda_kernel, linked.operator, linked.layer, linked.count) == ("gemm", "aten::mm", 5, 2)
    assert linked.microseconds == 6.0
    assert linked.call is not None and log.calls[linked.call].kernel.endswith(".mm")
    assert (lost.cuda_kernel, lost.call) == ("graph", None)


def test_operators_are_logged_by_their_schema(model: Any):
    log = CallLog()
    real = torch._ops.OpOverloadPacket.__call__
    library = torch.library.Library("runtime_tracing_test", "DEF")
    library.define("twice(Tensor x, *, float by=2.0) -> Tensor")
    library.impl("twice", lambda x, by=2.0: x * by, "CompositeExplicitAutograd")
    Wrapping(log).operators([torch._ops.OpOverloadPacket])
    try:
        log.phase = "decode"
        torch.ops.runtime_tracing_test.twice(torch.ones(2), by=3.0)
        torch.ops.aten.relu(torch.ones(2))  # PyTorch's own
    finally:
        torch._ops.OpOverloadPacket.__call__ = real
    (call,) = log.calls
    assert (call.library, call.kernel, call.arguments) == (
        "torch.ops",
        "runtime_tracing_test.twice",
        "x: float32[2], by: 3.0",
    )


def test_a_recording_is_read_as_it_was_written(model: Any, tmp_path: Path):
    log = CallLog(phase="decode 1")
    wrapped(log)
    model.Model().forward(torch.ones(4, 4))
    calls = recording.recorded_calls(
        log, {"decode 1": "decode"}, {"decode": [timeline.Launch("k", None, None, "", 1, 2)]}
    )
    path = tmp_path / "run.json"
    about = {"configuration": "x", "layers": [3, 58], "model_config": {"architectures": ["M"]}, **TEXTS}
    recording.write(path, about, calls)
    run = recording.read(path)
    assert run.calls == tuple(calls)
    assert (run.name, run.weight(1), run.weight(None)) == ("x", 58, 1)
    assert calls[-1].launches[0].cuda_kernel == "k"


@pytest.mark.parametrize(
    "change",
    [
        {"model": ["m"]},
        {"frames": [[0, "7", "f", ""]]},
        {"frames": [[0, 7, "f"]]},
        {"model_config": {"architectures": ["M"], "sliding_window": [4]}},
        {"model_config": {"architectures": []}},
        {"versions": {}},
        {"calls": [[["decode"], 0, -1, 0, 1, []]]},
        {"calls": [["decode", 0, -1, 0, 1, [[0, None, 1, "2"]]]]},
    ],
    ids=str,
)
def test_a_recording_of_other_types_is_refused(change: dict[str, Any], tmp_path: Path):
    about = {"configuration": "x", "layers": [1], "model_config": {"architectures": ["M"]}, **TEXTS}
    tables = {
        "files": ["sglang/a.py"],
        "frames": [],
        "stacks": [],
        "kernels": [["torch", "torch.mm"]],
        "arguments": [""],
    }
    content = {**about, **tables, "cuda_kernels": ["k"], "calls": [], **change}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**content, "sha256": content_sha256(content)}))
    with pytest.raises(recording.RecordingError, match=r"run\.json: (TypeError|KeyError|ValueError)"):
        recording.read(path)


def test_a_broken_recording_is_named(tmp_path: Path):
    path = tmp_path / "run.json"
    path.write_text('{"configuration": "x"}')
    with pytest.raises(recording.RecordingError, match=r"run\.json.*record it again"):
        recording.read(path)
