"""Common to flashinfer's attention wrappers: workspaces, limits, and what each backend rounds.

The following is from their source (flashinfer 0.7.2, include/flashinfer/attention), and plans respect it:

- plan() divides by the batch size and launches a grid of query tiles, so an empty batch and a batch without queries
  fail.
- Masked logits are -inf (math.cuh). A row without keys has an output of 0 and an lse of -inf in every backend, and
  merging keeps it so (state.cuh, cascade.cuh). Until 0.6.12 at least, infinity was 5e4: such an lse was from -5e4 to
  -5e4 + 32, and keys whose q.k came near -5e4 were confused with masked ones.
- If a request has more queries than keys, its first rows see no keys under the causal mask. fa2 has a defect there, so
  it is given no such plans. It (prefill.cuh) computes the first tile of keys that needs the mask as an unsigned
  kv_len + first row - qo_len. Where that is negative it wraps: no full tile of keys is masked, and every row of the
  query tile sees keys that it must not see. Measured with 0.6.12 on an H200: row 0 of 173 queries over 103 keys returns
  an lse of 6.67, as the 64 keys of the one full tile would have, instead of -inf. The expression is the same in 0.7.2.
- fa3 skips tiles of queries that see nothing. In a tile where other rows see keys, 0.6.12 returned the mean of values
  that such a row must not see, because its masked logits equaled its maximum. 0.7.2 returns 0 and -inf there
  (attention_updater.cuh). Both are known from the source, not measured, so fa3 is given no such plans yet.
- Keys from kv_len on are masked and values from there on are zeros, whatever the memory contains, so NaN does not leak.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flashinfer_trace.families.attention.cases import AttentionOptions
from flashinfer_trace.families.attention.policies import Rounding, kernel_policies
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs

#: Twice what fa2 needs at most on 132 multiprocessors: partial outputs of 128 heads in tiles of 128 queries.
WORKSPACE_BYTES = 512 * 2**20
#: What every plan() accepts: at least one request, at least one query, and a cache with at least one page.
BATCHES = {"len_indptr": (2, 1 << 20)}
QUERIES = {"total_q": (1, 1 << 30)}
PAGES = {"num_pages": (1, 1 << 30)}
#: For kernels that need a key in the batch; for those that also cannot compute a row without keys unless its request
#: has none; and for those that need a key in every request with a query.
SOME_KEYS = AttentionOptions(keyless=False)
SEEING = AttentionOptions(keyless=False, unseeing_rows=False)
WITH_KEYS = AttentionOptions(keyless=False, keyless_requests=False)

#: Tables of pages are as wide as whole numbers of this many tokens, as Blackwell's kernels need them.
TABLE_TOKENS = 128

#: (backend, definition, inputs, poisoned outputs) -> outputs.
Run = Callable[[str, Definition, Inputs, Outputs], Outputs]


@dataclass(frozen=True)
class Backend:
    """One of the kernels behind a wrapper.

    Attributes:
        name: the kernel's variant; except for `CUDA_CORES`, also what the wrapper takes as `backend`.
        rounding: what it rounds besides its output.
    """

    name: str
    rounding: Rounding


CUDA_CORES = Backend("CUDA cores", Rounding(weights=False, sum=False, partial=2))
FA2 = Backend("fa2", Rounding(weights=True, sum=True, partial=2))
FA3 = Backend("fa3", Rounding(weights=True, sum=False, partial=0))


def flashinfer_kernels(
    path: str,
    run: Run,
    backends: Sequence[Backend],
    *,
    limits: Mapping[str, tuple[int, int]],
    plan_options: AttentionOptions = SOME_KEYS,
    common: AttentionOptions | None = None,
) -> tuple[Kernel, ...]:
    """One kernel per backend of the wrapper at `path`; `Kernel` documents the other arguments."""
    return tuple(
        Kernel(
            path,
            functools.partial(run, backend.name),
            variant=backend.name,
            limits=limits,
            plan_options=plan_options,
            common=common,
            compare=kernel_policies(backend.rounding),
        )
        for backend in backends
    )


def masking(definition: Definition) -> dict[str, float]:
    """The arguments of plan() for the window of keys and the cap of logits that a Definition has.

    window_left counts the keys before a query's own one.
    """
    axes = definition.const_axes
    found: dict[str, float] = {}
    if "window_size" in axes:
        found["window_left"] = axes["window_size"] - 1
    if "logits_soft_cap" in axes:
        found["logits_soft_cap"] = float(axes["logits_soft_cap"])
    return found


def table_of(inputs: Inputs, page_size: int) -> torch.Tensor:
    """int32 [batch_size, pages]: the pages of each request, then page 0."""
    pages = inputs["kv_indptr"].diff()
    width = max([1, *pages.tolist()])
    whole = max(1, TABLE_TOKENS // page_size)
    column = torch.arange(-(-width // whole) * whole, device=pages.device)
    place = (inputs["kv_indptr"][:-1, None] + column).clamp_max(max(0, len(inputs["kv_indices"]) - 1))
    own = inputs["kv_indices"][place.long()] if len(inputs["kv_indices"]) else torch.zeros_like(place)
    return torch.where(column < pages[:, None], own, 0).to(torch.int32)


class Wrapper(Protocol):
    """One of flashinfer's classes: plan() takes the structure of a batch, run() its tensors."""

    def plan(self, *arguments: Any, **options: Any) -> None: ...

    def run(self, *arguments: Any, **options: Any) -> object: ...


@functools.cache
def workspace(device: torch.device) -> torch.Tensor:
    """Of all wrappers on a GPU: each uses it from its plan to the end of its run, and none in between."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@functools.cache
def wrapper(kind: Callable[..., Wrapper], device: torch.device, **options: str | bool | int) -> Wrapper:
    """One object of flashinfer's class `kind` per GPU and set of options; every case plans anew."""
    return kind(workspace(device), **options)
