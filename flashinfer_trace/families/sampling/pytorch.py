"""SGLang's sampler in PyTorch, which its backend `pytorch` and its deterministic mode call.

It sorts a row, drops what is beyond rank k or has more than p of mass before it, and draws from the rest. Of equally
probable tokens it keeps the first ones only, in an order that torch.sort chooses, and a row of which nothing is kept is
an error. With a seed for each request, it draws by the largest of log p plus Gumbel noise, which a hash of the seed,
the position and the token makes; without, torch.multinomial draws from CUDA's global generator.

From its source (SGLang 0.5.11 and 0.5.23, srt/layers/sampler.py): where the hash is 2^32 - 1 the noise is infinite, and
for a token that was dropped, whose log p is minus infinity, the sum is NaN, which torch.argmax takes for the largest.
So one draw in 2^32 / vocab_size returns a token that was dropped. The adapter passes seeds for which no hash is 2^32 -
1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from flashinfer_trace.families.sampling.rows import SamplingOptions
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, KernelCall, Outputs, SeededCall
from flashinfer_trace.verdict.compare import Policy

MODULE = "sglang.srt.layers.sampler"


def draw(seeds: bool, definition: Definition, inputs: Inputs, seed: int) -> Outputs:
    """One draw of each row; `seeds` says whether each request has one of its own, here the same at another position."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    probs = inputs["probs"]
    rows = torch.arange(len(probs), device=probs.device)
    own = harmless_seeds(seed, rows, probs.shape[1]) if seeds else None
    devices = [probs.device] if probs.is_cuda else []
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(seed)
        samples = top_k_top_p_min_p_sampling_from_probs_torch(
            probs, inputs["top_k"], inputs["top_p"], torch.zeros_like(inputs["top_p"]), False, own, rows
        )
    return {"samples": samples.to(torch.int64)}


def harmless_seeds(seed: int, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The same seed for each position: the first from `seed` on that gives no token the largest hash."""
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32

    tokens = torch.arange(vocab_size, device=positions.device)
    while True:
        own = torch.full_like(positions, seed)
        hashes = murmur_hash32(own.to(torch.uint64), positions, tokens)
        if not bool((hashes.view(torch.int32) == -1).any()):
            return own
        seed += 1


def joint_kernels(
    compare: Mapping[str, Policy], with_own_seed: Callable[[SeededCall], KernelCall]
) -> tuple[Kernel, ...]:
    """Both ways of drawing.

    Args:
        compare: the policy of the samples.
        with_own_seed: makes an adapter that chooses a seed for each case.
    """

    def kernel(seeds: bool) -> Kernel:
        call: SeededCall = functools.partial(draw, seeds)
        return Kernel(
            f"{MODULE}.top_k_top_p_min_p_sampling_from_probs_torch",
            with_own_seed(call),
            variant="with seeds" if seeds else "",
            # The Definition says, as flashinfer's kernel does, what is drawn first from rows of another sum than 1, and
            # at boundaries; this sampler draws from what it kept only.
            plan_options=SamplingOptions(lowest_k=1, sums_to_one=True, boundaries=False, untied=True),
            compare=compare,
            seeded=call,
        )

    return (kernel(False), kernel(True))
