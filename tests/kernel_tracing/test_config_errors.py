"""`--config`: what cannot be served is one line, which names the setting, its value and what is allowed."""

from __future__ import annotations

import json
import os

import pytest
from release import ROOT, SOURCES, needs_sources

from tools.kernel_tracing.__main__ import READS, _parser, main
from tools.kernel_tracing.configuration.checks import check_experts, expert_misfit, misfit
from tools.kernel_tracing.configuration.requested import ConfigurationError, model_config, parse
from tools.kernel_tracing.evaluator.serving import Serving
from tools.kernel_tracing.report.refusals import refusal
from tools.kernel_tracing.report.step import text as step_text
from tools.kernel_tracing.source.sources import SourceTree


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
        ("page_size=0", "page_size=0: must be a positive integer"),
        ("context_length=-1", "context_length=-1: must be a positive integer"),
        ("max_total_tokens=0", "max_total_tokens=0: must be a positive integer"),
        ("max_running_requests=0", "max_running_requests=0: must be a positive integer"),
        ("attention_backend=foo", "attention_backend=foo: choose one of triton, torch_native, "),
        ("disable_cuda_graph=maybe", "disable_cuda_graph=maybe: must be true or false"),
        ("speculative_algorithm=EAGLE", "the tracer does not evaluate speculative decoding; leave it out"),
        ("SGLANG_ENABLE_JIT_DEEPGEM=0", "did you mean SGLANG_ENABLE_JIT_DEEPGEMM?"),
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


def test_a_long_value_is_cut(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": "x" * 9000}))
    with pytest.raises(ConfigurationError, match=r"is 'x{199}\.\.\.; it must be"):
        parse(f"model={path}")


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


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (lambda path: path.write_text("[" * 100_000), "nested deeper than"),
        (lambda path: path.write_text("[1]"), "is no JSON object"),
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.write_text("{"), "line 1: not JSON"),
    ],
)
def test_a_hostile_configuration_is_one_line(tmp_path, put, message):
    path = tmp_path / "config.json"
    put(path)
    with pytest.raises(ConfigurationError, match=message):
        parse(f"model={path}")


@pytest.mark.parametrize("name", ["qwen3_8b", "Qwen3-8B", "qwen3-8b"])
def test_spellings_of_a_name(name):
    assert model_config(name)["architectures"] == ["Qwen3ForCausalLM"]


def test_the_output_says_what_it_omits():
    empty = {"configuration": "model=m", "gpu": "sm90", "sources": {"sglang": {"version": "1"}}, "frames": []}
    empty |= {"imposed": {}, "resolved": {}}
    document = {**empty, "prompts": [300, 17], "not_evaluated": [], "prefill": [], "decode": []}
    lines = step_text(document).splitlines()
    assert lines[-1] == "not listed: products by cuBLAS and other plain torch calls"
    assert lines[1] == "batch: 2 requests of 300 and 17 tokens; another batch may run other kernels"
    document["not_evaluated"] = [{"text": "a.py:3: unknown name x", "count": 2}]
    assert "not evaluated (2): a.py:3: unknown name x" in step_text(document).splitlines()


