"""model: tags follow from models/ or a curated claim; descriptions mean the same in a family, and have its numbers."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from fnmatch import fnmatchcase
from typing import Any

import jsonschema
import pytest

from flashinfer_trace import definitions, load
from flashinfer_trace.dataset.coverage import load_needs
from flashinfer_trace.dataset.model_claims import ModelClaims, curated_path, load_model_claims
from flashinfer_trace.dataset.validation.candidate import Candidate
from flashinfer_trace.dataset.validation.model_rules import (
    _NUMBER,
    _phrases,
    _value,
    _without_names,
    check_models,
    check_numbers,
)
from flashinfer_trace.dataset.validation.problems import Findings
from flashinfer_trace.format.naming import family_name, load_naming
from flashinfer_trace.kernels import TABLE

from .conftest import REPOSITORY, Dataset

CLAIMS = json.loads(curated_path(REPOSITORY).read_text(encoding="utf-8"))["claims"]


def rules(definition: dict[str, Any], claims: ModelClaims | None = None) -> list[str]:
    findings = Findings(REPOSITORY / "x.json", REPOSITORY)
    if claims is not None:
        check_models(Candidate(definition), claims, findings)
    check_numbers(Candidate(definition), findings)
    return [problem.rule for problem in findings.problems]


#: Kernels of sglang 0.5.8 that 0.5.11 no longer has.
KERNELS_OF_NO_CONFIGURATION = {"compute_problem_sizes_w4a8_kernel"}


def test_curated_claims_name_what_exists_and_is_claimed() -> None:
    schema = json.loads((REPOSITORY / "schema" / "curated_claims.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(json.loads(curated_path(REPOSITORY).read_text(encoding="utf-8")))
    known = load_model_claims(REPOSITORY)
    assert known is not None
    needs = load_needs(REPOSITORY).values()
    traced = {kernel["kernel"].partition(":")[2] for one in needs for kernel in one["kernels"]}
    known_paths = {at.path for one in TABLE for at in one.places} | {path for one in TABLE for path in one.launches}
    exported = {path.rpartition(".")[2] for path in known_paths}
    names = [one.name for one in definitions(root=REPOSITORY)]
    for claim in CLAIMS:
        name = claim.get("kernel", "dsv3_router_gemm")
        assert name in traced or name in exported or name in KERNELS_OF_NO_CONFIGURATION, claim
        assert set(claim.get("models", ())) <= known.models, claim
        for pattern in claim["definitions"]:
            assert any(fnmatchcase(one, pattern) for one in names), f"nothing has this name: {pattern}"


def test_the_sources_of_parallel_sizes_say_what_the_models_have() -> None:
    """Fields in parentheses are the models', and numbers are their constants or a rank's part of one."""
    checked = 0
    for claim in CLAIMS:
        files = re.findall(r"models/([\w.-]+)\.json", claim["source"])
        if not claim["source"].startswith("models/"):
            continue
        text = claim["source"].partition(": ")[2]
        sizes = {1, *(int(tag.partition(":")[2]) for tag in claim["tags"])}
        for name in files:
            config = json.loads((REPOSITORY / "models" / f"{name}.json").read_text(encoding="utf-8"))["config"]
            known = {value // size for value in config.values() if type(value) is int for size in sizes} | sizes
            head = config["hidden_size"] // config["num_attention_heads"]
            numbers = {int(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.])", text)}
            assert numbers <= {*known, head}, (claim, name)
            fields = re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", " ".join(re.findall(r"\(([^)]*)\)", text)))
            assert set(fields) <= config.keys(), (claim, name)
            checked += 1
    assert checked > 20


def test_a_description_says_that_a_model_uses_it_only_where_its_tag_does() -> None:
    """For example: nobody publishes Mixtral in fp8 blocks, and 8 ranks cannot share the 28 heads of Qwen2-57B-A14B."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(REPOSITORY.glob("models/*.json"))]
    titles = {rf"(?<![\w.-]){re.escape(one['title'])}(?!\w|[-.]\w)": one["name"] for one in files}
    users = re.compile(r"(?:Used (?:at TP [\d, and]+ |between the blocks )?(?:by|of)|he routed experts of) (.*)")
    said = 0
    for one in definitions(root=REPOSITORY):
        found = users.search(one.description)
        named = {name for title, name in titles.items() if found and re.search(title, found[1])}
        assert named <= set(one.tag_values("model")), one.name
        said += bool(named)
    assert said > 100


def test_a_claim_is_needed_or_curated(minimal: dict[str, Any]) -> None:
    claims = ModelClaims(
        frozenset({"a", "b", "c"}),
        {"rmsnorm_h8": frozenset({"model:a"})},
        ((("rms*",), frozenset({"model:b", "model:gpt-9001"})),),
    )
    unknown = (("gpt-9000", ["tag-model"]), ("gpt-9001", ["tag-model"]))
    for model, expected in (("a", []), ("b", []), ("c", ["tag-model"]), *unknown):
        assert rules({**minimal, "tags": ["status:unverified", f"model:{model}"]}, claims) == expected


def test_a_malformed_curated_file_is_reported(dataset: Dataset, minimal: dict[str, Any]) -> None:
    dataset.write("models/needs/x.json", {"model": "x", "ops": [], "sizes": []})
    dataset.write("models/curated/claims.json", {"claims": [{}]})
    found = dataset.problems(dataset.add(minimal))
    assert [(problem.rule, problem.file) for problem in found] == [("dataset-schema", "models/curated/claims.json")]


COPIED = "It normalizes the hidden state in DeepSeek-R1 and DeepSeek-V3, and (twice) in DeepSeek-R1."


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (COPIED, "DeepSeek-R1, DeepSeek-V3"),
        ("Attention. Used at TP 4 by Qwen2.5-14B. Sizes of Qwen3-8B.", "Qwen2.5-14B"),
        ("Attention of 8 heads, page size 1, in Qwen3-8B", "Qwen3-8B"),
        ("These are the sizes of Qwen3-8B at TP 1, but SGLang calls another kernel there.", ""),
        ("Router, Qwen3-8B's sizes. The size is Qwen3-8B's. This is the size of Qwen3-8B's hidden states.", ""),
        ("Used by Qwen3-9000B and by Qwen3-4B, which models/needs/ gives.", ""),
    ],
)
def test_without_model_tags_a_description_says_no_more_than_whose_sizes_these_are(
    text: str, named: str, minimal: dict[str, Any]
) -> None:
    known = load_model_claims(REPOSITORY)
    assert known is not None
    claims = ModelClaims(known.models, {minimal["name"]: frozenset({"model:qwen3-4b"})}, (), known.titles)
    findings = Findings(REPOSITORY / "x.json", REPOSITORY)
    check_models(Candidate({**minimal, "description": text}), claims, findings)
    assert [one.message.partition(", in ")[0] for one in findings.problems] == (
        [f"the description says of {named} what models/ does not"] if named else []
    )
    for one in findings.problems:
        assert one.rule == "description-model" and "write `Sizes of ...`" in one.hint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RMSNorm over 8 features.", []),
        ("RMSNorm over 7168 features.", ["description-number"]),
        ("RMSNorm over 7,168 features.", ["description-number"]),
        ("RMSNorm over 16 features.", ["description-number"]),
        ("Norm over 8 features (2 x 4 = 8), for Qwen3-30B-A3B and a 128x128 block at 2.5 GHz.", []),
        ("RMSNorm over 8 features, eps 1e-6 (0.000001).", []),
        ("RMSNorm over 8 features, eps 1e-9.", ["description-number"]),
        ("RMSNorm over 8 features, eps 0.000000001.", ["description-number"]),
        ("RMSNorm over 8 features in bf16.", []),
        ("RMSNorm over 8 features in fp16.", ["description-number"]),
        ("RMSNorm over 8 features in FP16.", ["description-number"]),
        ("RMSNorm over 8 features in half precision, eps 1E-9.", ["description-number"] * 2),
        ("Norm over 8 features at TP 8 (4 heads x 2).", []),
        ("Norm over 8 features at TP 8 (40 heads x 20).", ["description-number"]),
        ("Norm of 8 features, in halves of 4.", []),
    ],
)
def test_numbers_of_a_description(text: str, expected: list[str], minimal: dict[str, Any]) -> None:
    assert rules({**minimal, "description": text}) == expected


@pytest.mark.parametrize(
    ("name", "section", "old", "new", "said"),
    [
        ("gqa_paged_decode_h32_kv8_d128_ps64", "", "32 query heads", "64 query heads", "num_qo_heads is 32"),
        ("gqa_paged_decode_h32_kv8_d128_ps64", "", "8 key-value", "4 key-value", "num_kv_heads is 8"),
        ("gqa_paged_decode_h32_kv8_d128_ps64", "", "of size 128", "of size 64", "head_dim is 128"),
        ("gqa_paged_decode_h32_kv8_d128_ps64", "", "page size 64", "page size 16", "page_size is 64"),
        ("moe_topk_deepseek_topk8_ng8_kg4_e256", "", "best 4 of 8", "best 2 of 8", "topk_group is 4"),
        ("moe_topk_deepseek_topk8_ng8_kg4_e256", "", "4 of 8 groups", "4 of 4 groups", "n_group is 8"),
        ("moe_topk_deepseek_topk8_ng8_kg4_e256", "", "the 8 best", "the 6 best", "top_k is 8"),
        ("moe_topk_deepseek_topk8_ng8_kg4_e256", "", "among 256", "among 128", "num_experts is 256"),
        ("moe_topk_deepseek_shared_experts_topk9_ng8_kg4_e256_s1", "", "the 8 best", "the 9 best", "experts is 8"),
        (
            "gqa_extend_causal_h16_kv8_qk256_vo256_softcap50_window4096",
            "",
            "window of 4096",
            "window of 4095",
            "size is 4096",
        ),
        ("gemm_n6144_k4096", "", "4096 input", "6144 input", "K is 4096"),
        ("silu_and_mul_i1368", "", "1368 features", "2736 features", "intermediate_size is 1368"),
        ("fused_qknorm_h8_kv2_d128", "", "128 features", "256 features", "do not follow"),
        ("rope_with_cos_sin_cache_neox_style_h10_kv2_d128_rd128", "", "i + 64", "i + 32", "rotary_dim / 2 is 64"),
        ("moe_align_block_size_topk9_e161_b16", "", "(160", "(161", "num_experts - 1 is 160"),
        ("moe_align_block_size_topk9_e161_b16", "", "blocks of 16", "blocks of 32", "block_size is 16"),
        ("gqa_paged_decode_h32_kv8_d128_ps64", "axes/page_size", ".", ", or page size 16.", "page_size is 64"),
        ("gqa_paged_decode_h32_kv8_d128_ps64", "inputs/q", ".", " of 64 query heads.", "num_qo_heads is 32"),
        ("gqa_paged_decode_h32_kv8_d128_ps64", "inputs/sm_scale", "sqrt(128)", "sqrt(64)", "head_dim is 128"),
        ("gqa_extend_causal_h16_kv16_qk192_vo128", "inputs/sm_scale", "sqrt(192)", "sqrt(128)", "qk_dim is 192"),
        ("gqa_paged_decode_h32_kv8_d128_ps64", "outputs/lse", "logarithm", "logarithm of 5000", "do not follow"),
    ],
)
def test_a_phrase_gives_the_size_of_its_own_axis(name: str, section: str, old: str, new: str, said: str) -> None:
    """Each of these numbers but the last is that of some other axis, or of one digit."""
    data = load(name, REPOSITORY).to_dict()
    assert rules(data) == []
    entry = data
    for part in section.split("/") if section else ():
        entry = entry[part]
    assert old in entry["description"]
    entry["description"] = entry["description"].replace(old, new, 1)
    findings = Findings(REPOSITORY / "x.json", REPOSITORY)
    check_numbers(Candidate(data), findings)
    (problem,) = findings.problems
    assert problem.rule == "description-number" and said in problem.message
    assert problem.pointer == "/".join(["", *filter(None, section.split("/")), "description"])


def test_every_way_to_say_a_size_is_used_and_names_axes_that_exist() -> None:
    used: dict[str, bool] = {}
    for one in definitions(root=REPOSITORY):
        for phrase, axes in _phrases().items():
            said = [one.description, *(tensor.description for tensor in one.inputs.values())]
            named = {part for axis in axes for part in re.split(" [-/] ", axis)}
            if phrase.pattern not in used and any(map(phrase.search, said)) and named & set(one.const_axes):
                used[phrase.pattern] = True
    assert [phrase.pattern for phrase in _phrases() if phrase.pattern not in used] == []


@pytest.mark.parametrize("text", ["a", "a.", "1x", "1", "(a", "TP 1, "])
def test_a_description_of_any_length_is_read_at_once(text: str, minimal: dict[str, Any]) -> None:
    """The search for numbers begins once in each word; a number may have more digits than Python converts."""
    started = time.process_time()
    rules({**minimal, "description": (text * 100_000)[:100_000]})
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Qwen3-8B has 4096 features in blocks of 128x128, as gemm_n4096_k512 and float8_e4m3fn", ["4096"]),
        ("8B.100 and 3d77, x, and 512", ["512"]),
    ],
)
def test_numbers_in_names_are_none(text: str, numbers: list[str]) -> None:
    assert _NUMBER.findall(_without_names(text)) == numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(64 heads x 192)", 12288),
        ("((64 query + 2 x 8 key-value heads) x 128)", 10240),
        ("((28 query + 2 x 4 key-value heads) x 128, before its bias is added)", 4608),
        ("(q_lora_rank 1536 + kv_lora_rank 512 + rope 64)", 2112),
        ("(6 heads of 128 features: sizes of Llama-3.1-8B and Qwen3-8B at TP 1)", 768),
        ("(6 heads of 128 features, the sizes of Qwen3-8B: at TP 1)", 768),
        ("(vocabulary)", None),
        ("(see 3 and 4)", None),
    ],
)
def test_arithmetic_in_parentheses(text: str, value: int | None) -> None:
    assert _value(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RMSNorm of 4097 features.", "numbers that do not follow from the sizes (hidden_size 512): 4097"),
        ("RMSNorm with an epsilon of 1e-05.", "numbers that the reference does not use: 1e-05"),
    ],
)
def test_a_wrong_number_is_named_with_what_it_was_compared_with(text: str, message: str) -> None:
    definition = {**load("rmsnorm_h512", REPOSITORY).to_dict(), "description": text}
    findings = Findings(REPOSITORY / "x.json", REPOSITORY)
    check_numbers(Candidate(definition), findings)
    assert [one.message for one in findings.problems] == [f"the description mentions {message}"]


pytestmark = pytest.mark.quick


def test_no_definition_describes_alone_what_its_siblings_describe_otherwise() -> None:
    """Numbers apart. The needs of models are compared with the recipes, byte for byte, in tests/extract."""
    claims, naming = load_model_claims(REPOSITORY), load_naming(REPOSITORY)
    assert claims is not None
    wordings: dict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in definitions(root=REPOSITORY):
        assert one.path is not None
        data = json.loads(one.path.read_text(encoding="utf-8"))
        for section in ("axes", "inputs", "outputs"):
            for name, entry in data[section].items():
                # "in these models" where a recipe knows them, "in models" where people wrote the Definition.
                text = re.sub(r"\d+", "#", entry["description"]).replace("in these models", "in models")
                wordings[str(family_name(one, naming)), section, name][text].append(one.name)
    compared = 0
    alone: dict[str, set[str]] = defaultdict(set)
    for (_, section, name), found in wordings.items():
        compared += sum(map(len, found.values())) > 1
        for names in found.values() if len(found) > 1 else ():
            if len(names) == 1 and names[0] not in claims.needed:
                alone[names[0]].add(f"/{section}/{name}/description")
    assert compared > 800
    assert alone == {}, "describe them as their siblings do"
