"""`--config`: what it lists for a configuration, and what it says about the settings."""

from __future__ import annotations

import json

import pytest
from release import SOURCES, needs_sources

from tools.kernel_tracing.__main__ import main
from tools.kernel_tracing.configuration.requested import ConfigurationError
from tools.kernel_tracing.report.step import text as step_text
from tools.kernel_tracing.report.unsupported import recurrent_models, refuse
from tools.kernel_tracing.rules import serving_steps
from tools.kernel_tracing.source.sources import find_sources


def listed(tmp_path, config):
    """The document of a configuration, which `--json` writes."""
    path = tmp_path / "step.json"
    assert main(["--sources", str(SOURCES), "--config", config, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def names(document, phase="decode", model_only=False):
    """The kernels of a phase, or those below the model's forward."""
    files = [frame["file"] for frame in document["frames"]]
    return [
        kernel["name"]
        for kernel in document[phase]
        if not model_only or any(files[one].startswith(serving_steps.MODEL_FILES) for one in kernel["chain"])
    ]


@needs_sources
def test_decode_lists_what_the_replayed_graph_captured(tmp_path):
    eager = listed(tmp_path, "model=llama-3.1-8b,attention_backend=fa3")
    replayed = listed(tmp_path, "model=llama-3.1-8b,attention_backend=fa3,disable_cuda_graph=false")
    assert names(replayed, model_only=True) == names(eager, model_only=True)
    assert {"rmsnorm", "run_rope", "flash_attn_with_kvcache"} <= set(names(replayed, model_only=True))
    captured = [kernel["name"] for kernel in replayed["decode"] if kernel.get("captured")]
    assert captured == names(replayed, model_only=True)
    assert names(replayed)[0] == "clamp_position" and names(replayed)[-1] == names(eager)[-1]
    assert not [kernel for phase in ("prefill", "decode") for kernel in eager[phase] if "captured" in kernel]
    assert step_text(replayed).splitlines()[-2].startswith("captured: ")
    assert (replayed["imposed"].get("disable_cuda_graph"), eager["imposed"]["disable_cuda_graph"]) == (None, True)
    assert replayed["resolved"]["decode_attention_backend"] == "fa3"


@needs_sources
def test_a_graph_captures_its_all_reduces(tmp_path):
    """Before the capture, SGLang warms up without them: custom_all_reduce.py asks torch whether it captures."""
    found = listed(tmp_path, "model=llama-3.1-8b,tp=2,gpu=sm90,disable_cuda_graph=false")
    captured = [kernel["name"] for kernel in found["decode"] if kernel.get("captured")]
    assert "all_reduce" in captured and captured.index("all_reduce") < captured.index("flash_attn_with_kvcache")


@needs_sources
@pytest.mark.parametrize("setting", ["disable_piecewise_cuda_graph=false", "enforce_piecewise_cuda_graph=true"])
def test_piecewise_graphs_are_refused(capsys, setting):
    assert main(["--sources", str(SOURCES), "--config", f"model=qwen3-0.6b,{setting}"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(
        f"error: {setting}: the tracer does not evaluate piecewise CUDA graphs; leave it out"
    )


@needs_sources
def test_models_with_recurrent_layers_are_refused(capsys, tmp_path):
    """SGLang chooses their attention by the class of the configuration, of which the evaluator makes no object."""
    sources = find_sources(SOURCES)
    types = recurrent_models(sources)
    expected = {
        "qwen3_next",
        "qwen3_5_text",
        "falcon_h1",
        "nemotron_h",
        "kimi_linear",
        "jet_nemotron",
        "lfm2",
        "lfm2_vl",
    }
    assert expected <= set(types) and not {"chatglm", "olmo3", "longcat_flash", "qwen3_5"} & set(types)
    with pytest.raises(ConfigurationError, match="model_type=qwen3_5_text: Qwen3_5TextConfig of "):
        refuse({"text_config": {"model_type": "qwen3_5_text"}}, sources)
    refuse({"model_type": "qwen3_moe"}, sources)
    path = tmp_path / "config.json"
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "lfm2", "hidden_size": 64, "num_attention_heads": 4}
    sizes = {"num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 64, "rms_norm_eps": 1e-5}
    path.write_text(json.dumps(config | sizes))
    assert main(["--sources", str(SOURCES), "--config", f"model={path}"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: model_type=lfm2: Lfm2Config of sglang/srt/configs/ decides which layers")


@needs_sources
def test_flash_attention_4_is_listed(tmp_path):
    found = listed(tmp_path, "model=llama-3.1-8b,attention_backend=fa4,gpu=sm100")
    for phase in ("prefill", "decode"):
        (attention,) = [kernel for kernel in found[phase] if kernel["source"] == "flash-attn-4"]
        assert attention["name"] == "flash_attn_varlen_func"


def test_the_header_names_settings_and_counts_calls():
    kernel = {"name": "rmsnorm", "source": "sgl-kernel", "chain": []}
    document = {
        "configuration": "model=m",
        "gpu": "sm90",
        "sources": {"sglang": {"version": "1"}},
        "frames": [],
        "prompts": [300, 17],
        "not_evaluated": [],
        "imposed": {"disable_cuda_graph": True},
        "resolved": {"attention_backend": "fa3", "page_size": 1},
        "prefill": [kernel, kernel | {"name": "run_rope"}, kernel | {"captured": True}],
        "decode": [kernel],
    }
    lines = step_text(document).splitlines()
    assert lines[2:4] == [
        "set by the tracer: disable_cuda_graph=true",
        "resolved by SGLang: attention_backend=fa3, page_size=1",
    ]
    assert "prefill: 3 calls of 2 kernels; a repeated chain is listed once" in lines
    assert "decode: 1 call of 1 kernel; a repeated chain is listed once" in lines
    assert "   3 rmsnorm (sgl-kernel, captured)" in lines
    assert "decode: no kernels" in step_text({**document, "decode": []}).splitlines()
