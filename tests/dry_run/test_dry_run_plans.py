"""The arguments of the command, and its messages for bad ones."""

from __future__ import annotations

import json

import pytest

from tools.dry_run import __main__ as command
from tools.dry_run import plans, release

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3}


def made(model: str, **server):
    return plans.of_model(str(model), server, "sm90", ("prefill",), (5,))


def test_settings_are_values_and_a_comma_separates_them_where_a_key_follows():
    found = command._settings(["tp_size=8,attention_backend=fa3", "cuda_graph_bs=[1,2]", "enable_dp_attention=True"])
    assert found == {"tp_size": 8, "attention_backend": "fa3", "cuda_graph_bs": [1, 2], "enable_dp_attention": True}
    with pytest.raises(plans.PlanError, match="'tp' is not KEY=VALUE"):
        command._settings(["tp"])


def test_a_config_is_run_with_all_its_layers_and_the_files_beside_it(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "hf_quant_config.json").write_text("{}")
    plan = made(folder / "config.json", tp_size=2)
    assert (plan.name, plan.model.name, plan.model.layers) == ("my-model-tp_size_2", "my-model", (1, 1, 1))
    assert [path.name for path in plan.model.beside] == ["hf_quant_config.json"]


def test_a_model_may_be_named_by_its_beginning():
    assert made("llama").model.name == "llama_3.1_8b"
    assert made("Qwen3-8B", tp_size=2).name == "qwen3_8b-tp_size_2"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"architectures": "Llama"}'])
def test_a_file_that_is_no_configuration_is_refused_by_name(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(plans.PlanError, match=r"config\.json: not the config\.json of a model"):
        made(path)


def test_unknown_models_runs_and_releases_are_refused_with_those_that_are_known(tmp_path, capsys):
    assert command.main(["--model", "no_such_model", "--out", str(tmp_path / "x.json")]) == 2
    assert "llama_3.1_8b" in capsys.readouterr().err
    assert command.main(["--compare", "no_such_run"]) == 2
    assert "no recorded run no_such_run" in capsys.readouterr().err
    with pytest.raises(release.ReleaseError, match=r"there are 0\.5\.11"):
        release.read("0.1.0")


def test_a_release_that_is_not_installed_is_refused_with_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(release, "SITES", tmp_path)
    assert command.main(["--model", "llama_3.1_8b", "--out", str(tmp_path / "x.json")]) == 2
    assert "python -m tools.fetch_sources --install --release 0.5.23" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["set", "gpu"])
def test_every_run_of_the_set_has_a_plan(key):
    names = plans.named(key)
    assert len(names) == len(set(names)) > 5
    assert [plans.of_configuration(name).name for name in names] == names


def test_what_is_recorded_on_a_gpu_needs_one():
    assert {plans.listed(name).server.get("tp_size", 1) for name in plans.named("gpu")} == {1}


def test_a_recorded_run_is_named_with_the_folder_of_its_release(tmp_path, monkeypatch):
    for name in ("old", "0.5.23/new"):
        path = tmp_path / "traces" / "runtime" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(plans, "find_root", lambda: tmp_path)
    assert set(plans.recorded_runs()) == {"old", "0.5.23/new"}
