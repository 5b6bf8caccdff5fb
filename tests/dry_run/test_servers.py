"""Servers that nobody recorded on a GPU: what each must call, read by hand in SGLang's sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.dry_run import release
from tools.runtime_tracing import recording

ROOT = Path(__file__).resolve().parents[2]
INSTALL = f"python -m tools.fetch_sources --install --release {release.DEFAULT}"
pytestmark = [
    pytest.mark.skipif(
        not release.read().site.exists() and "CI" not in os.environ,
        reason=f"today's SGLang is not there; run {INSTALL}",
    ),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="names of functions in frames need Python 3.11"),
]
NEXTN = [
    "deepseek_v3",
    "--server",
    "tp_size=8",
    "speculative_algorithm=NEXTN",
    "--phases",
    "prefill",
    "draft",
    "verify",
]
#: Arguments -> phase -> kernels that it calls, and kernels that it does not call.
EXPECTED = [
    (
        NEXTN,
        {
            "prefill": ({"fused_eh_norm", "flash_attn_varlen_func"}, {"tree_speculative_sampling_target_only"}),
            "draft": (
                {"fused_eh_norm", "build_tree_kernel_efficient_func", "draft_topk1_postprocess"},
                {"top_p_renorm_probs"},
            ),
            "verify": ({"tree_speculative_sampling_target_only", "top_k_renorm_probs"}, {"fused_eh_norm"}),
        },
    ),
    (
        ["llama_3.1_8b", "--gpu", "sm100", "--phases", "prefill", "decode"],
        {
            "prefill": ({"trtllm_batch_context_with_kv_cache"}, {"flash_attn_with_kvcache"}),
            "decode": ({"trtllm_batch_decode_with_kv_cache"}, {"flash_attn_with_kvcache"}),
        },
    ),
]


@pytest.mark.parametrize(("arguments", "phases"), EXPECTED, ids=["NEXTN", "B200"])
def test_a_server_calls_what_its_sources_say(tmp_path, arguments, phases):
    out = tmp_path / "record.json"
    command = [sys.executable, "-m", "tools.dry_run", "--model", *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = recording.read(out).calls
    assert {call.phase for call in calls} == set(phases)
    for phase, (called, absent) in phases.items():
        kernels = {call.kernel.rpartition(".")[2] for call in calls if call.phase == phase}
        assert called <= kernels, phase
        assert not absent & kernels, phase
