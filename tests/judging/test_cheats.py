"""The judge rejects every cheating kernel, for the right reason, and passes the honest ones next to them."""

from __future__ import annotations

import pytest
from cheating_kernels import ALL, ATTENTION, CHEATS, EXPERTS, GEMM, NORM, ROTATION, SAMPLER, TREE, Cheat

from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.submission import RunLimits
from flashinfer_trace.judging.verdict import Grade

#: `hangs` waits for all of it.
SHORT = RunLimits(call=1.0, first_call=1.0)
#: At the small twin's sizes on a CPU, which their authors did not foresee any more than the own ones.
TWINS = (SAMPLER, ATTENTION, EXPERTS, ROTATION)

HONEST = {
    "norms.py:right": NORM,
    "products.py:right_gemm": GEMM,
    "samplers.py:honest": SAMPLER,
    "samplers.py:honest_attention": ATTENTION,
    "experts.py:honest_mixture": EXPERTS,
    "experts.py:honest_rotation": ROTATION,
    "trees.py:honest_tree": TREE,
}


def test_there_are_enough_of_them():
    assert len({cheat.path for cheat in ALL}) == len(ALL) >= 25
    assert sum(cheat.gpu for cheat in ALL) >= 25
    assert sum(cheat.cpu for cheat in ALL) >= 25


@pytest.mark.parametrize("cheat", [cheat for cheat in ALL if cheat.cpu], ids=lambda cheat: cheat.function)
def test_a_cheat_is_rejected(cheat: Cheat, server):
    limits = SHORT if cheat.function == "hangs" else RunLimits()
    twin = cheat.definition in TWINS
    # As many examples as for a user: has_a_capacity passes the drawn batches in which no expert takes five tokens.
    verdict = judge(cheat.path, cheat.definition, twin=twin, limits=limits, server=server)
    assert verdict.grade == Grade.WRONG, verdict
    assert verdict.failure is not None
    assert verdict.failure.kind in cheat.kinds, verdict


#: Dodges of a verdict: honest until it gets hard, or only where they seem to be looked at; the kind of failure.
DODGES = {
    "misses_a_package_when_it_is_hard": "raised",
    "lacks_memory_when_it_is_hard": "raised",
    "only_into_poison": "values",
    "where_it_is_judged": "values",
}


@pytest.mark.parametrize("function", DODGES)
def test_a_dodge_is_rejected(function: str, server):
    verdict = judge(f"{CHEATS}/norms.py:{function}", NORM, server=server)
    assert verdict.grade == Grade.WRONG and verdict.code == DODGES[function], verdict


def test_the_memory_of_the_judge_cannot_be_read_where_landlock_is(server):
    if not server.keeps_apart:
        pytest.skip("this system has no domains of Landlock (Linux 5.19), and verdicts say so")
    verdict = judge(f"{CHEATS}/processes.py:reads_the_memory_of_the_judge", NORM, examples=1, server=server)
    assert verdict.failure is not None and verdict.kept_apart
    assert verdict.failure.message.startswith("PermissionError: [Errno 13] Permission denied: '/proc/"), verdict
    assert "/mem'" in verdict.failure.message


@pytest.mark.parametrize("file", HONEST)
def test_an_honest_kernel_passes(file: str, server):
    name = HONEST[file]
    verdict = judge(str(CHEATS / file), name, twin=name in TWINS, examples=6, server=server)
    assert verdict.grade == Grade.REFERENCE or verdict.capped, verdict


@pytest.mark.gpu_harness
@pytest.mark.parametrize("cheat", [cheat for cheat in ALL if cheat.gpu], ids=lambda cheat: cheat.function)
def test_a_cheat_is_rejected_on_a_gpu(cheat: Cheat, server, cuda_device, recorded):
    options = {"device": cuda_device, "limits": RunLimits(call=10.0, first_call=30.0), "server": server}
    verdict = recorded("cheats", cheat.function, lambda: judge(cheat.path, cheat.definition, **options))
    assert verdict.grade == Grade.WRONG, verdict
    assert verdict.failure is not None
    assert verdict.failure.kind in cheat.kinds, verdict


@pytest.mark.gpu_harness
@pytest.mark.parametrize("file", HONEST)
def test_an_honest_kernel_passes_on_a_gpu(file: str, server, cuda_device, recorded):
    options = {"device": cuda_device, "examples": 15, "server": server}
    verdict = recorded("honest", file, lambda: judge(str(CHEATS / file), HONEST[file], **options))
    assert verdict.grade == Grade.REFERENCE, verdict
