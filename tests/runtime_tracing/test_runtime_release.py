"""The dataset covers the time of the recorded runs."""

from __future__ import annotations

from flashinfer_trace import definitions, find_root
from flashinfer_trace.dataset.evidence import RECORDED_ON, kernels_today, proofs
from flashinfer_trace.dataset.evidence import VERIFIED as VERIFIED_TAG
from tools.runtime_tracing.configurations import configurations
from tools.runtime_tracing.consistency import consistent
from tools.runtime_tracing.matching import Evidence, Standing
from tools.runtime_tracing.time_coverage import PHASES, step_times

#: The part of the GPU time of each step that must be in kernels with a verified Definition.
VERIFIED = 0.93
#: Runs whose time says nothing, because stand-ins ran for FlashAttention 3, or no single call launches a kernel.
WITHOUT_FIGURE = {
    "deepseek_v3-bf16-flashinfer-graph",
    "deepseek_v3-fp8-fa3_stand_in",
    "llama_3.1_8b-bf16-fa3_stand_in",
    "llama_3.1_8b-bf16-flashinfer-graph",
}


def test_nearly_all_time_is_in_kernels_of_definitions_that_are_verified_or_await_a_run():
    """What recording evidence again will verify: it shows that calls find their Definitions, whatever ran for these."""
    root = find_root()
    dataset = list(definitions(root=root))
    paths = {one.name: {entry.path for entry in proofs(root, one)} for one in dataset}
    for one in dataset:
        if VERIFIED_TAG not in one.tags:
            paths[one.name] |= {each.path for each in kernels_today(root, one).values() if each.runs_on(RECORDED_ON)}
    evidence = Evidence(dataset, paths)
    steps = [step for run in consistent(root / "traces" / "runtime", root) for step in step_times(run, evidence)]
    shares = {f"{step.run}, {step.phase}": step.share(Standing.VERIFIED) for step in steps}
    assert shares and {name: share for name, share in shares.items() if share < VERIFIED} == {}


def test_nearly_all_time_of_each_recorded_step_is_in_kernels_with_a_verified_definition():
    root = find_root()
    dataset = list(definitions(root=root))
    evidence = Evidence(dataset, {one.name: [entry.path for entry in proofs(root, one)] for one in dataset})
    steps = [step for run in consistent(root / "traces" / "runtime", root) for step in step_times(run, evidence)]
    names = {path.stem for path in (root / "traces" / "runtime").glob("*.json")}
    assert names == {name for name, one in configurations().items() if one.recorded}
    assert names > WITHOUT_FIGURE
    expected = {(name, phase) for name in names - WITHOUT_FIGURE for phase in PHASES}
    assert {(step.run, step.phase) for step in steps} == expected
    shares = {f"{step.run}, {step.phase}": step.share(Standing.VERIFIED) for step in steps}
    assert {name: share for name, share in shares.items() if share < VERIFIED} == {}
