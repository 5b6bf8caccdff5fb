"""The list of configurations, and the committed recordings of it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from flashinfer_trace import find_root
from tools.runtime_tracing import __main__ as command
from tools.runtime_tracing.configurations import FP8_BLOCKS, ConfigurationError, configurations, made, models
from tools.runtime_tracing.recording import read

ROOT = find_root()
RUNS = sorted((ROOT / "traces" / "runtime").glob("*.json"))


def test_every_model_has_the_layers_that_it_stands_for():
    for name, model in models().items():
        assert model.config["num_hidden_layers"] == len(model.layers), name
        assert len(model.config["architectures"]) == 1, name


def test_the_list_covers_what_it_should():
    found = configurations()
    assert {one.model.name for one in found.values()} == set(models())
    assert any(one.gpus == 2 for one in found.values())
    quantized = found["deepseek_v3-fp8-flashinfer"]
    assert quantized.model.config["quantization_config"] == FP8_BLOCKS
    assert "quantization_config" not in found["deepseek_v3-bf16-flashinfer"].model.config


def test_a_configuration_is_made_from_settings():
    one = made("deepseek_v3", {"quantization": "fp8", "attention_backend": "triton", "tp_size": 2})
    assert one.name == "deepseek_v3-quantization_fp8-attention_backend_triton-tp_size_2"
    assert one.server == {"attention_backend": "triton", "tp_size": 2}
    assert one.model.config["quantization_config"] == FP8_BLOCKS and one.gpus == 2


def test_experts_that_cannot_be_divided_are_refused(capsys: pytest.CaptureFixture[str]):
    assert made("deepseek_v3", {"tp_size": 8, "ep_size": 8}).gpus == 8
    assert command.main(["--model", "deepseek_v3", "--config", "tp_size=3,ep_size=3"]) == 2
    assert (
        "ep_size=3: EP 3 does not divide the 256 experts of deepseek_v3; choose from 1, 2, 4" in capsys.readouterr().err
    )


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigurationError, match=r"no model 'gpt9'; it has .*llama_3\.1_8b"):
        made("gpt9", {})
    assert command.main(["--configuration", "no_such"]) == 2
    assert "no configuration 'no_such'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--model", "deepseek_v3", "--config", "triton"])
    assert "'triton' is not KEY=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    "document",
    ['{"models": {}}', '{"models": {"x": {"layers": 3, "config": {}}}, "configurations": {}}', "[]"],
)
def test_a_malformed_list_is_named(tmp_path: Path, document: str):
    path = tmp_path / "list.json"
    path.write_text(document)
    with pytest.raises(ConfigurationError, match=r"list\.json: malformed"):
        configurations(path)


def test_recordings_follow_their_schema():
    validator = jsonschema.Draft202012Validator(json.loads((ROOT / "schema" / "runtime_trace.schema.json").read_text()))
    validator.check_schema(validator.schema)
    assert RUNS
    for path in RUNS:
        validator.validate(json.loads(path.read_text()))


def test_recordings_are_of_the_list():
    found = configurations()
    for path in RUNS:
        run = read(path)
        assert run.name == path.stem
        assert run.document["model_config"] == found[run.name].model.config, path.stem
        assert run.document["server"] == found[run.name].server, path.stem
        assert tuple(run.document["layers"]) == found[run.name].model.layers, path.stem
        phases = {call.phase for call in run.calls} - {"capture"}
        assert phases == set(found[run.name].phases), path.stem


def test_recordings_stay_small():
    assert sum(path.stat().st_size for path in RUNS) < 2_000_000
