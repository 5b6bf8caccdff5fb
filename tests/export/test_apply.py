"""Solutions for flashinfer.trace_apply: for the calls that they are for, and for no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from flashinfer_trace.cli import main
from flashinfer_trace.dataset.store import find_root
from flashinfer_trace.judging.export.apply_guard import fits
from tools.templates.record import RECORD, read_record

#: Names the directory that holds the package flashinfer of release 0.7.2.
SITE = "FLASHINFER_TRACE_TEST_FLASHINFER"
PROGRAM = Path(__file__).with_name("trace_apply_program.py")
KERNEL = """import torch


def run(hidden_states, weight):
    x = hidden_states.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(hidden_states.dtype)
"""


def exported(directory: Path, *names: str) -> tuple[Path, str]:
    """An export of the recorded dumps of these names, and what the command printed."""
    (directory / "kernel.py").write_text(KERNEL)
    dumps = {data["name"]: data for data in reversed(read_record(find_root() / RECORD).dumps)}
    for name in names:
        (directory / f"{name}.json").write_text(json.dumps(dumps[name]))
    files = [str(directory / f"{name}.json") for name in names]
    out = directory / "out"
    done = CliRunner().invoke(main, ["export", "apply", str(out), *files, "--kernel", str(directory / "kernel.py")])
    return out, done.output


def test_a_name_has_what_the_key_leaves_out(tmp_path: Path) -> None:
    out, _ = exported(tmp_path, "rmsnorm_h512")
    (solution,) = out.glob("solutions/*/*.json")
    written = json.loads(solution.read_text())
    assert written["name"] == written["definition"] == solution.stem == "rmsnorm_h512__bfloat16_eps1e-06"
    (guard,) = json.loads((out / "guards.json").read_text())
    assert guard["key"] == "rmsnorm_h512"
    assert guard["arguments"] == {"eps": 1e-6}


def test_a_call_that_does_not_tell_what_decides_is_refused(tmp_path: Path) -> None:
    out, told = exported(tmp_path, "gqa_ragged_h32_kv8_d128")
    assert "does not tell causal, window_left, logits_soft_cap, pos_encoding_mode" in told
    assert not out.exists()


def test_a_dump_that_is_another_function_is_refused(tmp_path: Path) -> None:
    out, told = exported(tmp_path, "merge_state_h16_d128")
    assert "no Definition here computes it" in told
    assert not out.exists()


@pytest.mark.parametrize(
    ("dtype", "hidden", "eps", "right"),
    [
        (torch.bfloat16, 512, 1e-6, True),
        (torch.bfloat16, 512, 1e-5, False),
        (torch.float16, 512, 1e-6, False),
        (torch.bfloat16, 1024, 1e-6, False),
    ],
)
def test_a_guard_lets_no_other_call_through(
    tmp_path: Path, dtype: torch.dtype, hidden: int, eps: float, right: bool
) -> None:
    out, _ = exported(tmp_path, "rmsnorm_h512")
    (guard,) = json.loads((out / "guards.json").read_text())
    tensors = {"hidden_states": torch.ones(2, hidden, dtype=dtype), "weight": torch.ones(hidden, dtype=dtype)}
    assert fits(guard, tensors, {**tensors, "eps": eps}) is right


def through_flashinfer(out: Path, how: str) -> dict[str, object]:
    """Who computed each call of trace_apply_program.py: FlashInfer's wrapper ran on CPU tensors."""
    site = os.environ.get(SITE)
    if not site:
        pytest.skip(f"{SITE} does not name a directory with FlashInfer 0.7.2")
    environment = {**os.environ, "PYTHONPATH": str(find_root()), "HOME": str(out.parent)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), site, str(out), how],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_flashinfers_wrapper_gives_a_solution_the_calls_that_it_is_for(tmp_path: Path) -> None:
    out, _ = exported(tmp_path, "rmsnorm_h512")
    told = through_flashinfer(out, "guarded")
    assert told.pop("places")
    assert told == {
        "bf16, 1e-6": "solution",
        "bf16, 1e-6, given": "solution",
        "bf16, 1e-5": "FlashInfer",
        "fp16, 1e-6": "FlashInfer",
        "bf16, another size": "FlashInfer",
    }


def test_without_the_guard_no_call_gets_a_solution(tmp_path: Path) -> None:
    out, _ = exported(tmp_path, "rmsnorm_h512")
    told = through_flashinfer(out, "plain")
    assert told.pop("places")  # FlashInfer's wrapper is there
    assert set(told.values()) == {"FlashInfer"}
