"""Sampling families: the oracle against plain loops, what plans draw, and what the policies must reject."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from drawn_plans import drawn
from sampling_rows import EXACT, case, definition_of

import flashinfer_trace
from flashinfer_trace.families import renorm, sampling
from flashinfer_trace.families.renorm import RENORM_ATOMIC
from flashinfer_trace.families.sampling import EXACT_SUPPORT, MIN_P_SUPPORT
from flashinfer_trace.families.sampling.inputs import make_rows
from flashinfer_trace.families.sampling.oracles import renorm_oracle, sampling_oracle
from flashinfer_trace.families.sampling.rows import KINDS
from flashinfer_trace.harness.case import reference_outputs, run_case, vacuity
from flashinfer_trace.harness.family import Family, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.verify import Job, verify
from flashinfer_trace.verdict.compare import Policy

FAMILIES = (*sampling.FAMILIES, *renorm.FAMILIES)
FAMILY = {family.name: family for family in FAMILIES}
#: Families whose p is a probability, not a share of what another filter keeps.
ABSOLUTE = ("top_p_sampling_from_probs", "top_k_top_p_joint_sampling_from_probs")
SAMPLERS = [family for family in FAMILIES if "samples" in family.compare]
RENORMALIZERS = [family for family in FAMILIES if "renorm_probs" in family.compare]


def plain_support(row: list[Fraction], parameters: dict[str, Any], absolute: bool) -> set[int]:
    """Kept tokens of one row by loops over exact fractions."""
    kept = {token for token, value in enumerate(row) if value > 0}
    if "min_p" in parameters:
        threshold = max(row) * Fraction(parameters["min_p"])
        return {token for token in kept if row[token] >= threshold}
    if "top_k" in parameters and parameters["top_k"] >= 0:
        kept = {token for token in kept if sum(other > row[token] for other in row) < parameters["top_k"]}
    if "top_p" in parameters:
        total = Fraction(1) if absolute else sum((row[token] for token in kept), Fraction(0))
        limit = Fraction(parameters["top_p"]) * total
        kept = {t for t in kept if sum((value for value in row if value > row[t]), Fraction(0)) < limit}
    return kept


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("seed", range(12))
def test_oracle_agrees_with_exact_fractions(family: Family, seed: int) -> None:
    """Dyadic rows of 32 tokens with ties and parameters that hit cumulative masses exactly."""
    definition = definition_of(family, 32)
    draws = Draws(seed, "cpu")
    row = make_rows("dyadic", 1, 32, draws)[0]
    ordered = row.sort(descending=True).values.cumsum(0)
    choices = {"top_k": 1 + seed, "top_p": float(ordered[seed]), "min_p": [0.0625, 0.5, 0.01][seed % 3]}
    parameters = {name: choices[name] for name in definition.inputs if name in choices}
    inputs = case(row.tolist(), 1, **parameters)
    fractions = [Fraction(value) for value in row.tolist()]
    kept = plain_support(fractions, parameters, family.name in ABSOLUTE)
    total = sum((fractions[token] for token in kept), Fraction(0))
    exact = [float(value / total) if token in kept else 0.0 for token, value in enumerate(fractions)]
    oracle = renorm_oracle if family in RENORMALIZERS else sampling_oracle
    (expected,) = oracle(definition, inputs).values()
    assert expected.value[0].tolist() == pytest.approx(exact, rel=1e-14)
    assert [bool(margin > 0) for margin in expected.parts["margin"][0]] == [token in kept for token in range(32)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_reference_meets_the_oracle(family: Family) -> None:
    report = verify(Job(flashinfer_trace.load(f"{family.name}_v129280"), family), examples=25, seed=2)
    assert report.status == "passed", report.message
    assert report.cases >= 25


def ordinary_plan(family: Family, rows: int) -> dict[str, Any]:
    """Rows that differ, with parameters under which every defect below shows."""
    spec = {"row": "normal", "sum": 1.0, "top_k": 6, "top_p": 0.9, "min_p": 0.02}
    keys = ["row", "sum", *definition_of(family).inputs]
    return {"rows": rows, "draws": 8192 // rows, "specs": [{key: spec[key] for key in keys if key in spec}]}


def policies(family: Family) -> list[Policy]:
    """The reference's policy and every kernel's."""
    (name,) = family.compare
    return [family.compare[name], *(kernel.compare[name] for kernel in family.kernels)]


def tempered(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "probs": torch.softmax(inputs["probs"].double().log() / 1.1, dim=-1).float()}


SAMPLE_MUTANTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zero": torch.zeros_like,
    "token + 1": lambda samples: (samples + 1) % 64,
    "rows swapped": lambda samples: samples.flip(0),
    "never written": lambda samples: torch.full_like(samples, torch.iinfo(torch.int32).min),
    "one never written": lambda samples: torch.where(torch.arange(len(samples)) == 99, -1, samples),
    "first draw repeated": lambda samples: samples[:: len(samples) // 2].repeat_interleave(len(samples) // 2),
}


@pytest.mark.parametrize("family", SAMPLERS, ids=lambda family: family.name)
@pytest.mark.parametrize("mutant", SAMPLE_MUTANTS)
def test_wrong_samples_are_rejected(family: Family, mutant: str) -> None:
    definition = definition_of(family, 64)
    inputs = family.inputs(definition, ordinary_plan(family, 2), 4, "cpu")
    expected = family.oracle(definition, inputs)["samples"]
    right = reference_outputs(definition, inputs, seed=1)["samples"]
    for policy in policies(family):
        assert policy.compare(right, expected).passed
        assert not policy.compare(SAMPLE_MUTANTS[mutant](right), expected).passed


@pytest.mark.parametrize("family", SAMPLERS, ids=lambda family: family.name)
def test_samples_of_another_case_are_rejected(family: Family) -> None:
    definition = definition_of(family, 64)
    inputs = [family.inputs(definition, ordinary_plan(family, 2), seed, "cpu") for seed in (4, 5)]
    stale = reference_outputs(definition, inputs[0], seed=1)["samples"]
    expected = family.oracle(definition, inputs[1])["samples"]
    assert not any(policy.compare(stale, expected).passed for policy in policies(family))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("top_k_sampling_from_probs", lambda inputs: {**inputs, "top_k": inputs["top_k"] - 1}),
        ("top_k_sampling_from_probs", lambda inputs: {**inputs, "top_k": inputs["top_k"] + 1}),
        ("top_k_top_p_sampling_from_probs", lambda inputs: {**inputs, "top_k": inputs["top_k"] - 1}),
        ("top_k_top_p_joint_sampling_from_probs", lambda inputs: {**inputs, "top_k": inputs["top_k"] - 1}),
        ("top_p_sampling_from_probs", lambda inputs: {**inputs, "top_p": torch.ones_like(inputs["top_p"])}),
        ("top_k_top_p_sampling_from_probs", lambda inputs: {**inputs, "top_p": torch.ones_like(inputs["top_p"])}),
        ("min_p_sampling_from_probs", lambda inputs: {**inputs, "min_p": torch.zeros_like(inputs["min_p"])}),
        ("top_k_sampling_from_probs", tempered),
        ("top_p_sampling_from_probs", tempered),
        ("top_k_top_p_sampling_from_probs", tempered),
        ("min_p_sampling_from_probs", tempered),
    ],
    ids=["k-1", "k+1", "k-1 of both", "k-1 of joint", "p ignored", "p ignored of both", "min_p ignored", *["1.1"] * 4],
)
def test_wrong_parameters_are_rejected(name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """k - 1, an ignored p and a temperature of 1.1, each drawn by a right sampler of the wrong distribution."""
    family = FAMILY[name]
    definition = definition_of(family, 64)
    plan = ordinary_plan(family, 1)
    probe = family.inputs(definition, plan, 0, "cpu")
    if change is tempered:
        # A temperature shows in what a filter leaves: let it leave much.
        wide = {"top_k": 60, "top_p": 0.999, "min_p": 0.0}
        plan["specs"] = [{**spec, **{key: wide[key] for key in wide if key in spec}} for spec in plan["specs"]]
    if len(probe) == 3 and not torch.equal(change(probe)["top_k"], probe["top_k"]):
        # Top-p must not hide the tokens that top-k passes.
        plan["specs"] = [{**spec, "top_p": 1.5} for spec in plan["specs"]]
    elif len(probe) == 3 and change is not tempered:
        # Top-p must leave out some of the tokens that top-k passes, whatever is drawn.
        plan["specs"] = [{**spec, "top_p": 0.7} for spec in plan["specs"]]
    for seed in range(5):
        inputs = family.inputs(definition, plan, seed, "cpu")
        expected = family.oracle(definition, inputs)["samples"]
        right, wrong = (reference_outputs(definition, i, seed)["samples"] for i in (inputs, change(inputs)))
        for policy in policies(family):
            assert policy.compare(right, expected).passed
            assert not policy.compare(wrong, expected).passed


RENORM_MUTANTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zero": torch.zeros_like,
    "scaled": lambda output: output * 1.01,
    "rows swapped": lambda output: output.flip(0),
    "shifted": lambda output: output.roll(1, dims=1),
    "one NaN": lambda output: torch.where(torch.arange(output.numel()).view_as(output) == 70, math.nan, output),
    "not scaled": lambda output: output * 0.9,
    "last kept one dropped": lambda output: torch.where(
        output == torch.where(output > 0, output, math.inf).amin(dim=-1, keepdim=True), 0.0, output
    ),
}


@pytest.mark.parametrize("family", RENORMALIZERS, ids=lambda family: family.name)
@pytest.mark.parametrize("mutant", RENORM_MUTANTS)
def test_wrong_renormalized_rows_are_rejected(family: Family, mutant: str) -> None:
    definition = definition_of(family, 64)
    plan = {**ordinary_plan(family, 3), "draws": 1}
    inputs = family.inputs(definition, plan, 4, "cpu")
    expected = family.oracle(definition, inputs)["renorm_probs"]
    right = reference_outputs(definition, inputs, seed=1)["renorm_probs"]
    other = family.inputs(definition, plan, 5, "cpu")
    stale = reference_outputs(definition, other, seed=1)["renorm_probs"]
    for policy in policies(family):
        assert policy.compare(right, expected).passed
        assert not policy.compare(stale, expected).passed
        wrong = RENORM_MUTANTS[mutant](right)
        assert not policy.compare(wrong, expected).passed


def test_the_widest_window_still_decides_exact_rows() -> None:
    """At a cumulative mass of exactly p no order of summation rounds, so the next token must go."""
    definition = definition_of(FAMILY["top_p_renorm_probs"])
    expected = renorm_oracle(definition, case(EXACT, 1, top_p=0.75))["renorm_probs"]
    right, one_more = (
        torch.tensor([[EXACT[token] / total if token in keep else 0.0 for token in range(8)]])
        for keep, total in (({1, 3}, 0.75), ({1, 3, 4}, 0.875))
    )
    assert RENORM_ATOMIC.compare(right, expected).passed
    assert not RENORM_ATOMIC.compare(one_more, expected).passed


def test_a_kernel_may_draw_a_token_of_probability_0_once_in_a_while_where_min_p_is_0() -> None:
    family = FAMILY["min_p_sampling_from_probs"]
    definition, inputs = definition_of(family), case(EXACT, 512, min_p=0.0)
    expected = sampling_oracle(definition, inputs)["samples"]
    right = reference_outputs(definition, inputs, seed=1)["samples"]
    nowhere = EXACT.index(0.0)
    for count, of_kernel, of_reference in ((0, True, True), (1, True, False), (8, False, False)):
        drawn = right.clone()
        drawn[:count] = nowhere
        passed = [policy.compare(drawn, expected).passed for policy in (MIN_P_SUPPORT, EXACT_SUPPORT)]
        assert passed == [of_kernel, of_reference], count
    assert [policy for kernel in family.kernels for policy in kernel.compare.values()] == [MIN_P_SUPPORT]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_plans_are_json_and_give_valid_inputs(family: Family, large: bool) -> None:
    definition = definition_of(family, 64)
    seen: set[str] = set()
    for plan in drawn(family.plans(PlanRequest(definition, {}, large)), 120):
        assert json.loads(json.dumps(plan)) == plan
        seen.update(spec["row"] for spec in plan["specs"])
        inputs = family.inputs(definition, plan, 1, "cpu")
        assert len(inputs["probs"]) == plan["rows"] * plan["draws"]
        assert len(inputs["probs"]) <= 8192
    assert seen == set(KINDS)


@pytest.mark.parametrize("family", RENORMALIZERS, ids=lambda family: family.name)
def test_options_of_sgl_kernel_reach_its_plans(family: Family) -> None:
    definition = definition_of(family, 64)
    (kernel,) = (kernel for kernel in family.kernels if kernel.library == "sglang-kernel")
    for plan in drawn(family.plans(PlanRequest(definition, {}, True, kernel.plan_options)), 60):
        assert all(spec["sum"] == 1.0 and spec.get("top_k", 1) >= 1 for spec in plan["specs"])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_sum_to_one_and_repeat(kind: str) -> None:
    row, again, other = (make_rows(kind, 1, 640, Draws(seed, "cpu"))[0] for seed in (1, 1, 2))
    assert torch.equal(row, again)
    assert float(row.double().sum()) == pytest.approx(0.0 if kind == "zero" else 1.0, abs=1e-6)
    assert kind in ("uniform", "zero") or not torch.equal(row, other)
    if kind == "dyadic":
        assert float(row.double().sum()) == 1.0 and float((row.double() * 2**20).frac().abs().max()) == 0.0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_axes_given_by_a_user(family: Family) -> None:
    definition = definition_of(family, 64)
    for batch_size in (1, 5):
        plan = family.plan_for_axes(definition, {"batch_size": batch_size}, Draws(0, "cpu"))
        inputs = family.inputs(definition, plan, 0, "cpu")
        assert inputs["probs"].shape == (batch_size, 64)
        assert not run_case(definition, family, plan, 0, "cpu").failures


def test_a_case_that_token_zero_would_pass_is_vacuous() -> None:
    family = FAMILY["top_k_sampling_from_probs"]
    definition = definition_of(family)
    expected = family.oracle(definition, case(EXACT, 64, top_k=0))
    assert vacuity(definition, expected, {"samples": EXACT_SUPPORT}) == "a zero samples would pass"
