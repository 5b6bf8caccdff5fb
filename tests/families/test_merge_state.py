"""Merging attention states: known results, and models of both kernels against their bounds."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from drawn_plans import drawn_plans, small_twin
from emulated_runs import install

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.merge_state import CORNER_VALUES, EMPTY, SPREADS, VALUES, accepted_rows
from flashinfer_trace.harness.case import evaluate, reference_outputs, reference_run, run_case
from flashinfer_trace.harness.layouts import LAYOUT
from flashinfer_trace.harness.verify import Job

NAMES = {"merge_state_h32_d128": 2.0, "merge_state_base_e_h128_d128": math.e}
PLAN = {"seq_len": 30, "spread": "mixed", "values": "normal", "empty": []}


def case(name, seed=1, **changes):
    """(family, twin, inputs, expected)."""
    family, definition = small_twin(name)
    inputs = family.inputs(definition, {**PLAN, **changes}, seed, "cpu")
    return family, definition, inputs, family.oracle(definition, inputs)


def states(*pairs):
    """Inputs with one query and three heads: each state's value, the same in all features, and its lse, per head."""
    inputs = {}
    for side, (values, lses) in zip("ab", pairs, strict=True):
        inputs[f"v_{side}"] = torch.tensor(values).view(1, 3, 1).expand(1, 3, 64).to(torch.bfloat16).contiguous()
        inputs[f"s_{side}"] = torch.tensor([lses])
    return inputs


