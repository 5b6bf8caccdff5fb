"""The policies for samplers and renormalizers: what they accept, what they reject, and how often."""

from __future__ import annotations

import math

import pytest
import torch

from flashinfer_trace.families.renorm import Renormalized
from flashinfer_trace.families.sampling.distribution import (
    MAX_BINS,
    MIN_EXPECTED,
    PART,
    Distribution,
    Support,
    chi_square_critical,
    chi_square_tail,
    running_sums,
)
from flashinfer_trace.families.sampling.oracles import signed_margin
from flashinfer_trace.verdict.compare import Expected

POLICY = Distribution("test")
ROW = torch.tensor([0.05, 0.4, 0.1, 0.2, 0.0, 0.25, 0.0, 0.0], dtype=torch.float64)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def expectation(value: torch.Tensor, draws: int, margin: torch.Tensor | None = None) -> Expected:
    """`draws` samples of each row of `value`, whose support is certain unless `margin` says otherwise."""
    group = torch.arange(len(value)).repeat_interleave(draws)
    if margin is None:
        margin = torch.where(value > 0, math.inf, -math.inf).double()
    return Expected(value, {"group": group, "margin": margin})


def sample(value: torch.Tensor, draws: int, generator: torch.Generator) -> torch.Tensor:
    return torch.multinomial(value, draws, replacement=True, generator=generator).flatten().to(torch.int32)


def normal_row(vocab_size: int, generator: torch.Generator, temperature: float = 1.0) -> torch.Tensor:
    logits = torch.randn(vocab_size, dtype=torch.float64, generator=generator) * 2.5
    return torch.softmax(logits / temperature, dim=-1)


def rejections(policy: Distribution, right: torch.Tensor, drawn: torch.Tensor, draws: int, runs: int) -> int:
    """How many of `runs` samplers of the distribution `drawn` are rejected where `right` is expected."""
    expected, generator = expectation(right, draws), seeded(5)
    return sum(not policy.compare(sample(drawn, draws, generator), expected).passed for _ in range(runs))


@pytest.mark.parametrize(
    ("degrees", "alpha", "critical"), [(1, 0.05, 3.8415), (10, 1e-3, 29.588), (100, 0.01, 135.807)]
)
def test_critical_values_are_those_of_the_tables(degrees: int, alpha: float, critical: float) -> None:
    assert chi_square_critical(degrees, alpha) == pytest.approx(critical, abs=1e-3)


@pytest.mark.parametrize("degrees", [1, 2, 3, 8, 15, 60, 127, 240, 4001])
@pytest.mark.parametrize("value", [0.01, 1.0, 30.0, 200.0, 500.0, 4000.0])
def test_the_tail_of_chi_square_is_the_incomplete_gamma_function(degrees: int, value: float) -> None:
    half = torch.tensor([degrees / 2, value / 2], dtype=torch.float64)
    assert chi_square_tail(degrees, value) == pytest.approx(float(torch.special.gammaincc(*half)), rel=1e-9)


@pytest.mark.parametrize("alpha", [1e-2, 1e-6, 1e-9, 1e-12])
def test_critical_value_of_two_degrees_is_exact(alpha: float) -> None:
    assert chi_square_critical(2, alpha) == pytest.approx(-2 * math.log(alpha), rel=1e-9)


def test_bins_are_large_enough_and_hold_descending_tokens() -> None:
    weight = torch.stack([normal_row(500, seeded(row)) for row in range(6)])
    draws = [10, 45, 200, 400, 2048, 100_000]
    group = torch.arange(6).repeat_interleave(torch.tensor(draws))
    support = Support.of(Expected(weight, {"group": group, "margin": torch.full_like(weight, math.inf)}), 0.0)
    used = [len(bins.share) for bins in support.bins]
    assert support.draws == draws
    assert used[0] == 1 and max(used) <= MAX_BINS and used[4] > 10
    for row, bins in enumerate(support.bins):
        assert math.fsum(bins.share) == pytest.approx(1, rel=1e-12)
        assert row == 0 or min(bins.share) * draws[row] >= MIN_EXPECTED
        joined = torch.tensor(bins.joined)[support.parts[row]]
        assert bool((joined[weight[row].argsort(descending=True)].diff() >= 0).all())
        share = torch.zeros(len(bins.share)).double().scatter_add(0, joined, weight[row])
        assert torch.allclose(share, torch.tensor(bins.share).double())
        score = torch.zeros_like(share).scatter_add(0, joined, weight[row] * weight[row].log()) / share
        mean = (weight[row] * weight[row].log()).sum()
        assert bins.score == pytest.approx((score - mean).tolist(), abs=1e-12)


