"""`--config`: what cannot be served is one line, which names the setting, its value and what is allowed."""

from __future__ import annotations

import json

import pytest
from release import SOURCES, needs_sources

from tools.kernel_tracing.__main__ import main
from tools.kernel_tracing.configuration.checks import check_experts, expert_misfit, misfit
from tools.kernel_tracing.configuration.requested import ConfigurationError, model_config, parse
from tools.kernel_tracing.report.step import text as step_text


def refused(capsys, config):
    """The message, which is all that is printed."""
    assert main(["--sources", str(SOURCES), "--config", config]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1, err
    return err


@needs_sources
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("tp=two", "tp_size=two: must be an integer"),
        ("tp=0", "tp_size=0: must be a positive integer"),
        ("tp=true", "tp_size=true: must be an integer"),
        (
            "tp=3",
            "tp_size=3: TP 3 does not divide the 32 query heads (num_attention_heads) of Qwen3",
        ),
        ("attention_backend=foo", "attention_backend=foo: choose one of triton, torch_native, "),
        ("disable_cuda_graph=maybe", "disable_cuda_graph=maybe: must be true or false"),
    ],
)
def test_values_that_no_server_takes(capsys, settings, message):
    assert message in refused(capsys, f"model=qwen3-8b,{settings}")


@needs_sources
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("deepseek-v3,tp=8,ep=3", "ep_size=3: EP 3 does not divide tp_size=8; choose from 1, 2, 4, 8"),
        ("deepseek-v3,ep=8", "ep_size=8: EP 8 does not divide tp_size=1; choose from 1"),
        (
            "mixtral-8x7b,tp=16,ep=16",
            "ep_size=16: EP 16 does not divide the 8 experts of MixtralForCausalLM; choose from 1",
        ),
        (
            "deepseek-v3,tp=8,ep=8,ep_num_redundant_experts=4",
            "ep_size=8: EP 8 does not divide the 260 experts of DeepseekV3ForCausalLM; choose from 1, 2, 4, 5, 10, ",
        ),
        ("qwen3-8b,tp=2,ep=2", "ep_size=2: Qwen3ForCausalLM has no experts; leave it out"),
    ],
)
def test_experts_that_cannot_be_divided(capsys, config, message):
    assert message in refused(capsys, f"model={config}")


def test_experts_are_divided_over_ranks():
    settings = {"tp_size": 8, "ep_size": 8}
    check_experts({"n_routed_experts": 256}, settings, "m")
    check_experts({"num_experts": 60}, settings | {"ep_num_redundant_experts": 4}, "m")
    check_experts({}, {"tp_size": 8}, "m")
    assert expert_misfit(60, 8, "m") == (
        "EP 8 does not divide the 60 experts of m; choose from 1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60"
    )


@needs_sources
def test_an_unknown_architecture(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["LamaForCausalLM"], "num_attention_heads": 32}))
    message = refused(capsys, f"model={path}")
    assert "architectures=LamaForCausalLM: no file in sglang/srt/models/ defines it; did you mean Llama" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "4096"}, "'hidden_size' is '4096'; it must be a positive integer"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0; it must be a positive integer"),
        ({"first_k_dense_replace": "x"}, "'first_k_dense_replace' is 'x'; it must be an integer that is not negative"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' is 'LlamaForCausalLM'; it must list one class"),
    ],
)
def test_constants_of_a_model(tmp_path, fields, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **fields}))
    with pytest.raises(ConfigurationError) as error:
        parse(f"model={path}")
    assert str(error.value) == f"{path}: the field {message}"


@pytest.mark.parametrize("name", ["qwen3_8b", "Qwen3-8B", "qwen3-8b"])
def test_spellings_of_a_name(name):
    assert model_config(name)["architectures"] == ["Qwen3ForCausalLM"]


def test_the_output_says_what_it_omits():
    empty = {"configuration": "model=m", "gpu": "sm90", "sources": {"sglang": {"version": "1"}}, "frames": []}
    empty |= {"imposed": {}, "resolved": {}}
    lines = step_text({**empty, "prefill": [], "decode": []}).splitlines()
    assert lines[-1] == "not listed: products by cuBLAS and other plain torch calls"


def test_heads_are_divided_or_copied():
    assert not misfit(32, 8, 4, "m") and not misfit(32, 8, 16, "m") and not misfit(128, None, 8, "m")
    assert misfit(32, 8, 3, "m") == "TP 3 does not divide the 32 query heads (num_attention_heads) of m"
    assert misfit(24, 4, 6, "m") == "TP 6 does not fit the 4 key-value heads (num_key_value_heads) of m"
