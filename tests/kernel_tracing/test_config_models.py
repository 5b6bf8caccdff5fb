"""`--config`: the model that a name, a directory or a file stands for, as SGLang loads it."""

from __future__ import annotations

from release import SOURCES, needs_sources

from tools.kernel_tracing.configuration.listed import configurations, evaluated
from tools.kernel_tracing.configuration.requested import completed, parse
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