@pytest.mark.parametrize("length", [1, PART - 1, PART, 3 * PART + 7])
def test_running_sums_are_those_of_all_elements_before(length: int) -> None:
    values = torch.rand(2, length, generator=seeded(1))
    wanted = torch.nn.functional.pad(values.double().cumsum(dim=-1), (1, 0))
    found = running_sums(values)
    assert (found.dtype, found.shape) == (torch.float64, (2, length + 1))
    assert torch.allclose(found, wanted, rtol=1e-15, atol=0)
    assert bool((found.diff(dim=-1) >= 0).all())


def test_a_right_sampler_fails_no_more_often_than_alpha() -> None:
    value = torch.stack([normal_row(64, seeded(row)) for row in range(3)])
    failed = rejections(Distribution("test", alpha=0.05), value, value, 512, 500)
    assert failed <= 25 + 3 * math.sqrt(25)


def test_the_smallest_bins_follow_chi_square_in_the_tail() -> None:
    runs, draws = 60_000, int(MIN_EXPECTED) * MAX_BINS
    tokens = torch.randint(0, MAX_BINS, (runs, draws), generator=seeded(1))
    observed = torch.zeros(runs, MAX_BINS).scatter_add_(1, tokens, torch.ones(runs, draws))
    statistic = (observed - MIN_EXPECTED).square().sum(dim=-1) / MIN_EXPECTED
    tail = int((statistic > chi_square_critical(MAX_BINS - 1, 1e-3)).sum())
    assert 30 <= tail <= 100


def test_a_right_sampler_passes_each_time() -> None:
    value = torch.stack([ROW, normal_row(8, seeded(2))])
    assert rejections(POLICY, value, value, 1024, 500) == 0


@pytest.mark.parametrize("wrong", [4, 8, -1, torch.iinfo(torch.int32).min])
def test_one_sample_outside_the_support_is_enough(wrong: int) -> None:
    samples = sample(ROW[None], 2048, seeded(0))
    assert POLICY.compare(samples, expectation(ROW[None], 2048)).passed
    samples[77] = wrong
    comparison = POLICY.compare(samples, expectation(ROW[None], 2048))
    assert comparison.ratio == math.inf and comparison.index == (77,)
    assert str(comparison).startswith(f"worst error is inf x its bound at [77]: got {wrong:.9g}; allowed: 5 tokens; ")


def test_the_only_token_that_is_allowed_is_named() -> None:
    row = torch.zeros(1, 32000, dtype=torch.float64)
    row[0, 31999] = 1.0
    comparison = POLICY.compare(torch.zeros(3, dtype=torch.int32), expectation(row, 3))
    text = "got 0; allowed: only token 31999; 3 of 3 samples are outside the support, first of row 0"
    assert str(comparison).endswith(text) and "nan" not in str(comparison)


def test_a_wrong_shape_is_rejected() -> None:
    assert not POLICY.compare(torch.zeros(3, dtype=torch.int32), expectation(ROW[None], 4)).passed


def test_no_samples_prove_nothing_and_pass() -> None:
    assert POLICY.compare(torch.zeros(0, dtype=torch.int32), expectation(ROW[None], 0)).passed


@pytest.mark.parametrize(("vocab_size", "draws"), [(64, 8192), (129280, 2048)])
def test_power_against_a_temperature_of_1_1(vocab_size: int, draws: int) -> None:
    """At the sizes that the twin and the GPU run, for one row of normal logits of standard deviation 2.5."""
    right, hot = normal_row(vocab_size, seeded(3))[None], normal_row(vocab_size, seeded(3), 1.1)[None]
    assert rejections(POLICY, right, hot, draws, 40) >= 39


@pytest.mark.parametrize("vocab_size", [64, 4096])
def test_power_against_a_missing_token(vocab_size: int) -> None:
    """k - 1 instead of k: 2048 draws reject a missing token of probability 0.02, whatever bin it shares."""
    k = 20
    right = torch.zeros(1, vocab_size, dtype=torch.float64)
    right[0, :k] = torch.linspace(0.08, 0.02, k, dtype=torch.float64)
    right /= right.sum()
    missing = right.clone()
    missing[0, k - 1] = 0
    assert right[0, k - 1] == pytest.approx(0.02, rel=1e-9)
    assert rejections(POLICY, right, missing / missing.sum(), 2048, 40) >= 39


def larger_of_two(value: torch.Tensor, share: float) -> torch.Tensor:
    """The distribution of a sampler that takes the larger of two indices in this share of its draws."""
    before = value.cumsum(dim=-1) - value
    return value * (1 - share) + share * value * (2 * before + value)


