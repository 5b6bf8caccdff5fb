"""models/*.json: valid, consistent, equal to the defaults in transformers that are a model's, and in the dataset."""

from __future__ import annotations

import copy
import importlib
import json
import re

import jsonschema
import pytest

import flashinfer_trace
from flashinfer_trace.format.naming import load_naming

ROOT = flashinfer_trace.find_root()
SCHEMA = json.loads((ROOT / "schema" / "model.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
MODELS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("models/*.json"))}
DEFINITIONS = {definition.name: definition for definition in flashinfer_trace.definitions()}

#: Models whose constants are the defaults of a configuration class in transformers, and the fields that differ: for
#: example, the class of Qwen3-MoE takes head_dim from the published file.
DEFAULTS = {
    "deepseek-v3": ("deepseek_v3", "DeepseekV3Config", ("rope_scaling",)),
    "deepseek-r1": ("deepseek_v3", "DeepseekV3Config", ("rope_scaling",)),
    "mixtral-8x7b": ("mixtral", "MixtralConfig", ()),
    "gemma-2-2b": ("gemma2", "Gemma2Config", ("hidden_act",)),
    "gpt-oss-120b": ("gpt_oss", "GptOssConfig", ("attention_bias",)),
    "qwen3-30b-a3b": ("qwen3_moe", "Qwen3MoeConfig", ("head_dim", "norm_topk_prob", "mlp_only_layers", "rope_theta")),
}


def parallel_sizes(config):
    """Tensor-parallel sizes up to 8 that divide the query heads, and the key-value heads or a multiple of them."""
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    return [size for size in (1, 2, 4, 8) if heads % size == 0 and (shared % size == 0 or size % shared == 0)]


def head_size(config):
    return config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_follows_the_schema_and_names_itself(name):
    model = MODELS[name]
    assert [error.message for error in VALIDATOR.iter_errors(model)] == []
    assert model["name"] == name
    assert load_naming(ROOT).namespaces["model"].accepts(name)
    assert re.sub(r"[^a-z0-9]", "", model["title"].lower()) == re.sub(r"[^a-z0-9]", "", name)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.pop("source"),
        lambda model: model["source"].pop("repository"),
        lambda model: model["source"].update(repository="https://example.org/model"),
        lambda model: model.update(name="DeepSeek V3"),
        lambda model: model["config"].pop("hidden_size"),
        lambda model: model["config"].update(hidden_size=0),
        lambda model: model["config"].update(hidden_size=7168.5),
        lambda model: model["config"].update(rms_norm_eps=1),
        lambda model: model["config"].update(rope_base=10000),
        lambda model: model["config"].pop("rope_theta"),
        lambda model: model["config"].update(rope_scaling={"factor": 40, "mscale": 1.0}),
        lambda model: model["config"].pop("routed_scaling_factor"),
        lambda model: model["config"].update(torch_dtype="float16"),
        lambda model: model.pop("checked"),
        lambda model: model.update(quantized=[{"repository": "nobody/nothing"}]),
        lambda model: model["config"].pop("qk_rope_head_dim"),
        lambda model: model["config"].pop("moe_intermediate_size"),
        lambda model: model["config"].update(architectures=["One", "Two"]),
        lambda model: model["config"]["quantization_config"].update(weight_block_size=[128]),
    ],
)
def test_a_malformed_model_does_not_follow_the_schema(change):
    model = copy.deepcopy(MODELS["deepseek-v3"])
    change(model)
    assert not VALIDATOR.is_valid(model)


