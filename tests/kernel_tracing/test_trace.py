"""Whole traces: determinism, natural roots, bad input, the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from synthetic import chains, trace_files, write

from tools.kernel_tracing.__main__ import main
from tools.kernel_tracing.graph.roots import RootsError
from tools.kernel_tracing.report.trace import trace
from tools.kernel_tracing.report.trace_files import dumps, link_base
from tools.kernel_tracing.source.sources import SourcesError, find_sources, notices
from tools.kernel_tracing.verify.check import check

TINY = """
from torch import nn
import triton
from sgl_kernel import good
@triton.jit
def scale_kernel(x):
    pass
class Tiny(nn.Module):
    def forward(self, x):
        scale_kernel[(1,)](x)
        return good(x)
EntryClass = Tiny
"""
SAMPLER = """
from sgl_kernel import other
class Sampler:
    def forward(self, x):
        return other(x)
class ModelRunner:
    def __init__(self):
        self.sampler = Sampler()
    def sample(self, x):
        return self.sampler.forward(x)
"""


def test_sources_of_kernels(tmp_path: Path) -> None:
    document = trace_files(tmp_path, {"models/tiny.py": TINY})
    assert {(kernel["name"], kernel["source"]) for kernel in document["kernels"]} == {
        ("good", "sgl-kernel"),
        ("scale_kernel", "triton"),
    }
    frame = document["kernels"][0]["chains"][0][0]
    assert frame == {
        "file": "sglang/srt/models/tiny.py",
        "line": 11,
        "function": "Tiny.forward",
        "call": "good(x)",
        "condition": "",
    }
    assert document["kernels"][1]["definition"] == {"file": "sglang/srt/models/tiny.py", "line": 6}


def test_deterministic(tmp_path: Path) -> None:
    files = {"models/tiny.py": TINY, "model_executor/model_runner.py": SAMPLER}
    first = dumps(trace_files(tmp_path, files))
    assert dumps(trace_files(tmp_path, files)) == first
    assert json.loads(first)["model"] == "tiny"


def test_natural_root(tmp_path: Path) -> None:
    document = trace_files(tmp_path, {"models/tiny.py": TINY, "model_executor/model_runner.py": SAMPLER})
    assert chains(document)["other"] == [("Sampler.forward", "ModelRunner.sample")]


def test_platform(tmp_path: Path) -> None:
    guarded = (
        TINY.replace("return good(x)", "return good(x) if is_hip() else x") + "from sglang.srt.utils import is_hip\n"
    )
    assert "good" not in chains(trace_files(tmp_path, {"models/tiny.py": guarded}))
    assert "good" in chains(trace_files(tmp_path, {"models/tiny.py": guarded}, platform="hip"))


def test_unknown_model_names_the_closest(tmp_path: Path) -> None:
    sources = find_sources(write(tmp_path, {"models/tiny.py": TINY}))
    with pytest.raises(RootsError, match=r"did you mean tiny\?.*available: tiny"):
        trace(sources, "tinny")


def test_entry(tmp_path: Path) -> None:
    sources = find_sources(write(tmp_path, {"models/tiny.py": TINY, "other.py": TINY.replace("Tiny", "Other")}))
    found = chains(trace(sources, "tiny", ["sglang.srt.other:Other"]))
    assert found["good"] == [("Other.forward",)]
    with pytest.raises(RootsError, match="has classes Other"):
        trace(sources, "tiny", ["sglang.srt.other:Nothing"])


def test_syntax_error_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    broken = {"broken.py": "def f(:\n", "models/tiny.py": TINY + "from sglang.srt.broken import f\nf()\n"}
    document = trace_files(tmp_path, broken)
    assert "good" in chains(document)
    assert [(problem["file"], problem["line"]) for problem in document["problems"]] == [("sglang/srt/broken.py", 1)]


def test_missing_and_incomplete_sources(tmp_path: Path) -> None:
    with pytest.raises(SourcesError, match="no such directory"):
        find_sources(tmp_path / "nowhere")
    with pytest.raises(SourcesError, match="no sglang package"):
        find_sources(tmp_path)
    (tmp_path / "sglang" / "srt" / "models").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    with pytest.raises(SourcesError, match=r"incomplete, srt/layers is missing"):
        find_sources(tmp_path)


def test_both_layouts(tmp_path: Path) -> None:
    wheel = write(tmp_path / "wheel", {"models/tiny.py": TINY})
    checkout = tmp_path / "checkout"
    (checkout / "sglang" / "sgl-kernel" / "python").mkdir(parents=True)
    (checkout / "sglang" / "python").mkdir()
    (wheel / "sglang").rename(checkout / "sglang" / "python" / "sglang")
    (wheel / "sgl_kernel").rename(checkout / "sglang" / "sgl-kernel" / "python" / "sgl_kernel")
    again = write(tmp_path / "wheel", {"models/tiny.py": TINY})
    assert trace(find_sources(checkout), "tiny") == trace(find_sources(again), "tiny")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path, {"models/tiny.py": TINY, "models/empty.py": "class E:\n    pass\nEntryClass = E\n"})
    target = tmp_path / "trace.json"
    common = ["--sources", str(root), "--json", str(target)]
    assert main([*common, "--model", "tiny"]) == 0
    assert {kernel["name"] for kernel in json.loads(target.read_text())["kernels"]} == {"good", "scale_kernel"}
    assert main([*common, "--model", "tiny", "--kernel", "good"]) == 0
    assert [kernel["name"] for kernel in json.loads(target.read_text())["kernels"]] == ["good"]
    assert main([*common, "--model", "nothing"]) == 2
    assert "no model named 'nothing'" in capsys.readouterr().err
    assert main([*common, "--model", "empty"]) == 1
    assert "no call of any kernel was found" in capsys.readouterr().err
    assert main(["--sources", str(tmp_path / "no"), "--model", "tiny"]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_bad_input_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path, {"models/tiny.py": TINY})
    good, bad = root / "good.json", root / "bad.json"
    common = ["--sources", str(root), "--model", "tiny"]
    assert main([*common, "--json", str(good)]) == 0
    for text in ("[]", "{}", '{"kernels": [{"name": "x"}]}', good.read_text().replace('"kernels"', '"ops"', 1)):
        bad.write_text(text)
        reason = "line 1: is no JSON object" if text == "[]" else "not kernel traces: /"
        for pair in ([good, bad], [bad, good]):
            assert main(["--diff", *map(str, pair)]) == 2
            assert f"error: {bad}: {reason}" in capsys.readouterr().err
        assert main(["--sources", str(root), "--verify", str(bad)]) == (2 if text == "[]" else 1)
        assert f"{bad}: " in capsys.readouterr().err
    assert main(["--diff", str(good), str(good)]) == 0
    assert capsys.readouterr().out == "No difference.\n"


def test_a_trace_without_kernels_is_not_verified(tmp_path: Path) -> None:
    document = trace_files(tmp_path, {"models/tiny.py": TINY})
    del document["problems"]
    assert check(document, tmp_path) == []
    assert check(document | {"kernels": []}, tmp_path) == ["/kernels: empty, so there is nothing to check"]


def test_places_that_cannot_be_written_are_reported_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path, {"models/tiny.py": TINY})
    report = root / "report.md"
    common = ["--sources", str(root), "--model", "tiny", "--out", str(report)]
    assert main([*common, "--json", str(root / "no" / "trace.json")]) == 2
    assert "no directory" in capsys.readouterr().err
    assert main([*common, "--json", str(root)]) == 2
    assert "a directory, not a file" in capsys.readouterr().err
    assert not report.exists()


def test_links_lead_from_the_report_to_the_sources(tmp_path: Path) -> None:
    root = write(tmp_path / "src", {"models/tiny.py": TINY})
    (tmp_path / "reports" / "deep").mkdir(parents=True)
    report = tmp_path / "reports" / "deep" / "tiny.md"
    assert main(["--sources", str(root), "--model", "tiny", "--out", str(report)]) == 0
    files = set(re.findall(r"\]\(([^)#]+)#L\d+\)", report.read_text()))
    assert "../../src/sglang/srt/models/tiny.py" in files
    assert all((report.parent / file).is_file() for file in files)
    assert link_base(Path("traces/kernel_traces.md"), tmp_path) == "../.sources/"


def test_entries_of_one_option(tmp_path: Path) -> None:
    second = TINY.replace("Tiny", "Other").replace("return good(x)", "return x")
    root = write(tmp_path, {"models/tiny.py": TINY, "other.py": second})
    target = root / "trace.json"
    entries = ["--entry", "sglang.srt.models.tiny:Tiny", "sglang.srt.other:Other"]
    assert main(["--sources", str(root), "--model", "tiny", *entries, "--json", str(target)]) == 0
    kernels = json.loads(target.read_text())["kernels"]
    roots = {chain[-1]["function"] for kernel in kernels for chain in kernel["chains"]}
    assert roots == {"Tiny.forward", "Other.forward"}


def test_what_the_sources_lack_is_reported(tmp_path: Path) -> None:
    root = write(tmp_path, {"models/tiny.py": TINY})
    sources = find_sources(root)
    assert list(notices(root, sources)) == [f"{root}: no flashinfer; calls into it are listed as unresolved"]
    (root / "flashinfer").mkdir()
    (root / "flashinfer" / "__init__.py").touch()
    sources = find_sources(root)
    manifest = root / "manifest.json"
    manifest.write_text(json.dumps({"sources": sources.describe()}))
    assert list(notices(root, sources)) == []
    (root / "sglang" / "srt" / "models" / "tiny.py").unlink()
    (told,) = notices(root, find_sources(root))
    assert "not the files of sglang that were fetched" in told
    for text in ("{", "[]", '{"sources": []}'):
        manifest.write_text(text)
        assert any("damaged" in line for line in notices(root, find_sources(root)))
