"""References of templates without a family here: what one call of each shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashinfer_trace.dataset.dumps import Alias, Match, dump_of, normalized
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.sandbox.worker import ReferenceWorker
from tools.templates.record import Record

#: Calls of a sampler. A right one that accepts with a probability of 0.8 does so in all of them once in 1.6 million.
DRAWS = 64


def probed(record: Record, worker: ReferenceWorker) -> list[str]:
    """A line of Markdown for each probe whose template the record has."""
    dumps = {data["template"]: data for data in reversed(record.dumps)}
    found = []
    for template, probe in (("chain_speculative_sampling", _chain), ("grouped_gemm_nt_masked", _grouped)):
        if template in dumps:
            found.append(f"`{template}`: {probe(dumps[template], worker)}")
    return found


def _run(data: Mapping[str, Any], worker: ReferenceWorker, given: Mapping[str, str], seed: int, **inputs: Any) -> Any:
    """The result of a dump's reference, in the sandbox; `given` has expressions of its arguments."""
    tensor = {"shape": [], "dtype": "float32"}
    contract = {"inputs": dict.fromkeys(inputs, tensor), "outputs": {"result": tensor}, "axes": {}, "reference": ""}
    own = Definition.from_dict({"name": data["name"], "op_type": "sampling", **contract})
    dump = dump_of(data)
    match = Match("", own, True, Alias("", (), inputs=given), {})
    return worker.run(normalized(dump, match), inputs, seed)["result"]


def _chain(data: Mapping[str, Any], worker: ReferenceWorker) -> str:
    probs = {"draft_probs": torch.tensor([[[0.5, 0.5]]]), "target_probs": torch.tensor([[[0.6, 0.4], [0.5, 0.5]]])}
    inputs = {**probs, "draft_token_ids": torch.tensor([[1]], dtype=torch.int32)}
    drawn = {tuple(_run(data, worker, {}, seed, **inputs).flatten().tolist()) for seed in range(DRAWS)}
    told = f"{len(drawn)} different results" if len(drawn) > 1 else f"always {list(*drawn)}"
    return (
        f"with draft probabilities [0.5, 0.5], target probabilities [0.6, 0.4] and the draft token 1, {DRAWS} seeds "
        f"give {told}; right is to accept token 1 with a probability of 0.4 / 0.5 = 0.8"
    )


def _grouped(data: Mapping[str, Any], worker: ReferenceWorker) -> str:
    ones = torch.ones(1, 2, 2)
    inputs = {"lhs": ones, "rhs": ones, "scale": torch.ones(1), "masked_m": torch.tensor([2], dtype=torch.int32)}
    given = {"lhs": "(lhs, scale)", "rhs": "(rhs, scale)", "out": "torch.zeros_like(lhs)"}
    plain, scaled = (
        float(_run(data, worker, given, 0, **{**inputs, "scale": torch.full((1,), scale)}).flatten()[0])
        for scale in (1.0, 2.0)
    )
    return (
        f"rows of ones times columns of ones, K = 2: the result is {plain:g} with both scales 1 and {scaled:g} with "
        "both scales 2; right is 2, and 8"
    )
