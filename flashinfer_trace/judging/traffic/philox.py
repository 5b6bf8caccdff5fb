"""Philox4x32-10, a counter-based generator of random bits: the same bits on every device and with every torch.

Each block of 128 bits is a function of a 128-bit counter and a 64-bit key (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC'11, https://doi.org/10.1145/2063384.2063405), so that blocks can be computed in any order. Only
integer operations are used, which are exact on CPUs and GPUs alike.
"""

from __future__ import annotations

import torch

__all__ = ["ROUNDS", "Stream", "philox"]

#: Multipliers of a round, and what is added to the key after each, as the authors chose them.
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_INCREMENTS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10

_WORD = 0xFFFFFFFF
#: Blocks that are computed at once: on a CPU as many as its caches hold.
_CPU_CHUNK, _GPU_CHUNK = 1 << 14, 1 << 23


def philox(counter: tuple[torch.Tensor, ...], key: tuple[int, int], rounds: int = ROUNDS) -> tuple[torch.Tensor, ...]:
    """The blocks of some counters.

    Args:
        counter: four int64 tensors of one shape: 32-bit words, the least significant first.
        key: two 32-bit words.

    Returns:
        Four int64 tensors of that shape, each element a 32-bit word.
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(rounds):
        # A product of two words wraps around in int64, but its 64 bits are right; so are those after the shift.
        low, high = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a = (high >> 32).bitwise_and_(_WORD).bitwise_xor_(b).bitwise_xor_(first)
        c = (low >> 32).bitwise_and_(_WORD).bitwise_xor_(d).bitwise_xor_(second)
        b, d = high.bitwise_and_(_WORD), low.bitwise_and_(_WORD)
        first, second = (first + _INCREMENTS[0]) & _WORD, (second + _INCREMENTS[1]) & _WORD
    return a, b, c, d


class Stream:
    """Draws of random bits, one after the other: draw n of a seed is the same whatever the others were.

    The counter of a block has the number of the block in its first two words, and that of the draw in its third.
    """

    def __init__(self, seed: int) -> None:
        self._key = seed & _WORD, (seed >> 32) & _WORD
        self._draws = 0

    def skip(self) -> None:
        """Leaves out one draw."""
        self._draws += 1

    def words(self, count: int, device: torch.device) -> torch.Tensor:
        """The next draw: int64 [count], all 64 bits of each random."""
        self._draws += 1
        blocks = -(-count // 2)
        found = torch.empty(2 * blocks, dtype=torch.int64, device=device)
        chunk = _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK
        for start in range(0, blocks, chunk):
            number = torch.arange(start, min(start + chunk, blocks), dtype=torch.int64, device=device)
            zero = torch.zeros_like(number)
            a, b, c, d = philox((number & _WORD, number >> 32, zero + self._draws, zero), self._key)
            part = found[2 * start : 2 * (start + len(number))].view(-1, 2)
            part[:, 0] = (b << 32) | a
            part[:, 1] = (d << 32) | c
        return found[:count]
