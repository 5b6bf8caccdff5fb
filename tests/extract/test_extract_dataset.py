"""The dataset is reproducible: extracting all models into an empty directory gives what they need, byte for byte.

Definitions that no model needs are curated: people write them, and the documents list them.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict

import pytest

import flashinfer_trace
from flashinfer_trace.dataset.model_claims import load_model_claims
from flashinfer_trace.format.files import json_text
from flashinfer_trace.format.naming import family_name, load_naming
from tools.extract_definitions import model_needs
from tools.extract_definitions.__main__ import main
from tools.extract_definitions.models import available
from tools.extract_definitions.recipes import RECIPES

ROOT = flashinfer_trace.find_root()
COMMITTED = {path.stem: path for path in flashinfer_trace.dataset.store.definition_paths(ROOT)}
NEEDS = [json.loads(path.read_text()) for path in sorted((ROOT / "models" / "needs").glob("*.json"))]
CURATED = {one.name: one for one in model_needs.curated(flashinfer_trace.definitions(), NEEDS)}


@pytest.fixture(scope="module")
def extracted(tmp_path_factory):
    """All models extracted at once, from the committed digests, into a directory that did not exist."""
    directory = tmp_path_factory.mktemp("extracted") / "definitions"
    assert main(["--all-models", "--definitions", str(directory)]) == 0
    return {path.stem: path for path in directory.glob("*/*.json")}


def without_description(path):
    """The text without the Definition's own description, which people may edit."""
    lines = path.read_text().splitlines(keepends=True)
    described = [number for number, line in enumerate(lines) if line.startswith('  "description": ')]
    assert len(described) == 1, path
    return "".join(lines[: described[0]] + lines[described[0] + 1 :])


def test_every_definition_that_a_model_needs_is_recreated_byte_for_byte(extracted):
    needed = {name: path for name, path in COMMITTED.items() if name not in CURATED}
    assert sorted(set(needed) - set(extracted)) == []
    different = [
        name for name, path in needed.items() if without_description(path) != without_description(extracted[name])
    ]
    assert different == []
    assert {name: path.parent.name for name, path in needed.items()} == {
        name: path.parent.name for name, path in extracted.items() if name in needed
    }


def test_curated_definitions_are_listed_and_claim_no_model_that_does_not_need_them(extracted):
    """Otherwise a Definition that its recipe no longer creates would pass as curated."""
    assert not set(CURATED) & set(extracted)
    listed = (
        pytest.importorskip("built_pages", reason="needs torch")
        .pages()["docs/coverage.md"]
        .partition("## Curated Definitions")[2]
    )
    assert [name for name in CURATED if f"`{name}`" not in listed] == []
    claims = load_model_claims(ROOT)
    assert claims is not None
    claimed = {
        name: [m for m in one.tag_values("model") if not claims.allows(name, m)] for name, one in CURATED.items()
    }
    assert {name: models for name, models in claimed.items() if models} == {}, "remove these model: tags"


def test_nothing_that_a_model_needs_is_left_to_extract(extracted):
    assert sorted(set(extracted) - set(COMMITTED)) == []


def test_extracting_into_the_dataset_changes_nothing(capsys):
    assert main(["--all-models", "--dry-run"]) == 0
    totals = capsys.readouterr().out.splitlines()[-1]
    assert totals.startswith("0 created, 0 tagged, ") and " 0 conflict" in totals


def test_the_first_model_tag_replaces_a_description_that_names_other_models(tmp_path):
    """Without model: tags, a description may say whose sizes these are; with them, `validate` refuses other models."""
    name = "gemm_bf16_n4096_k1792"
    before = json.loads(COMMITTED[name].read_text())
    before["description"] = "Linear layer of DeepSeek-V3."
    before["tags"] = [tag for tag in before["tags"] if not tag.startswith(("model:", "tp:"))]
    copy = tmp_path / "definitions" / "gemm" / f"{name}.json"
    copy.parent.mkdir(parents=True)
    copy.write_text(json_text(before))
    assert main(["--model-name", "llama-3.1-8b", "--tp", "1", "8", "--definitions", str(copy.parents[1])]) == 0
    after = json.loads(copy.read_text())
    assert after["description"].endswith("In Llama-3.1-8B: down_proj at TP 8.")
    assert {"model:llama-3.1-8b", "tp:8"} < set(after["tags"])
    changed = ("description", "tags")
    assert {key: after[key] for key in after if key not in changed} == {
        key: before[key] for key in before if key not in changed
    }


