"""That a sampler draws at random: anew in each call and in each process, and each row by itself."""

from __future__ import annotations

import sys

import pytest
import torch

from flashinfer_trace.judging.child import _seed_afresh
from flashinfer_trace.judging.draws import ALPHA, _chance
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.verdict import Grade

NAME = "min_p_sampling_from_probs_v32000"
SAMPLER = """
import itertools, os, torch

def sample(probs, min_p, u):
    kept = torch.where(probs >= min_p[:, None] * probs.max(-1, keepdim=True).values, probs, 0.0).double()
    mass = kept.cumsum(-1)
    token = torch.searchsorted(mass, (u * mass[:, -1])[:, None], right=True).squeeze(1).clamp(max=probs.shape[1] - 1)
    token[mass[:, -1] == 0] = 0
    token[probs.sum(-1) == 0] = probs.shape[1] - 1
    return token

def random(count, generator=None):
    return torch.rand(count, dtype=torch.float64, generator=generator)

def seeded(number):
    return torch.Generator().manual_seed(number)
"""
GOLDEN = "(torch.arange(len(p)) * 0.6180339887498949 + random(1)) % 1"
#: Where the random numbers of honest samplers come from: what is written before `run`, and in it.
HONEST = {
    "torch's generator": ("", "random(len(p))"),
    "a counter from a seed of torch's": (
        "SEEDS = itertools.count(int(torch.randint(1 << 40, ())))",
        "random(len(p), seeded(next(SEEDS)))",
    ),
    "a counter from the system's entropy": (
        "SEEDS = itertools.count(int.from_bytes(os.urandom(4), 'little'))",
        "random(len(p), seeded(next(SEEDS)))",
    ),
    "a generator of its own": ("OWN = torch.Generator(); OWN.seed()", "random(len(p), OWN)"),
}
#: The same of others, and what the verdict says of them.
DISHONEST = {
    "a constant seed in each call": ("", "random(len(p), seeded(7))", "it draws the same twice"),
    "a counter from a constant": (
        "SEEDS = itertools.count()",
        "random(len(p), seeded(next(SEEDS)))",
        "the first calls of two new processes draw the same",
    ),
    "a counter after the first call": (
        "SEEDS = itertools.count()",
        "random(len(p), None if (n := next(SEEDS)) == 0 else seeded(n))",
        "the second calls of two new processes draw the same",
    ),
    "one number for the batch": ("", "random(1).expand(len(p))", "neighbors"),
    "one number for two rows": ("", "random(len(p) // 2 + 1).repeat_interleave(2)[:len(p)]", "neighbors"),
    "one number for both halves": ("", "random((len(p) + 1) // 2).repeat(2)[:len(p)]", "rows half a batch apart alone"),
    "one number, and golden ratios": ("", GOLDEN, "neighbors"),
}


@pytest.fixture
def verdict_on(tmp_path, server):
    def judged(before: str, numbers: str):
        path = tmp_path / "sampler.py"
        path.write_text(f"{SAMPLER}\n{before}\n\ndef run(p, m):\n    return sample(p, m, {numbers})\n")
        return judge(str(path), NAME, twin=True, examples=1, seed=3, server=server)

    return judged


@pytest.mark.parametrize("source", HONEST)
def test_randomness_may_come_from_wherever_it_differs(source, verdict_on):
    verdict = verdict_on(*HONEST[source])
    assert verdict.capped and verdict.grade == Grade.KERNEL, verdict


@pytest.mark.parametrize("source", DISHONEST)
def test_what_repeats_itself_is_not_random(source, verdict_on):
    *parts, message = DISHONEST[source]
    verdict = verdict_on(*parts)
    assert verdict.grade == Grade.WRONG and verdict.failure.kind in ("values", "same-draws"), verdict
    if verdict.failure.kind == "same-draws" or "processes" in message:
        assert message in verdict.failure.message


def test_a_callable_may_have_a_generator_that_its_processes_share():
    """Its processes are copies of this one, generators and all: that two of them draw the same says nothing."""
    own = torch.Generator().manual_seed(1)

    def sampler(probs, min_p):
        kept = torch.where(probs >= min_p[:, None] * probs.max(-1, keepdim=True).values, probs, 0.0).double()
        empty = kept.sum(-1) == 0
        kept[empty, torch.where(probs[empty].sum(-1) == 0, probs.shape[1] - 1, 0)] = 1.0
        return torch.multinomial(kept, 1, generator=own).squeeze(1)

    verdict = judge(sampler, NAME, twin=True, examples=1, seed=3)
    assert verdict.grade == Grade.KERNEL and verdict.capped, verdict


def test_a_forked_process_draws_what_no_other_does():
    numpy_random = pytest.importorskip("numpy").random
    assert "numpy.random" in sys.modules
    drawn = set()
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(0)
            numpy_random.seed(0)
            _seed_afresh()
            drawn |= {float(torch.rand(())), float(numpy_random.random())}
    assert len(drawn) == 4


@pytest.mark.parametrize(("more", "fewer", "chance"), [(0, 0, 2.0), (1, 1, 1.5), (0, 3, 0.25), (3, 0, 0.25)])
def test_the_chance_of_two_counts_is_that_of_coins(more, fewer, chance):
    assert _chance(more, fewer) == chance


def test_only_many_rows_that_differ_one_way_are_evidence():
    assert _chance(0, 26) > ALPHA > _chance(0, 28) and _chance(480, 520) > 0.1 and _chance(300, 500) < ALPHA