@pytest.mark.parametrize(("name", "base"), NAMES.items())
def test_weights_by_hand(name, base):
    """Weights 1 : 1, 3 : 1, and a state that outweighs the other beyond float32."""
    _, definition = small_twin(name)
    inputs = states(([1.0, 4.0, 5.0], [7.0, math.log(3, base), 400.0]), ([3.0, 8.0, 9.0], [7.0, 0.0, -400.0]))
    outputs = reference_outputs(definition, inputs, 0)
    assert outputs["v_merged"][0, :, 0].tolist() == [2.0, 5.0, 5.0]
    expected = torch.tensor([[7 + math.log(2, base), math.log(4, base), 400.0]])
    torch.testing.assert_close(outputs["s_merged"], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_without_keys_counts_for_nothing(name):
    """The other state is returned unchanged; without keys on both sides, the output is 0 and the lse -inf."""
    family, definition = small_twin(name)
    inputs = states(([1.0, 4.0, 5.0], [-math.inf, -2.5, -math.inf]), ([3.0, 8.0, 9.0], [700.25, -math.inf, -math.inf]))
    for result in (
        reference_outputs(definition, inputs, 0),
        {o: e.value for o, e in family.oracle(definition, inputs).items()},
    ):
        assert result["v_merged"][0, :, 0].tolist() == [3.0, 4.0, 0.0]
        assert result["s_merged"].tolist() == [[700.25, -2.5, -math.inf]]


def test_a_share_below_the_normal_numbers_is_rounded_to_a_multiple_of_the_smallest():
    """As on an H200: 4,992 times a share of 2^-139, which float32 holds with ten bits, next to a value of 0."""
    family, definition = small_twin("merge_state_base_e_h128_d128")
    inputs = states(([4992.0] * 3, [9.766477584838867] * 3), ([0.0] * 3, [105.96512603759766] * 3))
    output, expected = (
        reference_outputs(definition, inputs, 0)["v_merged"],
        family.oracle(definition, inputs)["v_merged"],
    )
    assert not torch.equal(output.double(), expected.value.bfloat16().double())
    assert 0.9 < family.compare["v_merged"].compare(output, expected).ratio < 1


def test_an_lse_of_plus_infinity_means_no_keys_in_base_e():
    family, definition = small_twin("merge_state_base_e_h128_d128")
    least = states(([1.0, 4.0, 5.0], [-math.inf, -2.5, -math.inf]), ([3.0, 8.0, 9.0], [700.25, -math.inf, -math.inf]))
    largest = {name: value.masked_fill(value == -math.inf, math.inf) for name, value in least.items()}
    for results in (
        [reference_outputs(definition, inputs, 0) for inputs in (least, largest)],
        [{o: e.value for o, e in family.oracle(definition, inputs).items()} for inputs in (least, largest)],
    ):
        assert all(torch.equal(results[0][output], results[1][output]) for output in results[0])


@pytest.mark.parametrize(("name", "base"), NAMES.items())
def test_merged_states_are_the_attention_over_all_keys(name, base):
    _, definition = small_twin(name)
    generator = torch.Generator().manual_seed(4)
    logits = 4 * torch.randn(5, 3, 50, generator=generator, dtype=torch.float64)
    values = torch.randn(50, 64, generator=generator, dtype=torch.float64)

    def state(keys):
        lse = torch.logsumexp(logits[..., keys], -1) / math.log(base)
        return (torch.softmax(logits[..., keys], -1) @ values[keys]).to(torch.bfloat16), lse.float()

    merged = definition.run(*state(slice(0, 20)), *state(slice(20, 50)))
    v, s = state(slice(0, 50))
    torch.testing.assert_close(merged[0].float(), v.float(), rtol=2**-6, atol=2**-8)
    torch.testing.assert_close(merged[1], s, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_states_does_not_matter(name):
    _, definition, inputs, _ = case(name, empty=list(EMPTY))
    swapped = {"v_a": inputs["v_b"], "s_a": inputs["s_b"], "v_b": inputs["v_a"], "s_b": inputs["s_a"]}
    for output, value in reference_outputs(definition, swapped, 0).items():
        assert torch.equal(value, reference_outputs(definition, inputs, 0)[output])


def test_bases_differ():
    """A reference of one base fails the oracle of the other."""
    family, _, inputs, expected = case("merge_state_h32_d128", spread="near")
    _, other = small_twin("merge_state_base_e_h128_d128")
    for output, comparison in evaluate(family.policies(), reference_outputs(other, inputs, 0), expected).items():
        assert not comparison.passed, output


def kernel_model(base, v_a, s_a, v_b, s_b, error=0.0):
    """Both kernels in float32; `error` is that of an approximate exponential. In base e, +inf is read as -inf, and two
    states without keys give NaN."""
    if base != 2:
        s_a, s_b = (s.masked_fill(s == math.inf, -math.inf) for s in (s_a, s_b))
    top = torch.maximum(s_a, s_b)
    if base == 2:
        powers = [torch.exp2(s - top).nan_to_num(0.0) for s in (s_a, s_b)]
        log = torch.log2
    else:
        powers = [torch.exp2((s - top) * torch.tensor(math.log2(math.e))) for s in (s_a, s_b)]
        log = torch.log
    powers = [torch.where(power == 1, 1.0, power * (1 + error)) for power in powers]
    total = powers[0] + powers[1]
    shares = [(power / total).unsqueeze(-1) for power in powers]
    shares = [share.nan_to_num(0.0) for share in shares] if base == 2 else shares
    return (shares[0] * v_a.float() + shares[1] * v_b.float()).to(v_a.dtype), log(total) + top


@pytest.mark.parametrize("error", [-(2.0**-22), 0.0, 2.0**-22])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("name", "base"), NAMES.items())
def test_bounds_hold_for_a_model_of_the_kernel(name, base, spread, values, error):
    """The bounds are also tight: where the weights of both states matter, outputs use a good part of theirs."""
    worst = {"v_merged": 0.0, "s_merged": 0.0}
    for seed in range(3):
        family, _, inputs, expected = case(name, seed, spread=spread, values=values, empty=["a", "b"])
        outputs = dict(zip(expected, kernel_model(base, **inputs, error=error), strict=True))
        found = evaluate(family.policies(family.kernels[0]), outputs, expected)
        assert all(comparison.passed for comparison in found.values()), {o: str(c) for o, c in found.items()}
        worst = {output: max(ratio, found[output].ratio) for output, ratio in worst.items()}
    if spread == "near":
        assert worst["v_merged"] > 0.9
        assert worst["s_merged"] > 0.2


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_that_rounds_its_shares_is_rejected(name):
    """A kernel with shares in bf16 instead of float32, and one with an exponential that is off by a thousandth."""
    family, _, inputs, expected = case(name, spread="near")
    policies = family.policies(family.kernels[0])
    base = NAMES[name]
    v, s = kernel_model(base, **inputs, error=1e-3)
    assert not policies["s_merged"].compare(s, expected["s_merged"]).passed
    share = torch.sigmoid((inputs["s_a"] - inputs["s_b"]) * math.log(base)).bfloat16().float().unsqueeze(-1)
    v = (share * inputs["v_a"].float() + (1 - share) * inputs["v_b"].float()).bfloat16()
    assert not policies["v_merged"].compare(v, expected["v_merged"]).passed


@pytest.mark.parametrize("name", NAMES)
def test_plans_draw_the_awkward_rows_but_spare_kernels_what_they_answer_with_nan(name):
    family, definition = small_twin(name)
    (kernel,) = family.kernels
    spared = NAMES[name] != 2
    for target, sides in ((None, set(EMPTY)), (kernel, {"a", "b"} if spared else set(EMPTY))):
        plans = drawn_plans(family, definition, target)
        assert {plan["spread"] for plan in plans} == {*SPREADS, "mixed"}
        assert {plan["values"] for plan in plans} == set(VALUES)
        assert {side for plan in plans for side in plan["empty"]} == sides
        assert (min(plan["seq_len"] for plan in plans) == 0) is (target is None)
    _, _, inputs, _ = case(name, empty=list(EMPTY))
    nothing = [inputs[s].isinf() for s in ("s_a", "s_b")]
    assert all((inputs[s] == math.inf).any() for s in ("s_a", "s_b")) is spared
    assert (nothing[0] & nothing[1]).any()
    assert (nothing[0] & ~nothing[1]).any()
    assert (~nothing[0] & nothing[1]).any()
    assert kernel_model(NAMES[name], **inputs)[0].isnan().any() == spared


@pytest.mark.parametrize("name", NAMES)
def test_bounds_hold_for_a_model_of_the_kernel_in_every_corner(name):
    family, definition = small_twin(name)
    (kernel,) = family.kernels
    plans = Job(flashinfer_trace.load(name), family, kernel).corners
    spared = NAMES[name] != 2
    assert {plan["values"] for plan in plans} == {"normal", "large", *CORNER_VALUES, *(() if spared else ("spread",))}
    assert {side for plan in plans for side in plan["empty"]} == ({"a", "b"} if spared else set(EMPTY))
    # The reference has one row besides; and where the kernel is spared states that are both empty, these and many rows.
    assert len(Job(flashinfer_trace.load(name), family).corners) == len(plans) + (3 if spared else 1)
    for plan in plans:
        inputs = family.inputs(definition, {entry: value for entry, value in plan.items() if entry != LAYOUT}, 0, "cpu")
        assert all(inputs[value].isfinite().all() for value in ("v_a", "v_b"))
        expected = family.oracle(definition, inputs)
        outputs = dict(zip(expected, kernel_model(NAMES[name], **inputs), strict=True))
        found = evaluate(family.policies(kernel), outputs, expected)
        assert all(comparison.passed for comparison in found.values()), (plan, {o: str(c) for o, c in found.items()})
        # The right value of equal lses, but for an overflow where the states are added before they are weighted.
        halved = ((inputs["v_a"].float() + inputs["v_b"].float()) / 2).bfloat16()
        right = plan["spread"] == "equal" and plan["values"] != "huge"
        assert family.compare["v_merged"].compare(halved, expected["v_merged"]).passed is right


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_must_refuse_lses_with_other_rows_than_their_values(name):
    _, definition = small_twin(name)
    assert not accepted_rows(definition, reference_run())
    lax = dataclasses.replace(definition, reference=definition.reference.replace("== v_a.shape[:2]", ""))
    assert accepted_rows(lax, reference_run()) == [
        "reference: lses of 2 rows with values of 1 row were accepted; assert that their shapes agree"
    ]


def test_kernels_are_there_for_the_heads_that_they_launch():
    """flashinfer's block has a thread for 8 or 16 features of every head."""
    definition = flashinfer_trace.load("merge_state_h32_d128")
    family = family_of(definition)
    for heads, dim, fits in ((64, 128, True), (128, 128, False), (32, 512, True), (64, 512, False), (8, 192, False)):
        axes = {"num_heads": heads, "head_dim": dim}
        assert bool(family.kernels_of(definition.with_const_axes(axes))) is fits
    base_e = flashinfer_trace.load("merge_state_base_e_h128_d128")
    for dim, fits in ((192, True), (100, False)):
        assert bool(family_of(base_e).kernels_of(base_e.with_const_axes({"head_dim": dim}))) is fits


@pytest.fixture
def stand_ins(monkeypatch):
    """Modules with the calls of flashinfer 0.7.2 and sglang-kernel 0.4.10, and the results of their model."""

    def merge_state_v2(v_a, s_a, v_b, s_b, v_merged=None, s_merged=None):
        v, s = kernel_model(math.e, v_a, s_a, v_b, s_b)
        return v_merged.copy_(v), s_merged.copy_(s)

    def merge_state(v_a, s_a, v_b, s_b):
        return kernel_model(2, v_a, s_a, v_b, s_b)

    functions = {"flashinfer.cascade.merge_state": merge_state, "sgl_kernel.merge_state_v2": merge_state_v2}
    install(monkeypatch, functions)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_called_with_what_they_take(name, stand_ins):
    family, definition = small_twin(name)
    result = run_case(definition, family, {**PLAN, "empty": ["a", "b"]}, 3, "cpu", family.kernels[0])
    assert not result.failures
    assert not result.vacuous
    assert set(result.kernel) == {"v_merged", "s_merged"}
