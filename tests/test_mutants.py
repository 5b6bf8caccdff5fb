"""Every policy, of references and of kernels, rejects every applicable mutant of a correct output."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import evaluate, reference_outputs, vacuity
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.mutants import ANY_OUTPUT, MUTANTS, ONE_PER_CENT_TOO_LARGE
from flashinfer_trace.harness.unordered import Multiset
from flashinfer_trace.harness.verify import prepare

#: One Definition of each family: their twins are alike.
FIRST = {family_of(definition).name: definition for definition in flashinfer_trace.definitions()}
FAMILIES = {name: family_of(definition) for name, definition in FIRST.items()}
CASES = 12
#: At real sizes, where a case may take a second.
REAL_CASES = 4


def correct_cases(family, policies, device="cpu", count=CASES, kernel=None):
    """Real cases of the family's twin, on a GPU of the Definition itself.

    Each is (plan, reference outputs, outputs for other elements, expected).
    """
    definition = prepare(FIRST[family.name], family, device, full=False)
    limits, options = (kernel.limits, kernel.plan_options) if kernel else ({}, None)
    request = PlanRequest(definition, limits, device != "cpu", options)
    cases = []

    @hypothesis.settings(max_examples=4 * count, database=None, deadline=None, phases=[hypothesis.Phase.generate])
    @hypothesis.seed(7)
    @hypothesis.given(family.plans(request), st.integers(0, 2**31 - 1))
    def collect(plan, seed):
        if len(cases) >= count:
            return
        inputs = family.inputs(definition, plan, seed, device)
        expected = family.oracle(definition, inputs)
        if vacuity(definition, expected, policies):
            return
        other = family.inputs(definition, plan, seed + 1, device)
        outputs = reference_outputs(definition, inputs, seed)
        cases.append((plan, outputs, reference_outputs(definition, other, seed + 1), expected))

    collect()
    return cases


def applies(mutant, output):
    """Integers have no NaN; one per cent is less than a rounding to fp8; a single number cannot change places."""
    if output.numel() == 1 and mutant in MUTANTS and mutant not in ANY_OUTPUT:
        return False
    if not output.is_floating_point():
        return not mutant.floating_only
    return mutant is not ONE_PER_CENT_TOO_LARGE or torch.finfo(output.dtype).bits > 8


def accepted_mutants(cases, policies):
    """The mutants of the cases' outputs that a policy lets pass, and (output, mutant) of all that apply."""
    accepted, applied = [], set()
    for plan, outputs, other, expected in cases:
        assert all(c.passed for c in evaluate(policies, outputs, expected).values()), "the correct output fails"
        for name, want in expected.items():
            for mutant in policies[name].mutants(want):
                mutated = mutant.applied(outputs[name], other[name])
                if mutated is None:
                    continue
                applied.add((name, mutant.name))
                if policies[name].compare(mutated, want).passed:
                    accepted.append(f"{name}, {mutant.name}, plan {plan}")
    return accepted, applied


TARGETS = [
    pytest.param(family, kernel, id=f"{family.name}-{kernel.label if kernel else 'reference'}")
    for family in FAMILIES.values()
    for kernel in (None, *[kernel for kernel in family.kernels if kernel.compare])
]


@pytest.mark.parametrize(("family", "kernel"), TARGETS)
def test_policies_reject_every_mutant(family, kernel):
    policies = family.policies(kernel)
    cases = correct_cases(family, policies)
    assert len(cases) >= CASES // 2, "too few real cases to judge the policies by"
    accepted, applied = accepted_mutants(cases, policies)
    for name, output in cases[0][1].items():
        needed = {mutant.name for mutant in MUTANTS if applies(mutant, output)}
        if isinstance(policies[name], Multiset):
            # Another sort of the same rows is not stale.
            needed = {"zero", "two groups exchange a row"}
        missing = needed - {m for n, m in applied if n == name}
        assert not missing, f"{name}: no case applied the mutants {missing}"
    assert not accepted, "accepted:\n" + "\n".join(accepted)


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "kernel"), TARGETS)
def test_policies_reject_every_mutant_at_real_sizes(family, kernel, cuda_device):
    """Bounds grow with the lengths of sums: what they reject of a small twin, they must reject of the real thing."""
    policies = family.policies(kernel)
    cases = correct_cases(family, policies, cuda_device, REAL_CASES, kernel)
    assert cases, "no real case to judge the policies by"
    accepted, applied = accepted_mutants(cases, policies)
    assert applied
    assert not accepted, "accepted:\n" + "\n".join(accepted)
