"""One case at a time, with kernels that lie: the harness must notice each lie, and say how to repeat it."""

from __future__ import annotations

import dataclasses
import shlex

import pytest
import torch
from click.testing import CliRunner
from drawn_plans import drawn

import flashinfer_trace
from flashinfer_trace.cli import main
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import kernel_outputs, poisoned_outputs, run_case
from flashinfer_trace.harness.cases import BATCH
from flashinfer_trace.harness.family import Kernel, PlanRequest, private_kernel
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.job import BEYOND
from flashinfer_trace.harness.plans import OwnPlans
from flashinfer_trace.harness.verify import Job, prepare, verify, verify_together

pytestmark = pytest.mark.quick

PLAN = {"batch_size": 4, "values": "normal", "zero_row": False}
LOADED = flashinfer_trace.load("rmsnorm_h512")
FAMILY = family_of(LOADED)
DEFINITION = prepare(LOADED, FAMILY, "cpu", full=False)


def honest(definition, inputs, outputs):
    outputs["output"].copy_(definition.compiled(inputs["hidden_states"], inputs["weight"]))
    return outputs


def spoils_an_input(definition, inputs, outputs):
    result = honest(definition, inputs, outputs)
    inputs["weight"][0] += 1
    return result


def forgets_an_element(definition, inputs, outputs):
    correct = definition.compiled(inputs["hidden_states"], inputs["weight"])
    outputs["output"][:, 1:] = correct[:, 1:]
    return outputs


def wrong_dtype(definition, inputs, outputs):
    return {"output": honest(definition, inputs, outputs)["output"].float()}


def skips_the_weight(definition, inputs, outputs):
    return {"output": definition.compiled(inputs["hidden_states"], torch.ones_like(inputs["weight"]))}


def crashes(definition, inputs, outputs):
    raise RuntimeError("CUDA error: misaligned address")


def kernel(call, **changes) -> Kernel:
    return private_kernel("toy.kernel", "toy", call, **changes)


def failures(call, **changes) -> str:
    return "\n".join(run_case(DEFINITION, FAMILY, PLAN, 3, "cpu", kernel(call, **changes)).failures)


def test_an_honest_kernel_passes():
    result = run_case(DEFINITION, FAMILY, PLAN, 3, "cpu", kernel(honest))
    assert not result.failures
    assert not result.vacuous
    assert 0 < result.kernel["output"].ratio <= 1


def test_a_spoiled_input_is_named_unless_declared():
    assert "changed input weight, which it does not declare in place" in failures(spoils_an_input)
    assert not failures(spoils_an_input, in_place=("weight",))


TREE = flashinfer_trace.load("build_tree_kernel_efficient_topk1_s3_dt4")
MASKED = family_of(TREE).inputs(TREE, {"lengths": [17, 40], "shape": "random"}, 3, "cpu")


def test_booleans_are_poisoned_at_random():
    """With other bits for another seed, and not with those that the inputs of the same seed are drawn from."""
    first, again, other = (poisoned_outputs(TREE, MASKED, seed)["tree_mask_out"] for seed in (3, 3, 4))
    assert torch.equal(first, again) and 0.3 < (first == other).float().mean() < 0.7
    assert 0.3 < first.float().mean() < 0.7
    drawn = Draws(3, "cpu").integers(first.shape, 0, 1, torch.bool)
    assert 0.3 < (first == drawn).float().mean() < 0.7


@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_that_is_never_written_shows(value):
    """A kernel that writes only the True entries of a mask, or only the others."""

    def writes_one_value(definition, inputs, outputs):
        mask, *links = definition.compiled(*inputs.values())
        outputs["tree_mask_out"][mask == value] = value
        return {**outputs, **dict(zip(list(outputs)[1:], links, strict=True))}

    plan = {"lengths": [3, 1], "shape": "random"}
    found = run_case(TREE, family_of(TREE), plan, 3, "cpu", kernel(writes_one_value)).failures
    assert found and "output tree_mask_out" in found[0]


def test_each_seed_of_a_kernel_poisons_anew():
    def writes_nothing(definition, inputs, outputs):
        return outputs

    left = [kernel_outputs(TREE, kernel(writes_nothing), MASKED, seed=seed)[0]["tree_mask_out"] for seed in (1, 2)]
    assert not torch.equal(*left)


