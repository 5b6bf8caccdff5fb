"""The result of a run: a trace, or an exit status and no trace. SGLang is replaced by a function."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.runtime_tracing import __main__ as command
from tools.runtime_tracing import record as module
from tools.runtime_tracing import timeline
from tools.runtime_tracing.configurations import Configuration, Model
from tools.runtime_tracing.recording import read

MODEL = Model("toy", {"architectures": ["ToyForCausalLM"], "num_hidden_layers": 1}, (3,))
CONFIGURATION = Configuration("toy-bf16", MODEL, {"attention_backend": "triton"})


def test_a_run_becomes_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(configuration: Configuration, outcome: Any, rank: int, port: int) -> None:
        outcome.log.phase, outcome.phases["prefill 2"] = "prefill 2", "prefill"
        with outcome.log.call("triton", "kernels.add", lambda: "x: float32[2]"):
            pass
        outcome.launches["prefill"] = [timeline.Launch("add_kernel", 0, 0, "", 1, 2.5)]
        outcome.versions["sglang"] = "0.5.11"
        outcome.problems.append("deep_gemm: is missing")

    monkeypatch.setattr(module.sglang_runner, "run", run)
    path = tmp_path / "toy-bf16.json"
    assert module.record(CONFIGURATION, path) == 0
    recorded = read(path)
    (call,) = recorded.calls
    assert (call.phase, call.kernel, call.launches[0].microseconds) == ("prefill", "kernels.add", 2.5)
    assert recorded.document["server"] == {"attention_backend": "triton"}
    assert (recorded.document["layers"], recorded.document["versions"]) == ([3], {"sglang": "0.5.11"})
    output = capsys.readouterr().out
    assert "not wrapped: deep_gemm: is missing" in output and "RESULT toy-bf16 rank 0: recorded after" in output


RECORDING = (
    ["--configuration", "llama_3.1_8b-bf16-flashinfer"],
    ["--model", "llama_3.1_8b", "--config", "attention_backend=triton"],
    ["--all", "--only", "llama"],
)


@pytest.mark.parametrize("arguments", RECORDING)
def test_a_machine_without_sglang_is_told_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name.startswith("sgl") else name)
    assert command.main([*arguments, "--out", str(tmp_path / "run")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "recording needs sgl_kernel, sglang, which cannot be imported; docs/runtime_tracing.md"
    )
    assert captured.err.count("\n") == 1 and not captured.out and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("only on compute capability 10.0"), SystemExit(3)])
def test_a_failed_run_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
):
    def run(configuration: Configuration, outcome: Any, rank: int, port: int) -> None:
        outcome.reached = "warm-up"
        raise error

    monkeypatch.setattr(module.sglang_runner, "run", run)
    assert module.record(CONFIGURATION, tmp_path / "toy-bf16.json") == 1
    assert list(tmp_path.iterdir()) == []
    captured = capsys.readouterr()
    assert "failed at warm-up" in captured.out and type(error).__name__ in captured.err


def test_every_gpu_has_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = tmp_path / "seen"
    code = f"import sys; open({str(seen)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(f'#!/bin/sh\nshift 2\nexec {sys.base_prefix}/bin/python3 -c "{code}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["tools.runtime_tracing", "--configuration", "toy-tp2"])
    ranks: list[int] = []
    monkeypatch.setattr(module.sglang_runner, "run", lambda configuration, outcome, rank, port: ranks.append(rank))
    two = Configuration("toy-tp2", MODEL, gpus=2)
    assert module.record(two, tmp_path / "toy-tp2.json", port=4242) == 0
    assert seen.read_text() == "--configuration toy-tp2 --rank 1 --port 4242\n"
    assert module.record(two, tmp_path / "other.json", rank=1, port=4242) == 0  # starts none, writes nothing
    assert ranks == [0, 1] and not (tmp_path / "other.json").exists()
    assert len(seen.read_text().splitlines()) == 1


#: Rank 0 waits for a rank whose process ends at once.
ALONE = """
import sys, time, pathlib
from tools.runtime_tracing.configurations import Configuration, Model
from tools.runtime_tracing import record
def run(*_):
    print("rank 0 waits", flush=True)
    time.sleep(60)
record.sglang_runner.run, record.LAST_WORDS, sys.executable = run, 0.2, "false"
record.record(Configuration("toy-tp2", Model("toy", {}, (1,)), gpus=2), pathlib.Path(sys.argv[1]))
"""


def test_a_rank_does_not_wait_for_one_that_failed(tmp_path: Path):
    path = tmp_path / "toy-tp2.json"
    ended = subprocess.run([sys.executable, "-c", ALONE, path], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, path.exists()) == (1, False), ended.stderr
    assert ended.stdout.splitlines() == ["rank 0 waits", "rank 1 failed with status 1; its log says why"]
