"""`--config`: the model that a name, a directory or a file stands for, as SGLang loads it."""

from __future__ import annotations

import json

import pytest
from release import ROOT, SOURCES, needs_sources

from tools.kernel_tracing.configuration.listed import PROMPTS, configurations, evaluated, select
from tools.kernel_tracing.configuration.requested import ConfigurationError, completed, model_config, parse
from tools.kernel_tracing.evaluator.serving import Serving
from tools.kernel_tracing.report.evaluation import index_of
from tools.kernel_tracing.rules import serving_steps


def test_what_sglang_rewrites_as_it_loads_a_model():
    given = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 2048}
    assert completed(given).items() >= {**given, **serving_steps.REWRITTEN["DeepseekV32ForCausalLM"]}.items()
    assert completed({"architectures": ["LlamaForCausalLM"]})["architectures"] == ["LlamaForCausalLM"]


@needs_sources
def test_a_rewritten_model_runs_what_its_listed_configuration_runs():
    asked = Serving(index_of(SOURCES), parse("model=deepseek-v3.2,tp=8")).run()
    listed = Serving(index_of(SOURCES), evaluated(configurations()["deepseek_v3.2-fp8"])).run()
    assert (asked.resolved["attention_backend"], asked.resolved["page_size"]) == ("nsa", 64)
    assert {one.name for one in asked.events} == {one.name for one in listed.events}


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek-v3", "DeepSeek-V3"])
def test_the_name_of_a_model_is_no_beginning_of_others(name):
    every = configurations().values()
    assert {one.model.name for one in select(every, name)} == {"deepseek_v3"}


def test_the_beginning_of_a_name_chooses_all_that_begin_so():
    every = list(configurations().values())
    assert {one.model.name for one in select(every, "qwen2")} == {"qwen2.5_7b", "qwen2_57b_a14b"}
    assert {one.model.name for one in select(every, "Llama-3")} == {"llama_3.1_8b"}
    assert select(every, "all") == every
    with pytest.raises(ConfigurationError, match="no configuration of a model named 'lama'; there are deepseek_v3, "):
        select(every, "lama")


def test_a_directory_stands_for_its_config(tmp_path):
    with pytest.raises(ConfigurationError, match=r"config\.json: no such file; name a config\.json, or one of "):
        model_config(str(tmp_path))
    given = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40}
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert model_config(str(tmp_path)) == model_config(str(tmp_path / "config.json"))
    assert parse(f"model={tmp_path}/,tp=2").model["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"text_config": {"hidden_size": 5120}},
            "in its 'text_config'; models of several parts are not evaluated: give",
        ),
        (
            {
                "vision_config": {"hidden_size": 8},
                "llm_config": {"hidden_size": 9, "architectures": ["Qwen2ForCausalLM"]},
            },
            "in its 'llm_config'; models of several parts are not evaluated: give a config.json with the fields of "
            "'llm_config' and 'architectures': [Qwen2ForCausalLM]",
        ),
    ],
)
def test_models_of_several_parts(tmp_path, fields, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["Llama4ForConditionalGeneration"], **fields}))
    with pytest.raises(ConfigurationError) as error:
        model_config(str(path))
    assert str(error.value).startswith(f"{path}: the sizes of Llama4ForConditionalGeneration are ")
    assert message in str(error.value)


def test_parts_beside_a_model_of_its_own_sizes(tmp_path):
    path = tmp_path / "config.json"
    sizes = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vision_config": {"hidden_size": 8}}
    path.write_text(json.dumps(sizes))
    assert model_config(str(path))["hidden_size"] == 64


def test_the_documents_say_which_batch_is_evaluated():
    text = " ".join((ROOT / "docs" / "kernel_tracing.md").read_text().split())
    *first, last = map(str, PROMPTS)
    assert len(PROMPTS) == 8 and f"eight requests of {', '.join(first)} and {last} tokens" in text
    assert serving_steps.PROMPTS == (300, 17) and "two requests of 300 and 17 tokens" in text
