"""Claims of models/needs/: sizes that follow from the constants of models, and what their recorded runs call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from whole_dataset import DEFINITIONS as DATASET
from whole_dataset import with_calls

from flashinfer_trace import find_root
from flashinfer_trace.dataset.coverage import load_needs
from tools.extract.matched import Dataset, State, rows_of
from tools.extract.model_needs import _ops, _sizes, parallel_sizes, runs_of
from tools.runtime_tracing.model_calls import models_of
from tools.runtime_tracing.recording import read_all
from tools.trace.records import committed

ROOT = find_root()
NEEDS = load_needs(ROOT)
MODELS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "models").glob("*.json")}
RUNS = read_all(ROOT / "traces" / "runtime")
#: Configurations as published, each with the Definitions that a person read in the model's code.
PUBLISHED = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "published").glob("*.json"))
}
#: Axes that are sizes of a model or of one rank of it; the others are settings of a kernel (pages, blocks, groups).
SIZES = {
    *("hidden_size", "intermediate_size", "vocab_size", "in_features", "out_features", "gate_up_size"),
    *("num_qo_heads", "num_kv_heads", "num_heads", "head_dim", "num_experts", "top_k"),
}


def sizes_of(config: Mapping[str, Any]) -> set[int]:
    """Every size that a layer of a model can have on 1 to 8 GPUs: its constants, widths of its projections, shares."""
    get = lambda *names: next((config[name] for name in names if isinstance(config.get(name), int)), 0)  # noqa: E731
    hidden, heads = get("hidden_size"), get("num_attention_heads")
    kv, dim = get("num_key_value_heads") or heads, get("head_dim") or hidden // max(heads, 1)
    rank, latent, rotated = get("q_lora_rank"), get("kv_lora_rank"), get("qk_rope_head_dim")
    nope, value = get("qk_nope_head_dim"), get("v_head_dim")
    experts, chosen, shared = get("n_routed_experts", "num_experts", "num_local_experts"), get("num_experts_per_tok"), 1
    wide = [get("intermediate_size"), get("moe_intermediate_size"), get("shared_expert_intermediate_size")]
    wide += [get("moe_intermediate_size") * n for n in (1, 2)]
    whole = {value for value in config.values() if type(value) is int and value > 0}
    whole |= {kv, dim, heads * dim, rank + latent + rotated, latent + rotated, heads * (nope + rotated)}
    whole |= {heads * (nope + value), heads * value, nope + rotated, experts + shared, chosen + shared, 1}
    whole |= {2 * size for size in wide} | set(wide)
    whole |= {get("index_n_heads") * get("index_head_dim")}
    whole |= linear_sizes(config, hidden, heads, kv, dim)
    found = {size // ranks for size in whole for ranks in (1, 2, 4, 8) if size % ranks == 0}
    for ranks in (1, 2, 4, 8):
        share = max(kv // ranks, 1)
        found |= {share, share * dim, (heads // ranks + 2 * share) * dim, experts // ranks + shared}
    return found


def linear_sizes(config: Mapping[str, Any], hidden: int, heads: int, kv: int, dim: int) -> set[int]:
    """Widths of the projections and the convolution of linear attention, of Mamba, and of attention with a gate."""
    found = (
        {2 * heads * dim + 2 * kv * dim}
        if config.get("attn_output_gate") or "linear_num_key_heads" in config
        else set()
    )
    if "linear_num_key_heads" in config:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        found |= {values, 2 * keys + values, 2 * keys + 2 * values, 2 * config["linear_num_value_heads"]}
    if own := config.get("linear_attn_config"):
        wide = own["num_heads"] * own["head_dim"]
        found |= {wide, 3 * wide, 3 * wide + own["num_heads"] + 2 * own["head_dim"]}
    if "mamba_num_heads" in config:
        wide = config["mamba_num_heads"] * config["mamba_head_dim"]
        states = 2 * config["n_groups"] * config["ssm_state_size"]
        found |= {wide, wide + states, 2 * wide + states + config["mamba_num_heads"]}
    return found


def claimed(document: Mapping[str, Any]) -> dict[str, set[str]]:
    """Definition -> ops, of a file of models/needs/."""
    found: dict[str, set[str]] = {}
    for op in document["ops"]:
        for names in op["definitions"].values():
            for name in names:
                found.setdefault(name, set()).add(op["name"])
    return found


@pytest.mark.parametrize("model", sorted(NEEDS))
def test_each_claimed_size_follows_from_the_constants_of_the_model(model: str):
    known = sizes_of(MODELS[model]["config"])
    wrong = [
        (name, axis, value)
        for name in claimed(NEEDS[model])
        for axis, value in DATASET[name].const_axes.items()
        if axis in SIZES and value not in known
    ]
    assert claimed(NEEDS[model]) and wrong == []


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_plans_that_a_person_read_have_sizes_of_their_configurations(name: str):
    known = sizes_of(PUBLISHED[name]["config"])
    read = {one for op in PUBLISHED[name]["ops"].values() for names in op.values() for one in names}
    assert read
    sized = [DATASET[one].const_axes.items() for one in read & DATASET.keys()]
    assert [(axis, value) for axes in sized for axis, value in axes if axis in SIZES and value not in known] == []


def test_a_wrong_size_is_found():
    known = sizes_of(MODELS["llama-3.1-8b"]["config"])
    assert {4096, 6144, 28672, 14336, 128256, 32, 8, 128, 768} <= known
    assert not {7296, 2112, 5120, 129280, 11008} & known


@pytest.fixture(scope="module")
def known() -> Dataset:
    return with_calls()


@pytest.mark.parametrize("model", sorted(NEEDS))
def test_the_definitions_that_a_models_own_runs_call_are_claimed_or_recorded(model: str, known: Dataset):
    """Of one Definition for a call, and of runs with the model's own constants and weights."""
    runs = [run for run in RUNS if model in models_of(run, MODELS)]
    rows = rows_of(runs, known, ("prefill", "decode")) if runs else []
    called = {row.definitions[0] for row in rows if len(row.definitions) == 1 and row.state is not State.NEW_SIZE}
    assert {name for name in called if f"model:{model}" not in DATASET[name].tags} == set()
    assert runs == [] or called


