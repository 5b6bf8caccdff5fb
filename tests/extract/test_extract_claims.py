"""What extraction says of models and families is what the dataset's own rules accept: `validate` is clean afterwards.

In a dataset whose tags follow from models/, in contrast to the other tests of this directory.
"""

from __future__ import annotations

import json

import pytest
from small_models import MIXTURE, SPARSE, TINY, add_model, load_definition

from flashinfer_trace.dataset.sync import sync_definitions
from flashinfer_trace.dataset.validation import validate_paths
from tools.extract_definitions import model_needs

NAMING = "schema/naming.json"
CALLS = ("model:", "tp:", "ep:")


@pytest.fixture
def dataset(root, extract):
    """The dataset root, with what models/ says: the needs of tiny and twin-1.5, and the committed tags of families."""
    (root / "models" / "curated").mkdir()
    (root / "models" / "curated" / "claims.json").write_text('{"claims": []}')
    (root / "traces").mkdir()
    trace = {"configurations": [], "kernels": [], "uses": [], "sources": {}}
    (root / "traces" / "kernel_traces.json").write_text(json.dumps(trace))
    (root / "models" / "needs").mkdir()
    derive_needs(root)
    assert extract("--model-name", "tiny", "twin-1.5")[0] == 0
    return root


def derive_needs(root):
    """Writes models/needs/, as `flashinfer-trace sync` does."""
    for path, text in model_needs.documents(root).items():
        path.write_text(text)


def problems(root):
    return validate_paths([root / "definitions"], root).problems


def settles(root, extract, snapshot, *arguments):
    """Whether the dataset is valid once the needs are derived, and neither `embed` nor extraction changes it again."""
    derive_needs(root)
    assert problems(root) == []
    before, lists = snapshot(), (root / NAMING).read_text()
    assert sync_definitions(root, write=True) == []
    status, out, _ = extract(*arguments)
    assert status == 0 and "0 created, 0 tagged, " in out
    return (snapshot(), (root / NAMING).read_text()) == (before, lists)


def groups(root, family):
    return json.loads((root / NAMING).read_text())["families"][family]["some_tags"]


@pytest.mark.parametrize("normalises", [True, False])
def test_a_mixture_of_experts_of_new_sizes_settles(dataset, extract, snapshot, normalises):
    add_model(dataset, "sparse", "Sparse", {**SPARSE, "norm_topk_prob": normalises, "num_experts_per_tok": 6})
    status, out, err = extract("--model-name", "sparse")
    assert status == 0, err
    name, routing = "moe_topk_softmax_topk6_e16", f"routing:{'renormalize' if normalises else 'softmax'}"
    assert routing in load_definition(dataset, f"moe/{name}.json")["tags"]
    assert f"naming.json: lists {name}" in out
    (named,) = [one for one in groups(dataset, "moe_topk_softmax") if name in one.get("only", ())]
    assert named["tags"] == [routing]
    assert settles(dataset, extract, snapshot, "--model-name", "sparse")


def test_experts_that_a_glob_takes_for_others_are_excepted(dataset, extract, snapshot):
    """`*_topk6_*` stands for models that do not normalise; this one does."""
    add_model(dataset, "sparse", "Sparse", {**SPARSE, "num_experts_per_tok": 6})
    assert extract("--model-name", "sparse")[0] == 0
    written = {path.partition("/")[2].removesuffix(".json") for path in snapshot() if "moe_bf16_softmax" in path}
    assert written
    renormalise, softmax = (
        [one for one in groups(dataset, "moe_bf16_softmax_routing") if f"routing:{how}" in one.get("tags", ())]
        for how in ("renormalize", "softmax")
    )
    assert {name for one in renormalise for name in one.get("only", ())} == written
    assert {name for one in softmax for name in one["without"]} == written
    for name in written:
        assert "routing:renormalize" in load_definition(dataset, f"moe/{name}.json")["tags"]
        assert "routing:softmax" not in load_definition(dataset, f"moe/{name}.json")["tags"]


def test_two_models_that_route_one_size_in_other_ways_settle(dataset, extract, snapshot):
    add_model(dataset, "sparse", "Sparse", SPARSE)
    add_model(dataset, "other", "Other", {**SPARSE, "norm_topk_prob": False})
    assert extract("--model-name", "sparse")[0] == 0
    assert extract("--model-name", "other")[0] == 0
    tags = load_definition(dataset, "moe/moe_topk_softmax_topk2_e16.json")["tags"]
    assert {"routing:renormalize", "routing:softmax"} < set(tags)
    assert settles(dataset, extract, snapshot, "--model-name", "sparse", "other")


def test_grouped_experts_of_a_new_size_keep_their_kernels(dataset, extract, snapshot):
    add_model(dataset, "experts", "Experts", MIXTURE)
    before = (dataset / NAMING).read_text()
    assert extract("--model-name", "experts")[0] == 0
    tags = load_definition(dataset, "moe/moe_topk_deepseek_topk2_ng4_kg2_e16.json")["tags"]
    called = {tag.partition(":")[2] for tag in tags}
    assert {"flashinfer.fused_moe.fused_topk_deepseek", "sgl_kernel.moe_fused_gate"} <= called
    assert (dataset / NAMING).read_text() == before
    assert settles(dataset, extract, snapshot, "--model-name", "experts")


