"""Describes how an output as a whole is wrong, and guesses why. No verdict depends on it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch

from flashinfer_trace.format.definition import TensorSpec
from flashinfer_trace.judging.verdict import Failure
from flashinfer_trace.verdict.compare import Expected, Policy, correctly_rounded, unit_roundoff
from flashinfer_trace.verdict.errors import beyond_bound, element_bound, signed_errors
from flashinfer_trace.verdict.tensors import as_integers

#: A guess needs at least this many elements, and this share of them must fit it.
FEWEST, MOST_OF = 32, 0.98
#: How many indices are listed one by one.
LISTED = 4
#: Numbers of bounds: how far the median of a factor must be from 1, how close the other elements must be to the factor,
#: and how large an element must be to count.
STICKS_OUT, FITS, TELLING = 2.0, 2.0, 8.0
#: How many roundings to the output's dtype can be distinguished, and their names.
ROUNDINGS = {2: "two", 3: "three"}
#: Short names of dtypes that results of wider ones are rounded to in between; of TF32, how many low bits are zero.
NARROWER = {torch.bfloat16: "bf16", torch.float16: "fp16"}
TF32_MASK = (1 << 13) - 1


def diagnosed(
    failure: Failure, spec: TensorSpec, got: torch.Tensor, fill: torch.Tensor, expected: Expected, policy: Policy
) -> Failure:
    """A failure of values, with the share of wrong elements, where they are, their mean signed error, and a guess.

    Args:
        got, fill: what the call left, and what the memory held before it.
        policy: one that judges each element by itself. Under any other, only unwritten elements are reported.
    """
    value = expected.value
    if got.shape != value.shape or not got.numel():
        return failure
    unwritten = as_integers(got) == as_integers(fill.to(got.device))
    bound = element_bound(policy, expected, got.dtype)
    names = list(spec.shape or ())
    if bound is None:
        untouched = unwritten & (_blank(fill) | bool(unwritten.all()))
        guess = f"{_where(untouched, names)} not written" if untouched.any() else ""
        return dataclasses.replace(failure, guess=guess)
    wrong = beyond_bound(got, value, bound)
    written = torch.where(wrong & unwritten, math.nan, got.double())
    hit = {name: which(indices, size) for name, indices, size in _hit(wrong, names)}
    return dataclasses.replace(
        failure,
        wrong=int(wrong.sum()),
        share=float(wrong.double().mean()),
        signed=signed_errors(written, value, bound).mean if bool((bound > 0).all()) else math.nan,
        hit=hit,
        guess=_guess(got, value.double(), bound, wrong, unwritten, names),
    )


def _blank(fill: torch.Tensor) -> torch.Tensor:
    """Where a fill is not an ordinary number."""
    return fill.isnan() if fill.is_floating_point() else torch.zeros_like(fill, dtype=torch.bool)


def _guess(
    got: torch.Tensor,
    value: torch.Tensor,
    bound: torch.Tensor,
    wrong: torch.Tensor,
    unwritten: torch.Tensor,
    names: Sequence[str],
) -> str:
    """The most likely cause; empty if none is likely."""
    if not wrong.any():
        return ""
    for mask, what in ((unwritten, "not written"), (got.isnan(), "NaN"), (got == 0, "zero")):
        if float(mask[wrong].double().mean()) >= MOST_OF:
            return f"{_where(wrong & mask, names)} {what}"
    if got.is_floating_point():
        guess = _factor(got, value, bound) or _narrow(got) or _direction(got, value) or _roundings(got, value)
        if guess:
            return guess
    place = _where(wrong, names)
    return "" if place.startswith("all ") else f"only {place} wrong"


def _factor(got: torch.Tensor, value: torch.Tensor, bound: torch.Tensor) -> str:
    telling = (value.abs() > TELLING * bound) & value.isfinite() & got.isfinite()
    if int(telling.sum()) < FEWEST:
        return ""
    ratio = got.double()[telling] / value[telling]
    slack = bound[telling] / value[telling].abs()
    factor = float(ratio.median())
    fits = ((ratio - factor).abs() <= FITS * slack).double().mean()
    sticks_out = (abs(factor - 1) > STICKS_OUT * slack).double().mean()
    if fits < MOST_OF or sticks_out < MOST_OF:
        return ""
    return f"every element is {factor:.4g} x what is right"


def _narrow(got: torch.Tensor) -> str:
    """A guess at a narrower format of all results."""
    if got.dtype != torch.float32 or got.numel() < FEWEST:
        return ""
    finite = got[got.isfinite() & (got != 0)]
    if len(finite) < FEWEST:
        return ""
    for dtype, name in NARROWER.items():
        if bool((finite.to(dtype).float() == finite).all()):
            return f"every element is a {name} number: the result is rounded to {name} before it is float32"
    return "every element is a TF32 number" if bool(((as_integers(finite) & TF32_MASK) == 0).all()) else ""


def _roundings(got: torch.Tensor, value: torch.Tensor) -> str:
    """A guess at roundings to the output's dtype in between."""
    name = NARROWER.get(got.dtype)
    usual = value.isfinite() & (value.abs() > torch.finfo(got.dtype).smallest_normal) & got.isfinite()
    if name is None or int(usual.sum()) < FEWEST or not bool((usual | (got.double() == value)).all()):
        return ""
    own = float(((got.double() - value)[usual] / value[usual]).abs().max()) / unit_roundoff(got.dtype)
    count = math.ceil(own - 2 * unit_roundoff(got.dtype))
    return f"{ROUNDINGS[count]} {name} roundings: a result in between is rounded as well" if count in ROUNDINGS else ""


