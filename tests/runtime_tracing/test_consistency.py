"""The committed recordings agree with themselves; an edit is noticed, also if the digest is written again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashinfer_trace import find_root
from flashinfer_trace.dataset.digests import content_sha256
from flashinfer_trace.kernels.stacks import TODAY
from tools.runtime_tracing.configurations import named
from tools.runtime_tracing.consistency import consistent, contradictions
from tools.runtime_tracing.recording import TABLES, RecordingError, read, read_all, write

ROOT = find_root()
RUNS = ROOT / "traces" / "runtime"
TODAYS = RUNS / TODAY["sglang"]
NAME = "llama_3.1_8b-bf16-flashinfer"
Json = dict[str, Any]


@pytest.mark.parametrize("folder", [RUNS, TODAYS])
def test_the_committed_recordings_are_consistent_and_as_they_were_written(tmp_path: Path, folder: Path) -> None:
    runs = consistent(folder, ROOT)
    assert len(runs) > 30 or {run.name for run in runs} == set(named("gpu"))
    for run in runs:
        about = {
            name: value for name, value in run.document.items() if name not in ("$schema", "sha256", *TABLES, "calls")
        }
        write(tmp_path / "again.json", about, run.calls)
        assert (tmp_path / "again.json").read_bytes() == (folder / f"{run.name}.json").read_bytes(), run.name


@pytest.fixture
def document() -> Json:
    loaded: Json = json.loads((RUNS / f"{NAME}.json").read_text(encoding="utf-8"))
    return loaded


def launched(document: Json, layers: int = 1) -> list[Any]:
    """A call with a kernel whose launches are of so many layers."""
    return next(call for call in document["calls"] if len({one[1] for one in call[5]} - {None}) == layers)


def of_flashinfer(document: Json) -> list[str]:
    """The first kernel of FlashInfer in the table."""
    return next(one for one in document["kernels"] if one[0] == "flashinfer")


EDITS: dict[str, tuple[Callable[[Json], object], str]] = {
    "a time that is too short": (lambda d: launched(d)[5][0].__setitem__(3, 0.01), "times in 0.01 microseconds"),
    "a time of one layer": (lambda d: launched(d, 2)[5][0].__setitem__(3, 1e6), "microseconds in one layer, and"),
    "a count of launches": (lambda d: launched(d)[5][0].__setitem__(2, 0), "ran 0 times"),
    "a count of one layer": (lambda d: launched(d, 2)[5][0].__setitem__(2, 94), "times in layers that are alike"),
    "a count of calls": (lambda d: launched(d).__setitem__(4, 97), "calls of the same arguments launch the same"),
    "the library of a kernel": (
        lambda d: of_flashinfer(d).__setitem__(0, "sgl_kernel"),
        "is not a function of sgl_kernel",
    ),
    "a kernel": (
        lambda d: of_flashinfer(d).__setitem__(1, "vllm.rmsnorm"),
        "vllm.rmsnorm is not a function of flashinfer",
    ),
    "a version": (lambda d: d["versions"].update({"sglang": "0.5.12"}), "the recorded runs are of 0.5.11"),
    "the GPU": (lambda d: d["versions"].update(gpu="NVIDIA H20O"), "schema/gpus.json has no NVIDIA H20O"),
    "a prompt": (
        lambda d: d["prompts"].__setitem__(0, 701),
        f"prompts: configurations.json has another one for {NAME}",
    ),
    "the number of GPUs": (lambda d: d.update(gpus=2), "gpus: configurations.json has another one"),
    "a stand-in": (lambda d: d["stand_ins"].append("sgl_kernel.x"), "stand_ins: configurations.json has another one"),
    "a variable": (lambda d: d["environment"].update(A="1"), "environment: configurations.json has another one"),
    "layers": (lambda d: d["layers"].__setitem__(1, 99), "layers: configurations.json has another one"),
    "what SGLang resolved": (
        lambda d: d["resolved"].update(attention_backend="triton"),
        "resolved.attention_backend: 'triton', but server has 'flashinfer'",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_refused_with_and_without_a_new_digest(tmp_path: Path, document: Json, name: str) -> None:
    path = tmp_path / f"{NAME}.json"
    change, message = EDITS[name]
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(RecordingError, match=r"json: .*its sha256 is of another content.*record it again"):
        read_all(tmp_path)
    forge(path, document)
    assert any(message in text for text in contradictions(read(path), ROOT)), list(contradictions(read(path), ROOT))
    with pytest.raises(RecordingError) as refused:
        consistent(tmp_path, ROOT)
    assert str(path) in str(refused.value) and f"--configuration {NAME}" in str(refused.value)


def test_a_kernel_whose_path_is_no_text_is_refused(tmp_path: Path, document: Json) -> None:
    document["kernels"][0][1] = 5
    path = tmp_path / f"{NAME}.json"
    path.write_text(json.dumps({**document, "sha256": content_sha256(document, "$schema", "sha256")}))
    with pytest.raises(RecordingError, match="is not a list of strings"):
        read(path)


def forge(path: Path, document: Json) -> None:
    """Writes the digest of an edited recording."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.runtime_tracing.recording.content_sha256", lambda data, *without: document["sha256"])
        run = read(path)
    about = {name: value for name, value in document.items() if name not in ("$schema", "sha256", *TABLES, "calls")}
    write(path, about, run.calls)
