"""The function of a reference, as answers to small questions: the facts of the table schema/flashinfer_bench.json.

Each probe calls a ``run`` of ours or of flashinfer-bench with inputs whose result can be told in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashinfer_trace import Definition

Run = Callable[..., Any]
Value = float | str
Probe = Callable[[Definition, Run], Value]

#: Sizes at which large Definitions are probed.
VOCABULARY = 64
EXPERT_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_experts": 32,
    "num_local_experts": 8,
    "gemm1_out_size": 256,
    "num_hidden_blocks": 2,
    "num_intermediate_blocks": 1,
    "num_gemm1_out_blocks": 2,
}
DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float8_e4m3fn", "int32", "int64")
}


def small(definition: Definition) -> Definition:
    """The same function at sizes that take no time: of a matrix, a vocabulary or DeepSeek-V3's experts."""
    match definition.op_type:
        case "gemm":
            return definition.with_const_axes({"N": 8, "K": 16})
        case "sampling":
            return definition.with_const_axes({"vocab_size": VOCABULARY})
        case "moe":
            return definition.with_const_axes(EXPERT_SIZES)
        case _:
            return definition


def zeros(definition: Definition, **axes: int) -> dict[str, Any]:
    """Inputs of zeros, with these values of var axes; 1 for other ones, and for scalars."""
    sizes = {**dict.fromkeys(definition.var_axes, 1), **definition.const_axes, **axes}
    return {
        name: 1 if one.shape is None else torch.zeros([sizes[axis] for axis in one.shape], dtype=DTYPES[one.dtype])
        for name, one in definition.inputs.items()
    }