def _direction(got: torch.Tensor, value: torch.Tensor) -> str:
    usual = value.isfinite() & got.isfinite() & (value != 0)
    own, right = got.double()[usual], value[usual]
    off = own != correctly_rounded(right, got.dtype)
    if int(off.sum()) < FEWEST:
        return ""
    inward = float((own[off].abs() < right[off].abs()).double().mean())
    if inward >= MOST_OF:
        return "all toward zero: truncated, or terms are left out"
    return "all away from zero: terms are counted twice, or rounded up" if 1 - inward >= MOST_OF else ""


def _hit(mask: torch.Tensor, names: Sequence[str]) -> list[tuple[str, list[int], int]]:
    """For each axis: its name, the indices at which an element is in the mask, and its size."""
    found = []
    for axis, size in enumerate(mask.shape):
        others = [one for one in range(mask.ndim) if one != axis]
        hit = mask.any(dim=tuple(others)) if others else mask
        name = names[axis] if axis < len(names) else f"axis {axis}"
        found.append((name, hit.nonzero().flatten().tolist(), size))
    return found


def _where(mask: torch.Tensor, names: Sequence[str]) -> str:
    """The elements of a mask in words, with the verb: ``rows 128 and up are``."""
    parts = []
    for number, (name, indices, size) in enumerate(_hit(mask, names)):
        if len(indices) < size:
            word = "heads" if "head" in name and "dim" not in name else name if number else "rows"
            parts.append(f"{word} {which(indices, size)}")
    whole = int(mask.sum()) >= MOST_OF * math.prod(len(indices) for _, indices, _ in _hit(mask, names))
    some = "" if whole else "some elements of "
    return f"{some}{', '.join(parts) or 'all elements'} are"


def which(indices: Sequence[int], size: int) -> str:
    """Some of the indices from 0 to size - 1 in words: ``all``, ``128 and up``, ``3 to 7``, ``every 2nd from 1``."""
    if len(indices) == size:
        return "all"
    if not indices:
        return "none"
    first, last, steps = indices[0], indices[-1], {b - a for a, b in itertools.pairwise(indices)}
    if steps == {1} or len(indices) == 1:
        if last == size - 1 and first < last:
            return f"{first} and up"
        return str(first) if first == last else f"{first} to {last}"
    if len(steps) == 1 and len(indices) > LISTED // 2:
        return f"every {_ordinal(steps.pop())} from {first}"
    shown = ", ".join(map(str, indices[:LISTED]))
    return shown if len(indices) <= LISTED else f"{shown}, ... ({len(indices)} of {size})"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 10 <= number % 100 <= 20 else ending}"
