"""Every model file of a release is tried: its first model, with made-up sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.kernel_tracing.__main__ import main
from tools.kernel_tracing.configuration.model_files import model_files
from tools.kernel_tracing.configuration.requested import ConfigurationError
from tools.kernel_tracing.evaluator.serving import Configuration, Serving
from tools.kernel_tracing.evaluator.values import Instance
from tools.kernel_tracing.report.model_files import tried
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.sources import find_sources

FILES = {
    "sglang/__init__.py": "",
    "sglang/srt/layers/__init__.py": "",
    "sglang/srt/models/one.py": "class Plain: ...\nclass Other(Plain): ...\nEntryClass = [Plain, Other]\n",
    "sglang/srt/models/annotated.py": "class Last(object): ...\nEntryClass: type = Last\n",
    "sglang/srt/models/vision.py": "class Tower: ...\n",
    "sglang/srt/other.py": "class Else: ...\nEntryClass = Else\n",
    "sgl_kernel/__init__.py": "",
    "flashinfer/__init__.py": "",
}


@pytest.fixture()
def sources(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_first_model_of_each_file_that_serves_one(sources: Path) -> None:
    found = {one.name: one.model.config for one in model_files(find_sources(sources))}
    assert {name: config["architectures"] for name, config in found.items()} == {
        "annotated": ["Last"],
        "one": ["Plain"],
    }
    assert all(config["hidden_size"] > 0 for config in found.values())


def test_a_file_has_sizes_of_its_own(sources: Path, tmp_path: Path) -> None:
    (sizes := tmp_path / "sizes.json").write_text('{"common": {"a": 1, "b": 2}, "models": {"one": {"b": 3}}}')
    configs = {one.name: one.model.config for one in model_files(find_sources(sources), sizes)}
    assert [(name, config["a"], config["b"]) for name, config in configs.items()] == [
        ("annotated", 1, 2),
        ("one", 1, 3),
    ]


def test_sizes_that_are_malformed_are_named(sources: Path, tmp_path: Path) -> None:
    (sizes := tmp_path / "sizes.json").write_text('{"common": {}}')
    with pytest.raises(ConfigurationError, match=r"sizes\.json: malformed .*it needs `common` and `models`"):
        model_files(find_sources(sources), sizes)


def test_a_file_without_models_is_no_release(sources: Path) -> None:
    for name in ("one", "annotated"):
        (sources / f"sglang/srt/models/{name}.py").write_text("")
    with pytest.raises(ConfigurationError, match="no file has an EntryClass"):
        model_files(find_sources(sources))


def test_a_model_that_inherits_from_nothing_is_found(sources: Path) -> None:
    serving = Serving(Index(find_sources(sources)), Configuration({"architectures": ["Plain"]}))
    found, name = serving._architecture()
    assert (found.name, name) == ("Plain", "Plain")


def test_parts_of_a_configuration_are_objects_but_for_the_quantisation() -> None:
    parts = {"vision_config": {"depth": 2}, "quantization_config": {"bits": 4}, "rope_scaling": {"factor": 8}}
    config = Serving._object(Serving.__new__(Serving), parts)
    assert isinstance(config.fields["vision_config"], Instance)
    assert config.fields["vision_config"].fields["depth"] == 2
    assert (config.fields["quantization_config"], config.fields["rope_scaling"]) == ({"bits": 4}, {"factor": 8})


def test_what_runs_no_kernel_is_named(sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tried(sources)
    assert (found.files, found.kernels, found.chains) == (2, 0, 0)
    assert found.silent == dict.fromkeys(("annotated", "one"), "what it calls is in no file of the sources")
    assert found.problems == ["/kernels: empty, so there is nothing to check"]
    assert main(["--model-files", "--sources", str(sources)]) == 1
    assert "one.py: no chain passes its own code: what it calls is in no file" in capsys.readouterr().out
