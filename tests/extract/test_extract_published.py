"""Ten configurations as published, which models/ does not have: the plan is what a person read in the model's code.

Each fixture in published/ says where its configuration comes from (`checked`), what the code does (`read`), which
Definitions each op needs (`ops`), why other ops have none (`unsupported`: a part of the reason), and which ops this
configuration never calls (`skipped`). `sources` has the lines of SGLang's code where a person read this, for each op,
as `file:line: code` of release 0.5.11; `before` has what the release whose traces are committed says instead.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import digests
import pytest
import release
from plans import plan_of

import flashinfer_trace
from tools.extract_definitions import understanding
from tools.extract_definitions.errors import ExtractionError
from tools.extract_definitions.models import Model, available
from tools.extract_definitions.needs import Options, Request
from tools.extract_definitions.plan import UNDERSTOOD, Planner
from tools.extract_definitions.settings import EXPRESSED
from tools.extract_definitions.traces import usage_of
from tools.extract_definitions.understanding import known_fields, unclassified

ROOT = flashinfer_trace.find_root()
FIXTURES = {path.stem: path for path in sorted(Path(__file__).with_name("published").glob("*.json"))}


def planned(name, **changes):
    """The needs of a fixture's configuration, by op and op_type, the reasons of other ops, and ops never called."""
    data = json.loads(FIXTURES[name].read_text())
    return data, plan_of(FIXTURES[name], {**data["config"], **changes})


def test_there_are_ten_and_none_is_a_model_of_the_dataset():
    assert len(FIXTURES) == 10 and not set(FIXTURES) & set(available(ROOT))


@pytest.mark.parametrize("name", FIXTURES)
def test_the_plan_is_what_a_person_read_in_the_code(name):
    expected, (ops, unsupported, skipped) = planned(name)
    assert expected["checked"] and expected["read"]
    assert ops == expected["ops"]
    assert sorted(unsupported) == sorted(expected["unsupported"])
    assert {op: reason for op, reason in unsupported.items() if expected["unsupported"][op] not in reason} == {}
    assert skipped == expected["skipped"]


@pytest.mark.parametrize("name", FIXTURES)
def test_each_line_names_the_code_that_a_person_read(name):
    """Each op of the plan has a line that calls it, and no other op has lines."""
    data = json.loads(FIXTURES[name].read_text())
    assert set(data["sources"]) == {*data["ops"], *data["unsupported"], *data["skipped"]}
    without = [op for op, lines in data["sources"].items() if not any(re.search(rf"\b{op}\(", one) for one in lines)]
    assert without == []
    assert set(data["before"]) <= set(data["sources"])


@cache
def lines_of(directory, file):
    return (directory / file).read_text(encoding="utf-8").splitlines()


def misquoted(directory, sources):
    """The sources whose file does not have this text in this line."""
    found = []
    for source in sources:
        match = re.fullmatch(r"(sglang/[\w/]+\.py):(\d+): (\S.*)", source)
        assert match is not None, source
        file, number, text = match.groups()
        lines = lines_of(directory, file)
        if int(number) > len(lines) or lines[int(number) - 1].strip() != text:
            found.append(source)
    return found


@release.needs_sources
@pytest.mark.parametrize("name", FIXTURES)
def test_the_lines_are_in_the_code(name):
    sources = json.loads(FIXTURES[name].read_text())["sources"]
    assert misquoted(release.SOURCES, [one for lines in sources.values() for one in lines]) == []
    file, _, rest = sources["sampler"][0].partition(":")
    assert misquoted(release.SOURCES, [f"{file}:1:{rest.partition(':')[2]}"]), "a wrong line number would not be found"


@cache
def texts_of(directory):
    """Every line of a release's code, without its indentation."""
    return {
        line.strip() for path in (directory / "sglang" / "srt").rglob("*.py") for line in path.open(encoding="utf-8")
    }


@digests.needs_digest_sources
@pytest.mark.parametrize("name", FIXTURES)
def test_the_release_of_the_plan_says_the_same_or_what_is_listed(name):
    data = json.loads(FIXTURES[name].read_text())
    known = texts_of(digests.SOURCES)
    changed = {op for op, lines in data["sources"].items() if {one.split(": ", 1)[1] for one in lines} - known}
    assert changed == set(data["before"])
    assert misquoted(digests.SOURCES, [one for lines in data["before"].values() for one in lines]) == []


