"""Every output is judged: what is not declared, not compared, or not in memory of its own is an error."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import flashinfer_trace
from flashinfer_trace.families import FamilyError, families_of_op_type, family_of
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.format.reference import load_run
from flashinfer_trace.harness.case import run_case
from flashinfer_trace.harness.family import Kernel, PlanRequest, private_kernel
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.harness.verify import Job, verify
from flashinfer_trace.verdict.compare import Exact, Expected

pytestmark = pytest.mark.quick

PLAN = {"batch_size": 4, "values": "normal", "zero_row": False}
LOADED = flashinfer_trace.load("fused_add_rmsnorm_residual_out_h4096")
FAMILY = family_of(LOADED)
DEFINITION = Job(LOADED, FAMILY).sized
RETURN = "return output, residual_out"


def test_the_reference_returns_as_the_tests_below_expect():
    assert DEFINITION.reference.count(RETURN) == 1


def failures(definition: Definition, family=FAMILY, kernel: Kernel | None = None) -> str:
    return "\n".join(run_case(definition, family, PLAN, 3, "cpu", kernel).failures)


def returning(expression: str) -> Definition:
    """The twin with another return statement."""
    return dataclasses.replace(DEFINITION, reference=DEFINITION.reference.replace(RETURN, f"return {expression}"))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("output[:2], residual_out", "output output has the shape [2, 64]; the Definition says ['batch_size', 'hidden"),
        ("output.flatten(), residual_out", "output output has the shape [256]; the Definition says"),
        ("output, residual_out.float()", "output residual_out is torch.float32; the Definition says bfloat16"),
        ("output, residual_out.to('meta')", "output residual_out is on meta; the inputs are on cpu"),
        ("output, [residual_out]", "output residual_out is a list; it must be a tensor"),
        ("output, {'a': residual_out}", "output residual_out is a dict; it must be a tensor"),
        ("output, 1.0", "output residual_out is a float; it must be a tensor"),
        ("output, None", "output residual_out is a NoneType; it must be a tensor"),
        ("output.t().contiguous().t(), residual_out", "output output is not contiguous: strides [1, 4] of the shape"),
        ("output, output[:1].expand(4, -1)", "output residual_out is not contiguous: strides [0, 1]"),
        ("output, residual", "output residual_out shares memory with input residual"),
        ("residual_out, residual_out", "output residual_out shares memory with output output"),
    ],
)
def test_what_a_reference_may_not_return(expression, message):
    text = failures(returning(expression))
    assert f"reference: {message}" in text
    assert verify(Job(returning(expression), FAMILY, full=True), plan=PLAN, seed=3).status == "failed"


def test_a_reference_may_not_return_a_sparse_tensor():
    definition = returning("output, residual_out.to_sparse()")
    # The allow-list refuses to_sparse before anything runs: past it, the output is judged anyway.
    vars(definition)["compiled"] = load_run(definition.reference, definition.name)
    text = failures(definition)
    assert "reference: output residual_out has the layout torch.sparse_coo; it must be a dense" in text


@pytest.mark.parametrize("expression", ["[output, residual_out]", "{'output': output, 'residual_out': residual_out}"])
def test_a_reference_returns_a_tuple(expression):
    with pytest.raises(AssertionError, match="it must return a tensor, or a tuple of tensors in the order of"):
        failures(returning(expression))


def test_a_reference_returns_as_many_results_as_declared():
    with pytest.raises(InputError, match=r"3 results for the outputs \['output', 'residual_out'\]"):
        failures(returning("output, residual_out, output"))


def kernel(outputs, **changes) -> Kernel:
    """A kernel that returns what `outputs` makes of (correct outputs, inputs, poisoned outputs)."""

    def call(definition, inputs, poisoned):
        correct = dict(zip(definition.outputs, definition.compiled(*inputs.values()), strict=True))
        return outputs(correct, inputs, poisoned)

    return private_kernel("toy.kernel", "toy", call, **changes)


def in_the_inputs(correct, inputs, poisoned):
    return {
        name: inputs[i].copy_(correct[name]) for name, i in (("output", "hidden_states"), ("residual_out", "residual"))
    }


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (lambda c, i, p: {"output": c["output"]}, "output residual_out is missing"),
        (lambda c, i, p: {**c, "lse": c["output"]}, "output lse is not one of the Definition's: ['output', 'residual"),
        (lambda c, i, p: {**c, "output": c["output"][:, :8]}, "output output has the shape [4, 8]; the Definition"),
        (lambda c, i, p: {**c, "output": [c["output"]]}, "output output is a list; it must be a tensor"),
        (lambda c, i, p: {**c, "output": c["output"].half()}, "output output is torch.float16; the Definition says"),
        (in_the_inputs, "output output shares memory with input hidden_states, which it does not declare in place"),
    ],
)
def test_what_a_kernel_may_not_return(outputs, message):
    assert f"toy.kernel: {message}" in failures(DEFINITION, kernel=kernel(outputs))


@pytest.mark.parametrize(
    ("outputs", "in_place"),
    [
        (lambda c, i, p: c, ()),
        (lambda c, i, p: {name: value.t().contiguous().t() for name, value in c.items()}, ()),
        (lambda c, i, p: {name: p[name].copy_(value) for name, value in c.items()}, ()),
        (in_the_inputs, ("hidden_states", "residual")),
    ],
    ids=["own memory", "other strides", "poisoned memory", "declared in place"],
)
def test_what_a_kernel_may_return(outputs, in_place):
    assert not failures(DEFINITION, kernel=kernel(outputs, in_place=in_place))


SCALAR = Definition.from_dict(
    {
        "name": "count_n4",
        "op_type": "toy",
        "axes": {"m": {"type": "var"}},
        "inputs": {"x": {"shape": ["m"], "dtype": "int32"}},
        "outputs": {"count": {"shape": None, "dtype": "int64"}},
        "reference": "import torch\n\n\ndef run(x):\n    return RESULT\n",
    }
)
COUNT = dataclasses.replace(
    FAMILY,
    name="count",
    twin={},
    make_inputs=lambda definition, plan, draws: {"x": draws.integers([plan["m"]], 1, 9, torch.int32)},
    plan=RowPlans({"m": Count(3, 3)}),
    oracle=lambda definition, inputs: {"count": Expected(torch.tensor(len(inputs["x"])))},
    compare={"count": Exact()},
    kernels=(),
)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("x.shape[0]", ""),
        ("torch.tensor(x.shape[0])", ""),
        ("x.shape[0] + 1", "reference: output count: worst error is inf x its bound"),
        ("float(x.shape[0])", "output count is a float; it must be a number or a 0-d tensor, int64"),
        ("torch.tensor([x.shape[0]])", "output count has the shape [1]; the Definition says null, which is a"),
    ],
)
def test_a_scalar_output_is_a_number_or_a_0_d_tensor(result, message):
    definition = dataclasses.replace(SCALAR, reference=SCALAR.reference.replace("RESULT", result))
    found = run_case(definition, COUNT, {"m": 3}, 1, "cpu").failures
    assert (found == []) if not message else (message in "\n".join(found))


RESIDUAL = {"residual_out": FAMILY.compare["residual_out"]}
TOY = private_kernel("toy.kernel", "toy", lambda definition, inputs, outputs: outputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"compare": RESIDUAL},
            "family fused_add_rmsnorm_residual_out: `compare` has no policy for the outputs ['output']",
        ),
        ({"compare": {**FAMILY.compare, "lse": Exact()}}, "`compare` names ['lse'], which are not outputs of fused"),
        ({"twin": {"hidden_sise": 8}}, "`twin` names ['hidden_sise'], which are not constant axes of fused_add"),
        ({"kernels": {"compare": {"lse": Exact()}}}, "`compare` of toy.kernel names ['lse'], which are not outputs of"),
        ({"kernels": {"limits": {"tokens": (1, 9)}}}, "`limits` of toy.kernel names ['tokens'], which are not"),
        ({"kernels": {"in_place": ("q",)}}, "`in_place` of toy.kernel names ['q'], which are not inputs of fused_add"),
    ],
)
def test_a_record_that_names_something_else_is_refused_before_any_case(change, message, monkeypatch):
    toy = dataclasses.replace(TOY, **change["kernels"]) if "kernels" in change else None
    family = dataclasses.replace(FAMILY, **{**change, "kernels": (toy,) if toy else ()})
    cases = []
    report = verify(Job(LOADED, family, toy), on_case=lambda _, result: cases.append(result))
    assert (report.status, cases) == ("failed", [])
    assert message in report.message
    monkeypatch.setitem(families_of_op_type("rmsnorm"), family.name, family)
    with pytest.raises(FamilyError) as error:
        family_of(LOADED)
    assert message in str(error.value)


@pytest.mark.parametrize("names", [["output"], ["output", "residual_out", "lse"], []])
def test_an_oracle_that_speaks_of_other_outputs_is_refused(names):
    said = Expected(torch.zeros(4, 64, dtype=torch.float64))
    family = dataclasses.replace(FAMILY, oracle=lambda definition, inputs: dict.fromkeys(names, said))
    cases = []
    report = verify(Job(LOADED, family), on_case=lambda _, result: cases.append(result))
    assert (report.status, cases) == ("failed", [])
    assert (
        f"the oracle speaks of the outputs {names}; fused_add_rmsnorm_residual_out_h4096 has ['output', 'res"
        in report.message
    )


def test_plans_of_an_unknown_axis_are_refused():
    request = PlanRequest(DEFINITION, {}, large=False)
    with pytest.raises(FamilyError, match=r"plans draw the axis num_tokens; variable axes are \['batch_size'\]"):
        request.range("num_tokens", 0, 4, 8)
    family = dataclasses.replace(FAMILY, plan=RowPlans({"num_tokens": Count(4, 8)}))
    assert "plans draw the axis num_tokens" in verify(Job(LOADED, family)).message


@pytest.mark.parametrize("plan", [{**PLAN, "num_tokens": 3}, {"batch_size": 3}, {}])
def test_a_plan_with_other_entries_is_refused(plan):
    report = verify(Job(LOADED, FAMILY), plan=plan)
    assert report.status == "failed"
    unknown, missing = sorted(plan.keys() - PLAN.keys()), sorted(PLAN.keys() - plan.keys())
    assert f"a plan with unknown entries {unknown} and without {missing}; plans of fused_add" in report.message


@pytest.mark.parametrize("seed", [1, 5, 8, 18])
def test_enough_cases_count_where_a_third_is_vacuous(seed):
    """hypothesis repeats itself, so few rounds do not find 120 distinct ones."""
    definition = flashinfer_trace.load("moe_prepare_input_topk8_e256_h7168_i256")
    report = verify(Job(definition, family_of(definition), None, "cpu"), examples=120, seed=seed)
    assert report.status == "passed", report