def attention(definition: Definition, queries: int, keys: int) -> dict[str, Any]:
    """Inputs of one request, all zero, whose keys lie in the first pages, or in the first slots that a query names."""
    size = definition.const_axes.get("page_size", 1)
    pages = -(-keys // size)
    tokens = dict.fromkeys(("total_q", "num_tokens"), queries)
    cache = {"total_kv": keys, "num_kv_indices": pages, "num_pages": max(pages, 1), "len_indptr": 2}
    inputs = zeros(definition, **tokens, **cache)
    filled = {
        "qo_indptr": [0, queries],
        "kv_indptr": [0, pages if "kv_indices" in inputs else keys],
        "kv_indices": [*range(pages)],
        "kv_last_page_len": [keys - size * (pages - 1) if pages else 0],
    }
    inputs |= {name: torch.tensor(one, dtype=torch.int32) for name, one in filled.items() if name in inputs}
    if "sparse_indices" in inputs:
        inputs["sparse_indices"].fill_(-1)[:, :keys] = torch.arange(keys, dtype=torch.int32)
    return inputs


def lse_of_equal_keys(definition: Definition, run: Run) -> Value:
    return float(run(**attention(definition, 1, 8))[1][0, 0])


def lse_of_one_key(definition: Definition, run: Run) -> Value:
    """Each part of the query (q, or q_nope and q_pe) has the same share of the product."""
    inputs = attention(definition, 1, 1)
    queries = [name for name in inputs if name in ("q", "q_nope", "q_pe")]
    for name in inputs:
        if name in queries:
            inputs[name][..., 0] = 64 / len(queries)
        elif name in ("k", "k_cache", "ckv_cache", "kpe_cache"):
            inputs[name][..., 0] = 1
    return float(run(**{**inputs, "sm_scale": 1 / 64})[1][0, 0])


def keys_of_the_first_query(definition: Definition, run: Run) -> Value:
    """The weight of the first of equal keys, which is the only one with a value, is the reciprocal of their number."""
    inputs = attention(definition, 2, 4)
    values = next(inputs[name] for name in ("v", "v_cache", "ckv_cache") if name in inputs)
    values.view(-1)[0] = 1
    return 1 / float(run(**inputs)[0][0, 0, 0])


def request_without_keys(definition: Definition, run: Run) -> Value:
    output, lse = run(**attention(definition, 1, 0))
    return f"output {float(output.float().abs().max()):g}, lse {float(lse.max()):g}"


def head_of_query_heads(definition: Definition, run: Run) -> Value:
    inputs = attention(definition, 1, 1)
    heads, groups = definition.const_axes["num_qo_heads"], definition.const_axes["num_kv_heads"]
    values = inputs["v" if "v" in inputs else "v_cache"]
    values += torch.arange(groups).unsqueeze(1)
    found = run(**inputs)[0][0, :, 0].int()
    return "head // group size" if torch.equal(found, torch.arange(heads).int() // (heads // groups)) else "other"


def norm(definition: Definition, run: Run, value: float) -> torch.Tensor:
    """The norm of rows of one value, with weights of 1."""
    inputs = zeros(definition)
    inputs["hidden_states"].fill_(value)
    inputs["weight"].fill_(1)
    return run(**inputs)


def epsilon(definition: Definition, run: Run) -> Value:
    square = 2.0**-20
    return square / float(norm(definition, run, square**0.5)[0, 0]) ** 2 - square


def norm_of_ones(definition: Definition, run: Run) -> Value:
    return float(norm(definition, run, 1.0)[0, 0])


def canceled_feature(definition: Definition, run: Run) -> Value:
    inputs = zeros(definition)
    for name in ("hidden_states", "residual", "weight"):
        inputs[name].fill_(1)
    inputs["residual"][0, 0] = -1
    return float(run(**inputs)[0, 0])


def column_of_a_row(definition: Definition, run: Run) -> Value:
    inputs = zeros(definition)
    inputs["A"][0, 2] = 1
    inputs["B"][5, 2] = 3
    return float(run(**inputs)[0].argmax())


def turned_feature(definition: Definition, run: Run) -> Value:
    """Cosines of 0 and sines of 1: a quarter turn."""
    inputs = zeros(definition)
    inputs["q"][..., 0] = 1
    inputs["cos_sin_cache"][:, definition.const_axes["rotary_dim"] // 2 :] = 1
    turned = run(**inputs)[0][0, 0]
    place = int(turned.abs().argmax())
    return place * float(turned[place])


def experts(definition: Definition, run: Run, bias: Mapping[int, float]) -> torch.Tensor:
    """The outputs for equal scores and this bias: feature i is the weight of expert i times its activation.

    The first half of gemm1 gives 1, the second 8.
    """
    inputs = zeros(definition)
    for expert, value in bias.items():
        inputs["routing_bias"][expert] = value
    for name in ("hidden_states_scale", "gemm1_weights_scale", "gemm2_weights_scale"):
        inputs[name].fill_(1)
    one, gate = (torch.tensor(value).to(torch.float8_e4m3fn) for value in (1.0, 8.0))
    inputs["hidden_states"][0, 0] = one
    inputs["gemm1_weights"][:, 0, 0] = one
    inputs["gemm1_weights"][:, definition.const_axes["intermediate_size"], 0] = gate
    for expert in range(definition.const_axes["num_local_experts"]):
        inputs["gemm2_weights"][expert, expert, 0] = one
    return run(**{**inputs, "local_expert_offset": 0, "routed_scaling_factor": 2.0})[0]


#: Two experts of each of four groups.
PREFERRED = {0: 2.0, 1: 2.0, 4: 1.0, 5: 1.0, 8: 1.0, 9: 1.0, 12: 1.0, 13: 1.0}


def weighted_activation(definition: Definition, run: Run) -> Value:
    """Weight 1/8, factor 2, activation 8 / (1 + exp(-8)): 2. A bias in the weights, or the gate first, give others."""
    return float(experts(definition, run, PREFERRED)[0])


def group_score(definition: Definition, run: Run) -> Value:
    """Group 0 has the best expert, group 1 the best two; three others are kept in any case."""
    others = {expert: 4.0 for group in (2, 3, 4) for expert in (4 * group, 4 * group + 1)}
    output = experts(definition, run, {0: 1.0, 4: 0.75, 5: 0.75, **others})
    return "sum of the 2 best" if float(output[4]) > 0 and float(output[0]) == 0 else "other"


def kept(definition: Definition, run: Run, **limits: float) -> int:
    """How many tokens of probabilities 0.4, 0.3, 0.2 and 0.1 are drawn."""
    torch.manual_seed(0)
    inputs = zeros(definition, batch_size=256)
    inputs["probs"][:, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    for name, value in limits.items():
        if name in inputs:
            inputs[name].fill_(value)
    return len(set(run(**inputs).tolist()))


def delta_net(definition: Definition, **scalars: float) -> dict[str, Any]:
    """One token of one sequence with a decay of 1 and a beta of 0."""
    inputs = {**zeros(definition, len_cu_seqlens=2), **scalars}
    inputs["a"].fill_(-100)
    inputs["b"].fill_(-100)
    if "cu_seqlens" in inputs:
        inputs["cu_seqlens"][1] = 1
    return inputs


def corrected_value(definition: Definition, run: Run) -> Value:
    """The result of a state of 1 after a beta of 1 has replaced it by 3 under the key."""
    inputs = delta_net(definition, scale=1.0)
    for name, value in (("q", 1), ("k", 1), ("v", 3)):
        inputs[name][..., 0 if name != "v" else slice(None)] = value
    inputs["b"].fill_(100)
    inputs["state"].fill_(1)
    return float(run(**inputs)[0].flatten()[0])


def key_head(definition: Definition, run: Run) -> Value:
    inputs, heads = delta_net(definition, scale=1.0), definition.const_axes["num_v_heads"]
    keys = definition.const_axes["num_q_heads"]
    inputs["q"][..., 0] = torch.arange(keys)
    inputs["state"].fill_(1)
    found = run(**inputs)[0].view(heads, -1)[:, 0].int()
    return "head // group size" if torch.equal(found, torch.arange(heads).int() // (heads // keys)) else "other"


def default_scale(definition: Definition, run: Run) -> Value:
    inputs = delta_net(definition, scale=0.0)
    inputs["q"][..., 0] = 1
    inputs["state"].fill_(1)
    return float(run(**inputs)[0].flatten()[0])


def state_step(definition: Definition, run: Run, slot: int) -> torch.Tensor:
    """The output for an input of 1 that B writes to state 0 and C reads there, with a skip of 2 and no decay."""
    inputs = zeros(definition)
    for name, value in (("x", 1), ("D", 2)):
        inputs[name].fill_(value)
    for name in "BC":
        inputs[name][..., 0] = 1
    inputs["state_batch_indices"].fill_(slot)
    return run(**inputs)[0]


PROBES: Mapping[str, Probe] = {
    "lse_of_8_equal_keys": lse_of_equal_keys,
    "lse_of_a_key_with_logit_1": lse_of_one_key,
    "keys_that_the_first_of_2_queries_sees_of_4": keys_of_the_first_query,
    "request_without_keys": request_without_keys,
    "key_value_head_of_a_query_head": head_of_query_heads,
    "value_3_under_a_key_that_a_beta_of_1_corrects": corrected_value,
    "key_head_of_a_value_head": key_head,
    "scale_that_0_stands_for": default_scale,
    "output_for_an_input_of_1_with_a_step_of_0_and_a_skip_of_2": lambda definition, run: float(
        state_step(definition, run, 0)[0, 0, 0]
    ),
    "output_of_padding": lambda definition, run: float(state_step(definition, run, -1)[0, 0, 0]),
    "epsilon": epsilon,
    "norm_of_ones_with_weight_1": norm_of_ones,
    "norm_where_residual_cancels": canceled_feature,
    "column_that_row_5_of_B_gives": column_of_a_row,
    "feature_that_a_quarter_turn_makes_of_feature_0": turned_feature,
    "expert_of_8_equal_ones_times_2_with_up_1_and_gate_8": weighted_activation,
    "score_of_a_group": group_score,
    "tokens_kept_by_top_k_2": lambda definition, run: kept(definition, run, top_k=2, top_p=1),
    "tokens_kept_by_top_p_0.5": lambda definition, run: kept(definition, run, top_k=4, top_p=0.5),
    "tokens_kept_by_top_k_2_and_top_p_0.55": lambda definition, run: kept(definition, run, top_k=2, top_p=0.55),
}