#: A field that changes a kernel's function -> the ops of Llama-3.2-1B, or of the other model, that it refuses.
REFUSED = [
    ("llama-3.2-1b", "attn_logit_softcapping", 30.0, {"attn"}),
    ("llama-3.2-1b", "sliding_window", 4096, {"attn"}),
    ("llama-3.2-1b", "layer_types", ["full_attention", "sliding_attention"], {"attn"}),
    ("llama-3.2-1b", "attention_chunk_size", 8192, {"attn"}),
    ("llama-3.2-1b", "query_pre_attn_scalar", 256, {"attn"}),
    ("llama-3.2-1b", "no_rope_layers", [1, 0], {"attn", "rotary_emb"}),
    ("llama-3.2-1b", "vocab_size", 128255, {"logits_processor"}),
    ("llama-3.2-1b", "bias", True, {"qkv_proj", "o_proj"}),
    ("llama-3.2-1b", "mlp_bias", True, {"gate_up_proj", "down_proj"}),
    ("llama-3.2-1b", "residual_multiplier", 0.22, {"input_layernorm", "post_attention_layernorm", "norm"}),
    ("llama-3.2-1b", "hidden_act", "gelu", {"act_fn"}),
    ("llama-3.2-1b", "rope_is_neox_style", False, {"rotary_emb"}),
    ("llama-3.2-1b", "rope_scaling", {"rope_type": "longrope"}, {"rotary_emb"}),
    ("llama-3.2-1b", "rope_scaling", {"type": "default", "mrope_section": [16, 24, 24]}, {"rotary_emb"}),
    ("llama-3.2-1b", "rotary_pct", 0.25, {"rotary_emb"}),
    (
        "llama-3.2-1b",
        "quantization_config",
        {"quant_method": "gptq"},
        {
            *("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "logits_processor"),
        },
    ),
    (
        "llama-3.2-1b",
        "quantization_config",
        {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}},
        {
            *("attn", "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "logits_processor"),
        },
    ),
    (
        "llama-3.2-1b",
        "compression_config",
        {"quant_method": "compressed-tensors"},
        {
            *("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "logits_processor"),
        },
    ),
    (
        "llama-3.2-1b",
        "compression_config",
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}},
        {
            *("attn", "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "logits_processor"),
        },
    ),
    ("glm-4.5-air", "topk_method", "greedy", {"topk"}),
    ("glm-4.5-air", "scoring_func", "softmax", {"topk"}),
    ("glm-4.5-air", "norm_topk_prob", False, {"topk"}),
    ("qwen3-32b", "dual_chunk_attention_config", {"chunk_size": 8192}, {"attn", "rotary_emb"}),
    ("qwen3-32b", "partial_rotary_factor", 0.5, {"rotary_emb"}),
    ("qwen3-32b", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, {"rotary_emb"}),
    ("glm-4.5-air", "partial_rotary_factor", None, {"rotary_emb"}),
    ("glm-4.5-air", "swiglu_limit", 7.0, {"act_fn", "experts"}),
    ("glm-4.5-air", "moe_layer_freq", 2, {"act_fn", "experts", "gate_up_proj", "down_proj"}),
]


@pytest.mark.parametrize(("name", "field", "value", "refused"), REFUSED)
def test_a_field_that_changes_a_function_makes_its_ops_unsupported(name, field, value, refused):
    data, (ops, unsupported, _) = planned(name, **{field: value})
    assert set(data["ops"]) - set(ops) == refused
    assert {op: reason for op, reason in unsupported.items() if op in refused and field not in reason} in (
        {},
        {op: reason for op, reason in unsupported.items() if op in refused and field == "bias"},
    )


@pytest.mark.parametrize(("cap", "reported"), [(30.0, True), (None, False)])
def test_the_cap_of_the_final_logits_is_a_function_without_a_family(cap, reported):
    """It is no other kernel of the product, which the family of the output head covers."""
    data = json.loads(FIXTURES["gemma-2-9b"].read_text())
    config = {**data["config"], "final_logit_softcapping": cap}
    model = Model("m", "M", config, FIXTURES["gemma-2-9b"])
    plan = Planner(ROOT, ROOT / "definitions").plan([Request(model, usage_of(model.architecture, None), Options())])
    rows = {(row.state, row.detail) for row in plan.rows if row.name == "logits_processor"}
    unsupported = "no family covers the cap of the final logits (final_logit_softcapping 30.0)"
    assert rows == {
        ("unsupported", unsupported) if reported else ("partly", "without a Definition: triton:fused_softcap_kernel")
    }


def test_a_norm_of_pytorch_is_reported():
    data = json.loads(FIXTURES["qwen3-32b"].read_text())
    model = Model("m", "M", data["config"], FIXTURES["qwen3-32b"])
    usage = usage_of(model.architecture, None)
    modules = {**usage.code.modules, "last_norm": ("nn.LayerNorm(5120)",), "gate": ("torch.nn.Linear(5120, 1)",)}
    usage = replace(usage, code=replace(usage.code, modules=modules))
    plan = Planner(ROOT, ROOT / "definitions").plan([Request(model, usage, Options())])
    found = {row.name: (row.state, row.detail) for row in plan.rows if row.name in ("last_norm", "gate", "norm")}
    assert found.pop("last_norm") == ("unsupported", "PyTorch's own kernels compute it (nn.LayerNorm)")
    assert "gate" not in found


def test_a_bias_is_part_of_the_layers_that_add_it():
    """Of ranks that share the rows of a product, as those of o_proj at TP 8, only the first adds the bias."""
    _, (ops, _, _) = planned("llama-3.2-1b", attention_bias=True)
    assert ops["qkv_proj"] == {"gemm": ["gemm_bf16_bias_n3072_k2048", "gemm_bf16_bias_n384_k2048"]}
    biased = ["gemm_bf16_bias_n2048_k2048", "gemm_bf16_bias_n2048_k256", "gemm_bf16_n2048_k256"]
    assert ops["o_proj"] == {"gemm": biased}


def test_a_router_that_multiplies_in_float32_is_not_one_in_bfloat16():
    """As GLM-4.5's in release 0.5.11."""
    data = json.loads(FIXTURES["glm-4.5-air"].read_text())
    usage = usage_of("Glm4MoeForCausalLM", None)
    wide = {"linear": ("F.linear(hidden_states.to(torch.float32), self._weight_fp32, None)",)}
    model = Model("m", "M", data["config"], FIXTURES["glm-4.5-air"])
    request = Request(model, replace(usage, code=replace(usage.code, products=wide)), Options())
    ops, unsupported = Planner(ROOT, ROOT / "definitions").needs_of(request)
    assert set(data["ops"]) - set(ops) == {"gate"}
    assert "the code multiplies in float32" in unsupported["gate"]


def test_a_window_that_is_switched_off_changes_nothing():
    _, (ops, _, _) = planned("qwen3-32b", sliding_window=131072, use_sliding_window=False)
    assert "attn" in ops
    _, (ops, unsupported, _) = planned("qwen3-32b", sliding_window=4096, use_sliding_window=True)
    assert "attn" not in ops and "sliding_window 4096" in unsupported["attn"]


def test_a_field_that_nobody_has_classified():
    """It is reported; if the code of the model reads it, no op is claimed but the sampler, which has no weights."""
    data = json.loads(FIXTURES["llama-3.2-1b"].read_text())
    config = {**data["config"], "novel_gate": True}
    model = Model("m", "M", config, FIXTURES["llama-3.2-1b"])
    usage = usage_of("LlamaForCausalLM", None)
    assert unclassified(model, UNDERSTOOD) == ["novel_gate"]
    reads = {**usage.code.reads, "novel_gate": ("False",)}
    for code, claimed in ((usage.code, set(data["ops"])), (replace(usage.code, reads=reads), {"sampler"})):
        request = Request(model, replace(usage, code=code), Options())
        ops, unsupported = Planner(ROOT, ROOT / "definitions").needs_of(request)
        assert set(ops) == claimed
    assert "the code reads novel_gate, which nobody has classified" in unsupported["attn"]


def test_no_op_is_called_unused_where_the_code_reads_what_nobody_has_classified():
    """Here, experts are all there is. What is not understood might be another network beside them."""
    path = ROOT / "models/qwen2-57b-a14b.json"
    config = {**json.loads(path.read_text())["config"], "shared_expert_intermediate_size": 0, "novel_gate": True}
    model, usage = Model("m", "M", config, path), usage_of("Qwen2MoeForCausalLM", None)
    reads = {**usage.code.reads, "novel_gate": ("False",)}
    dense = {"act_fn", "gate_up_proj", "down_proj"}
    for code, unused in ((usage.code, dense), (replace(usage.code, reads=reads), set())):
        request = Request(model, replace(usage, code=code), Options())
        _, unsupported = Planner(ROOT, ROOT / "definitions").needs_of(request)
        assert set(request.unused) == unused and set(unsupported) & dense == dense - unused
    assert all(unsupported[op].startswith("the code reads novel_gate, which nobody") for op in dense)


def test_an_absent_field_counts_by_the_default_that_the_code_gives_it():
    """Qwen3-Next's qkv_proj has a gate for each query head unless a field says no that its configuration lacks."""
    data = json.loads(FIXTURES["llama-3.2-1b"].read_text())
    model, usage = Model("m", "M", data["config"], FIXTURES["llama-3.2-1b"]), usage_of("LlamaForCausalLM", None)
    for defaults, claimed in (
        (("True",), {"sampler"}),
        ((), {"sampler"}),
        (("False", "hasattr"), set(data["ops"])),
        (("None", "True"), {"sampler"}),
    ):
        code = replace(usage.code, reads={**usage.code.reads, "novel_gate": defaults})
        ops, _ = Planner(ROOT, ROOT / "definitions").needs_of(Request(model, replace(usage, code=code), Options()))
        assert set(ops) == claimed


@pytest.mark.parametrize(("default", "claimed"), [("True", True), ("False", False), ("not config.gptj", False)])
def test_what_decides_an_argument_counts_by_its_default(default, claimed):
    """ERNIE 4.5 rotates neighbouring features unless its configuration says otherwise."""
    data = json.loads(FIXTURES["llama-3.2-1b"].read_text())
    model, usage = Model("m", "M", data["config"], FIXTURES["llama-3.2-1b"]), usage_of("LlamaForCausalLM", None)
    code = replace(usage.code, reads={**usage.code.reads, "rope_is_neox_style": ("True", default)})
    request = Request(model, replace(usage, code=code), Options())
    ops, unsupported = Planner(ROOT, ROOT / "definitions").needs_of(request)
    assert set(data["ops"]) - set(ops) == (set() if claimed else {"rotary_emb"})
    assert claimed or f"by default {default}: other pairs of features" in unsupported["rotary_emb"]


def test_an_op_is_refused_where_nothing_shows_how_it_is_built():
    data = json.loads(FIXTURES["llama-3.2-1b"].read_text())
    model, usage = Model("m", "M", data["config"], FIXTURES["llama-3.2-1b"]), usage_of("LlamaForCausalLM", None)
    modules = {name: texts for name, texts in usage.code.modules.items() if name != "qkv_proj"}
    code = replace(usage.code, modules=modules)
    request = Request(model, replace(usage, code=code), Options())
    ops, unsupported = Planner(ROOT, ROOT / "definitions").needs_of(request)
    assert set(data["ops"]) - set(ops) == {"qkv_proj"}
    assert unsupported["qkv_proj"].startswith("nothing shows how the code builds qkv_proj")


#: What the code of a model might pass instead -> the ops that are refused.
PASSED = [
    ("modules", "attn", "RadixAttention(self.num_heads, attn_type=AttentionType.ENCODER_ONLY)", {"attn"}),
    ("modules", "attn", "FlexAttention(self.num_heads)", {"attn"}),
    ("modules", "attn", "RadixAttention(self.num_heads, logit_cap=config.attn_logit_softcapping)", {"attn"}),
    ("modules", "input_layernorm", "GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)", {"input_layernorm"}),
    ("modules", "input_layernorm", "RMSNorm(config.hidden_size, eps=1e-12)", {"input_layernorm"}),
    ("modules", "input_layernorm", "RMSNorm(config.hidden_size)", {"input_layernorm"}),
    ("modules", "act_fn", "SiluAndMul(limit=7)", {"act_fn"}),
    ("modules", "down_proj", "RowParallelLinear(a, b)", {"down_proj"}),
    ("modules", "down_proj", "RowParallelLinear(a, b, bias=True)", {"down_proj"}),
    ("modules", "rotary_emb", "get_rope(self.head_dim, is_neox_style=False)", {"rotary_emb"}),
    ("modules", "logits_processor", "LogitsProcessor(config, logit_scale=0.5)", {"logits_processor"}),
    ("calls", "attn", "self.attn(q, k, v, forward_batch, alibi_slopes=self.slopes)", {"attn"}),
    *(
        ("modules", op, f"{text}, bias=False)", {op})
        for op, text in (
            ("qkv_proj", "QKVParallelLinear(hidden_size, self.head_dim, self.heads * 2, self.total_num_kv_heads"),
            ("qkv_proj", "QKVParallelLinear(hidden_size, self.v_head_dim, self.total_num_heads"),
            ("qkv_proj", "QKVParallelLinear(hidden_size, head_dim, num_heads, num_kv_heads, self.qkv_bias"),
            ("o_proj", "RowParallelLinear(self.total_num_heads * self.v_head_dim, hidden_size"),
            ("gate_up_proj", "MergedColumnParallelLinear(hidden_size, [intermediate_size] * 3"),
            ("down_proj", "RowParallelLinear(input_size=self.inner_size, output_size=hidden_size"),
        )
    ),
    (
        *("modules", "qkv_proj"),
        "QKVParallelLinear(hidden_size=config.hidden_size, head_size=self.head_dim, bias=config.attention_bias, "
        "total_num_heads=config.num_attention_heads, total_num_kv_heads=config.num_key_value_heads)",
        set(),
    ),
]


@pytest.mark.parametrize(("section", "attribute", "text", "refused"), PASSED)
def test_what_the_code_passes_is_the_second_witness(section, attribute, text, refused):
    data = json.loads(FIXTURES["llama-3.2-1b"].read_text())
    usage = usage_of("LlamaForCausalLM", None)
    code = replace(usage.code, **{section: {**getattr(usage.code, section), attribute: (text,)}})
    reads = {**code.reads, "attn_logit_softcapping": ()}
    model = Model("m", "M", data["config"], FIXTURES["llama-3.2-1b"])
    request = Request(model, replace(usage, code=replace(code, reads=reads)), Options())
    ops, unsupported = Planner(ROOT, ROOT / "definitions").needs_of(request)
    assert set(data["ops"]) - set(ops) == refused
    assert all("the code " in unsupported[op] for op in refused)


def test_every_field_is_classified_once():
    """What is harmless changes nothing, and what a recipe understands needs no neutral value."""
    known = known_fields()
    data = json.loads(understanding.FIELDS.read_text())
    names = [name for group in data["harmless"].values() for name in group]
    assert len(names) == len(set(names)) and not set(names) & set(known.neutral)
    compared = {"residual_multiplier", "use_sliding_window"}  # with what the code reads
    understood = UNDERSTOOD - EXPRESSED - compared
    understood -= {"attention_bias", "hidden_act", "architectures", "moe_layer_freq"}
    assert not understood & (known.harmless | set(known.neutral))
    groups = {*understanding.GROUPS, "all", *(op for usage in map(usage_of_fixture, FIXTURES) for op in usage)}
    assert {one for entry in known.neutral.values() for one in entry["affects"]} <= groups


def usage_of_fixture(name):
    architecture = json.loads(FIXTURES[name].read_text())["config"]["architectures"][0]
    return {op.name for op in usage_of(architecture, None).ops}


def test_a_recipe_cannot_read_a_field_that_it_does_not_declare():
    model = Model("m", "M", {"hidden_size": 8, "novel_gate": 1}, Path("m.json")).restricted(
        frozenset({"hidden_size"}), "r"
    )
    assert model.size("hidden_size") == 8 and list(model.config) == ["hidden_size"] and len(model.config) == 1
    with pytest.raises(ExtractionError, match="the recipe r reads 'novel_gate', which its `fields` do not declare"):
        model.count("novel_gate")
