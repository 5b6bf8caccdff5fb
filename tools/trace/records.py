"""Which records of runs a command reads: those of this checkout by model, those in files, or a dry run of a model."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from flashinfer_trace.dataset.coverage import plain_name
from tools.runtime_tracing.recording import Recording, RecordingError, read, read_all

#: Where records of runs are: on a GPU, and dry.
PLACES = (Path("traces", "runtime"), Path("traces", "dry"))
ALL = "all"


def committed(root: Path) -> list[Recording]:
    """Every record of a checkout.

    Raises:
        RecordingError: one cannot be read.
    """
    return [run for place in PLACES for run in read_all(root / place)]


def of_model(runs: Sequence[Recording], model: str) -> list[Recording]:
    """The runs of the model of that name, the default first; `all` stands for all models.

    For an unknown name, those of models whose names begin like it; else those of its type (`qwen2_moe`), as their
    configurations give it. Capitals, `_`, `.` and `-` make no difference.
    """
    wanted = plain_name(model)
    names = {run.name: plain_name(str(run.document["model"])) for run in runs}
    ways: tuple[Callable[[Recording], bool], ...] = (
        lambda run: names[run.name] == wanted or model == ALL,
        lambda run: names[run.name].startswith(wanted),
        lambda run: plain_name(str(run.document["model_config"].get("model_type", ""))) == wanted,
    )
    return default_first(next((found for way in ways if (found := list(filter(way, runs)))), []))


def default_first(runs: Sequence[Recording]) -> list[Recording]:
    """The runs, by model; of each, those first whose server has the fewest settings that differ from the default."""
    return sorted(
        runs,
        key=lambda run: (
            str(run.document["model"]),
            len(run.document["server"]) + len(run.document["environment"]),
            run.name,
        ),
    )


def releases(runs: Sequence[Recording]) -> list[str]:
    """The releases of SGLang that were run, the newest first."""
    found = {str(run.document["versions"]["sglang"]) for run in runs}
    return sorted(
        found, key=lambda text: [int(part) if part.isdigit() else 0 for part in text.split(".")], reverse=True
    )


def of_release(runs: Sequence[Recording], release: str | None) -> list[Recording]:
    """The runs of a release; of the newest one if none is given.

    Raises:
        RecordingError: there are none.
    """
    known = releases(runs)
    wanted = release or next(iter(known), "")
    found = [run for run in runs if run.document["versions"]["sglang"] == wanted]
    if not found:
        raise RecordingError(
            f"no record is of SGLang {wanted}; there are records of {', '.join(known) or 'no release'}"
        )
    return found


def run_dry(model: str, server: str, release: str | None) -> Recording:
    """A dry run of a model: SGLang's own code, without a GPU.

    Args:
        model: a name that `tools.dry_run` knows, or a config.json.
        server: settings of the server, `name=value` separated by commas.
        release: of SGLang; None for the default of `tools.dry_run`.

    Raises:
        RecordingError: the run failed; the message is that of SGLang.
    """
    if importlib.util.find_spec("tools.dry_run") is None:
        raise RecordingError(f"{model}: no record of it, and this checkout has no tools/dry_run; give --record FILE")
    with tempfile.TemporaryDirectory(prefix="flashinfer_trace_") as directory:
        out = Path(directory) / "record.json"
        command = [sys.executable, "-m", "tools.dry_run", "--model", model, "--out", str(out)]
        command += ["--server", server] if server else []
        command += ["--release", release] if release else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not out.exists():
            last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise RecordingError(f"{model}: the dry run failed: {last}")
        return read(out)