def test_an_element_that_is_never_written_is_nan():
    text = failures(forgets_an_element)
    assert "toy.kernel: output output: worst error is inf x its bound at [0, 0]: got nan" in text
    assert FAMILY.compare["output"].reason in text


def test_a_wrong_dtype_is_named():
    assert "toy.kernel: output output is torch.float32; the Definition says bfloat16" in failures(wrong_dtype)


def test_a_wrong_value_is_named():
    assert "toy.kernel: output output: worst error" in failures(skips_the_weight)


def test_a_reference_that_is_worse_than_the_kernel_fails():
    # The same mathematics with one rounding too many.
    rounded_twice = DEFINITION.reference.replace(".mul_(weight)", ".bfloat16().float().mul_(weight)")
    assert rounded_twice != DEFINITION.reference
    loose = dataclasses.replace(FAMILY.compare["output"], bound=lambda expected: expected.value.abs() * 0.1 + 1e-6)
    family = dataclasses.replace(FAMILY, compare={"output": loose})
    worse = dataclasses.replace(DEFINITION, reference=rounded_twice)
    correct = DEFINITION.compiled
    right = kernel(lambda d, i, o: {"output": correct(i["hidden_states"], i["weight"])})
    found = {rows: run_case(worse, family, {**PLAN, "batch_size": rows}, 3, "cpu", right).failures for rows in (4, 24)}
    assert "reference: output output is farther from the oracle" in "\n".join(found[24])
    assert found[4] == [], "a few rows may differ so by chance"


def test_a_reference_that_writes_to_its_inputs_fails():
    copies = "x = hidden_states.to(torch.float32, copy=True)"
    assert copies in DEFINITION.reference
    reference = DEFINITION.reference.replace(copies, "x = hidden_states.mul_(1.5).float()")
    definition = dataclasses.replace(DEFINITION, reference=reference)
    with pytest.raises(AssertionError, match=r"the reference changed its inputs \['hidden_states'\]"):
        run_case(definition, FAMILY, PLAN, 3, "cpu")


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({**PLAN, "batch_size": 0}, "output is empty"),
        ({**PLAN, "batch_size": 1, "zero_row": True}, "a zero output would pass"),
    ],
)
def test_vacuous_cases_are_recognized(plan, reason):
    assert run_case(DEFINITION, FAMILY, plan, 3, "cpu").vacuous == reason


def own_plans(draw, corners):
    """The plans of the family with these functions, and without a corner of many rows."""
    return OwnPlans(draw, FAMILY.plan_for_axes, corners, many_rows=0)


def test_vacuous_cases_never_count(monkeypatch):
    monkeypatch.setattr("flashinfer_trace.harness.cases.ROUNDS", 3)
    only_empty = dataclasses.replace(
        FAMILY,
        plan=own_plans(lambda request: FAMILY.plans(request).map(lambda p: {**p, "batch_size": 0}), lambda request: []),
    )
    report = verify(Job(LOADED, only_empty), examples=5)
    assert report.status == "failed"
    assert report.cases == 0
    assert report.vacuous > 0
    assert "only 0 of 5 cases prove something" in report.message


CORNER = {"batch_size": 3, "values": "large", "zero_row": True}


def with_corners(*corners, **changes):
    plan = own_plans(FAMILY.plan.plans, lambda request: corners)
    return dataclasses.replace(FAMILY, plan=plan, strided=(), isolated=(), **changes)


def test_corners_run_first_in_every_verification_and_beside_the_examples():
    ran = []
    report = verify(Job(LOADED, with_corners(CORNER)), examples=4, on_case=lambda _, result: ran.append(result))
    assert (report.status, report.corners, ran[0].plan) == ("passed", 1, CORNER)
    assert report.cases >= 5
    assert verify(Job(LOADED, with_corners(CORNER), kernel(honest)), examples=4).corners == 1


def test_a_run_without_one_of_its_corners_fails():
    report = verify(Job(LOADED, with_corners(CORNER, {**CORNER, "values": "none"})), examples=4)
    assert report.status == "failed" and "KeyError" in report.message and '"values":"none"' in report.message


def test_a_check_of_the_family_fails_the_reference_and_is_not_asked_of_kernels():
    family = with_corners(checks=(lambda definition, run: [f"{definition.name} is wrong"],))
    report = verify(Job(LOADED, family), examples=4)
    assert (report.status, report.message) == ("failed", "rmsnorm_h512 is wrong")
    assert verify(Job(LOADED, family, kernel(honest)), examples=4).status == "passed"


