"""SGLang's sampler in PyTorch, which its backend `pytorch` and its deterministic mode call.

It sorts a row, drops what is beyond rank k or has more than p of mass before it, and draws from the rest. Of equally
probable tokens it keeps the first ones only, in an order that torch.sort chooses, and a row of which nothing is kept is
an error. With a seed for each request, it draws by the largest of log p plus Gumbel noise, which a hash of the seed,
the position and the token makes; without, torch.multinomial draws from CUDA's global generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.sampling.rows import SamplingOptions
from flashinfer_trace.harness.compare import Policy
from flashinfer_trace.harness.family import Inputs, Kernel, KernelCall, Outputs, SeededCall

__all__ = ["joint_kernels"]

MODULE = "sglang.srt.layers.sampler"
#: That of the recorded runs which call it.
VOCABULARY = 128256


def draw(seeds: bool, definition: Definition, inputs: Inputs, seed: int) -> Outputs:
    """One draw of each row; `seeds` says whether each request has one of its own, here the same at another position."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    probs = inputs["probs"]
    rows = torch.arange(len(probs), device=probs.device)
    own = torch.full_like(rows, seed) if seeds else None
    with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(seed)
        samples = top_k_top_p_min_p_sampling_from_probs_torch(
            probs, inputs["top_k"], inputs["top_p"], torch.zeros_like(inputs["top_p"]), False, own, rows
        )
    return {"samples": samples.to(torch.int64)}


def unrecorded(definition: Definition) -> str | None:
    """Why it is not run for a Definition: it sorts every draw, which takes a GPU longer than all other samplers."""
    size = definition.const_axes["vocab_size"]
    return None if size == VOCABULARY else f"is run for a vocabulary of {VOCABULARY}, as recorded, and no other"


def joint_kernels(compare: Mapping[str, Policy], with_own_seed: Callable[[SeededCall], KernelCall]) -> tuple[Kernel, ...]:
    """Both ways of drawing.

    Args:
        compare: the policy of the samples.
        with_own_seed: makes an adapter that chooses a seed for each case.
    """

    def kernel(seeds: bool) -> Kernel:
        call: SeededCall = functools.partial(draw, seeds)
        return Kernel(
            f"{MODULE}.top_k_top_p_min_p_sampling_from_probs_torch",
            "sglang",
            with_own_seed(call),
            variant="with seeds" if seeds else "",
            min_capability=(8, 0),
            # The Definition says, as flashinfer's kernel does, what is drawn first from rows of another sum than 1, and
            # at boundaries; this sampler draws from what it kept only.
            plan_options=SamplingOptions(lowest_k=1, sums_to_one=True, boundaries=False, untied=True),
            supports=unrecorded,
            compare=compare,
            modules=(MODULE,),
            seeded=call,
            optional=True,
        )

    return (kernel(False), kernel(True))