def test_a_stage_that_does_not_call_a_new_definition_is_excepted(dataset, extract, snapshot):
    """Keys and values are expanded from the latent only in prefill; the list knows that of 512 features alone."""
    add_model(dataset, "experts", "Experts", {**MIXTURE, "kv_lora_rank": 128, "v_head_dim": 40})
    assert extract("--model-name", "experts", "--execution-modes", "prefill")[0] == 0
    some = [path for path in snapshot() if path.startswith("gemm/fp8_blockwise_scaled_mm")]
    assert some and all("stage:decode" in load_definition(dataset, path)["tags"] for path in some)
    for path in some:
        (dataset / "definitions" / path).unlink()
    assert extract("--model-name", "experts")[0] == 0
    prefill = [path for path in some if "stage:decode" not in load_definition(dataset, path)["tags"]]
    assert prefill and all(path.endswith("_k128.json") for path in prefill)
    assert settles(dataset, extract, snapshot, "--model-name", "experts")


def test_another_directory_leaves_the_lists_alone(dataset, extract, tmp_path):
    add_model(dataset, "sparse", "Sparse", SPARSE)
    before = (dataset / NAMING).read_text()
    assert extract("--model-name", "sparse", "--definitions", tmp_path / "elsewhere")[0] == 0
    assert (dataset / NAMING).read_text() == before


def test_a_configuration_without_a_model_claims_nothing(dataset, extract, snapshot, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "intermediate_size": 160}))
    before = snapshot()
    status, _, err = extract("--model-name", "my-tiny", "--config", path)
    assert status == 0
    assert "as there is no models/my-tiny.json; existing Definitions stay as they are. To claim the model, add" in err
    after = snapshot()
    assert {name: after[name] for name in before} == before
    created = {name: json.loads(text) for name, text in after.items() if name not in before}
    assert "gemm/gemm_bf16_n64_k160.json" in created
    assert not [tag for data in created.values() for tag in data["tags"] if tag.startswith(CALLS)]
    assert not [data for data in created.values() if "my-tiny" in data["description"]]
    description = created["gemm/gemm_bf16_n64_k160.json"]["description"]
    assert description.endswith("In models of these sizes: down_proj.")
    assert problems(dataset) == [] and sync_definitions(dataset, write=False) == []


def test_sizes_beyond_the_defaults_claim_nothing(dataset, extract, snapshot):
    before = snapshot()
    # TP 2 is a default of attention, but not of projections; pages of 16 tokens are of nothing.
    status, _, err = extract("--model-name", "tiny", "--tp", 1, 2, "--page-sizes", 1, 16)
    assert status == 0 and "for what tiny needs at other sizes than models/tiny.json gives by default" in err
    after = snapshot()
    assert {name: after[name] for name in before} == before
    created = {name: json.loads(text) for name, text in after.items() if name not in before}
    assert "gemm/gemm_bf16_n64_k48.json" in created and [name for name in created if name.endswith("_ps16.json")]
    assert not [tag for data in created.values() for tag in data["tags"] if tag.startswith(CALLS)]
    assert not [data for data in created.values() if "Tiny" in data["description"]]
    assert problems(dataset) == [] and sync_definitions(dataset, write=False) == []


def test_sizes_that_no_tag_may_give_are_in_no_description(dataset, extract, snapshot):
    """`validate` accepts numbers of ten and more only if the sizes or the tags have them."""
    wide = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 8, "intermediate_size": 512}
    add_model(dataset, "wide", "Wide", {**SPARSE, **wide, "moe_intermediate_size": 512})
    add_model(dataset, "dense", "Dense", {**TINY, **wide})
    assert extract("--model-name", "wide", "dense")[0] == 0
    derive_needs(dataset)
    status, _, err = extract("--model-name", "wide", "dense", "--tp", 16, "--ep", 16)
    assert status == 0, err
    assert [name for name in snapshot() if "moe_bf16" in name and name.endswith("_h64_i32.json")]
    experts = load_definition(dataset, "moe/moe_bf16_softmax_routing_topk2_e16_h64_i32.json")["description"]
    assert experts.startswith(
        "One rank's share of the routed experts of models of these sizes under tensor parallelism"
    )
    assert "activation/silu_and_mul_i32.json" in snapshot()
    assert problems(dataset) == []


def test_sizes_among_the_defaults_are_claimed(dataset, extract):
    path = dataset / "definitions" / "gemm" / "gemm_bf16_n64_k96.json"
    whole = path.read_text()
    path.unlink()
    assert extract("--model-name", "tiny", "twin-1.5", "--tp", 1)[0] == 0
    assert path.read_text() == whole


def test_the_configuration_of_a_model_of_the_dataset_is_claimed(dataset, extract, tmp_path):
    path = dataset / "definitions" / "gemm" / "gemm_bf16_n64_k96.json"
    path.unlink()
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    status, _, err = extract("--model-name", "tiny", "--config", tmp_path / "config.json")
    assert status == 0 and "tags" not in err
    assert "model:tiny" in json.loads(path.read_text())["tags"]


def test_a_tag_that_the_rules_refuse_is_found_before_anything_is_written(dataset, extract, snapshot, monkeypatch):
    add_model(dataset, "sparse", "Sparse", SPARSE)
    before = snapshot()
    monkeypatch.setattr("tools.extract_definitions.plan.Planner._listed", lambda self, family, data: data["tags"])
    status, _, err = extract("--model-name", "sparse")
    assert status == 1 and "tag-unfounded" in err and "nothing was written" in err
    assert snapshot() == before
