"""The sampling kernels' rules, as the references follow them: ties, thresholds met exactly, corners of k and p."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_rows import EXACT, case, definition_of

from flashinfer_trace.families import renorm, sampling
from flashinfer_trace.harness.case import reference_outputs

FAMILY = {family.name: family for family in (*sampling.FAMILIES, *renorm.FAMILIES)}
TIED = [0.3, 0.2, 0.2, 0.2, 0.1, 0.0, 0.0, 0.0]
ZERO = [0.0] * 8


def drawn(name: str, row: list[float], **parameters: float) -> list[float]:
    """Frequencies of the tokens that the reference draws."""
    inputs = case(row, 20_000, **parameters)
    samples = reference_outputs(definition_of(FAMILY[name]), inputs, seed=3)["samples"]
    assert samples.dtype == torch.int64
    return (torch.bincount(samples.long(), minlength=len(row)).double() / len(samples)).tolist()


def share(row: list[float], keep: set[int]) -> list[float]:
    """Probabilities in proportion among the tokens in `keep`."""
    total = sum(row[token] for token in keep)
    return [value / total if token in keep else 0.0 for token, value in enumerate(row)]


def assert_drawn(frequencies: list[float], expected: list[float]) -> None:
    """Exact support; frequencies within five standard deviations of 20,000 draws."""
    assert [f > 0 for f in frequencies] == [e > 0 for e in expected]
    assert frequencies == pytest.approx(expected, abs=5 * 0.5 / math.sqrt(20_000))


@pytest.mark.parametrize(
    ("top_k", "keep"),
    [
        (1, {0}),
        (2, {0, 1, 2, 3}),  # three tokens are tied with the second
        (4, {0, 1, 2, 3}),
        (5, {0, 1, 2, 3, 4}),
        (8, {0, 1, 2, 3, 4}),  # never a token of probability 0
        (9, {0, 1, 2, 3, 4}),
        (1 << 30, {0, 1, 2, 3, 4}),
        (-1, {0, 1, 2, 3, 4}),
    ],
)
def test_top_k_keeps_ties_and_positive_tokens(top_k: int, keep: set[int]) -> None:
    assert_drawn(drawn("top_k_sampling_from_probs", TIED, top_k=top_k), share(TIED, keep))


@pytest.mark.parametrize(
    ("top_p", "keep"),
    [
        (0.05, {1}),
        (0.5, {1}),  # the mass reaches p exactly with token 1, which is the last one
        (0.500001, {1, 3}),
        (0.75, {1, 3}),
        (0.875, {1, 3, 4}),
        (0.8751, {0, 1, 2, 3, 4}),  # both tied tokens stay
        (1.0, {0, 1, 2, 3, 4}),
        (1.5, {0, 1, 2, 3, 4}),
    ],
)
@pytest.mark.parametrize(
    "name", ["top_p_sampling_from_probs", "top_k_top_p_sampling_from_probs", "top_k_top_p_joint_sampling_from_probs"]
)
def test_top_p_keeps_the_token_that_reaches_p_and_its_ties(name: str, top_p: float, keep: set[int]) -> None:
    parameters = {"top_p": top_p} if "top_k" not in name else {"top_k": -1, "top_p": top_p}
    assert_drawn(drawn(name, EXACT, **parameters), share(EXACT, keep))


@pytest.mark.parametrize(("top_k", "top_p", "keep"), [(2, 0.6, {1}), (2, 0.7, {1, 3}), (4, 1.0, {0, 1, 2, 3, 4})])
@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0])
def test_top_k_scales_before_top_p(top_k: int, top_p: float, keep: set[int], scale: float) -> None:
    row = [value * scale for value in EXACT]
    assert_drawn(drawn("top_k_top_p_sampling_from_probs", row, top_k=top_k, top_p=top_p), share(row, keep))


@pytest.mark.parametrize(
    ("top_k", "top_p", "keep"), [(2, 0.6, {1, 3}), (2, 0.5, {1}), (4, 0.75, {1, 3}), (1, 0.9, {1})]
)
def test_joint_top_p_looks_at_the_whole_row(top_k: int, top_p: float, keep: set[int]) -> None:
    """The two most probable tokens have 0.5 and 0.25: of what top-k keeps, 0.6 would be reached by the first alone."""
    drawn_row = drawn("top_k_top_p_joint_sampling_from_probs", EXACT, top_k=top_k, top_p=top_p)
    assert_drawn(drawn_row, share(EXACT, keep))


@pytest.mark.parametrize(
    ("min_p", "keep"), [(0.25, {1, 3, 4}), (0.26, {1, 3}), (1.0, {1}), (0.0, {0, 1, 2, 3, 4}), (-0.5, {0, 1, 2, 3, 4})]
)
@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0])
def test_min_p_keeps_the_threshold_itself_at_any_scale(min_p: float, keep: set[int], scale: float) -> None:
    row = [value * scale for value in EXACT]
    assert_drawn(drawn("min_p_sampling_from_probs", row, min_p=min_p), share(row, keep))


@pytest.mark.parametrize(
    ("name", "row", "parameters", "token"),
    [
        ("top_k_sampling_from_probs", TIED, {"top_k": 0}, 0),
        ("top_k_sampling_from_probs", ZERO, {"top_k": 3}, 0),
        ("top_p_sampling_from_probs", EXACT, {"top_p": 0.0}, 0),
        ("top_p_sampling_from_probs", EXACT, {"top_p": -1.0}, 0),
        ("top_p_sampling_from_probs", ZERO, {"top_p": 0.9}, 0),
        ("top_k_top_p_sampling_from_probs", EXACT, {"top_k": 0, "top_p": 0.9}, 0),
        ("top_k_top_p_sampling_from_probs", EXACT, {"top_k": 3, "top_p": 0.0}, 0),
        ("top_k_top_p_sampling_from_probs", ZERO, {"top_k": 3, "top_p": 0.9}, 0),
        ("top_k_top_p_joint_sampling_from_probs", EXACT, {"top_k": 0, "top_p": 0.9}, 0),
        ("top_k_top_p_joint_sampling_from_probs", EXACT, {"top_k": 3, "top_p": 0.0}, 0),
        ("top_k_top_p_joint_sampling_from_probs", ZERO, {"top_k": 3, "top_p": 0.9}, 0),
        ("min_p_sampling_from_probs", EXACT, {"min_p": 1.5}, 0),
        ("min_p_sampling_from_probs", ZERO, {"min_p": 0.5}, 7),
    ],
)
def test_where_nothing_can_be_drawn(name: str, row: list[float], parameters: dict[str, float], token: int) -> None:
    assert drawn(name, row, **parameters)[token] == 1.0


def test_the_first_draw_is_not_scaled_by_the_rows_sum() -> None:
    """Sum 2: mass beyond 1 is not reached at first. Sum 1/2: the last positive token takes what is missing."""
    double, half = [2 * value for value in EXACT], [value / 2 for value in EXACT]
    assert_drawn(drawn("top_k_sampling_from_probs", double, top_k=5), [0.125, 0.875, 0, 0, 0, 0, 0, 0])
    # Tokens 1 and 3 are kept; token 0, an eighth of the first draws, is drawn again between them.
    expected = [0, 0.875 + 0.125 * 2 / 3, 0, 0.125 / 3, 0, 0, 0, 0]
    assert_drawn(drawn("top_p_sampling_from_probs", double, top_p=1.25), expected)
    expected = [0.03125, 0.25, 0.03125, 0.125, 0.0625 + 0.5, 0, 0, 0]
    assert_drawn(drawn("top_p_sampling_from_probs", half, top_p=0.9), expected)


def renormalized(name: str, row: list[float], **parameters: float) -> list[float]:
    inputs = case(row, 2, **parameters)
    output = reference_outputs(definition_of(FAMILY[name]), inputs, seed=0)["renorm_probs"]
    assert torch.equal(output[0], output[1])
    return output[0].tolist()


@pytest.mark.parametrize(
    ("top_k", "keep"), [(1, {1}), (3, {1, 3, 4}), (4, {0, 1, 2, 3, 4}), (8, {0, 1, 2, 3, 4}), (-1, {0, 1, 2, 3, 4})]
)
@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0])
def test_top_k_renorm(top_k: int, keep: set[int], scale: float) -> None:
    row = [value * scale for value in EXACT]
    assert renormalized("top_k_renorm_probs", row, top_k=top_k) == pytest.approx(share(row, keep), rel=1e-7)


@pytest.mark.parametrize(
    ("top_p", "keep"),
    [(-1.0, {1}), (0.0, {1}), (0.5, {1}), (0.75, {1, 3}), (0.9, {0, 1, 2, 3, 4}), (1.5, {0, 1, 2, 3, 4})],
)
@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0])
def test_top_p_renorm_takes_p_as_a_share_of_the_sum(top_p: float, keep: set[int], scale: float) -> None:
    row = [value * scale for value in EXACT]
    assert renormalized("top_p_renorm_probs", row, top_p=top_p) == pytest.approx(share(row, keep), rel=1e-7)


def test_renorm_gives_zeros_where_nothing_is_kept() -> None:
    assert renormalized("top_k_renorm_probs", EXACT, top_k=0) == ZERO
    assert renormalized("top_k_renorm_probs", ZERO, top_k=2) == ZERO
    assert renormalized("top_p_renorm_probs", ZERO, top_p=0.9) == ZERO