def test_models_one_by_one_give_the_same_but_for_descriptions(extracted, tmp_path):
    directory = tmp_path / "definitions"
    for name in reversed(available(ROOT)):
        assert main(["--model-name", name, "--definitions", str(directory)]) == 0
    found = {path.stem: path for path in directory.glob("*/*.json")}
    assert set(found) == set(extracted)
    assert [name for name in found if without_description(found[name]) != without_description(extracted[name])] == []


def test_every_family_that_a_model_needs_has_one_recipe():
    naming = load_naming(ROOT)
    needed = {family_name(one, naming) for one in flashinfer_trace.definitions() if one.name not in CURATED}
    made = sorted(family for recipe in RECIPES for family in recipe.families)
    assert made == sorted(set(made)) and needed <= set(made)
    known = {name: naming.families[name].op_type for name in made}
    assert {family: recipe.op_type for recipe in RECIPES for family in recipe.families} == known


def test_one_model_takes_less_than_20_s(tmp_path):
    start = time.process_time()
    assert main(["--model-name", "deepseek-v3", "--definitions", str(tmp_path / "d")]) == 0
    assert time.process_time() - start < 20


#: Facts about the published models, written independently of the recipes: family -> sizes that must be there.
KNOWN = {
    "llama-3.1-8b": ["gemm_bf16_n6144_k4096", "gemm_bf16_n28672_k4096", "gemm_bf16_n4096_k14336", "rmsnorm_h4096"],
    "llama-3.1-70b": ["gqa_paged_decode_h8_kv1_d128_ps1", "gqa_paged_decode_h64_kv8_d128_ps64"],
    "deepseek-v3": ["mla_paged_decode_h16_ckv512_kpe64_ps64", "fp8_blockwise_scaled_mm_n2112_k7168"],
    "qwen3-30b-a3b": ["rmsnorm_h128", "gqa_ragged_prefill_causal_h32_kv4_d128", "gemm_bf16_n128_k2048"],
    "mixtral-8x7b": ["gqa_paged_prefill_causal_h32_kv8_d128_ps1", "gemm_bf16_n8_k4096"],
    "gemma-2-2b": ["gemma_rmsnorm_h2304", "gqa_paged_decode_h8_kv4_d256_ps64_softcap50_window4096"],
    "gpt-oss-120b": ["gqa_paged_decode_h64_kv8_d64_ps1_sinks_window128", "gqa_paged_decode_h64_kv8_d64_ps1_sinks"],
    "glm-4.5": ["moe_topk_deepseek_topk8_ng1_kg1_e160", "rope_with_cos_sin_cache_neox_style_h96_kv8_d128_rd64"],
    "kimi-k2": ["top_k_top_p_joint_sampling_from_probs_v163840", "gemm_bf16_n384_k7168"],
}


def test_models_have_the_definitions_that_they_are_known_to_need(extracted):
    of_model = defaultdict(set)
    for name, path in extracted.items():
        for tag in json.loads(path.read_text())["tags"]:
            if tag.startswith("model:"):
                of_model[tag.removeprefix("model:")].add(name)
    assert {model: sorted(set(names) - of_model[model]) for model, names in KNOWN.items()} == {
        model: [] for model in KNOWN
    }
    assert not [name for name in of_model["deepseek-v3.2"] if name.startswith(("mla_paged", "mla_ragged"))]
    # What the checkpoint has in bfloat16: the router and the output head, on one rank and on eight.
    bf16 = {name for name in of_model["deepseek-v3"] if name.startswith("gemm_bf16")}
    assert bf16 == {"gemm_bf16_n256_k7168", "gemm_bf16_n129280_k7168", "gemm_bf16_n16160_k7168"}


def test_the_sizes_that_the_documents_say_were_run():
    """docs/verification.md: the table is derived; each Definition of the dataset is in it, and is verified or named."""
    verification = pytest.importorskip("tools.verification")
    rows = {row[0].strip("`"): row[1:] for row in verification.sizes(ROOT)}
    assert {op_type for op_type, row in rows.items() if row[0] == "1, 2, 4, 8"} == {
        *("activation", "gqa_paged", "gqa_ragged", "mla_ragged", "rmsnorm", "rope"),
    }
    assert {op_type for op_type, row in rows.items() if row[0] == "1, 8"} == {"gemm", "mla_paged", "moe"}
    assert {op_type for op_type, row in rows.items() if row[0] == "any"} == {"renorm", "sampling"}
    assert [op_type for op_type, row in rows.items() if row[1] != "-"] == ["moe"]
    assert sum(int(row[2]) for row in rows.values()) == len(COMMITTED) - len(CURATED)
    document = pytest.importorskip("built_pages", reason="needs torch").pages()["docs/verification.md"]
    for name, path in COMMITTED.items():
        assert "status:verified" in json.loads(path.read_text())["tags"] or f"- `{name}`" in document, name