def test_a_reference_without_an_assert_of_a_const_axis_fails():
    source = LOADED.reference.replace("    assert weight.shape == (HIDDEN_SIZE,)\n", "")
    assert source != LOADED.reference
    report = verify(Job(dataclasses.replace(LOADED, reference=source), FAMILY), examples=4)
    assert report.status == "failed"
    assert "input weight with 65 in dimension 0, where axis hidden_size is 64" in report.message


def test_a_crash_is_a_failure_that_can_be_repeated():
    report = verify(Job(LOADED, FAMILY, kernel(crashes)), examples=5)
    assert report.status == "failed"
    assert "RuntimeError: CUDA error: misaligned address" in report.message
    assert "repeat: flashinfer-trace verify rmsnorm_h512 --kernel toy.kernel --device cpu --plan" in report.message


def test_a_report_counts_distinct_cases_and_keeps_the_worst():
    report = verify(Job(LOADED, FAMILY, kernel(honest)), examples=25, seed=4)
    assert (report.status, report.message) == ("passed", "")
    assert report.cases >= 25
    summary = report.outputs["output"]
    assert 0 < summary.kernel_worst <= 1
    assert summary.kernel_worst == summary.reference_worst  # the same function on the same inputs
    again = verify(Job(LOADED, FAMILY, kernel(honest)), examples=25, seed=4)
    assert (again.cases, again.outputs) == (report.cases, report.outputs)


def test_the_printed_line_repeats_the_case():
    line = Job(LOADED, FAMILY).line(PLAN, 3)
    program, *arguments = shlex.split(line)
    assert program == "flashinfer-trace"
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "1 passed, 0 failed" in result.output


def test_large_plans_respect_the_limits_of_a_kernel():
    strategy = FAMILY.plans(PlanRequest(DEFINITION, {"batch_size": (1, 16)}, large=True))
    sizes = {plan["batch_size"] for plan in drawn(strategy, 60)}
    assert min(sizes) >= 1
    assert max(sizes) <= 16
    assert len(sizes) > 5


def counted_family(ran):
    """The family with an oracle that notes how often it was asked."""

    def oracle(definition, inputs):
        ran.append("oracle")
        return FAMILY.oracle(definition, inputs)

    return dataclasses.replace(FAMILY, oracle=oracle)


def named(name, call, **changes):
    return dataclasses.replace(kernel(call, **changes), path=f"toy.{name}")


def test_kernels_share_their_cases_and_one_that_fails_does_not_stop_the_others():
    ran = []
    family = counted_family(ran)

    def counted(definition, inputs, outputs):
        ran.append("kernel")
        return honest(definition, inputs, outputs)

    def wrong_at_last(definition, inputs, outputs):
        outputs = honest(definition, inputs, outputs)
        late = ran.count("oracle") > 10
        return {**outputs, "output": outputs["output"] * 2} if late and len(outputs["output"]) else outputs

    kernels = [
        named("first", counted),
        named("wrong", wrong_at_last),
        named("crashing", crashes),
        named("second", counted),
        named("limited", honest, limits={"batch_size": (2, 6)}),
    ]
    jobs = [Job(LOADED, family, each) for each in kernels]
    reports = verify_together(jobs, examples=25, seed=4)
    assert [report.target for report in reports] == [each.label for each in kernels]
    assert [report.status for report in reports] == ["passed", "failed", "failed", "passed", "passed"]
    first, wrong, crashing, second, limited = reports
    assert first.cases == second.cases >= 25 and limited.cases >= 25
    assert 0 < wrong.cases < 25 and crashing.cases == 0
    assert "toy.wrong: output output" in wrong.message and "--kernel toy.wrong" in wrong.message
    assert "RuntimeError" in crashing.message and "--kernel toy.crashing" in crashing.message
    shared = first.cases + first.vacuous
    assert ran.count("kernel") == 2 * shared
    assert ran.count("oracle") == shared + limited.cases + limited.vacuous
    alone = verify(Job(LOADED, FAMILY, kernels[0]), examples=25, seed=4)
    assert dataclasses.replace(alone, seconds=0.0) == dataclasses.replace(first, seconds=0.0)


