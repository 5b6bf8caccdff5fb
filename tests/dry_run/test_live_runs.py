"""Live dry runs, of processes that import SGLang once for all of them.

- Configurations that reading them by hand got wrong. SGLang's own code runs or refuses them.
- Servers that nobody recorded on a GPU: what each must call, read by hand in SGLang's sources.
- Recorded runs are repeated: the same kernels from the same places. All: python -m tools.dry_run --compare.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from flashinfer_trace import find_root
from tools.dry_run import compare, plans, release
from tools.dry_run.many import Outcome, run_many
from tools.runtime_tracing import recording
from tools.runtime_tracing.configurations import PROMPTS, Configuration

ROOT = find_root()
RUNS = ROOT / "traces" / "runtime"
LIVE = [
    *(
        pytest.mark.skipif(
            not release.read(version).site.exists() and "CI" not in os.environ,
            reason=f"SGLang {version} is not there; run python -m tools.fetch_sources --install --release {version}",
        )
        for version in ("0.5.11", release.DEFAULT)
    ),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="names of functions in frames need Python 3.11"),
]
CASES = {
    case["name"]: case for case in json.loads(Path(__file__).with_name("wrong_before.json").read_text(encoding="utf-8"))
}
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
Phases = dict[str, tuple[set[str], set[str]]]
#: Name -> model, server, GPU, and phase -> kernels that it calls, and kernels that it does not call.
SERVERS: dict[str, tuple[str, dict[str, Any], str, Phases]] = {
    "NEXTN": (
        "deepseek_v3",
        {"tp_size": 8, "speculative_algorithm": "NEXTN"},
        "sm90",
        {
            "prefill": ({"fused_eh_norm", "flash_attn_varlen_func"}, {"tree_speculative_sampling_target_only"}),
            "draft": (
                {"fused_eh_norm", "build_tree_kernel_efficient_func", "draft_topk1_postprocess"},
                {"top_p_renorm_probs"},
            ),
            "verify": ({"tree_speculative_sampling_target_only", "top_k_renorm_probs"}, {"fused_eh_norm"}),
        },
    ),
    "B200": (
        "llama_3.1_8b",
        {},
        "sm100",
        {
            "prefill": ({"trtllm_batch_context_with_kv_cache"}, {"flash_attn_with_kvcache"}),
            "decode": ({"trtllm_batch_decode_with_kv_cache"}, {"flash_attn_with_kvcache"}),
        },
    ),
    # Each rank gathers the tokens of all before the experts, and takes its own out of their sum.
    "DP": (
        "deepseek_v3",
        {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True},
        "sm90",
        {"decode": ({"memcpy_triton", "all_reduce", "flash_attn_with_kvcache"}, {"allreduce_fusion"})},
    ),
    # The first stage of two has the embedding and no sampler.
    "PP": (
        "llama_3.1_8b",
        {"pp_size": 2},
        "sm90",
        {"decode": ({"flash_attn_with_kvcache", "silu_and_mul"}, {"top_k_top_p_sampling_from_probs"})},
    ),
    # A replay launches the layers without any call: they are in the capture. The sampler is outside of the graph.
    "graphs": (
        "llama_3.1_8b",
        {"disable_cuda_graph": False},
        "sm90",
        {
            "capture": ({"flash_attn_with_kvcache", "silu_and_mul"}, {"top_k_top_p_sampling_from_probs"}),
            "decode": ({"top_k_top_p_sampling_from_probs"}, {"flash_attn_with_kvcache", "silu_and_mul"}),
        },
    ),
}
#: A dense model, experts in fp8 on two ranks, and sparse attention: between them, most entry points.
RECORDED = ("llama_3.1_8b-bf16-flashinfer", "deepseek_v3-fp8-flashinfer-tp2", "deepseek_v3.2-fp8-nsa-fp8_cache")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The outcome of each run whose test is selected."""
    wanted = {item.callspec.id for item in request.session.items if hasattr(item, "callspec")}
    runs: dict[str, tuple[Configuration, str]] = {}
    for name, case in CASES.items():
        folder = tmp_path_factory.mktemp(name)
        for file, content in {"config.json": case["config"], **case.get("beside", {})}.items():
            (folder / file).write_text(json.dumps(content), encoding="utf-8")
        plan = plans.of_model(str(folder / "config.json"), case.get("server", {}), "sm90", ("decode",), PROMPTS)
        runs[name] = plan, release.DEFAULT
    for name, (model, server, gpu, phases) in SERVERS.items():
        wanted_phases = tuple(phase for phase in phases if phase != "capture")
        runs[name] = plans.of_model(model, server, gpu, wanted_phases, PROMPTS), release.DEFAULT
    runs |= {name: plans.of_record(RUNS / f"{name}.json") for name in RECORDED}
    return {one.name: one for one in run_many({name: run for name, run in runs.items() if name in wanted}, 2)}


def kernels(calls: tuple[recording.RecordedCall, ...], phase: str = "decode") -> dict[str, list[str]]:
    """Kernel, by its last part -> the arguments of each of its calls."""
    given: dict[str, list[str]] = {}
    for call in calls:
        if call.phase == phase:
            given.setdefault(call.kernel.rpartition(".")[2], []).append(call.arguments)
    return given


def check(calls: tuple[recording.RecordedCall, ...], expected: dict[str, str], absent: list[str]) -> None:
    given = kernels(calls)
    for kernel, arguments in expected.items():
        assert any(arguments in one for one in given.get(kernel, [])), (kernel, given.get(kernel))
    assert not given.keys() & set(absent)


@pytest.mark.parametrize("name", IN_THE_SET)
def test_a_model_of_the_set_calls_what_a_person_read(name: str) -> None:
    check(recording.read(ROOT / "traces" / "dry" / f"{name}.json").calls, IN_THE_SET[name], [])


class TestLive:
    """Each test looks at a run of its own."""

    pytestmark = LIVE

    @pytest.mark.parametrize("name", CASES)
    def test_a_configuration_calls_what_a_person_read_or_is_refused(
        self, name: str, outcomes: dict[str, Outcome]
    ) -> None:
        case, outcome = CASES[name], outcomes[name]
        if "refused" in case:
            assert outcome.record is None
            assert case["refused"] in outcome.output
        else:
            assert outcome.record is not None, outcome.output
            check(outcome.record.calls, case["calls"], case.get("absent", []))

    @pytest.mark.parametrize("name", SERVERS)
    def test_a_server_calls_what_its_sources_say(self, name: str, outcomes: dict[str, Outcome]) -> None:
        outcome, phases = outcomes[name], SERVERS[name][-1]
        assert outcome.record is not None, outcome.output
        assert {call.phase for call in outcome.record.calls} == set(phases)
        for phase, (called, absent) in phases.items():
            given = kernels(outcome.record.calls, phase)
            assert called <= given.keys(), phase
            assert not absent & given.keys(), phase

    @pytest.mark.parametrize("name", RECORDED)
    def test_a_recorded_run_is_repeated(self, name: str, outcomes: dict[str, Outcome]) -> None:
        outcome = outcomes[name]
        assert outcome.record is not None, outcome.output
        found = compare.compare(recording.read(RUNS / f"{name}.json"), outcome.record.calls)
        assert not found.unexplained, "\n".join(compare.report(found))
        assert found.equal > 50

    def test_a_run_needs_little_time_and_memory(self, outcomes: dict[str, Outcome]) -> None:
        """`python -m tools.dry_run --check` does the same for all runs of the set."""
        assert [one.line for one in outcomes.values() if not one.fits] == []
        assert all(one.seconds > 1 and one.memory > 1e8 for one in outcomes.values() if one.record)