@pytest.mark.parametrize("vocab_size", [64, 129280])
def test_power_against_an_error_that_depends_on_the_index(vocab_size: int) -> None:
    """Bins in order of probability hold tokens from everywhere: they see the index only where few tokens weigh much."""
    right = torch.full((1, vocab_size), 1 / vocab_size, dtype=torch.float64)
    normal = normal_row(vocab_size, seeded(3))[None]
    for value in (right, normal):
        assert larger_of_two(value, 0.35).sum().item() == pytest.approx(1.0, abs=1e-12)
        assert rejections(POLICY, value, larger_of_two(value, 0.35), 2048, 40) >= 38
        assert rejections(POLICY, value, larger_of_two(value, -0.35), 2048, 40) >= 38
    found = POLICY.compare(sample(larger_of_two(normal, 0.35), 8192, seeded(6)), expectation(normal, 8192))
    assert "in order of index, samples are +0.0" in found.detail


def test_a_right_sampler_is_off_in_order_of_index_no_more_often_than_its_part_of_alpha() -> None:
    """Bernstein's bound is not far from the truth either: at half its exponent, some samplers are."""
    value = torch.stack([normal_row(64, seeded(row)) for row in range(3)])
    group = torch.arange(3).repeat_interleave(512)
    support = Support.of(Expected(value, {"group": group, "margin": torch.full_like(value, math.inf)}), 0.0)
    assert (value * support.middle).sum(dim=-1).tolist() == pytest.approx([0.0] * 3, abs=1e-12)
    assert (value * support.middle.square()).sum(dim=-1).tolist() == pytest.approx(support.spread, rel=1e-9)
    policy, generator, ratios = Distribution("test", alpha=0.25), seeded(5), []
    for _ in range(1000):
        tokens = sample(value, 512, generator).long()
        moved = float(support.middle[group, tokens].sum())
        ratios.append(policy._order(moved, [512.0] * 3, support)[0])
    assert sum(ratio > 1 for ratio in ratios) <= 50 + 3 * math.sqrt(50)
    assert sum(ratio > 0.5 for ratio in ratios) >= 20


def test_uniform_instead_of_proportional_is_rejected() -> None:
    assert rejections(POLICY, ROW[None], (ROW > 0).double()[None], 512, 50) == 50


def test_draws_of_another_row_are_rejected() -> None:
    value = torch.stack([ROW, ROW.roll(1)])
    samples = sample(value, 256, seeded(4))
    assert POLICY.compare(samples, expectation(value, 256)).passed
    assert not POLICY.compare(samples.roll(256), expectation(value, 256)).passed


def test_a_token_at_the_threshold_is_drawn_as_often_as_if_it_were_kept() -> None:
    kept = torch.tensor([[0.6, 0.4, 0.0]], dtype=torch.float64)
    margin = torch.tensor([[math.inf, math.inf, 0.0]], dtype=torch.float64)
    without = expectation(kept, 2000, margin)
    chance = {**without.parts, "chance": torch.tensor([[0.6, 0.4, 0.1]], dtype=torch.float64)}
    with_it = Expected(kept, chance)
    drawn = sample(torch.tensor([[0.6, 0.4, 0.1]], dtype=torch.float64), 2000, seeded(8))
    policy = Distribution("test", window=1e-6)
    assert policy.compare(drawn, with_it).passed
    assert not policy.compare(drawn, without).passed
    too_often = sample(torch.tensor([[0.6, 0.4, 0.5]], dtype=torch.float64), 2000, seeded(9))
    assert not policy.compare(too_often, with_it).passed


def test_repeated_draws_are_rejected() -> None:
    """The same uniform number for each draw of a row: every sample is in the support, all are equal."""
    assert not POLICY.compare(torch.ones(512, dtype=torch.int32), expectation(ROW[None], 512)).passed


class TestUndecidable:
    """Token 0, of probability 0.05, lies within the window."""

    policy = Distribution("test", window=1e-5)
    margin = torch.where(ROW > 0, 0.5, -0.5)[None].clone()

    def setup_method(self) -> None:
        self.margin[0, 0] = 1e-6

    def test_may_be_drawn(self) -> None:
        samples = sample(ROW[None], 2048, seeded(1))
        assert bool((samples == 0).any())
        assert self.policy.compare(samples, expectation(ROW[None], 2048, self.margin)).passed

    def test_need_not_be_drawn(self) -> None:
        samples = sample(torch.where(torch.arange(8) == 0, 0.0, ROW)[None], 2048, seeded(1))
        assert self.policy.compare(samples, expectation(ROW[None], 2048, self.margin)).passed

    def test_may_not_take_more_than_its_share(self) -> None:
        often = torch.where(torch.arange(8) == 0, 0.15, ROW)
        assert not self.policy.compare(
            sample(often[None], 2048, seeded(1)), expectation(ROW[None], 2048, self.margin)
        ).passed

    def test_is_certain_for_a_narrower_window(self) -> None:
        narrow = Distribution("test", window=1e-7)
        without = sample(torch.where(torch.arange(8) == 0, 0.0, ROW)[None], 2048, seeded(1))
        assert not narrow.compare(without, expectation(ROW[None], 2048, self.margin)).passed