def test_a_kernel_that_takes_more_shares_the_cases_of_others_and_has_some_of_its_own():
    """Here the narrow kernel wants no rows of zeros. Only the wide one has the corner with one."""
    ran = []
    family = dataclasses.replace(
        counted_family(ran),
        strided=(),
        isolated=(),
        plan=own_plans(
            lambda request: FAMILY.plan.plans(request).filter(lambda plan: request.plan_options is None or wide(plan)),
            lambda request: [PLAN] if request.plan_options else [PLAN, CORNER],
        ),
    )

    def wide(plan):
        return not plan["zero_row"]

    seen = {"narrow": [], "wide": []}

    def noting(name):
        def call(definition, inputs, outputs):
            seen[name].append(bool((inputs["hidden_states"] == 0).all(dim=1).any()))
            return honest(definition, inputs, outputs)

        return call

    kernels = [named("wide", noting("wide"), common="narrow"), named("narrow", noting("narrow"), plan_options="narrow")]
    reports = verify_together([Job(LOADED, family, each) for each in kernels], examples=30, seed=4)
    assert [(report.status, report.corners) for report in reports] == [("passed", 2), ("passed", 1)]
    shared = reports[1].cases + reports[1].vacuous
    assert shared == len(seen["narrow"]) >= 31 and ran.count("oracle") == len(seen["wide"])
    assert not any(seen["narrow"]) and any(seen["wide"][shared:])
    assert reports[0].cases >= reports[1].cases + BEYOND
    alone = verify(Job(LOADED, family, kernels[0]), examples=30, seed=4)
    assert alone.corners == 2 and 32 <= alone.cases < 32 + BATCH


def test_what_the_wide_kernel_fails_alone_is_no_failure_of_the_narrow_one():
    family = dataclasses.replace(
        FAMILY,
        plan=FAMILY.plan.with_corners(lambda request: [PLAN] if request.plan_options else [PLAN, CORNER]),
        strided=(),
        isolated=(),
    )

    def fails_where_a_row_is_zero(definition, inputs, outputs):
        assert not (inputs["hidden_states"] == 0).all(dim=1).any(), "a row of zeros"
        return honest(definition, inputs, outputs)

    kernels = [
        named("wide", fails_where_a_row_is_zero, common="narrow"),
        named("narrow", honest, plan_options="narrow"),
    ]
    reports = verify_together([Job(LOADED, family, each) for each in kernels], examples=1, seed=0)
    assert [report.status for report in reports] == ["failed", "passed"]
    assert "a row of zeros" in reports[0].message and "--kernel toy.wide" in reports[0].message


def test_a_kernel_that_fails_only_sometimes_is_told_apart():
    ran = []

    def fails_once(definition, inputs, outputs):
        ran.append(definition)
        assert len(ran) != 9, "a race"
        return honest(definition, inputs, outputs)

    report = verify(Job(LOADED, FAMILY, kernel(fails_once)), examples=20)
    assert report.status == "failed"
    assert "passed when the same case was run again" in report.message and "a race" in report.message
    assert "repeat: flashinfer-trace verify rmsnorm_h512" in report.message


def test_a_reference_that_fails_fails_every_kernel():
    wrong = dataclasses.replace(LOADED, reference=LOADED.reference.replace("mul_(weight)", "mul_(weight * 1.01)"))
    jobs = [Job(wrong, FAMILY, named(name, honest)) for name in ("first", "second")]
    reports = verify_together(jobs, examples=5, seed=4)
    assert [report.status for report in reports] == ["failed", "failed"]
    for report, name in zip(reports, ("first", "second"), strict=True):
        assert "reference: output output" in report.message and f"--kernel toy.{name}" in report.message


def test_an_input_that_one_kernel_spoils_is_whole_for_the_next():
    def spoils(definition, inputs, outputs):
        result = {name: value.clone() for name, value in honest(definition, inputs, outputs).items()}
        for value in inputs.values():
            value.fill_(7)
        return result

    in_place = ("hidden_states",)
    kernels = [named("spoils", spoils), named("allowed", spoils, in_place=in_place), named("last", honest)]
    reports = verify_together([Job(LOADED, FAMILY, each) for each in kernels], plan=PLAN, seed=3)
    assert [report.status for report in reports] == ["failed", "failed", "passed"]
    assert "toy.spoils changed input hidden_states" in reports[0].message
    assert "toy.allowed changed input weight" in reports[1].message and "hidden_states" not in reports[1].message
