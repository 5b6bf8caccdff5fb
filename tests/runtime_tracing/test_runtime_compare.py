"""A recorded run is looked up in a static trace; both are made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_up_traces import chain, file_form

from tools.runtime_tracing import __main__ as command
from tools.runtime_tracing.compare import compare, launched, report, seen
from tools.runtime_tracing.frames import Frame
from tools.runtime_tracing.recording import RecordedCall, RecordedLaunch, Recording, RecordingError, write
from tools.runtime_tracing.static import entering, read_static

ENTRY = Frame("sglang/srt/models/toy.py", 90, "ToyForCausalLM.forward")
NORM = Frame("sglang/srt/layers/layernorm.py", 261, "RMSNorm.forward_cuda")
LAYER = Frame("sglang/srt/models/toy.py", 40, "ToyLayer.forward")
ROPE = Frame("sglang/srt/layers/rotary.py", 7, "Rotary.forward")
RUNNER = Frame("sglang/srt/model_executor/model_runner.py", 3000, "ModelRunner.forward")
JIT = Frame("sglang/jit_kernel/rope.py", 20, "apply_rope")


def traced(name: str, *chains: tuple[Frame, ...]) -> dict[str, Any]:
    frames = [chain(*({**frame._asdict(), "call": "f()"} for frame in one)) for one in chains]
    definition = {"file": "", "line": 0}
    return {"name": name, "source": "sgl-kernel", "category": "other", "definition": definition, "chains": frames}


@pytest.fixture
def static_path(tmp_path: Path) -> Path:
    kernels = [
        traced("rmsnorm", (NORM, LAYER, ENTRY), (NORM, ENTRY)),
        traced("run_rope", (JIT, ROPE, LAYER, ENTRY)),
        traced("never_called", (LAYER, ENTRY)),
    ]
    path = tmp_path / "kernel_traces.json"
    path.write_text(json.dumps(file_form(kernels, {"sglang": {"version": "0.5.11", "sha256": "0" * 64}})))
    return path


def called(
    kernel: str, *stack: Frame, phase: str = "prefill", library: str = "sgl_kernel", **more: Any
) -> RecordedCall:
    known = {"arguments": "", "count": 1, "through": (), "launches": (RecordedLaunch("k", 0, 1, 2.0),), **more}
    return RecordedCall(phase=phase, library=library, kernel=kernel, stack=stack, **known)


def run(*calls: RecordedCall, version: str = "0.5.11", stand_ins: tuple[str, ...] = ()) -> Recording:
    about = {"configuration": "small-bf16", "layers": [1], "versions": {"sglang": version, "gpu": "NVIDIA H200"}}
    return Recording({**about, "stand_ins": list(stand_ins)}, calls)


KNOWN = called("sgl_kernel.elementwise.rmsnorm", NORM, LAYER, ENTRY, RUNNER)
ROTATED = called(
    "sglang.jit_kernel.rope.apply_rope", ROPE, LAYER, ENTRY, RUNNER, library="jit", through=("rope.run_rope",)
)


def test_what_ran_is_found(static_path: Path):
    found = compare(run(KNOWN, ROTATED), read_static(static_path))
    assert not found.missing
    assert [str(one) for one in (found.kernels, found.lines, found.chains)] == ["2 of 2"] * 3


def test_what_is_missing_is_named(static_path: Path):
    other = called("sgl_kernel.elementwise.rmsnorm", NORM, ROPE, ENTRY)
    moved = called("sgl_kernel.elementwise.rmsnorm", NORM._replace(line=262), LAYER, ENTRY)
    absent = called("deep_gemm.fp8_gemm_nt", LAYER, ENTRY)
    static = read_static(static_path)
    found = compare(run(KNOWN, other, moved, absent), static)
    assert found.kernels.missing == ("deep_gemm.fp8_gemm_nt",)
    assert found.lines.missing == (
        "sgl_kernel.elementwise.rmsnorm at sglang/srt/layers/layernorm.py:262",
        "deep_gemm.fp8_gemm_nt at sglang/srt/models/toy.py:40",
    )
    assert len(found.chains.missing) == 3 and len(found.chains.found) == 1
    text = report([found], static, seen([run(KNOWN)], static))
    assert "kernels 1 of 2, call lines 1 of 3, chains 1 of 4" in text
    assert "Seen in a run: 1 of 4 chains, 1 of 3 kernels" in text


def test_each_chain_says_where_it_was_seen(static_path: Path):
    static = read_static(static_path)
    assert seen([run(KNOWN, ROTATED)], static) == [[["small-bf16"], []], [["small-bf16"]], [[]]]
    assert seen([run(KNOWN, version="0.5.8")], static) == [[[], []], [[]], [[]]]


def test_only_kernels_that_ran_are_looked_up(static_path: Path):
    calls = [
        called("torch.mm", LAYER, ENTRY, library="torch"),
        called("flashinfer.mla.Wrapper.plan", LAYER, ENTRY, library="flashinfer"),
        called("torch.ops.sglang.fused_experts", LAYER, ENTRY, library="torch.ops"),
        called("sgl_kernel.workspace_size", LAYER, ENTRY, launches=()),
        called("sgl_kernel.captured", LAYER, ENTRY, launches=(), phase="capture"),
        called("sgl_kernel.flash_attn.varlen", LAYER, ENTRY, launches=()),
        called("sgl_kernel.outside", RUNNER),
        called("", library=""),
    ]
    inside, elsewhere = launched(run(*calls, stand_ins=("sgl_kernel.flash_attn.varlen",)), read_static(static_path))
    assert [one.kernel for one in inside] == ["sgl_kernel.captured", "sgl_kernel.flash_attn.varlen"]
    assert elsewhere == ["sgl_kernel.outside"]


def test_traces_that_do_not_belong_together_are_not_compared(static_path: Path):
    static = read_static(static_path)
    assert "of SGLang 0.5.8, the static trace of 0.5.11" in compare(run(KNOWN, version="0.5.8"), static).unrelated
    other = run(KNOWN)
    other.document["configuration"] = "large-bf16"  # type: ignore[index]
    assert compare(other, static).unrelated == "the static trace lacks this configuration"


def test_a_chain_begins_where_sglang_enters_a_library():
    inner = Frame("flashinfer/prefill.py", 9, "run")
    assert entering([inner, JIT, ROPE, ENTRY]) == (ROPE, ENTRY)
    assert entering([JIT]) == (JIT,)


def test_the_command_compares_files(static_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = tmp_path / "runs"
    runs.mkdir()
    write(runs / "small-bf16.json", run().document, [KNOWN])
    shown = tmp_path / "seen.json"
    arguments = ["--compare", str(static_path), "--runs", str(runs), "--json", str(shown)]
    assert command.main(arguments) == 0
    assert "kernels 1 of 1" in capsys.readouterr().out
    assert json.loads(shown.read_text())["kernels"][0] == {"name": "rmsnorm", "chains": [["small-bf16"], []]}
    write(runs / "small-bf16.json", run().document, [called("sgl_kernel.unknown", LAYER, ENTRY)])
    assert command.main(arguments) == 1
    write(runs / "small-bf16.json", run(version="0.5.8").document, [KNOWN])
    assert command.main(arguments) == 3


def test_a_file_of_another_form_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "x.json"
    path.write_text('{"kernels": []}')
    with pytest.raises(RecordingError, match=r"x\.json: is no static trace"):
        read_static(path)
    assert command.main(["--compare", str(path)]) == 2
    assert "python -m tools.kernel_tracing" in capsys.readouterr().err
