"""The numbers of a checkpoint: what its configuration says of its dtype, and which of its layers are quantised."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from plans import plan_of

import flashinfer_trace
from tools.extract_definitions.models import Model
from tools.extract_definitions.module_places import placed_modules
from tools.extract_definitions.needs import Options, Request
from tools.extract_definitions.number_formats import METHODS, numbers
from tools.extract_definitions.traces import usage_of

ROOT = flashinfer_trace.find_root()
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
LLAMA, MIXTURE, LATENT = ("llama-3.1-8b", 32), ("qwen3-30b-a3b", 48), ("deepseek-v3", 61)
LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
QKV = ("q_proj", "k_proj", "v_proj")


def path_of(name):
    return ROOT / "models" / f"{name}.json"


def config_of(model, quantization=None, **changes):
    """The configuration of a model of the dataset, with its number of layers, as another checkpoint has it."""
    name, layers = model
    config = json.loads(path_of(name).read_text())["config"] | {"num_hidden_layers": layers, **changes}
    return config if quantization is None else {**config, "quantization_config": quantization}


def plan(model, quantization=None, **changes):
    """The Definitions of each op, and the reasons of ops that have none."""
    ops, unsupported, _ = plan_of(path_of(model[0]), config_of(model, quantization, **changes))
    return {op: [name for of in found.values() for name in of] for op, found in ops.items()}, unsupported


def request_of(model, quantization, **changes):
    name = model[0]
    made = Model(name, name, config_of(model, quantization, **changes), path_of(name))
    return Request(made, usage_of(made.architecture, None), Options())


def said(model, op, quantization, **changes):
    """What the numbers of an op are: fp8, bf16, or the reasons why neither is claimed."""
    found = numbers(request_of(model, quantization, **changes), op)
    return "; ".join(found.reasons) or ("fp8" if found.quantised else "bf16")


def listed(*names, key="modules_to_not_convert", **changes):
    return {**BLOCKS, key: list(names), **changes}


def of_layers(text, layers):
    return [text.format(layer) for layer in layers]


def some(op, number, of, name, key="modules_to_not_convert"):
    return f"some layers of {op} are not quantised: {number} of {of}, as {name} ({key})"


FIRST = "model.layers.0"
OUT = "SGLang 0.5.8 quantises {}, which modules_to_not_convert leaves out"
#: model, list -> op -> its numbers.
LISTS = [
    (LLAMA, [], dict.fromkeys(LINEAR, "fp8")),
    (LLAMA, ["lm_head", f"{FIRST}.input_layernorm", "model.norm"], dict.fromkeys(LINEAR, "fp8")),
    (
        LLAMA,
        [f"{FIRST}.self_attn.o_proj"],
        {"o_proj": some("o_proj", 1, 32, f"{FIRST}.self_attn.o_proj"), "qkv_proj": "fp8", "down_proj": "fp8"},
    ),
    (
        LLAMA,
        ["model.layers.9"],
        {
            "o_proj": some("o_proj", 1, 32, "model.layers.9.self_attn.o_proj"),
            "qkv_proj": some("qkv_proj", 1, 32, "model.layers.9.self_attn.qkv_proj"),
            "down_proj": some("down_proj", 1, 32, "model.layers.9.mlp.down_proj"),
            "gate_up_proj": some("gate_up_proj", 1, 32, "model.layers.9.mlp.gate_up_proj"),
        },
    ),
    (
        LLAMA,
        ["model.layers.3"],
        {"o_proj": "takes model.layers.30.self_attn.o_proj for one that modules_to_not_convert names"},
    ),
    (LLAMA, ["mlp"], {"gate_up_proj": "bf16", "down_proj": "bf16", "qkv_proj": "fp8", "o_proj": "fp8"}),
    (
        LLAMA,
        of_layers("model.layers.{}.self_attn", range(32)),
        {"qkv_proj": "bf16", "o_proj": "bf16", "gate_up_proj": "fp8"},
    ),
    (
        LLAMA,
        of_layers("model.layers.{}.self_attn", range(31)),
        {"o_proj": some("o_proj", 31, 32, f"{FIRST}.self_attn.o_proj")},
    ),
    (LLAMA, ["o_proj", "model.layers.32.mlp"], {"o_proj": "bf16", "down_proj": "fp8"}),
    (
        LLAMA,
        [f"{FIRST}.self_attn.{one}" for one in QKV],
        {"qkv_proj": OUT.format(f"{FIRST}.self_attn.qkv_proj"), "o_proj": "fp8"},
    ),
    (
        LLAMA,
        [f"{FIRST}.self_attn.{one}" for one in QKV[1:]],
        {
            "qkv_proj": f"only a part of {FIRST}.self_attn.qkv_proj is not quantised: "
            f"modules_to_not_convert lists {FIRST}.self_attn.k_proj"
        },
    ),
    (
        LLAMA,
        ["model.layers.1.mlp.gate"],
        {
            "gate_up_proj": "SGLang 0.5.8 takes model.layers.1.mlp.gate_up_proj for one that "
            "modules_to_not_convert names, which it is not",
            "down_proj": "fp8",
        },
    ),
    *(
        (LLAMA, [name], dict.fromkeys(LINEAR, f"lists {name}, which is no module that extraction knows"))
        for name in ("experts", "model.layers.0.mlp.fc1", "self_attn.q", "re:.*mlp.c_fc")
    ),
    (MIXTURE, of_layers("model.layers.{}.mlp.gate", range(48)), {"experts": "fp8", "topk": "fp8", "o_proj": "fp8"}),
    *(
        (MIXTURE, [name], {"experts": OUT.format(f"{FIRST}.mlp.experts"), "o_proj": "fp8", "topk": "fp8"})
        for name in ("experts", "mlp")
    ),
    (
        MIXTURE,
        ["model.layers.0.mlp.experts.0.down_proj"],
        {"experts": f"only a part of {FIRST}.mlp.experts is not quantised", "qkv_proj": "fp8"},
    ),
    (
        LATENT,
        ["model.layers.2.mlp"],
        {
            "down_proj": some("down_proj", 1, 61, "model.layers.2.mlp.down_proj"),
            "experts": "fp8",
            "gate": "bf16",
            "kv_b_proj": "fp8",
        },
    ),
    (
        LATENT,
        ["model.layers.61.eh_proj", "shared_experts"],
        {
            "down_proj": some("down_proj", 58, 61, "model.layers.3.mlp.shared_experts.down_proj"),
            "experts": "only a part of model.layers.3.mlp.experts is not quantised: modules_to_not_convert lists "
            "model.layers.3.mlp.shared_experts.gate_proj",
        },
    ),
    (
        LATENT,
        ["self_attn"],
        dict.fromkeys(("o_proj", "q_b_proj", "kv_b_proj", "fused_qkv_a_proj_with_mqa"), "bf16"),
    ),
]


@pytest.mark.parametrize(("model", "names", "expected"), LISTS)
def test_a_list_of_what_is_not_quantised_counts_layer_by_layer(model, names, expected):
    found = {op: said(model, op, listed(*names)) for op in expected}
    assert {op: text for op, text in found.items() if expected[op] not in text} == {}


def test_an_op_of_which_some_layers_are_quantised_has_no_definition():
    ops, unsupported = plan(MIXTURE, listed(f"{FIRST}.self_attn.o_proj"))
    assert "o_proj" not in ops and some("o_proj", 1, 48, f"{FIRST}.self_attn.o_proj") in unsupported["o_proj"]
    assert all(name.startswith("fp8_blockwise_scaled_mm") for name in ops["qkv_proj"])
    ops, _ = plan(MIXTURE, listed("self_attn"))
    assert all(name.startswith("gemm_bf16") for name in ops["qkv_proj"] + ops["o_proj"])
    ops, unsupported = plan(MIXTURE, listed("mlp.experts"))
    assert "experts" not in ops and "leaves out" in unsupported["experts"]
    assert not [name for name in ops["topk"] if "block_scale" in name]


def test_a_list_that_numbers_layers_needs_the_number_of_layers():
    reason = "the configuration lacks the field num_hidden_layers; add it (modules_to_not_convert)"
    assert said(LLAMA, "o_proj", listed("model.layers.5.mlp"), num_hidden_layers=None) == reason
    assert said(LLAMA, "o_proj", listed("mlp"), num_hidden_layers=None) == "fp8"
    assert said(LATENT, "experts", listed("lm_head"), num_hidden_layers=None) == "fp8"


def test_ignored_layers_count_before_modules_to_not_convert():
    both = {**listed("mlp"), "ignored_layers": ["o_proj"]}
    assert [said(LLAMA, op, both) for op in ("o_proj", "down_proj")] == ["bf16", "fp8"]
    assert [said(LLAMA, op, {**both, "ignored_layers": None}) for op in ("o_proj", "down_proj")] == ["fp8", "fp8"]
    found = said(LLAMA, "down_proj", listed("model.layers.9.mlp.down_proj", key="ignored_layers"))
    assert found == some("down_proj", 1, 32, "model.layers.9.mlp.down_proj", "ignored_layers")


@pytest.mark.parametrize("value", ["lm_head", [1], [""], ["re:("], {"a": 1}])
def test_a_list_must_be_one_of_names(value):
    found = said(LLAMA, "o_proj", {**BLOCKS, "modules_to_not_convert": value})
    assert found.startswith("modules_to_not_convert of quantization_config fp8 is ") and "list of names" in found


#: What is not understood of a quantization_config, and the reason; every op with weights or keys is refused.
NOT_UNDERSTOOD = [
    ({**BLOCKS, "novel": 1}, "nobody has classified novel 1 of quantization_config (number_formats.py)"),
    ({**BLOCKS, "fmt": "e5m2"}, 'nobody has classified fmt "e5m2" of quantization_config'),
    ({**BLOCKS, "lm_head": False}, "nobody has classified lm_head false of quantization_config"),
    ({**BLOCKS, "activation_scheme": "static"}, "SGLang refuses activation_scheme static with weights in blocks"),
    ({"quant_method": "gptq", "dynamic": {"+:a": {}}, "lm_head": False}, "nobody has classified dynamic "),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "numbers of this checkpoint (quantization_config modelopt)"),
    ({}, "numbers of this checkpoint (quantization_config {} gives no quant_method)"),
    ("fp8", 'numbers of this checkpoint (quantization_config "fp8" gives no quant_method)'),
]


@pytest.mark.parametrize(("quantization", "reason"), NOT_UNDERSTOOD)
def test_what_is_not_understood_is_refused(quantization, reason):
    ops, unsupported = plan(LLAMA, quantization)
    refused = {*LINEAR, "attn", "logits_processor"}
    assert not refused & set(ops) and {op for op in refused if reason not in unsupported[op]} == set()
    assert {"norm", "rotary_emb", "act_fn", "sampler"} <= set(ops)


def test_known_values_change_nothing():
    expected = {op: said(LLAMA, op, BLOCKS) for op in (*LINEAR, "logits_processor")}
    for more in ({"scale_fmt": "ue8m0"}, {"fmt": None}, {"kv_cache_scheme": None}):
        assert {op: said(LLAMA, op, {**BLOCKS, **more}) for op in expected} == expected
    assert said(LLAMA, "o_proj", {"quant_method": "fp8", "activation_scheme": "static"}).startswith("no family covers")


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
PACKED = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
#: quantization_config -> whether the output head is claimed, or a part of the reason.
HEADS = [
    (BLOCKS, ""),
    ({"quant_method": "fp8"}, "nothing says"),
    ({"quant_method": "fp8", "ignored_layers": ["lm_head"]}, ""),
    (AWQ, ""),
    ({**AWQ, "lm_head": True}, "the output head is quantised (lm_head in quantization_config awq)"),
    (GPTQ, "nothing says that the output head is not quantised (no lm_head in quantization_config gptq)"),
    ({**GPTQ, "lm_head": False}, ""),
    ({**GPTQ, "lm_head": True}, "the output head is quantised"),
    (BITS, "nothing says"),
    ({**BITS, "llm_int8_skip_modules": ["lm_head"]}, ""),
    (PACKED, "nothing says"),
    ({**PACKED, "ignore": ["lm_head"]}, ""),
    ({**PACKED, "ignore": ["re:.*lm_head"]}, ""),
    ({**PACKED, "ignore": ["model.norm"]}, "nothing says"),
    (FBGEMM, ""),
]


@pytest.mark.parametrize(("quantization", "reason"), HEADS)
def test_the_output_head_is_claimed_where_it_is_not_quantised(quantization, reason):
    ops, unsupported = plan(LLAMA, quantization)
    if reason:
        assert "logits_processor" not in ops and reason in unsupported["logits_processor"]
    else:
        assert ops["logits_processor"] == ["gemm_bf16_n128256_k4096", "gemm_bf16_n16032_k4096"]
    assert quantization == BLOCKS or "no family covers the numbers" in unsupported["o_proj"]


LLAMA_405B = (
    *(f"model.layers.{layer}.mlp.{one}_proj" for layer in (0, 31) for one in ("down", "gate", "up")),
    *(f"model.layers.{layer}.self_attn.{one}" for layer in range(32) for one in (*QKV, "o_proj")),
)


def test_other_methods_compare_names_in_other_ways():
    """As Llama-3.1-405B-FP8, whose q_proj, k_proj and v_proj SGLang does not find in its qkv_proj."""
    fbgemm = {**FBGEMM, "modules_to_not_convert": list(LLAMA_405B)}
    assert {op: said(LLAMA, op, fbgemm) for op in LINEAR} == {
        "o_proj": "bf16",
        "qkv_proj": OUT.format(f"{FIRST}.self_attn.qkv_proj"),
        "gate_up_proj": some("gate_up_proj", 2, 32, f"{FIRST}.mlp.gate_up_proj"),
        "down_proj": some("down_proj", 2, 32, f"{FIRST}.mlp.down_proj"),
    }
    halves = [f"model.layers.{layer}.mlp.{one}_proj" for layer in range(32) for one in ("gate", "up")]
    assert said(LLAMA, "gate_up_proj", {**FBGEMM, "modules_to_not_convert": halves}) == "bf16"
    for key, quantization in (("modules_to_not_convert", AWQ), ("llm_int8_skip_modules", BITS), ("ignore", PACKED)):
        assert said(LLAMA, "o_proj", {**quantization, key: ["self_attn"]}) == "bf16"
        assert said(LLAMA, "down_proj", {**quantization, key: ["self_attn"]}).startswith("no family covers")
    whole = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(32)]
    assert said(LLAMA, "o_proj", {**BITS, "llm_int8_skip_modules": whole}) == "bf16"
    assert "quantises" in said(LLAMA, "o_proj", {**BITS, "llm_int8_skip_modules": ["self_attn.o_proj"]})
    assert said(LLAMA, "qkv_proj", {**PACKED, "ignore": ["re:.*self_attn.*"]}) == "bf16"
    assert said(MIXTURE, "experts", {**PACKED, "ignore": ["experts"]}).startswith("no family covers")
    assert said(MIXTURE, "topk", AWQ).startswith("no family covers")


def test_every_key_that_lists_modules_is_read():
    assert {key for method in METHODS.values() for key in method.lists} == {
        *("ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules", "ignore")
    }


def test_a_module_that_the_code_does_not_name_has_no_place():
    request = request_of(LLAMA, listed("mlp"))
    modules = request.usage.code.modules
    assert modules["o_proj"][0].count("add_prefix('o_proj', prefix)") == 1
    known = placed_modules(request, request.model, ["mlp"])
    assert known.layers == 32 and len(known.of["o_proj"]) == 32 and set(known.of) == set(LINEAR)
    code = replace(request.usage.code, modules={**modules, "o_proj": ("RowParallelLinear(a, b)",)})
    other = replace(request, usage=replace(request.usage, code=code))
    reason = "nothing shows where the code places o_proj, and modules_to_not_convert leaves modules unquantised"
    assert numbers(other, "o_proj").reasons == (reason,)


def test_the_experts_of_mixtral_have_other_names():
    model = ("mixtral-8x7b", 32)
    found = said(model, "experts", listed("model.layers.4.block_sparse_moe.experts.0.w2"))
    assert found.startswith("only a part of model.layers.4.block_sparse_moe.experts is not quantised")
    assert said(model, "experts", listed("block_sparse_moe.gate")) == "fp8"


@pytest.mark.parametrize("fields", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_all_layers_may_be_dense_or_have_experts_where_that_is_not_clear(fields):
    request = request_of(MIXTURE, listed("mlp"), **fields)
    places = placed_modules(request, request.model, ["mlp"]).of
    assert len(places["experts"]) == len(places["down_proj"]) == 48


#: Fields of a model of the dataset that lacks its dtype, and whether SGLang serves it in bfloat16.
WITHOUT = [
    ("llama-3.1-8b", {}, False),
    ("llama-3.1-8b", {"torch_dtype": None}, False),
    ("llama-3.1-8b", {"dtype": "bfloat16"}, True),
    ("gemma-2-2b", {}, True),
    ("gemma-2-2b", {"model_type": "gemma2"}, True),
    ("llama-3.1-8b", {"model_type": "gemma"}, True),
    ("gpt-oss-120b", {}, True),
    ("gpt-oss-120b", {"quantization_config": None}, False),
    ("deepseek-v3", {}, False),
]


@pytest.mark.parametrize(("name", "fields", "is_claimed"), WITHOUT)
def test_a_configuration_without_a_dtype_is_what_sglang_takes_it_for(name, fields, is_claimed):
    config = {key: value for key, value in config_of((name, 32)).items() if key != "torch_dtype"}
    ops, unsupported, _ = plan_of(path_of(name), {**config, **fields})
    reason = "the configuration gives no torch_dtype or dtype, and SGLang then serves the model in float16"
    assert ("norm" in ops) is is_claimed and (reason in unsupported.get("norm", "")) is not is_claimed
    assert "sampler" in ops


def test_an_expression_that_takes_too_long_is_refused():
    slow = {**PACKED, "ignore": ["re:(?:.*?){20}[A-Z]"]}
    assert "has an expression that takes too long" in said(LLAMA, "qkv_proj", slow)
