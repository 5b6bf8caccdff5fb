"""Costs of recurrent layers: each token reads and changes the state of its sequence, which moves once each way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashinfer_trace.judging.costs.elementwise import rows_named
from flashinfer_trace.judging.costs.work import CUDA_CORES, CostFunction, Sizes, Work, each

#: Of each token and head: A_log's exp, sum, softplus (2), product; sigmoid (3).
GATES = 8
#: Of each element of the state: decay; product with the key and sum; product with the change and sum; product with the
#: query and sum.
DELTA = 7


def gdn_verify(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """The slots that sequences begin with are read; the pool is not written."""
    slots = rows_named(inputs["initial_state_indices"], sizes["pool_size"])
    operations = delta_rule(sizes, sizes["batch_size"] * sizes["seq_len"])
    return Work({CUDA_CORES: operations}, {"initial_state": slots})


def gdn_prefill(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """As many products as the recurrence has, which chunks of tokens give to the tensor cores."""
    pairs = sizes["total_seq_len"] * sizes["num_v_heads"] * sizes["head_size"] ** 2
    gates = GATES * sizes["total_seq_len"] * sizes["num_v_heads"]
    return Work({"bfloat16": (DELTA - 1) * pairs, CUDA_CORES: gates + pairs})


def delta_rule(sizes: Sizes, tokens: int) -> int:
    return tokens * sizes["num_v_heads"] * (GATES + DELTA * sizes["head_size"] ** 2)


def of_pool(*rows: str) -> CostFunction:
    """One token of each sequence that has a slot: only these rows of inputs, and these slots, are read."""

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        indices = inputs["state_indices"]
        slots, real = rows_named(indices, sizes["pool_size"]), indices >= 0
        operations = {CUDA_CORES: delta_rule(sizes, int(real.sum()))}
        return Work(operations, {"state": slots, **dict.fromkeys(rows, real)}, {"state_out": slots})

    return work


def state_update(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """Of each feature the step (5 operations); of each element of the state decay (3), input (3) and output (2)."""
    indices, heads = inputs["state_batch_indices"], sizes["nheads"] * sizes["head_dim"]
    slots, real = rows_named(indices, sizes["state_cache_size"]), indices >= 0
    reads = {"state": slots, **dict.fromkeys(("x", "dt", "B", "C"), real)}
    return Work({CUDA_CORES: int(real.sum()) * heads * (5 + 8 * sizes["dstate"])}, reads, {"new_state": slots})


def state_scan(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """As many products as the recurrence has, which chunks of tokens give to the tensor cores."""
    features = sizes["total_seq_len"] * sizes["nheads"] * sizes["head_dim"]
    steps = 8 * sizes["total_seq_len"] * sizes["nheads"]
    return Work({"bfloat16": 4 * features * sizes["dstate"], CUDA_CORES: steps + features * (2 + sizes["dstate"])})


#: Of each element that a filter gives: negation, exp, sum and quotient of silu.
SILU = 4


def convolution_of_a_token(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    indices = inputs["conv_state_indices"]
    slots, real = rows_named(indices, sizes["num_states"]), indices >= 0
    operations = int(real.sum()) * sizes["conv_dim"] * (2 * sizes["width"] + SILU)
    return Work({CUDA_CORES: operations}, {"conv_state": slots}, {"conv_state_out": slots})


def convolution(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """States are read where a sequence has an initial one, and written for all."""
    slots, first = inputs["cache_indices"], inputs["has_initial_state"].bool()
    operations = sizes["num_tokens"] * sizes["conv_dim"] * (2 * sizes["width"] + SILU)
    reads = {"conv_states": rows_named(slots[first], sizes["num_states"])}
    return Work({CUDA_CORES: operations}, reads, {"conv_states_out": rows_named(slots, sizes["num_states"])})


COSTS: dict[str, CostFunction] = {
    "fused_gdn_gating": each(GATES, "num_tokens", "num_v_heads"),
    "gdn_decode": lambda sizes, inputs: Work({CUDA_CORES: delta_rule(sizes, sizes["batch_size"])}),
    "gdn_prefill": gdn_prefill,
    "gdn_verify": gdn_verify,
    "causal_conv1d": convolution,
    "causal_conv1d_update": convolution_of_a_token,
    "mamba_ssu_decode": state_update,
    "mamba_ssu_decode_float32": state_update,
    "mamba_ssd_prefill": state_scan,
    "gdn_packed_decode": of_pool("mixed_qkv", "a", "b"),
    "kda_prefill": gdn_prefill,
    "kda_packed_decode": of_pool("mixed_qkv", "a", "b"),
}
