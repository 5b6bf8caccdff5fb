"""SplitMix64 as a counter-based generator of random words: the same bits on every device and with every torch.

Each word of 64 bits is a function of its number alone (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA'14, https://doi.org/10.1145/2660193.2660195). It takes eight integer operations, so a CPU makes
words almost as fast as torch's own generator does, and a GPU makes gigabytes of them in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch

#: The step from one word to the next, and the shifts and the multipliers that mix it, as the authors chose them.
GAMMA = 0x9E3779B97F4A7C15
MIXES = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
ALL = (1 << 64) - 1
#: Words that are computed at once: on a CPU as many as its caches hold.
CPU_CHUNK, GPU_CHUNK = 1 << 14, 1 << 23
#: Up to so many words are computed at once on a CPU, which is done before a GPU has launched its kernels.
FEW = 1 << 14


def of_words(
    seed: int, draw: int, count: int, device: torch.device, of: Callable[[Any, Any], Any], dtype: str, each: int = 1
) -> torch.Tensor:
    """The values made from the words of a draw, [count].

    Args:
        seed, draw: give the words: draw n is the same whatever the sizes of the others are.
        device: where they are made.
        of: (words, numpy or torch) -> what is made of int64 words, for arrays and tensors alike, of this dtype.
        each: how many are made of each word.
    """
    if not count:  # an empty array has no strides that a tensor could have
        return torch.empty(0, dtype=getattr(torch, dtype), device=device)
    base, words = mixed_number(seed + draw * GAMMA), -(-count // each)
    if words <= FEW:
        return torch.from_numpy(of(_mixed(numpy.arange(1, words + 1), base), numpy))[:count].to(device)
    library: Any = numpy if device.type == "cpu" else torch
    where, chunk = ({}, CPU_CHUNK) if library is numpy else ({"device": device}, GPU_CHUNK)
    found = library.empty(words * each, dtype=getattr(library, dtype), **where)
    for start in range(0, words, chunk):
        stop = min(start + chunk, words)
        numbers = library.arange(start + 1, stop + 1, dtype=library.int64, **where)
        found[start * each : stop * each] = of(_mixed(numbers, base), library)
    return (torch.from_numpy(found) if library is numpy else found)[:count]


def _mixed(numbers: Any, base: int) -> Any:
    """Words by number, int64 [n] of numpy or of torch, in place: products and sums wrap around."""
    numbers *= _signed(GAMMA)
    numbers += _signed(base)
    for shift, multiplier in MIXES:
        if isinstance(numbers, numpy.ndarray):
            numbers ^= (numbers.view(numpy.uint64) >> numpy.uint64(shift)).view(numpy.int64)
        else:
            numbers ^= (numbers >> shift) & (ALL >> shift)
        if multiplier != 1:
            numbers *= _signed(multiplier)
    return numbers


def mixed_number(number: int) -> int:
    """A word by its number, as one number."""
    number &= ALL
    for shift, multiplier in MIXES:
        number = ((number ^ (number >> shift)) * multiplier) & ALL
    return number


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
