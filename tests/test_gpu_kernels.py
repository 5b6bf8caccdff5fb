"""`pytest -m gpu`: every embedded run() against every real kernel of its family, over drawn shapes."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gpu_runs
import pytest
from gpu_libraries import skip_unusable
from made_up_evidence import read_lines, small_dataset, write_lines

import flashinfer_trace
from flashinfer_trace.cli.processes import memory_of_weights
from flashinfer_trace.dataset.evidence import SEED
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.family import Kernel, private_kernel
from flashinfer_trace.harness.verify import Report
from flashinfer_trace.kernels.table import FROM_BLACKWELL, KernelFacts, Place

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PAIRS = [
    # In the order in which they are verified: see `Queue`. The pairs of a Definition share its cases; they
    # are neighbors, which worksteal leaves on one worker.
    pytest.param(definition, kernel, id=f"{definition.name}-{kernel.label}")
    for definition in sorted(flashinfer_trace.definitions(), key=memory_of_weights, reverse=True)
    for kernel in family_of(definition).kernels_of(definition)
]


@pytest.fixture(scope="session")
def runs(request, cuda_device, examples) -> Iterator[gpu_runs.GpuRuns]:
    """The result of every chosen pair, on this process's GPU or on all GPUs."""
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    pairs = [(each["definition"], each["kernel"]) for each in chosen if each.keys() == {"definition", "kernel"}]
    option = request.config.getoption
    evidence, jobs = option("--record-evidence"), option("--gpu-jobs")
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")  # a worker of pytest-xdist has none

    def tell(report: Report) -> None:
        if terminal is not None:
            figures = f"{report.cases} cases, {report.worst:.3f}, {report.seconds:.1f} s"
            terminal.ensure_newline()
            terminal.write_line(f"{report.definition} {report.target}: {report.status}, {figures}")
            terminal.flush()

    with gpu_runs.GpuRuns(pairs, cuda_device, examples, option("--seed"), evidence, jobs, tell) as found:
        yield found


@pytest.mark.gpu
@pytest.mark.parametrize(("definition", "kernel"), PAIRS)
def test_reference_and_kernel_meet_their_bounds(definition, kernel, cuda_device, runs, examples, request):
    """The kernels of a Definition share its cases."""
    import torch

    skip_unusable(kernel, torch.cuda.get_device_capability(cuda_device), request.config.getoption("--require-gpu"))
    report = runs.report(definition, kernel)
    assert report.status == "passed", report.message
    assert report.cases >= examples


def of_extra(project: dict, *extras: str) -> set[str]:
    """The distributions that these extras name, without versions."""
    named = [each for extra in extras for each in project["optional-dependencies"][extra]]
    return {re.split(r"[^\w.-]", each)[0] for each in named}