@needs_sources
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "llama-3.1-8b,attention_backend=trtllm_mha",
            "ValueError: TRTLLM MHA backend for prefill is only supported on Blackwell GPUs (SM100). Please use a "
            "different prefill backend. (sglang/srt/server_args.py:2630)",
        ),
        (
            "deepseek-v3,tp=8,fp8_gemm_runner_backend=flashinfer_trtllm",
            "FlashInfer TRTLLM FP8 GEMM requires SM100/SM103 GPUs and FlashInfer. (sglang/srt/layers/quantization/",
        ),
        (
            "llama-3.1-8b,gpu=sm100,attention_backend=fa3",
            "NotImplementedError: flash_attn at sgl-kernel is only supported on sm90 and above (sglang/jit_kernel/",
        ),
        (
            "llama-3.1-8b,quantization=awq",
            "ValueError: {model_config.dtype} is not supported for quantization method {model_config.quantization}. "
            "Supported dtypes: {supported_dtypes} (sglang/srt/model_loader/loader.py:253)",
        ),
    ],
)
def test_what_sglang_refuses_as_it_starts(capsys, config, message):
    assert message in refused(capsys, f"model={config}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--kernel", "rmsnorm", "--json", "f"],
            "--json: --kernel does not use it; leave it out (--kernel uses --traces",
        ),
        (
            ["--diff", "a", "b", "--out", "f"],
            "--out: --diff does not use it; leave it out (--diff uses no other option)",
        ),
        (["--model", "llama", "--config", "model=qwen3-8b"], "--model: --config does not use it"),
        (["--model-files", "--jobs", "7"], "--jobs: --model-files does not use it"),
        (["--verify", "f", "--traces", "g"], "--traces: --verify does not use it"),
        (["--traces", "g"], "--traces: a trace does not use it; leave it out (a trace uses --model, "),
        (["--config", "model=qwen3-8b,tp=2,tp_size=4"], "'tp_size=4': tp_size is already '2'; give each setting once"),
        (["--config", "model=qwen3-8b,model=qwen3-4b"], "'model=qwen3-4b': model is already 'qwen3-8b'"),
    ],
)
def test_nothing_that_is_given_is_ignored(capsys, options, message):
    assert main(options) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and message in err


def test_close_names_are_suggested_for_a_kernel(capsys):
    assert main(["--traces", str(ROOT / "traces" / "kernel_traces.json"), "--kernel", "fp8_gemm"]) == 1
    assert "has no kernel named 'fp8_gemm'; did you mean fp8_gemm_nt or " in capsys.readouterr().err


def test_every_option_is_read_by_something():
    read = {*READS, *(name for names in READS.values() for name in names)} - {""}
    assert read == set(vars(_parser().parse_args([])))


def test_no_listed_configuration_is_refused():
    problems = [
        one["text"] for one in json.loads((ROOT / "traces" / "kernel_traces.json").read_text())["not_evaluated"]
    ]
    assert any(": raises " in text for text in problems) and not refusal(problems, SourceTree({}))


def test_what_other_files_raise_is_no_refusal():
    sources = SourceTree({})
    assert not refusal(["sglang/srt/models/llama.py:3: raises ValueError ('no',)"], sources)
    assert not refusal(["sglang/srt/server_args.py:3: unknown name x"], sources)
    assert refusal(["sglang/srt/server_args.py:3: raises ValueError (?,)"], sources).startswith(
        "ValueError: no message"
    )


@needs_sources
def test_an_error_of_the_evaluator_is_one_line(capsys, monkeypatch):
    def broken(self):
        raise ZeroDivisionError("modulo by zero")

    monkeypatch.setattr(Serving, "run", broken)
    message = refused(capsys, "model=qwen3-8b")
    assert (
        "model=qwen3-8b: the evaluator fails with ZeroDivisionError: modulo by zero (test_config_errors.py:" in message
    )


@needs_sources
def test_what_is_not_evaluated_is_in_every_file(capsys, tmp_path):
    report, data = tmp_path / "step.txt", tmp_path / "step.json"
    config = "model=deepseek-v3.2,tp=8"
    assert main(["--sources", str(SOURCES), "--config", config, "--out", str(report), "--json", str(data)]) == 0
    found = json.loads(data.read_text())
    assert found["prompts"] == [300, 17] and found["not_evaluated"]
    err = capsys.readouterr().err
    for one in found["not_evaluated"]:
        line = f"not evaluated ({one['count']}): {one['text']}"
        assert line in report.read_text().splitlines() and line in err.splitlines()


def test_heads_are_divided_or_copied():
    assert not misfit(32, 8, 4, "m") and not misfit(32, 8, 16, "m") and not misfit(128, None, 8, "m")
    assert misfit(32, 8, 3, "m") == "TP 3 does not divide the 32 query heads (num_attention_heads) of m"
    assert misfit(24, 4, 6, "m") == "TP 6 does not fit the 4 key-value heads (num_key_value_heads) of m"
