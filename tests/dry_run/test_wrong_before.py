"""Configurations that reading them by hand got wrong: SGLang's own code says what they call, or refuses them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashinfer_trace import find_root
from tools.dry_run import release
from tools.runtime_tracing import recording

ROOT = find_root()
INSTALL = f"python -m tools.fetch_sources --install --release {release.DEFAULT}"
CASES = json.loads(Path(__file__).with_name("wrong_before.json").read_text(encoding="utf-8"))
#: Committed record -> kernel -> arguments of one of its calls, read by hand in the configuration and the code.
IN_THE_SET = {
    # 256 routed experts and the shared one, which the server fuses, each of 2048 / 8 columns of gate and of up.
    "deepseek_v3-fp8": {"invoke_fused_moe_kernel": "float8_e4m3fn[257,512,7168]"},
    # TP 4: 16 / 4 key heads and 32 / 4 value heads of 128.
    "qwen3_next_80b_a3b-bf16": {"fused_recurrent_gated_delta_rule_packed_decode": "bfloat16[8,2048]"},
    # 40 query heads and 8 key-value heads of 128 at TP 8.
    "llama_4_scout_17b_16e-bf16": {"flash_attn_with_kvcache": "q: bfloat16[8,5,128]"},
    # 48 query heads at TP 4.
    "minimax_m2.5-fp8": {"flash_attn_with_kvcache": "q: bfloat16[8,12,128]"},
    # 32 query heads of 128.
    "nemotron_3_nano_30b_a3b-bf16": {"flash_attn_with_kvcache": "q: bfloat16[8,32,128]"},
}


def check(calls: list[recording.RecordedCall], expected: dict[str, str], absent: list[str]) -> None:
    given: dict[str, list[str]] = {}
    for call in calls:
        given.setdefault(call.kernel.rpartition(".")[2], []).append(call.arguments)
    for kernel, arguments in expected.items():
        assert any(arguments in one for one in given.get(kernel, [])), (kernel, given.get(kernel))
    assert not given.keys() & set(absent)


@pytest.mark.parametrize("name", IN_THE_SET)
def test_a_model_of_the_set_calls_what_a_person_read(name: str) -> None:
    check(recording.read(ROOT / "traces" / "dry" / f"{name}.json").calls, IN_THE_SET[name], [])


@pytest.mark.skipif(
    not release.read().site.exists() and "CI" not in os.environ, reason=f"today's SGLang is not there; run {INSTALL}"
)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="names of functions in frames need Python 3.11")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_configuration_calls_what_a_person_read_or_is_refused(tmp_path: Path, case: dict[str, Any]) -> None:
    for name, content in {"config.json": case["config"], **case.get("beside", {})}.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    out = tmp_path / "record.json"
    command = [sys.executable, "-m", "tools.dry_run", "--model", str(tmp_path / "config.json"), "--phases", "decode"]
    command += ["--server", *(f"{key}={value}" for key, value in case.get("server", {}).items()), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    if "refused" in case:
        assert done.returncode == 1 and not out.exists()
        assert case["refused"] in done.stderr
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        check(recording.read(out).calls, case["calls"], case.get("absent", []))
