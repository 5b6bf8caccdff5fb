"""What flashinfer's attention wrappers have in common: workspaces, infinities, limits.

By their source (flashinfer 0.6.12, include/flashinfer/attention), and plans keep to:

- plan() divides by the batch size and launches a grid of query tiles: a batch of none, and one without queries, fail.
- The infinity is 5e4 (math.cuh). Masked logits are -5e4, in fa2 and fa3 *before* scaling, so keys whose q.k
  comes near -5e4 would be confused with masked ones; the plans' q.k stays below 5e3.
- A request without keys: decode starts from m = -5e4, d = 1 in each of up to 32 warps, and fa2 adds weights of 1 for
  masked keys to d, but both set the output to 0 and answer lse = m + log2(d), from -5e4 to -5e4 + 32. fa3 answers 0 and
  exactly -5e4.
- A query longer than its keys under the causal mask, whose first rows see none: two defects, so neither fa2 nor fa3 is
  given such plans. fa2 (prefill.cuh) computes the first tile of keys that needs the mask as an unsigned
  kv_len + first row - qo_len; where that is negative it wraps, no full tile of keys is masked, and every row of the
  query tile sees keys that it must not: measured on an H200, row 0 of 173 queries over 103 keys answers an lse of 6.67,
  as the 64 keys of the one full tile would have, instead of -inf. fa3 skips tiles of queries that see nothing; in one
  where others see keys, such a row gets the mean of values that it must not see, because its masked logits equal its
  maximum (read in its source, not measured).
- Keys from kv_len on are masked and values from there on are zeros, whatever the memory holds: NaN does not leak.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashinfer_trace.families.attention.cases import ROWS_WITHOUT_KEYS
from flashinfer_trace.families.attention.policies import Rounding

__all__ = ["CUDA_CORES", "EMPTY", "FA2", "FA3", "LAUNCHABLE", "MASKED", "SEEING", "wrapper"]

#: Partial outputs of 128 heads in tiles of 128 queries: what fa2 needs at most on 132 multiprocessors, twice.
WORKSPACE_BYTES = 512 * 2**20
LAUNCHABLE = {"len_indptr": (2, 1 << 20), "total_q": (1, 1 << 30), "num_pages": (1, 1 << 30), "total_kv": (1, 1 << 30)}
#: For a kernel that cannot compute a row without keys unless its request has none.
SEEING = {**LAUNCHABLE, ROWS_WITHOUT_KEYS: (0, 0)}
#: The lse of a row without keys: of a skipped tile, and of one that was computed and masked.
EMPTY = (-5e4, -5e4)
MASKED = (-5e4, -5e4 + 32)
FA2 = Rounding(weights=True, sum=True, partial=True)
FA3 = Rounding(weights=True, sum=False, partial=False)
CUDA_CORES = Rounding(weights=False, sum=False, partial=True)


@functools.cache
def wrapper(path: str, device: torch.device, *arguments: Any) -> Any:
    """One of flashinfer's wrappers, by dotted path, with its workspace; every call plans anew.

    `arguments` are keyword arguments of the constructor as (name, value).
    """
    import importlib

    module, _, name = path.rpartition(".")
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return getattr(importlib.import_module(module), name)(workspace, "NHD", **dict(arguments))