def test_margins_are_relative_and_infinite_where_sums_are_exact() -> None:
    above = torch.tensor([[0.0, 0.45, 0.5, 0.9]] * 3, dtype=torch.float64)
    limit = torch.tensor([[0.5], [0.5], [0.0]], dtype=torch.float64)
    margin = signed_margin(above, limit, torch.tensor([[False], [True], [False]]))
    assert margin[0].tolist() == pytest.approx([1.0, 0.1, 0.0, -0.8])
    assert margin[1].tolist() == [math.inf, math.inf, -math.inf, -math.inf]
    assert margin[2].tolist() == [-math.inf] * 4


class TestRenormalized:
    """Token 3 of the first row lies within the window."""

    policy = Renormalized("test", relative=1e-6, window=1e-5)
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    margin = torch.tensor([[1.0, 0.5, 0.2, -1e-6], [-0.2, -0.1, 0.1, 1.0]], dtype=torch.float64)

    def expected(self) -> Expected:
        weight = torch.where(self.margin > 0, self.probs, 0.0)
        parts = {"margin": self.margin, "probs": self.probs, "scaled": torch.tensor([[True], [True]])}
        return Expected(weight / weight.sum(dim=-1, keepdim=True), parts)

    def right(self) -> torch.Tensor:
        return self.expected().value.float()

    def test_the_exact_result_passes(self) -> None:
        assert self.policy.compare(self.right(), self.expected()).passed

    def test_an_undecidable_token_may_stay_if_the_others_make_room(self) -> None:
        kept = self.right()
        kept[0] = self.probs[0].float()
        assert self.policy.compare(kept, self.expected()).passed
        kept[0, :3] = self.right()[0, :3]
        assert not self.policy.compare(kept, self.expected()).passed

    @pytest.mark.parametrize("token", [0, 1, 2])
    def test_a_certain_token_may_not_go(self, token: int) -> None:
        wrong = torch.where(torch.arange(4) == token, 0.0, self.right())
        wrong[0] /= wrong[0].sum()
        assert not self.policy.compare(wrong, self.expected()).passed

    def test_a_certain_other_may_not_stay(self) -> None:
        wrong = self.right()
        wrong[1] = torch.tensor([0.0, 0.2, 0.3, 0.4]) / 0.9
        assert not self.policy.compare(wrong, self.expected()).passed

    def test_wrong_values_are_rejected(self) -> None:
        right = self.right()
        nan = right.clone()
        nan[1, 2] = math.nan
        mutants = [right * 1.01, right.flip(0), right.roll(1, dims=1), torch.zeros_like(right), nan, right[:1], -right]
        for mutant in mutants:
            assert not self.policy.compare(mutant, self.expected()).passed


@pytest.mark.parametrize(("difference", "swaps"), [(0.05, False), (0.2, True)])
def test_rows_are_swapped_only_where_one_case_tells_them_apart(difference: float, swaps: bool) -> None:
    value = torch.stack([ROW, ROW])
    value[1, 1] -= difference
    value[1, 2] += difference
    expected = expectation(value, 3)
    mutants = {mutant.name: mutant for mutant in POLICY.mutants(expected)}
    assert ("two rows swapped" in mutants) == swaps
    samples, other = torch.tensor([1, 2, 3, 5, 5, 5]), torch.zeros(6, dtype=torch.int64)
    if swaps:
        swapped = mutants["two rows swapped"].applied(samples, other)
        assert swapped is not None and swapped.tolist() == [5, 5, 5, 1, 2, 3]
    shifted = mutants["shifted by one"].applied(torch.full((6,), 7), other)
    assert shifted is not None and shifted.tolist() == [0] * 6


def test_a_zero_output_has_the_shape_of_the_samples() -> None:
    zero = POLICY.zero(expectation(ROW.unsqueeze(0), 5), torch.int32)
    assert (zero.shape, zero.dtype) == ((5,), torch.int32)
