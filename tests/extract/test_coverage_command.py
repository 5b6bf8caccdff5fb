"""flashinfer-trace coverage, and the files under models/needs/ that it reads."""

from __future__ import annotations

import json

import jsonschema
import pytest
from click.testing import CliRunner

import flashinfer_trace
from flashinfer_trace.cli import main
from flashinfer_trace.dataset.coverage import load_needs, model_coverages

ROOT = flashinfer_trace.find_root()
DEFINITION = {
    "description": "One.",
    "axes": {},
    "inputs": {},
    "outputs": {},
    "reference": "",
}


MODELS = sorted(path.stem for path in (ROOT / "models").glob("*.json"))


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(main, ["coverage", *arguments])


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A model with a verified Definition (of two ops), one without evidence, and three that are missing."""
    (tmp_path / "schema").mkdir()
    for name, status in (("g_1", "verified"), ("g_2", "unverified")):
        path = tmp_path / "definitions" / "gemm" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**DEFINITION, "name": name, "op_type": "gemm", "tags": [f"status:{status}"]}))
    needs = {
        "model": "small",
        "ops": [
            {"name": "o_proj", "definitions": {"gemm": ["g_1", "g_2", "g_3"], "quantize": ["q_1"]}},
            {"name": "norm", "definitions": {"gemm": ["g_1"], "rmsnorm": ["r_1"]}},
        ],
        "unsupported": [{"name": "indexer", "reason": "no family covers it: triton:k"}],
    }
    (tmp_path / "models" / "needs").mkdir(parents=True)
    (tmp_path / "models" / "needs" / "small.json").write_text(json.dumps(needs))
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    return tmp_path


def test_what_exists_is_verified_or_missing(small):
    (one,) = model_coverages(small)
    assert one.model == "small" and one.unsupported == {"indexer": "no family covers it: triton:k"}
    projection, quantizer, shared, norm = one.ops
    assert (quantizer.name, quantizer.op_type, quantizer.missing) == ("o_proj", "quantize", ("q_1",))
    assert (shared.name, shared.verified) == ("norm", ("g_1",))
    assert (projection.exists, projection.verified, projection.missing) == (("g_1", "g_2"), ("g_1",), ("g_3",))
    assert (norm.exists, norm.verified, norm.missing) == ((), (), ("r_1",))


def test_the_matrix(small, invoke):
    result = invoke()
    assert result.exit_code == 0, result.output
    headings, row = (line.split() for line in result.output.splitlines()[:2])
    assert headings == ["Model", "gemm", "quantize", "rmsnorm", "all", "gaps"]
    assert row == ["small", "1/2/3", "0/0/1", "0/0/1", "1/2/5", "1"]


def test_the_ops_of_a_model(small, invoke):
    lines = invoke("--model", "small").output.splitlines()
    assert lines[1].split() == ["o_proj", "gemm", "3", "2", "1", "g_3"]
    assert lines[2].split() == ["o_proj", "quantize", "1", "0", "0", "q_1"]
    assert lines[3].split() == ["norm", "gemm", "1", "1", "1", "-"]
    assert lines[4].split() == ["norm", "rmsnorm", "1", "0", "0", "r_1"]
    assert lines[5] == "gap: indexer: no family covers it: triton:k"


def test_as_json(small, invoke):
    (one,) = json.loads(invoke("--format", "json").output)
    assert one["ops"][0]["missing"] == ["g_3"]


def test_an_unknown_model(small, invoke):
    result = invoke("--model", "smal")
    assert result.exit_code == 2 and "no model named 'smal'" in result.output
    assert "did you mean small? Available: small" in result.output


@pytest.mark.parametrize("name", ["SMALL", "s_mall", "small"])
def test_spellings_of_a_name(small, invoke, name):
    assert invoke("--model", name).output == invoke("--model", "small").output
    assert invoke("--model", name).exit_code == 0


def test_an_unknown_model_without_a_close_one(small, invoke):
    assert "needs. Available: small" in invoke("--model", "qqqqqqqq").output


def test_a_config_json_stands_for_the_model_that_has_its_constants(invoke, tmp_path):
    """Constants are in text_config, and the file has more fields than models/."""
    own = json.loads((ROOT / "models" / "qwen3.5-27b.json").read_text(encoding="utf-8"))["config"]
    text = {name: value for name, value in own.items() if name != "architectures"} | {"num_hidden_layers": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": own["architectures"], "text_config": text}))
    assert invoke("--model", str(path)).output == invoke("--model", "qwen3.5-27b").output
    found = CliRunner().invoke(main, ["find", str(path), "linear", "attention"])
    assert found.exit_code == 0 and "gdn_packed_decode_qk16_v48_d128" in found.output
    path.write_text(json.dumps({"architectures": own["architectures"], "text_config": text | {"hidden_size": 5184}}))
    refused = invoke("--model", str(path))
    assert refused.exit_code == 2 and "qwen3.5-27b differs in hidden_size; in a checkout, `python -m" in refused.output
    path.write_text("{")
    assert invoke("--model", str(path)).exit_code == 2


def test_without_needs(small, invoke):
    (small / "models" / "needs" / "small.json").unlink()
    result = invoke()
    assert result.exit_code == 2 and "flashinfer-trace sync" in result.output


def test_needs_that_are_not_json(small, invoke):
    (small / "models" / "needs" / "small.json").write_text("{")
    result = invoke()
    assert result.exit_code == 2 and "cannot be read" in result.output


def test_committed_needs_follow_the_schema():
    """That they are up to date, `sync --check` of the whole dataset shows, which is a test of its own."""
    paths = [*(ROOT / "models" / "needs").glob("*.json")]
    assert sorted(path.stem for path in paths) == MODELS
    validator = jsonschema.Draft202012Validator(json.loads((ROOT / "schema" / "model_needs.schema.json").read_text()))
    for path in paths:
        assert [error.message for error in validator.iter_errors(json.loads(path.read_text()))] == [], path


def kernels_of(name):
    return {entry["kernel"] for entry in load_needs(ROOT, name)[name]["kernels"]}


def test_the_kernels_of_a_model_are_those_of_its_own_runs():
    """DeepSeek-V3, DeepSeek-V3.2 and Kimi-K2 have one architecture: DeepseekV3ForCausalLM."""
    own, sparse, kimi = (kernels_of(name) for name in ("deepseek-v3", "deepseek-v3.2", "kimi-k2"))
    indexer = {"deep-gemm:fp8_paged_mqa_logits", "triton:topk_transform_paged_v2"}
    assert indexer <= sparse and not indexer & (own | kimi)
    assert "sgl-kernel:kimi_k2_moe_fused_gate" in kimi - own and "flashinfer:fused_topk_deepseek" in own - kimi


def test_a_model_without_runs_has_the_kernels_of_the_same_model_or_of_its_architecture():
    assert kernels_of("deepseek-r1") == kernels_of("deepseek-v3")
    assert kernels_of("llama-3.1-405b") == kernels_of("llama-3.1-8b") | kernels_of("llama-3.1-70b")
    assert all(kernels_of(name) for name in MODELS)


def test_an_op_that_no_definition_describes_says_why():
    reasons = {op["name"]: op["reason"] for op in load_needs(ROOT, "kimi-k2")["kimi-k2"]["unsupported"]}
    assert reasons["embed_tokens"] == "no family covers it: torch"
    assert "bmm" not in reasons and "experts" not in reasons


def test_no_model_lacks_a_definition_that_its_ops_need():
    assert {one.model: [name for op in one.ops for name in op.missing] for one in model_coverages(ROOT)} == {
        name: [] for name in MODELS
    }
