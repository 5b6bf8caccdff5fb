"""SGLang's Triton attention for decode: one product over slots of a cache, in two launches.

From its source (SGLang 0.5.23, kernels/ops/attention/decode_attention.py):

- The keys of a request are split into at most `SPLITS` parts of a multiple of 32. The first launch stores the output
  and the natural lse of each part in float32; the second one merges them. Parts without keys are not written.
- Weights are summed in float32 and rounded to bf16 for the product with the values.
- Slots after the last key of a request are masked when they are loaded, so NaN in other slots does not leak.
- A request without keys divides 0 by 0. SGLang never has one, so plans do not draw any.
- With one query head for each key head (MHA), another kernel runs. It multiplies q and k, and sums the products, in
  bf16, which float32 cannot bound: see findings/kernels.json. No Definition names it.
"""

from __future__ import annotations

import torch

from flashinfer_trace.families.attention.kernels import BATCHES, PAGES, WITH_KEYS
from flashinfer_trace.families.attention.policies import LOG2_E, Rounding, kernel_policies
from flashinfer_trace.harness.family import Kernel, KernelCall, Outputs

MODULE = "sglang.kernels.ops.attention.decode_attention"
#: SGLang's default of triton_attention_num_kv_splits.
SPLITS = 8
ROUNDING = Rounding(weights=True, sum=False, partial=0)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
    output: torch.Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    **options: bool,
) -> Outputs:
    """Runs the kernel on queries [batch, heads, dim] and slots [slots, kv_heads, dim].

    `scales` are those of the cache, `options` further arguments of the kernel.

    The lse comes from those of the parts, which the first launch stores, and from the sinks [heads]: parts without keys
    keep -inf.
    """
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    batch, heads, _ = q.shape
    parts = torch.empty(batch, heads, SPLITS, values.shape[-1], dtype=torch.float32, device=q.device)
    lse = torch.full((batch, heads, SPLITS), -torch.inf, dtype=torch.float32, device=q.device)
    splits = torch.full((batch,), SPLITS, dtype=torch.int32, device=q.device)
    where = kv_indptr, kv_indices.long()
    common = (q, keys, values, output, *where, parts, lse, splits, SPLITS, sm_scale, *scales)
    decode_attention_fwd(*common, logit_cap=logit_cap, sinks=sinks, **options)
    if sinks is not None:
        lse = torch.cat((lse, sinks[None, :, None].expand(batch, -1, -1)), dim=-1)
    return {"output": output, "lse": torch.logsumexp(lse, dim=-1) * LOG2_E}


def decode_kernel(call: KernelCall) -> Kernel:
    """The kernel of a family; `call` passes the family's inputs to `attend`."""
    return Kernel(
        f"{MODULE}.decode_attention_fwd",
        call,
        limits={**BATCHES, **PAGES},
        plan_options=WITH_KEYS,
        compare=kernel_policies(ROUNDING),
    )
