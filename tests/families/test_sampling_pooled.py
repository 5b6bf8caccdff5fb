"""Errors that all cases of a sampler show together, and none of them alone."""

from __future__ import annotations

import pytest
import torch
from test_sampling_distribution import POLICY, expectation, normal_row, sample, seeded

from flashinfer_trace.verdict.compare import Comparison, Score
from flashinfer_trace.verdict.pooled import Pool

CASES, DRAWS, VOCABULARY = 20, 2048, 128_256


def even_tokens(row, draws, generator):
    """Tokens of even index 10 % too often."""
    weight = row.clone()
    weight[0, ::2] *= 1.1
    return sample(weight, draws, generator)


def sharper(row, draws, generator):
    return sample(row**1.05, draws, generator)


def by(row, u):
    return torch.searchsorted(row[0].cumsum(0), u, right=True).clamp_max(row.shape[1] - 1).int()


def of_eleven_bits(row, draws, generator):
    return by(row, torch.randint(2048, [draws], generator=generator).double() / 2048)


def stratified(row, draws, generator):
    return by(row, (torch.arange(draws) + torch.rand(draws, dtype=torch.float64, generator=generator)) / draws)


def ran(draw, seed, vocabulary=VOCABULARY):
    """The failures of a run's cases together, and how many of them fail alone."""
    generator, pool, failed = seeded(seed), Pool(), 0
    for _ in range(CASES):
        row = normal_row(vocabulary, generator).unsqueeze(0)
        compared = POLICY.compare(draw(row, DRAWS, generator), expectation(row, DRAWS))
        failed += not compared.passed
        pool.add({"samples": compared})
    return pool.failure(), failed


@pytest.mark.parametrize(
    ("draw", "shows", "vocabulary"),
    [
        (even_tokens, "odd indices", VOCABULARY),
        (sharper, "log-probabilities", VOCABULARY),
        (of_eleven_bits, "pairs of equal draws", VOCABULARY),
        (stratified, "chi-square", 64),
    ],
)
def test_a_wrong_sampler_is_rejected(draw, shows, vocabulary):
    message, _ = ran(draw, 1, vocabulary)
    assert shows in message


def test_one_case_of_these_draws_alone_rejects_few():
    assert [ran(draw, 2, 4096)[1] for draw in (even_tokens, sharper)] == [0, 0]


@pytest.mark.parametrize("vocabulary", [64, 4096])
def test_a_right_sampler_passes(vocabulary):
    for seed in range(10):
        assert ran(sample, seed, vocabulary) == ("", 0)


def test_sums_of_scores_are_judged_by_their_variance():
    pool = Pool()
    for _ in range(100):
        pool.add({"a": Comparison(0.0, scores=(Score("odd", 1.0, 1.0, 1.0), Score("even", 5.0, 1.0, low=True)))})
    output, worst = pool.worst()
    assert output == "a" and worst.ratio > 1 and "odd is off by +100.0, standard deviation 10.0" in worst.detail
    assert Pool().worst() is None and Pool().failure() == ""
