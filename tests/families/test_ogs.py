"""Products of experts over sorted rows: oracle and reference against loops, bounds, and how the kernel is called."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from drawn_plans import small_twin
from emulated_runs import assert_adapter_passes, install

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import evaluate, reference_outputs
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.power import stand_in
from flashinfer_trace.harness.verify import Job, verify

NAMES = (
    "moe_bf16_gather_gemm_e128_n1536_k2048",
    "moe_bf16_gather_gemm_swiglu_e128_n5760_k2880",
    "moe_bf16_scatter_gemm_e128_n2048_k768",
    "moe_bf16_scatter_gemm_bias_e128_n2880_k2880",
    "moe_mxfp4_scatter_gemm_bias_e128_n2880_k2880",
    "moe_mxfp4_gather_gemm_swiglu_e128_n5760_k2880",
)
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
SWIGLU = NAMES[1]


def case(name, values="normal", **plan):
    family, twin = small_twin(name)
    usual = family.plan_for_axes(twin, {}, Draws(0, "cpu"))
    given = {**usual, "num_tokens": 9, "top_k": 3, "groups": "uneven", "values": values, **plan}
    return family, twin, family.inputs(twin, given, 3, "cpu")


def widened(codes, scales):
    """Bytes uint8 [k / 2, n] and [k / 32, n] -> float32 [k, n]."""
    pairs = torch.stack([codes & 15, codes >> 4], dim=1).flatten(0, 1)
    return LEVELS[pairs.long()] * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=0)


def weights_of(inputs, expert):
    if "weights_scale" not in inputs:
        return inputs["weights"][expert].double()
    return widened(*(inputs[name][expert].view(torch.uint8).mT for name in ("weights", "weights_scale"))).double()


def by_loops(inputs):
    """A row at a time, in float64."""
    experts = torch.arange(len(inputs["weights"])).repeat_interleave(inputs["expert_counts"].long())
    rows = []
    for row, expert in enumerate(experts.tolist()):
        x = inputs["x"][inputs["row_tokens"][row] if "row_tokens" in inputs else row].double()
        y = x @ weights_of(inputs, expert)
        if "bias" in inputs:
            y = y + inputs["bias"][expert].double()
        if "limit" in inputs:
            pairs = y.view(-1, 2)
            gate = pairs[:, 0].clamp(max=inputs["limit"])
            linear = pairs[:, 1].clamp(-inputs["limit"], inputs["limit"])
            y = gate / (1 + torch.exp(-inputs["alpha"] * gate)) * (linear + 1)
        rows.append(y * inputs["gammas"][row].double() if "gammas" in inputs else y)
    if "positions" not in inputs:
        return torch.stack(rows)
    return torch.stack([sum(rows[row] for row in own) for own in inputs["positions"].tolist()])


@pytest.mark.parametrize("values", ["normal", "large", "integers"])
@pytest.mark.parametrize("name", NAMES)
def test_oracle_and_reference_are_what_loops_give(name, values):
    family, definition, inputs = case(name, values)
    expected = family.oracle(definition, inputs)
    torch.testing.assert_close(expected["output"].value, by_loops(inputs), rtol=1e-10, atol=1e-12)
    comparisons = evaluate(family.policies(), reference_outputs(definition, inputs, 3), expected)
    assert comparisons["output"].passed


@pytest.mark.parametrize(("alpha", "limit"), [(1.0, 1.5), (0.5, 20.0)])
@pytest.mark.parametrize("name", [SWIGLU, NAMES[-1]])
def test_oracle_and_reference_take_any_alpha_and_limit(name, alpha, limit):
    family, definition, inputs = case(name, alpha=alpha, limit=limit)
    assert (inputs["alpha"], inputs["limit"]) == (alpha, limit)
    expected = family.oracle(definition, inputs)
    torch.testing.assert_close(expected["output"].value, by_loops(inputs), rtol=1e-10, atol=1e-12)
    comparisons = evaluate(family.policies(), reference_outputs(definition, inputs, 3), expected)
    assert comparisons["output"].passed


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", [SWIGLU, NAMES[-1]])
def test_corners_have_each_alpha_and_limit(name, large):
    family, definition, _ = case(name)
    corners = family.corners(PlanRequest(definition, {}, large))
    assert {plan["alpha"] for plan in corners} == {1.702, 1.0, 0.5}
    assert {plan["limit"] for plan in corners} == {7.0, 1.5, 20.0}


@pytest.mark.parametrize("usual", [{"alpha": 1.702}, {"limit": 7.0}])
@pytest.mark.parametrize("name", [SWIGLU, NAMES[-1]])
def test_a_kernel_that_has_alpha_or_limit_built_in_is_refused(name, usual):
    definition = flashinfer_trace.load(name)

    def call(definition, inputs, outputs):
        return reference_outputs(definition, {**inputs, **usual}, 0)

    kernel = dataclasses.replace(stand_in(None), call=call)
    assert verify(Job(definition, family_of(definition), kernel), examples=0).status == "failed"


@pytest.mark.parametrize("name", NAMES[4:])
def test_scales_far_from_1_meet_activations_that_undo_them(name):
    family, definition, inputs = case(name, "far")
    exponents = (inputs["weights_scale"].int() & 255) - 127
    assert exponents.min() < -60 and exponents.max() > 50
    expected = family.oracle(definition, inputs)
    torch.testing.assert_close(expected["output"].value, by_loops(inputs), rtol=1e-10, atol=1e-12)
    assert 1e-3 < expected["output"].value.abs().max() < 1e3


@pytest.mark.parametrize("change", ["alpha", "limit"])
def test_another_activation_is_rejected(change):
    family, definition, inputs = case(SWIGLU)
    expected = family.oracle(definition, inputs)
    found = by_loops({**inputs, change: inputs[change] * 1.02}).bfloat16()
    (kernel,) = family.kernels
    assert not evaluate(family.policies(kernel), {"output": found}, expected)["output"].passed


@pytest.mark.parametrize("name", NAMES[2:5])
def test_rows_may_be_rounded_before_their_sum_but_not_twice_as_coarsely(name):
    family, definition, inputs = case(name, top_k=4)
    expected, (kernel,) = family.oracle(definition, inputs), family.kernels
    assert "rows" in expected["output"].parts
    off = expected["output"].parts["rows"] * torch.linspace(-1, 1, expected["output"].value.shape[1]).sign()
    for units, accepted in ((2.0**-8, True), (2.0**-6, False)):
        found = {"output": (expected["output"].value + off * units).bfloat16()}
        assert evaluate(family.policies(kernel), found, expected)["output"].passed is accepted
    assert evaluate(family.policies(), {"output": expected["output"].value.bfloat16()}, expected)["output"].passed


def test_gates_are_cut_off_above_and_linear_features_on_both_sides():
    definition = flashinfer_trace.load(SWIGLU)
    small = definition.with_const_axes({"num_experts": 1, "n": 6, "half_n": 3, "k": 1})
    inputs = {
        "x": torch.ones(1, 1, dtype=torch.bfloat16),
        # Gate and linear feature: 100 and 1; -100 and 1; 1 and -100.
        "weights": torch.tensor([[[100.0, 1.0, -100.0, 1.0, 1.0, -100.0]]], dtype=torch.bfloat16),
        "bias": torch.zeros(1, 6),
        "expert_counts": torch.tensor([1], dtype=torch.int32),
        "row_tokens": torch.tensor([0], dtype=torch.int32),
        "alpha": 1.0,
        "limit": 7.0,
    }
    output = small.name_outputs(small.run(**inputs))["output"]
    expected = [14 / (1 + math.exp(-7)), 0.0, -6 / (1 + math.exp(-1))]
    torch.testing.assert_close(output[0].float(), torch.tensor(expected), rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize(("gate", "accepted"), [(-51.4, True), (-48.0, False)])
def test_only_a_sigmoid_below_the_smallest_normal_number_may_be_flushed(gate, accepted):
    """The sigmoid of a gate of -51.4 is 1e-38, and the output 4e-36, because gates have no lower limit."""
    family, definition, inputs = case(SWIGLU)
    pairs = torch.tensor([gate, 7.0]).repeat(inputs["bias"].shape[1] // 2)
    inputs |= {"x": torch.zeros_like(inputs["x"]), "bias": pairs.expand_as(inputs["bias"]).contiguous()}
    expected = family.oracle(definition, inputs)
    right = expected["output"].value.bfloat16()
    assert right.count_nonzero() == right.numel()
    (kernel,) = family.kernels
    for found, passes in ((right, True), (torch.zeros_like(right), accepted)):
        assert evaluate(family.policies(kernel), {"output": found}, expected)["output"].passed is passes


@dataclass
class FakeFn:
    name: str
    fn: object
    fn_arg_names: tuple
    reduction_n: int = 1


@dataclass
class FakeActivation:
    specs: FakeFn
    fn_args: tuple


def fake_swiglu(y, alpha, limit):
    gate, linear = y[:, ::2].clamp(max=limit), y[:, 1::2].clamp(-limit, limit)
    share = gate / (1 + torch.exp(-alpha * gate))
    return share * linear + share


@dataclass
class FakeTensor:
    storage: SimpleNamespace
    dtype: object
    layout: object = None


def fake_convert(tensor, layout):
    assert (tensor.dtype == "fp4") == (layout == ("values", {"mx_axis": -2}))
    return FakeTensor(SimpleNamespace(data=tensor.storage.data.clone()), tensor.dtype, layout[0])


CONSTRAINTS: dict[str, int] = {}


@contextlib.contextmanager
def fake_constraints(constraints):
    CONSTRAINTS.update(constraints)
    yield
    CONSTRAINTS.clear()


def dense(w, precision_config):
    """Weights [experts, k, n]."""
    if precision_config is None:
        assert not CONSTRAINTS
        return w
    scale = precision_config.b_mx_scale
    assert CONSTRAINTS == {"split_k": 1}
    assert precision_config.b_microblock_size == 32
    assert (w.layout, scale.layout) == ("values", "scales")
    codes, scales = w.storage.data, scale.storage.data
    assert scales.shape[1] == -(-codes.shape[1] // 64) * 4, "a tile of scales would be read in part"
    own = scales[:, : codes.shape[1] // 16]
    return torch.stack([widened(*each).bfloat16() for each in zip(codes, own, strict=True)])


def fake_matmul(
    a, b, bias, a_ragged_metadata, gather_indx=None, scatter_indx=None, precision_config=None, gammas=None, c=None,
    fused_activation=None,
):  # fmt: skip
    """Rows in float32, rounded, and written to the places of their pairs."""
    b = dense(b, precision_config)
    assert a.dtype == b.dtype == c.dtype == torch.bfloat16
    assert bias is None or bias.dtype == torch.float32
    counts, total = a_ragged_metadata
    assert total == int(counts.sum())
    for indices in (gather_indx, scatter_indx):
        assert indices is None or (indices.dtype == torch.int32 and len(indices) == total)
    rows = a.float() if gather_indx is None else a[gather_indx].float()
    experts = torch.arange(len(b)).repeat_interleave(counts.long())
    out = torch.stack([row @ b[expert].float() for row, expert in zip(rows, experts, strict=True)])
    if bias is not None:
        out = out + bias[experts]
    if fused_activation is not None:
        assert fused_activation.specs.reduction_n == 2
        out = fused_activation.specs.fn(out, *fused_activation.fn_args)
    if gammas is not None:
        out = out * gammas.float().unsqueeze(1)
    assert c.shape == out.shape
    c[slice(None) if scatter_indx is None else scatter_indx.long()] = out.bfloat16()


@pytest.fixture
def library(monkeypatch):
    stand_ins = {
        "matmul.matmul": fake_matmul,
        "matmul.FnSpecs": FakeFn,
        "matmul.FusedActivation": FakeActivation,
        "matmul.PrecisionConfig": SimpleNamespace,
        "matmul_details.opt_flags": SimpleNamespace(scoped_opt_flags_constraints=fake_constraints),
        "tensor.FP4": "fp4",
        "tensor.wrap_torch_tensor": lambda tensor, dtype=None: FakeTensor(SimpleNamespace(data=tensor), dtype),
        "tensor.convert_layout": fake_convert,
        "tensor.make_ragged_tensor_metadata": lambda counts, rows: (counts, rows),
        "tensor_details.layout": SimpleNamespace(
            make_default_matmul_mxfp4_w_layout=lambda **options: ("values", options),
            make_default_matmul_mxfp4_w_scale_layout=lambda **options: ("scales", options),
        ),
        "swiglu.swiglu_fn": fake_swiglu,
    }
    install(monkeypatch, {f"triton_kernels.{path}": value for path, value in stand_ins.items()})


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_is_called_as_its_library_wants(name, library):
    assert_adapter_passes(name, "triton_kernels.matmul.matmul")