def test_every_model_has_runs_of_its_architecture():
    runs = committed(ROOT)
    assert all(runs_of(name, MODELS, runs) for name in MODELS)


def test_parallel_sizes_of_op_types():
    found = parallel_sizes(NEEDS.values())
    assert found["gqa_paged"].tensor == {1, 2, 4, 8} and found["moe"].expert == {8}
    assert found["sampling"].tensor == set() and "rmsnorm_h7168" in found["rmsnorm"].names
    assert all(name in DATASET for one in found.values() for name in one.names)


def test_a_model_needs_what_its_own_runs_call(known: Dataset):
    runs = [run for run in RUNS if "qwen3-8b" in models_of(run, MODELS)]
    ops = {op["name"]: op["definitions"] for op in _ops([], runs, known)}
    assert ops["qkv_proj"] == {"gemm": ["gemm_bf16_n6144_k4096"]} and ops["act_fn"] == {
        "activation": ["silu_and_mul_i12288"]
    }
    claimed = [{"name": "act_fn", "definitions": {"activation": ["silu_and_mul_i6144"]}}]
    (kept,) = (op for op in _ops(claimed, runs, known) if op["name"] == "act_fn")
    assert kept["definitions"] == {"activation": ["silu_and_mul_i12288", "silu_and_mul_i6144"]}


def test_the_sizes_that_ranks_divide_have_the_parallel_size_of_the_run(known: Dataset):
    (run,) = (run for run in committed(ROOT) if run.name == "llama_3.1_70b-bf16")
    ((tag, names),) = (
        (one["tag"], one["definitions"]) for one in _sizes([], [run], run.document["model_config"], known)
    )
    assert tag == "tp:4" and "gemm_bf16_n2560_k8192" in names and "rmsnorm_h8192_eps1e5" not in names
