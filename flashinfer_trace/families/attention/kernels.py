"""Common to flashinfer's attention wrappers: workspaces, limits, and the roundings of each backend.

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
- fa3's epilogue copies outputs that a slower warp has not written, now and then (findings/kernels.json): elements are
  values instead. A run that met this is not repeated until it passes.
- Keys from kv_len on are masked and values from there on are zeros, whatever the memory contains, so NaN does not leak.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.families.attention.cases import AttentionOptions
from flashinfer_trace.families.attention.policies import Rounding, kernel_policies
from flashinfer_trace.families.calls import called, function_at
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs

#: Twice what fa2 needs at most on 132 multiprocessors: partial outputs of 128 heads in tiles of 128 queries.
WORKSPACE_BYTES = 512 * 2**20
#: Every plan() accepts these: at least one request, at least one query, and a cache with at least one page.
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
        name: the kernel's variant; except for `CUDA_CORES`, also the wrapper's argument `backend`.
        rounding: the values that it rounds, other than its output.
    """

    name: str
    rounding: Rounding


CUDA_CORES = Backend("CUDA cores", Rounding(weights=False, sum=False, partial=2))
FA2 = Backend("fa2", Rounding(weights=True, sum=True, partial=2))
FA3 = Backend("fa3", Rounding(weights=True, sum=False, partial=0))


def flashinfer_kernels(
    path: str, run: Run, backends: Sequence[Backend], *, plan_options: AttentionOptions = SOME_KEYS, **how: Any
) -> tuple[Kernel, ...]:
    return tuple(
        Kernel(
            path,
            functools.partial(run, one.name),
            one.name,
            plan_options=plan_options,
            compare=kernel_policies(one.rounding),
            **how,
        )
        for one in backends
    )


def masking(definition: Definition) -> dict[str, float]:
    """The arguments of plan() for the window of keys and the cap of logits that a Definition has. window_left counts
    the keys before a query's own one."""
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


def last_page_len(inputs: Inputs) -> torch.Tensor:
    """Tokens in the last page of each request: int32 [batch_size]; 0 for a request without pages."""
    pages = inputs["kv_indptr"].diff()
    return torch.where(pages > 0, inputs.get("kv_last_page_len", 1), 0).to(torch.int32)


@dataclass(frozen=True)
class Planned:
    """How one of flashinfer's wrappers is made, planned and run, as texts (see `calls.called`). Beside inputs, outputs
    and axes they may name ``last`` (see `last_page_len`), ``offsets`` of the queries, ``caches``, and ``window``, the
    keys before a query's own one, or -1."""

    path: str
    plan: str
    run: str
    made: str = "backend="

    def kernels(self, backends: Sequence[Backend], **how: Any) -> tuple[Kernel, ...]:
        return flashinfer_kernels(self.path, self.call, backends, **how)

    @property
    def call(self) -> Run:
        return functools.partial(run_planned, self.path, self.plan, self.run, self.made)


#: The last arguments of plan() and run() of most wrappers.
DTYPES = "q_data_type=q.dtype kv_data_type="
RESULTS = "out=output lse= return_lse=True"


def run_planned(
    path: str, plan: str, run: str, made: str, backend: str, definition: Definition, inputs: Inputs, outputs: Outputs
) -> Outputs:
    """Makes one of flashinfer's wrappers for a backend, plans it, and runs it."""
    asked, q = masking(definition), inputs["q"]
    known = {
        **{**inputs, **outputs, "backend": backend, "caches": (inputs.get("k_cache"), inputs.get("v_cache"))},
        **{"last": last_page_len(inputs), "window": int(asked.get("window_left", -1))},
        "offsets": inputs.get("qo_indptr", torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)),
    }
    options = called(dict, "" if backend == CUDA_CORES.name else made, definition, known)
    of_class = wrapper(function_at(path), q.device, kv_layout="NHD", **options)
    # The window and the cap are arguments of plan() where a Definition has them.
    words = [] if "window" in plan else [f"{name}={value}" for name, value in asked.items()]
    called(of_class.plan, " ".join((plan, *words)), definition, known)
    called(of_class.run, run, definition, known)
    return outputs


@functools.cache
def workspace(device: torch.device) -> torch.Tensor:
    """The workspace of all wrappers on a GPU: each uses it from its plan to the end of its run, and none in between."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@functools.cache
def wrapper(kind: Callable[..., Any], device: torch.device, **options: str | bool | int) -> Any:
    """One object of flashinfer's class `kind` per GPU and set of options; every case plans anew."""
    return kind(workspace(device), **options)
