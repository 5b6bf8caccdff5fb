"""`--config`: what cannot be served is one line, which names the setting, its value and what is allowed."""

from __future__ import annotations

import json

import pytest
from release import SOURCES, needs_sources

from tools.kernel_tracing.__main__ import main
from tools.kernel_tracing.configuration.checks import misfit
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
    lines = step_text({**empty, "prefill": [], "decode": []}).splitlines()
    assert lines[-1] == "not listed: products by cuBLAS and other plain torch calls"


def test_heads_are_divided_or_copied():
    assert not misfit(32, 8, 4, "m") and not misfit(32, 8, 16, "m") and not misfit(128, None, 8, "m")
    assert misfit(32, 8, 3, "m") == "TP 3 does not divide the 32 query heads (num_attention_heads) of m"
    assert misfit(24, 4, 6, "m") == "TP 6 does not fit the 4 key-value heads (num_key_value_heads) of m"