def test_gpu_tests_are_collected_with_the_packages_of_the_extra_alone(tmp_path):
    """A GPU runner installs `gpu`, not `test`: pytest stops if a single file cannot be imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    missing = of_extra(project, "test") - of_extra(project, "gpu", "verify")
    modules = {name for name, owners in importlib.metadata.packages_distributions().items() if missing & {*owners}}
    assert {"grimp", "selenium"} <= modules
    (tmp_path / "absent.py").write_text(
        "import sys\n\nclass Absent:\n    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {modules}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "absent", "--collect-only", "-q", "-m", "gpu"]
    found = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout[-3000:]
    assert found.stdout.count("test_reference_and_kernel_meet_their_bounds") == len(PAIRS)


def test_only_pairs_without_evidence_of_today_are_chosen_on_request(tmp_path):
    """Of three kernels of a Definition, one with evidence, one judged by older code, one without a run."""
    name = "silu_and_mul_i7168"
    small_dataset(tmp_path, ROOT, name)
    evidence = tmp_path / "evidence" / "activation" / f"{name}.jsonl"
    known, stale, lost = read_lines(evidence)
    stale["family"] = "0" * 12
    write_lines(evidence, [known, stale])
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "--missing-evidence", __file__],
        cwd=ROOT,
        env={**os.environ, "FLASHINFER_TRACE_ROOT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    chosen = {line.partition("[")[2].removesuffix("]") for line in found.stdout.splitlines() if "::" in line}
    assert chosen == {f"{name}-{line['kernel']}" for line in (stale, lost)}, found.stdout[-3000:]


@pytest.mark.parametrize("worker", [False, True])
def test_pairs_are_verified_together_but_by_a_worker_of_xdist(monkeypatch, worker):
    """All in other processes, on all GPUs; or those of one Definition at a time, in this one, on its own GPU."""
    import torch

    calls = []

    def made_up(tasks, settings, *_):
        calls.append((settings.device, [(task.definition.name, task.target) for task in tasks]))
        return (Report(task.definition.name, task.target, settings.device, "passed") for task in tasks)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu_runs, "run_tasks", made_up)
    monkeypatch.setattr(gpu_runs, "run_in_processes", made_up)
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    else:
        monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    own = private_kernel("pytest.kernel", "pytest", None)
    blackwell = private_kernel("pytest.new", "pytest", None, on=FROM_BLACKWELL)
    norms = [flashinfer_trace.load(name) for name in ("rmsnorm_h512", "rmsnorm_h7168")]
    pairs_of_norms = [(one, each) for one in norms for each in (own, blackwell)]
    told: list[Report] = []
    with gpu_runs.GpuRuns(pairs_of_norms, "cuda:1", 2, 0, None, 3, told.append) as runs:
        for norm in norms:
            assert runs.report(norm, own).definition == norm.name
        with pytest.raises(pytest.fail.Exception, match=r"rmsnorm_h512 was not verified against pytest\.new"):
            runs.report(norms[0], blackwell)
    pairs = [(norm.name, "pytest.kernel") for norm in norms]
    assert [(report.definition, report.target) for report in told[:2]] == pairs, "each is told as it comes"
    assert calls[:2] == ([("cuda:1", pairs[:1]), ("cuda:1", pairs[1:])] if worker else [("cuda", pairs)])


def test_a_run_with_a_chosen_seed_is_not_recorded(pytestconfig, monkeypatch, tmp_path):
    configure = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py")).pytest_configure
    monkeypatch.setattr(pytestconfig.option, "record_evidence", tmp_path)
    monkeypatch.setattr(pytestconfig.option, "seed", SEED)
    configure(pytestconfig)
    monkeypatch.setattr(pytestconfig.option, "seed", 7)
    with pytest.raises(pytest.UsageError, match="--record-evidence needs --seed 0"):
        configure(pytestconfig)


def test_every_definition_has_a_real_kernel():
    without = [d.name for d in flashinfer_trace.definitions() if not family_of(d).kernels_of(d)]
    assert not without, f"no kernel in the family records computes {without}"


@pytest.mark.parametrize("require_gpu", [False, True])
@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize(
    ("path", "library", "reason"),
    [
        ("toy.kernel", "no-such-library", "needs no-such-library, which is not installed"),
        ("toy.kernel", "pytest", "needs toy of pytest, which cannot be imported"),
    ],
)
def test_a_missing_library_is_named_and_fails_only_where_it_is_required(
    path, library, reason, optional, require_gpu, monkeypatch
):
    monkeypatch.setattr("flashinfer_trace.kernels.table.OPTIONAL", ("toy.",) if optional else ())
    kernel = private_kernel(path, library, lambda *_: {})
    outcome = pytest.fail.Exception if require_gpu and not optional else pytest.skip.Exception
    with pytest.raises(outcome, match=f"toy.kernel.* {reason}"):
        skip_unusable(kernel, (9, 0), require_gpu)


def test_an_installed_library_is_not_skipped():
    skip_unusable(private_kernel("pytest.main", "pytest", lambda *_: {}), (9, 0), require_gpu=True)


@pytest.mark.parametrize("require_gpu", [False, True])
def test_a_kernel_that_the_installed_release_lacks_is_skipped_whatever_is_required(require_gpu):
    facts = KernelFacts("pytest.gone", (Place("pytest.gone", "pytest", until="7.4"),))
    kernel = Kernel("pytest.gone", lambda *_: {}, facts=facts)
    with pytest.raises(pytest.skip.Exception, match=r"pytest\.gone: not in pytest [\d.]+, last in 7\.4"):
        skip_unusable(kernel, (9, 0), require_gpu)


def test_a_kernel_of_another_gpu_is_skipped_whatever_is_required():
    kernel = private_kernel("toy.kernel", "no-such-library", lambda *_: {}, on=FROM_BLACKWELL)
    with pytest.raises(pytest.skip.Exception, match=r"needs compute capability 10\.0"):
        skip_unusable(kernel, (9, 0), require_gpu=True)
