"""User errors: each message says what is wrong, where, and what to do; nothing is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import SPARSE, TINY, add_model

import flashinfer_trace
from tools.extract_definitions import plan, traces


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tyny", "no model named 'tyny'; did you mean tiny? Available: tiny, twin-1.5"),
        ("qqqqqqqq", "no model named 'qqqqqqqq'. Available: tiny, twin-1.5"),
        ("../tiny", "no model named '../tiny'"),
    ],
)
def test_unknown_models(extract, snapshot, name, message):
    status, _, err = extract("--model-name", name)
    assert status == 2 and message in err and snapshot() == {}


@pytest.mark.parametrize("name", ["tiny", "TINY", "twin_1_5", "twin-1-5", "Twin 1.5"])
def test_spellings_of_a_name(extract, name):
    assert extract("--model-name", name, "--dry-run")[0] == 0


@pytest.mark.parametrize("field", sorted(TINY.keys() - {"head_dim", "rms_norm_eps", "torch_dtype"}))
def test_a_missing_field_is_named(extract_config, snapshot, field):
    status, _, err = extract_config("partial", {name: value for name, value in TINY.items() if name != field})
    assert status == 2 and f"config.json: the configuration of partial lacks the field '{field}'" in err
    assert snapshot() == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "the field 'hidden_size' is '64'; it must be a positive integer"),
        ({"vocab_size": 0}, "the field 'vocab_size' is 0; it must be a positive integer"),
        ({"num_attention_heads": True}, "the field 'num_attention_heads' is True; it must be a positive integer"),
        (
            {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None},
            "num_attention_heads 7 does not divide hidden_size 64; add 'head_dim'",
        ),
        (
            {"num_attention_heads": 32, "num_key_value_heads": 7},
            "num_key_value_heads 7 does not divide num_attention_heads",
        ),
        ({"rms_norm_eps": -1}, "the field 'rms_norm_eps' is -1; it must be a positive number"),
        ({"head_dim": 127}, "head_dim is 127; heads have an even number of features"),
        ({"partial_rotary_factor": 0.02}, "partial_rotary_factor 0.02 rotates 1 of 64 features"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor 2 rotates 128 of 64 features"),
        ({"architectures": "LlamaForCausalLM"}, "it must list one class"),
        ({"architectures": ["UnheardForCausalLM"]}, "no trace of the architecture UnheardForCausalLM; there are "),
        ({"architectures": ["../up"]}, "no trace of the architecture ../up"),
    ],
)
def test_unusable_fields(extract_config, snapshot, changes, message):
    status, _, err = extract_config("odd", {**TINY, **changes})
    assert status == 2 and message in err and snapshot() == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model["config"].update(torch_dtype="bfloat"), 'torch_dtype is "bfloat" (one of bfloat16)'),
        (lambda model: model["config"].update(head_dim=None), "head_dim is null, must be integer"),
        (lambda model: model["config"].update(rope_base=1), 'config has no field "rope_base"'),
        (lambda model: model["config"].pop("vocab_size"), "config lacks the field 'vocab_size'"),
        (lambda model: model.pop("checked"), "the file lacks the field 'checked'"),
        (lambda model: model.update(name="other"), 'name is "other", but the file is tiny.json'),
    ],
)
def test_a_model_that_the_schema_refuses_is_not_extracted(root, extract, snapshot, change, message):
    path = root / "models" / "tiny.json"
    model = json.loads(path.read_text())
    change(model)
    path.write_text(json.dumps(model))
    for arguments in (["--model-name", "tiny"], ["--all-models", "--dry-run"]):
        status, out, err = extract(*arguments)
        assert (status, out) == (2, "") and f"models/tiny.json:1: dataset-schema: {message}" in err
    assert snapshot() == {}


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "TP 3 does not divide the 8 query heads (num_attention_heads) of tiny; choose from 1, 2, 4, 8"),
        (16, "TP 16 does not divide the 8 query heads"),
    ],
)
def test_tensor_parallel_sizes_must_divide_the_heads(extract, snapshot, size, message):
    status, _, err = extract("--model-name", "tiny", "--tp", 1, size)
    assert status == 2 and message in err and snapshot() == {}


def test_key_value_heads_are_divided_or_copied(root, extract):
    add_model(root, "odd", "Odd", {**TINY, "num_attention_heads": 12, "head_dim": 8, "num_key_value_heads": 3})
    assert extract("--model-name", "odd", "--tp", 6, "--dry-run")[0] == 0
    status, _, err = extract("--model-name", "odd", "--tp", 2)
    assert status == 2 and "TP 2 does not fit the 3 key-value heads (num_key_value_heads) of odd" in err
    assert "choose from 1, 3, 6, 12\n" in err  # not 2 and 4, which fit the query heads alone


def test_expert_parallel_sizes_must_divide_the_experts(extract, root, snapshot):
    add_model(root, "sparse", "Sparse", SPARSE)
    assert extract("--model-name", "sparse", "--ep", 4, "--dry-run")[0] == 0
    status, _, err = extract("--model-name", "sparse", "--ep", 2, 3)
    assert status == 2 and "EP 3 does not divide the 16 experts of sparse; choose from 1, 2, 4, 8, 16\n" in err
    assert snapshot() == {}


def test_an_activation_that_no_family_computes_is_reported(extract_config, snapshot):
    status, _, err = extract_config("odd", {**TINY, "hidden_act": "gelu"})
    refused = "unsupported: odd: act_fn: extraction derives no activation of hidden_act 'gelu': sgl-kernel:silu_and_mul"
    assert status == 0 and refused in err
    assert snapshot() and not [path for path in snapshot() if path.startswith("activation/")]


def test_other_dtypes_are_refused(extract_config, snapshot):
    status, _, err = extract_config("odd", {**TINY, "torch_dtype": "float16"})
    assert status == 0 and "unsupported: odd: attn: the families are for bfloat16 (torch_dtype float16)" in err
    assert {path.partition("/")[0] for path in snapshot()} == {"renorm", "sampling"}


def test_missing_sources_are_refused(extract, snapshot):
    status, _, err = extract("--model-name", "tiny", "--sources", "absent")
    assert status == 2 and "--sources absent: no such directory; leave it out to use the committed traces" in err
    assert snapshot() == {}
    assert extract("--model-name", "tiny")[0] == 0


def test_expert_parallel_sizes_of_a_model_without_experts_are_reported(extract):
    status, _, err = extract("--model-name", "tiny", "--ep", 2, 4)
    assert status == 0 and "left out: --ep 2 4 for tiny, which has no experts" in err
    assert "--ep" not in extract("--model-name", "tiny")[2]


def test_definitions_must_be_a_directory(extract, root):
    status, _, err = extract("--model-name", "tiny", "--definitions", root / "models" / "tiny.json")
    assert status == 2 and "tiny.json: not a directory; --definitions takes a directory" in err


def run(root, *arguments, **options):
    """Runs the command in a separate process, as a shell does."""
    command = [sys.executable, "-m", "tools.extract_definitions", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(flashinfer_trace.__file__).parents[1])}
    return subprocess.Popen(
        command, cwd=root, env=environment, text=True, stderr=subprocess.PIPE, stdout=options.get("stdout")
    )


def test_a_reader_that_leaves_early(root):
    reading, writing = os.pipe()
    os.close(reading)
    with run(root, "--model-name", "tiny", "--dry-run", stdout=writing) as process:
        os.close(writing)
        assert process.communicate()[1] == "" and process.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_report_that_cannot_be_printed(root):
    with open("/dev/full", "w") as full, run(root, "--model-name", "tiny", "--dry-run", stdout=full) as process:
        err = process.communicate()[1]
    assert process.returncode == 1
    assert err == "error: cannot print the report: No space left on device\n"


def test_default_sizes_that_do_not_fit_are_left_out_and_reported(root, extract):
    add_model(root, "odd", "Odd", {**TINY, "num_attention_heads": 4, "head_dim": 16})
    status, _, err = extract("--model-name", "odd")
    assert status == 0 and "left out: TP 8 does not divide the 4 query heads" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-name", "tiny", "--tp", "0"], "'0' is not a size between 1 and 9999"),
        (["--model-name", "tiny", "--tp", "two"], "'two' is not a size"),
        (["--model-name", "tiny", "--page-sizes", "-1"], "'-1' is not a size"),
        (["--model-name", "tiny", "--execution-modes", "train"], "invalid choice: 'train'"),
        (["--model-name", "tiny", "--all-models"], "not allowed with argument"),
        ([], "one of the arguments --model-name --all-models is required"),
        (["--model-name", "tiny", "twin-1.5", "--config", "c.json"], "--config gives the constants of one model"),
        (["--model-name", "new", "--config", "absent.json"], "absent.json: cannot be read: No such file or directory"),
        (["--model-name", "tiny", "--sources", "."], "no sglang package"),
    ],
)
def test_wrong_usage(extract, snapshot, arguments, message):
    status, _, err = extract(*arguments)
    assert status == 2 and message in err and snapshot() == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "is no JSON object"),
        ("{}", "lacks the field 'architectures'"),
        (
            '{"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}}',
            "write the object of 'text_config'",
        ),
    ],
)
def test_malformed_configurations(extract, tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    status, _, err = extract("--model-name", "new", "--config", path)
    assert status == 2 and f"{path}: " in err and message in err


def test_a_name_that_cannot_be_a_tag(extract, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    status, _, err = extract("--model-name", "a model!", "--config", path)
    assert status == 2 and "cannot be the value of a model: tag" in err


@pytest.mark.parametrize("text", ["{", '{"name": "gemm_bf16_n64_k64"}'])
def test_a_broken_definition_in_the_way(root, extract, text):
    path = root / "definitions" / "gemm" / "gemm_bf16_n64_k64.json"
    path.parent.mkdir()
    path.write_text(text)
    status, _, err = extract("--model-name", "tiny")
    assert status == 2 and f"{path}: not a Definition" in err
    assert path.read_text() == text


def test_a_model_file_without_its_parts(root, extract):
    (root / "models" / "tiny.json").write_text("{}")
    status, _, err = extract("--model-name", "tiny")
    assert status == 2 and "lacks 'title' or 'config'" in err


def test_a_broken_digest(root, extract, tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "COMMITTED", tmp_path)
    (tmp_path / "LlamaForCausalLM.json").write_text('{"ops": []}')
    status, _, err = extract("--model-name", "tiny")
    assert status == 2 and "LlamaForCausalLM.json: not a digest" in err


def test_a_dataset_without_a_family_says_so(root, extract, snapshot):
    path = root / "schema" / "naming.json"
    naming = json.loads(path.read_text())
    del naming["families"]["fused_add_rmsnorm_residual_out"]
    path.write_text(json.dumps(naming))
    status, _, err = extract("--model-name", "tiny")
    assert status == 0
    assert "unsupported: tiny: norm: schema/naming.json has no family fused_add_rmsnorm_residual_out" in err
    assert "rmsnorm/rmsnorm_h64.json" in snapshot()


def test_a_name_that_is_too_long_for_a_definition_is_reported(root, extract, monkeypatch):
    monkeypatch.setattr(plan, "derive_name", lambda *_: "x" * 200)
    status, _, error = extract("--model-name", "tiny", "--dry-run")
    assert status == 2 and "make what is no Definition" in error and "Traceback" not in error
