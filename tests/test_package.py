"""Promises to users of the package: a light import, the data in the wheel, flashinfer-bench, and clean code."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flashinfer_trace

ROOT = Path(__file__).resolve().parent.parent
#: Packages that users of the data do not need.
HEAVY = {"torch", "numpy", "hypothesis", "flashinfer", "sgl_kernel", "triton"}
#: The folders of the dataset in the wheel.
DATA = ("definitions", "evidence", "models", "reference", "schema")


def run(*command: str, cwd: Path = ROOT) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.mark.parametrize(
    "statement",
    [
        "import flashinfer_trace",
        "import flashinfer_trace; list(flashinfer_trace.definitions())",
        "from click.testing import CliRunner; from flashinfer_trace.cli import main; "
        "assert CliRunner().invoke(main, ['coverage']).exit_code == 0",
        "from tools.extract.__main__ import main; assert main(['--model-name', 'llama']) == 0",
    ],
)
def test_no_torch_and_no_cuda_package_is_imported(statement):
    run(
        sys.executable, "-c", f"{statement}\nimport sys\nloaded = {HEAVY} & set(sys.modules)\nassert not loaded, loaded"
    )


def test_import_takes_less_than_150_ms():
    """Of processor time, which other jobs on the machine hardly affect."""
    code = "import time; start = time.process_time(); import flashinfer_trace; print(time.process_time() - start)"
    assert min(float(run(sys.executable, "-c", code)) for _ in range(5)) < 0.150


CHECKED = ("definitions", "evidence", "models", "workloads")


def test_the_dataset_is_valid_in_7500_calls_for_each_file_and_without_torch():
    """The number of function calls is the same in every run; on a busy machine, the time differs by half.

    Checks by schemas without caches of what they found make more calls than with them, and take less time.
    """
    code = (
        "import cProfile, pstats, sys; from flashinfer_trace.cli import main; profile = cProfile.Profile()\n"
        "try: profile.runcall(main, ['validate'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print(pstats.Stats(profile).total_calls)\n"
        f"loaded = {HEAVY} & set(sys.modules)\nassert not loaded, loaded"
    )
    definitions, *others = (list((ROOT / name).rglob("*.json*")) for name in CHECKED)
    *printed, calls = run(sys.executable, "-c", code).splitlines()
    assert printed[0].startswith(f"{len(definitions)} Definitions checked, no problems")
    assert int(calls) < 7500 * (len(definitions) + sum(map(len, others)))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A directory that contains only what the wheel installs."""
    directory = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".git", ".sources*", ".whl", ".venv", ".*_cache", "__pycache__", ".hypothesis")
    shutil.copytree(ROOT, directory / "source", ignore=ignored)
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory), cwd=directory / "source")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site")
    return directory / "site"


def test_the_wheel_owns_one_name(site):
    (metadata,) = site.glob("*.dist-info")
    assert {path.name for path in site.iterdir()} == {"flashinfer_trace", metadata.name}


def test_the_wheel_carries_the_dataset(site):
    """Byte for byte; its norms show that it is valid inside the wheel."""
    for name in DATA:
        assert contents(site / "flashinfer_trace" / "data" / name) == contents(ROOT / name)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import flashinfer_trace\n"
        "assert flashinfer_trace.__file__.startswith(sys.argv[1]), flashinfer_trace.__file__\n"
        "from flashinfer_trace.dataset.validation import validate_paths\n"
        "root = flashinfer_trace.find_root()\n"
        "result = validate_paths([root / 'definitions' / 'rmsnorm'], root)\n"
        "assert not result.problems, result.problems\n"
        "print(result.checked, len(list(flashinfer_trace.definitions())))\n"
    )
    checked, found = run(sys.executable, "-c", code, str(site), cwd=site.parent).split()
    assert int(checked) == len(list((ROOT / "definitions" / "rmsnorm").glob("*.json")))
    assert int(found) == len(list(flashinfer_trace.definitions()))


def contents(directory: Path) -> dict[str, bytes]:
    """The files of the dataset in a directory."""
    files = (path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def test_messages_that_name_a_tool_say_that_it_needs_a_checkout():
    """The wheel has no tools, so a message that names one must tell users of the wheel where the command works."""
    named = []
    for path in sorted((ROOT / "flashinfer_trace").rglob("*.py")):
        tree = ast.parse(path.read_text())
        comments = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Constant, ast.JoinedStr)) and node not in comments:
                text = ast.unparse(node)
                if "python -m tools" in text:
                    named.append((path.name, text))
    assert [one for one in named if "checkout" not in one[1]] == []
    assert named, "the scan must find the existing messages"


def test_every_definition_loads_in_flashinfer_bench():
    bench = pytest.importorskip("flashinfer_bench.data", reason="pip install --no-deps flashinfer-bench==0.1.2")
    for definition in flashinfer_trace.definitions():
        assert definition.path is not None
        loaded = bench.Definition(**json.loads(definition.path.read_text()))
        assert loaded.const_axes == definition.const_axes
        assert list(loaded.inputs) == list(definition.inputs)


@pytest.mark.parametrize(
    "command",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)],
    ids=["ruff check", "ruff format", "mypy"],
)
def test_code_quality(command):
    run(sys.executable, "-m", *command)


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "meta", "mps"])
def test_a_device_that_is_not_here_is_named(device):
    with pytest.raises(flashinfer_trace.InputError, match=f"^device '{device}': "):
        flashinfer_trace.make_inputs("rmsnorm_h512", device=device)
    with pytest.raises(flashinfer_trace.InputError, match=f"^device '{device}': "):
        flashinfer_trace.workloads("rmsnorm_h512")[0].inputs(device)


def test_inputs_are_made_for_a_name_too():
    assert flashinfer_trace.make_inputs("rmsnorm_h512", {"batch_size": 2})["hidden_states"].shape == (2, 512)


def test_an_unknown_op_type_is_an_error_with_a_suggestion():
    with pytest.raises(flashinfer_trace.DatasetError, match="no op_type 'gem'; did you mean gemm"):
        list(flashinfer_trace.definitions(op_type="gem"))


@pytest.mark.skipif("CI" not in os.environ, reason="only CI must have what tests skip themselves without")
def test_ci_has_ray():
    """Without it, the tests of clusters are skipped."""
    assert importlib.metadata.version("ray")
