"""The dataset covers the time of the recorded runs; what it does not cover has a reason."""

from __future__ import annotations

import functools

import pytest

from flashinfer_trace import definitions, find_root
from flashinfer_trace.dataset.coverage import reasons
from flashinfer_trace.dataset.evidence import RECORDED_ON, kernels_today, proofs
from flashinfer_trace.dataset.evidence import VERIFIED as VERIFIED_TAG
from flashinfer_trace.kernels.stacks import TODAY
from tools.runtime_tracing.configurations import configurations
from tools.runtime_tracing.consistency import consistent
from tools.runtime_tracing.matching import Evidence, Standing
from tools.runtime_tracing.recording import Recording
from tools.runtime_tracing.time_coverage import PHASES, StepTime, step_times

RECORDED = find_root() / "traces" / "runtime"
#: The part of the GPU time of each step that must be in kernels with a verified Definition: of the runs that have all
#: settings and kernels of the last release, and of the default servers of today's.
VERIFIED = {RECORDED: 0.93, RECORDED / TODAY["sglang"]: 0.95}
#: Runs of today with Definitions that await a GPU run -> the least share of their steps that is verified until then.
AWAITED = {"qwen3_next_80b_a3b-bf16-tp1": 0.18}
#: A kernel that takes a larger part of a step of today without a verified Definition has a reason.
NAMED = 0.001
#: Runs whose time says nothing, because stand-ins ran for FlashAttention 3, or no single call launches a kernel.
WITHOUT_FIGURE = {
    "deepseek_v3-bf16-flashinfer-graph",
    "deepseek_v3-fp8-fa3_stand_in",
    "llama_3.1_8b-bf16-fa3_stand_in",
    "llama_3.1_8b-bf16-flashinfer-graph",
}
FOLDERS = pytest.mark.parametrize("folder", VERIFIED, ids=["all_settings", "today"])


@functools.cache
def runs(folder) -> list[Recording]:
    return consistent(folder, find_root())


@functools.cache
def evidence(awaited: bool) -> Evidence:
    """The evidence, and, if `awaited`, that which runs of unverified Definitions are to give."""
    root, dataset = find_root(), list(definitions())
    paths = {one.name: {entry.path for entry in proofs(root, one)} for one in dataset}
    for one in dataset if awaited else ():
        if VERIFIED_TAG not in one.tags:
            paths[one.name] |= {each.path for each in kernels_today(root, one).values() if each.runs_on(RECORDED_ON)}
    return Evidence(dataset, paths)


def steps(folder, awaited: bool = False) -> list[StepTime]:
    return [step for run in runs(folder) for step in step_times(run, evidence(awaited), reasons(find_root()))]


@FOLDERS
def test_nearly_all_time_is_in_kernels_of_definitions_that_are_verified_or_await_a_run(folder):
    """Evidence recorded again verifies them: it shows that calls find their Definitions, whatever ran for these."""
    shares = {f"{step.run}, {step.phase}": step.share(Standing.VERIFIED) for step in steps(folder, awaited=True)}
    assert shares and {name: share for name, share in shares.items() if share < VERIFIED[folder]} == {}


@FOLDERS
def test_nearly_all_time_of_each_recorded_step_is_in_kernels_with_a_verified_definition(folder):
    expected = {(run.name, phase) for run in runs(folder) if run.name not in WITHOUT_FIGURE for phase in PHASES}
    found = {(step.run, step.phase): step.share(Standing.VERIFIED) for step in steps(folder)}
    assert found.keys() == expected
    low = {key: share for key, share in found.items() if share < AWAITED.get(key[0], VERIFIED[folder])}
    assert low == {}
    above = {name for name in AWAITED if all(found.get((name, phase), 0) >= VERIFIED[folder] for phase in PHASES)}
    assert above == set(), "these are verified now"


def test_every_configuration_that_is_listed_as_recorded_is():
    names = {run.name for run in runs(RECORDED)}
    assert names == {name for name, one in configurations().items() if one.recorded}
    assert names > WITHOUT_FIGURE


def test_the_rest_of_the_time_of_today_has_reasons():
    without = {
        (kernel, step.run)
        for step in steps(RECORDED / TODAY["sglang"])
        for kernel, time in step.missing.items()
        if time >= NAMED * step.microseconds and not step.reasons[kernel]
    }
    assert without == set(), "give them reasons in traces/kernels_without_definition.json"
