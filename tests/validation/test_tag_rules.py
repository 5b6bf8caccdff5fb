"""The tags of Definitions follow from models/: what the dataset says is refused as soon as one of them is another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashinfer_trace import definitions
from flashinfer_trace.dataset.model_claims import curated_path, load_model_claims, missing_files, recorded_path
from flashinfer_trace.dataset.store import definition_paths
from flashinfer_trace.dataset.sync import sync_definitions
from flashinfer_trace.dataset.validation import Problem, validate_paths
from flashinfer_trace.format.naming import family_name, load_naming

from .conftest import REPOSITORY, drop_other_claims

PATHS = {path.stem: path for path in definition_paths(REPOSITORY)}
#: A Definition that models need, one that people wrote for models, one that nobody needs, and one that runs call.
NEEDED, CLAIMED, OTHER, RECORDED = (
    "gqa_paged_decode_h8_kv1_d128_ps1",
    "mla_rope_quantize_fp8_h16_ckv512_kpe64",
    "gemm_n6144_k4096",
    "silu_and_mul_per_token_group_quant_fp8_i2048_g128",
)
EXPERTS = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
KERNEL = "sgl_api:sgl_kernel.flash_attn.flash_attn_with_kvcache"


def tags_of(name: str) -> list[str]:
    tags: list[str] = json.loads(PATHS[name].read_text(encoding="utf-8"))["tags"]
    return tags


def problems(name: str, tags: list[str]) -> list[Problem]:
    """Problems that `validate` finds in a committed Definition with other tags."""
    data = {**json.loads(PATHS[name].read_text(encoding="utf-8")), "tags": tags}
    return validate_paths([PATHS[name]], REPOSITORY, {PATHS[name]: json.dumps(data, indent=2)}).problems


def tag_problems(name: str, tags: list[str]) -> list[Problem]:
    """`problems` of tags: a description that names a model or a size without its tag is reported next to them."""
    return [one for one in problems(name, tags) if not one.rule.startswith("description-")]


FALSIFIED = [
    (NEEDED, KERNEL, "called_as:sgl_kernel.flash_attn.flash_attn_varlen_func"),
    (NEEDED, "tp:8", "tp:16"),
    (NEEDED, "stage:decode", "stage:prefill"),
    (EXPERTS, "ep:8", "ep:4"),
    (EXPERTS, "routing:deepseek-v3", "routing:renormalize"),
    (EXPERTS, "quantization:fp8_block_scale", "quantization:int8"),
    (CLAIMED, "tp:8", "tp:1"),
]


@pytest.mark.parametrize(("name", "tag", "other"), FALSIFIED)
def test_another_value_is_refused(name: str, tag: str, other: str) -> None:
    tags = tags_of(name)
    found = tag_problems(name, [other if one == tag else one for one in tags])
    assert [problem.rule for problem in found] == ["tag-missing", "tag-unfounded"]
    missing, unfounded = found
    assert json.dumps(tag) in missing.message and json.dumps(other) in unfounded.message
    assert unfounded.pointer == f"/tags/{tags.index(tag)}"
    for problem in found:
        assert problem.file.endswith(f"{name}.json") and f"flashinfer-trace sync {name}" in problem.hint


@pytest.mark.parametrize("name", [NEEDED, EXPERTS, CLAIMED, OTHER, RECORDED])
def test_each_tag_that_is_lost_is_missed(name: str) -> None:
    tags = tags_of(name)
    assert problems(name, tags) == []
    for tag in tags:
        if not tag.startswith("status:"):
            (found,) = tag_problems(name, [one for one in tags if one != tag])
            assert found.rule == "tag-missing" and json.dumps(tag) in found.message  # also a long one, to be copied


def test_a_tag_of_no_model_is_named_with_those_that_follow() -> None:
    (found,) = problems(NEEDED, [*tags_of(NEEDED), "ep:8"])
    assert found.message.startswith('the tag "ep:8" does not follow from models/; ')


@pytest.mark.parametrize(
    ("name", "tag", "rule"),
    [
        (OTHER, "tp:1", "tag-unfounded"),
        (OTHER, "model:llama-3.1-8b", "tag-model"),
        (RECORDED, "model:llama-3.1-8b", "tag-model"),
        (OTHER, "called_as:sgl_kernel.fp8_blockwise_scaled_mm", "tag-unfounded"),
        (OTHER, "fused", "tag-unfounded"),
        (NEEDED, "ep:8", "tag-unfounded"),
        (NEEDED, "called_as:sgl_kernel.no_such_function", "tag-unfounded"),
    ],
)
def test_one_tag_more_is_refused_once(name: str, tag: str, rule: str) -> None:
    assert [problem.rule for problem in problems(name, [*tags_of(name), tag])] == [rule]


@pytest.mark.parametrize(
    ("name", "old", "new", "rules"),
    [
        (CLAIMED, "TP 8", "TP 4", ["description-number"]),
        (NEEDED, "at TP 8", "at TP 1", ["description-number"]),
        ("merge_state_h16_d128", "TP 8", "TP 4", []),  # without tp: tags there is nothing to compare with
    ],
)
def test_parallel_sizes_of_a_description_are_those_of_the_tags(name: str, old: str, new: str, rules: list[str]) -> None:
    text = PATHS[name].read_text(encoding="utf-8")
    assert old in text
    found = validate_paths([PATHS[name]], REPOSITORY, {PATHS[name]: text.replace(old, new)}).problems
    assert [problem.rule for problem in found] == rules


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A dataset with the real models/ and schema/, and a handful of Definitions."""
    root = tmp_path / "dataset"
    for directory in ("schema", "models", "reference", "evidence/runs"):
        shutil.copytree(REPOSITORY / directory, root / directory)
    for name in (NEEDED, EXPERTS, CLAIMED, OTHER, RECORDED):
        for directory, suffix in (("definitions", "json"), ("evidence", "jsonl")):
            source = REPOSITORY / directory / PATHS[name].parent.name / f"{name}.{suffix}"
            if source.exists():
                target = root / source.relative_to(REPOSITORY)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    drop_other_claims(root)
    return root


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def in_any_order(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {**data, "tags": sorted(data["tags"])}


def test_embed_writes_the_tags_that_follow(copy: Path) -> None:
    assert sync_definitions(copy, write=True) == []
    originals = {path: in_any_order(path) for path in definition_paths(copy)}
    for path in originals:
        edit(path, lambda data: data.update(tags=[*data["tags"][:1], "tp:64", "called_as:sgl_kernel.silu_and_mul"]))
    changes = dict(sync_definitions(copy, write=True))
    assert set(changes) == set(originals) and all("-tp:64" in change for change in changes.values())
    assert {path: in_any_order(path) for path in originals} == originals
    assert validate_paths([], copy).problems == []


def test_a_claim_or_a_family_that_changes_is_noticed_in_its_definitions(copy: Path) -> None:
    def other_size(data: dict[str, Any]) -> None:
        claim = next(one for one in data["claims"] if "mla_rope_quantize_fp8_h16_*" in one["definitions"])
        claim["tags"] = ["tp:4"]

    def other_tag(data: dict[str, Any]) -> None:
        data["families"]["gemm"]["tags"] = ["fused"]

    edit(curated_path(copy), other_size)
    edit(copy / "schema" / "naming.json", other_tag)
    found = {(Path(problem.file).stem, problem.rule) for problem in validate_paths([], copy).problems}
    assert found == {(CLAIMED, "tag-missing"), (CLAIMED, "tag-unfounded"), (OTHER, "tag-missing")}


def test_a_recorded_call_gives_a_tag_as_long_as_it_is_there(copy: Path) -> None:
    """No model needs this Definition, and nobody claims it for one."""
    known = load_model_claims(copy)
    assert known is not None and known.needed.get(RECORDED) is None
    assert not any(RECORDED in names for names, _ in known.curated)
    assert known.calls(RECORDED) == {"model:deepseek-r1", "model:deepseek-v3"}
    text = recorded_path(copy, RECORDED).read_text(encoding="utf-8")
    recorded_path(copy, RECORDED).unlink()
    found = [(problem.rule, Path(problem.file).stem) for problem in validate_paths([], copy).problems]
    assert found == [("tag-model", RECORDED)] * 2
    ((path, change),) = sync_definitions(copy, write=True)
    assert (path.stem, change) == (RECORDED, "tags (-model:deepseek-r1 -model:deepseek-v3)")
    recorded_path(copy, RECORDED).write_text(text, encoding="utf-8")
    found = [(problem.rule, "models/recorded/" in problem.message) for problem in validate_paths([path], copy).problems]
    assert found == [("tag-missing", True)] * 2
    assert sync_definitions(copy, write=True) == [(path, "tags (+model:deepseek-r1 +model:deepseek-v3)")]
    assert validate_paths([], copy).problems == []


@pytest.mark.parametrize(
    ("lost", "hint"),
    [
        ("models/needs/llama-3.1-8b.json", "flashinfer-trace sync"),
        ("models/qwen3-8b.json", "version control"),
        ("models/curated/claims.json", "version control"),
        ("models/recorded", "flashinfer-trace sync"),
    ],
)
def test_a_file_from_which_tags_follow_cannot_be_lost(copy: Path, lost: str, hint: str) -> None:
    assert missing_files(copy) == []
    shutil.rmtree(copy / lost) if (copy / lost).is_dir() else (copy / lost).unlink()
    found = [problem for problem in validate_paths([], copy).problems if problem.rule == "dataset-schema"]
    assert [problem.file for problem in found] == [lost] and hint in found[0].hint


def test_every_family_and_every_group_is_of_some_definition() -> None:
    naming = load_naming(REPOSITORY)
    members: dict[str, list[str]] = {}
    for one in definitions(root=REPOSITORY):
        members.setdefault(str(family_name(one, naming)), []).append(one.name)
    assert set(naming.families) == set(members)
    groups = [(name, group) for name, family in naming.families.items() for group in family.tags if group.tags]
    assert [one for one in groups if not any(map(one[1].covers, members[one[0]]))] == []
    patterns = [pattern for _, group in groups for pattern in (*group.only, *group.without)]
    assert len(patterns) > 15
    lonely = [one for one in patterns if "*" not in one and one not in PATHS]
    assert lonely == []
    for _, group in groups:
        for tag in group.tags:
            namespace, colon, value = tag.partition(":")
            assert naming.namespaces[namespace].accepts(value) if colon else tag in naming.flags, tag