@pytest.mark.parametrize("name", MODELS)
def test_the_constants_fit_together(name):
    config = MODELS[name]["config"]
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    # Latent attention has different head sizes.
    assert head_size(config) in (64, 128, 256) or {"kv_lora_rank", "o_lora_rank"} & config.keys()
    experts = [config[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if key in config]
    assert len(experts) <= 1
    if experts:
        chosen = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
        assert next(config[key] for key in chosen if key in config) < experts[0]
    if "n_group" in config:
        assert experts[0] % config["n_group"] == 0
        assert config["topk_group"] <= config["n_group"]


def test_a_model_that_is_the_same_as_another_has_its_constants():
    """The other names none itself, as what is traced for it is looked up under its own name."""
    same = {name: model["same_as"] for name, model in MODELS.items() if "same_as" in model}
    assert same["deepseek-r1"] == "deepseek-v3"
    for name, other in same.items():
        assert name != other and other not in same and MODELS[name]["config"] == MODELS[other]["config"]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_how_it_was_checked(name):
    """Its words about a test are true, and fields that the test leaves out are named."""
    checked = MODELS[name]["checked"]
    assert ("by a test" in checked) is (name in DEFAULTS)
    for field in DEFAULTS[name][2] if name in DEFAULTS else ():
        assert field in checked
    if name in DEFAULTS:
        assert "compared with" in checked and DEFAULTS[name][1] in checked
    # Each says where a copy of the published file was found, or which fields nobody has found quoted.
    assert "agree with" in checked or "by hand" in checked
    assert "All fields agree with" in checked or "All fields, also" in checked or "by hand" in checked


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_published_under_its_name(name):
    model = MODELS[name]
    title, repository = (plain(text) for text in (model["title"], model["source"]["repository"]))
    assert plain(name) == title and title in repository


def plain(text):
    return re.sub(r"[^a-z0-9]", "", text.lower())


#: Fields that differ in runs with few layers: the kinds of layers, and formats of weights that they leave or write out.
OF_RUNS = {"architectures", "first_k_dense_replace", "layer_types", "quantization_config"}


def test_recorded_runs_have_the_same_constants():
    """The runs in traces/runtime/ say with which constants SGLang built the model."""
    models = {plain(name): model for name, model in MODELS.items()}
    compared = set()
    for path in sorted((ROOT / "traces" / "runtime").glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        if model := models.get(plain(run["model"])):
            own = {field: value for field, value in model["config"].items() if field not in OF_RUNS}
            assert own == {field: run["model_config"].get(field) for field in own}, (path.name, model["name"])
            compared.add(model["name"])
    assert len(compared) > 10


@pytest.mark.parametrize("name", DEFAULTS)
def test_transformers_has_the_same_defaults(name):
    pytest.importorskip("transformers", reason="pip install transformers (it does not bring torch)")
    module, cls, other = DEFAULTS[name]
    configuration = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    defaults = getattr(configuration, cls)().to_dict()
    compared = 0
    for field, value in MODELS[name]["config"].items():
        if field in defaults and field not in (*other, "architectures"):
            assert defaults[field] == value, field
            compared += 1
    assert compared >= 8


def test_every_model_tag_has_a_model_and_every_model_is_tagged():
    tagged = {model for definition in DEFINITIONS.values() for model in definition.tag_values("model")}
    assert tagged == set(MODELS)


def sizes_of_ranks(name):
    """The tensor-parallel sizes at which the dataset has a model, by models/needs/."""
    needed = json.loads((ROOT / "models" / "needs" / f"{name}.json").read_text(encoding="utf-8"))
    return {int(size["tag"].partition(":")[2]) for size in needed["sizes"] if size["tag"].startswith("tp:")}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_a_size_of_ranks_that_divides_its_heads(name):
    sizes, heads = sizes_of_ranks(name), MODELS[name]["config"]["num_attention_heads"]
    assert sizes and all(heads % size == 0 for size in sizes)


@pytest.mark.parametrize("name", [name for name in MODELS if sizes_of_ranks(name) >= {1, 2}])
def test_the_dataset_has_the_sizes_of_the_model(name):
    config = MODELS[name]["config"]
    suffix = {1e-6: "", 1e-5: "_eps1e5"}[config["rms_norm_eps"]]
    hidden, heads, shared = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    # rmsnorm_h4096 is what flashinfer-bench calls so: the one with an epsilon of 1e-5.
    named = {"": "_eps1e6", "_eps1e5": ""}[suffix] if hidden == 4096 else suffix
    if "Gemma" in config["architectures"][0]:
        expected = {f"gemma_rmsnorm_h{hidden}", f"gemma_fused_add_rmsnorm_h{hidden}"}
    else:
        expected = {f"rmsnorm_h{hidden}{named}", f"fused_add_rmsnorm_residual_out_h{hidden}{suffix}"}
    expected |= {f"{f}_v{config['vocab_size']}" for f in ("min_p_sampling_from_probs", "top_p_renorm_probs")}
    expected.add(f"gemm_bf16_n{config['vocab_size']}_k{hidden}")
    for size in parallel_sizes(config):
        if "kv_lora_rank" in config:
            part = config["qk_rope_head_dim"]
            expected.add(f"rope_with_cos_sin_cache_gptj_style_h{heads // size}_kv1_d{part}_rd{part}")
        else:
            rotated = int(head_size(config) * config.get("partial_rotary_factor", 1))
            axes = f"h{heads // size}_kv{max(1, shared // size)}_d{head_size(config)}_rd{rotated}"
            expected.add(f"rope_with_cos_sin_cache_neox_style_{axes}")
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        if "swiglu_limit" in config:
            continue  # the experts' activation is another one
        activation = "gelu_tanh" if "hidden_activation" in config else "silu"
        expected.add(f"{activation}_and_mul_i{width // size}")
    missing = expected - set(DEFINITIONS)
    assert not missing
    untagged = {d for d in expected if name not in DEFINITIONS[d].tag_values("model")}
    assert not untagged


@pytest.mark.parametrize("name", MODELS)
def test_each_gap_of_a_model_is_named_with_its_reason(name):
    """An op whose kernels have Definitions is not said to have none."""
    own = pytest.importorskip("built_pages", reason="needs torch").ops()[name]
    needed = json.loads((ROOT / "models" / "needs" / f"{name}.json").read_text(encoding="utf-8"))
    named = {op: line for line in own.splitlines() if line.startswith("- ") for op in re.findall(r"`(\w+)`", line)}
    assert set(named) >= {gap["name"] for gap in needed["unsupported"]}
    for gap in needed["unsupported"]:
        reason, _, kernels = gap["reason"].rpartition(": ")
        assert len(reason) > 10 and named[gap["name"]].endswith(f": {reason}") and kernels
    with_definitions = {"bmm", "bmm_fp8", "concat_mla_k", "merge_state_v2", "set_mla_kv_buffer"} & set(named)
    assert not with_definitions or not any("no family covers it" in named[op] for op in with_definitions)


@pytest.mark.parametrize("name", MODELS)
def test_no_tensor_parallel_size_is_tagged_that_does_not_divide_the_heads(name):
    """Only Definitions that belong to no other model are checked."""
    sizes = {str(size) for size in parallel_sizes(MODELS[name]["config"])}
    own = [d for d in DEFINITIONS.values() if d.tag_values("model") == [name] and d.op_type in ("gemm", "rope")]
    assert all(set(definition.tag_values("tp")) <= sizes for definition in own)
