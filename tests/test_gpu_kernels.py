"""`pytest -m gpu`: every embedded run() against every real kernel of its family, over drawn shapes."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from gpu_libraries import skip_unusable
from gpu_sharing import SharedGpu
from made_up_evidence import small_dataset

import flashinfer_trace
from flashinfer_trace.definition import Definition
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.evidence import record
from flashinfer_trace.harness.family import Kernel
from flashinfer_trace.harness.verify import Job, Report, verify_together
from flashinfer_trace.ledger import SEED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
#: What CUDA, torch and the libraries say if the GPU has no memory left.
OUT_OF_MEMORY = "out of memory"
PAIRS = [
    # The pairs of a Definition share its cases. They are neighbours, which worksteal leaves on one worker.
    pytest.param(definition, kernel, id=f"{definition.name}-{kernel.label}")
    for definition in flashinfer_trace.definitions()
    for kernel in family_of(definition).kernels_of(definition)
]


@pytest.fixture(scope="session")
def reports() -> dict[tuple[str, str], Report]:
    """What was found so far, by Definition and kernel."""
    return {}


@pytest.fixture(scope="session")
def poisoned() -> list[str]:
    """What left the CUDA context unusable, once something has: everything after it would fail because of it."""
    return []


def chosen_kernels(request: pytest.FixtureRequest, definition: Definition) -> list[Kernel]:
    """The selected kernels of the Definition that this GPU can run."""
    import torch

    capability = torch.cuda.get_device_capability()
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    pairs = [pair for pair in chosen if pair.keys() == {"definition", "kernel"}]
    kernels = [pair["kernel"] for pair in pairs if pair["definition"].name == definition.name]
    return [kernel for kernel in kernels if kernel.unavailable(capability) is None and kernel.missing() is None]


@pytest.fixture(scope="session")
def shared_gpu(cuda_device, tmp_path_factory) -> SharedGpu | None:
    """The GPU of this worker, if it may have others on it; the temporary directories of all workers lie in one."""
    workers = "PYTEST_XDIST_WORKER" in os.environ
    return SharedGpu(tmp_path_factory.getbasetemp().parent, cuda_device) if workers else None


def verified(jobs: Sequence[Job], gpu: SharedGpu | None, **options: int) -> list[Report]:
    """The reports of a Definition's jobs; if memory ran out on a shared GPU, those of a second run, alone on it."""
    import torch

    if gpu is None:
        return verify_together(jobs, **options)
    for turn in (gpu.together, gpu.alone):
        with turn():
            found = verify_together(jobs, **options)
            with contextlib.suppress(RuntimeError):  # of an unusable context, which the caller finds out
                torch.cuda.empty_cache()
        if not any(OUT_OF_MEMORY in report.message for report in found):
            break
        gc.collect()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("definition", "kernel"), PAIRS)
def test_reference_and_kernel_meet_their_bounds(
    definition, kernel, cuda_device, shared_gpu, examples, reports, poisoned, request
):
    """The first pair of a Definition verifies all of its kernels on shared cases; the others read their reports."""
    import torch

    require_gpu = request.config.getoption("--require-gpu")
    skip_unusable(kernel, torch.cuda.get_device_capability(cuda_device), require_gpu)
    if (definition.name, kernel.label) not in reports:
        if poisoned:
            pytest.fail(f"not run: the CUDA context is unusable since {poisoned[0]}")
        family = family_of(definition)
        jobs = [Job(definition, family, each, cuda_device) for each in chosen_kernels(request, definition)]
        found = verified(jobs, shared_gpu, examples=examples, seed=request.config.getoption("--seed"))
        reports |= {(definition.name, report.target): report for report in found}
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            poisoned.append(request.node.name)
    report = reports[definition.name, kernel.label]
    assert report.status == "passed", report.message
    assert report.cases >= examples
    directory = request.config.getoption("--record-evidence")
    if directory:
        record(directory, definition, kernel, report)


def of_extra(project: dict, *extras: str) -> set[str]:
    """The distributions that these extras name, without versions."""
    named = [each for extra in extras for each in project["optional-dependencies"][extra]]
    return {re.split(r"[^\w.-]", each)[0] for each in named}


def test_gpu_tests_are_collected_with_the_packages_of_the_extra_alone(tmp_path):
    """A GPU runner installs `gpu`, not `test`: pytest stops if a single file cannot be imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    missing = of_extra(project, "test") - of_extra(project, "gpu", "verify")
    modules = {name for name, owners in importlib.metadata.packages_distributions().items() if missing & {*owners}}
    assert {"grimp", "safetensors", "selenium"} <= modules
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
    evidence = tmp_path / "evidence" / "activation" / f"{name}.json"
    document = json.loads(evidence.read_text())
    _, stale, lost = document["entries"]
    stale["digests"]["family"] = "0" * 64
    document["entries"].remove(lost)
    evidence.write_text(json.dumps(document))
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "--missing-evidence", __file__],
        cwd=ROOT,
        env={**os.environ, "FLASHINFER_TRACE_ROOT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    chosen = {line.partition("[")[2].removesuffix("]") for line in found.stdout.splitlines() if "::" in line}
    assert chosen == {f"{name}-{entry['kernel']['label']}" for entry in (stale, lost)}, found.stdout[-3000:]


@pytest.mark.parametrize(
    ("messages", "runs"),
    [
        (["CUDA out of memory", ""], 2),
        (["CUDA out of memory"] * 3, 2),
        (["worst error is 2 x its bound"], 1),
        ([""], 1),
    ],
)
def test_a_worker_that_ran_out_of_memory_tries_again_alone(tmp_path, monkeypatch, messages, runs):
    turns = []

    def made_up(jobs, **options):
        turns.append(beside(tmp_path))
        message = messages[len(turns) - 1]
        return [
            Report("rmsnorm_h512", "toy.kernel", "cuda:0", status="failed" if message else "passed", message=message)
        ]

    monkeypatch.setattr(f"{__name__}.verify_together", made_up)
    (report,) = verified([], SharedGpu(tmp_path, "cuda:0"), examples=1)
    assert report.message == messages[runs - 1] and turns == [True, False][:runs]


def beside(directory: Path) -> bool:
    """Whether another worker can have a turn on the GPU now."""
    with (directory / "cuda0.turn").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_worker_alone_waits_for_the_others_and_keeps_them_waiting(tmp_path):
    gpu, order = SharedGpu(tmp_path, "cuda:0"), []
    begun, ended = threading.Event(), threading.Event()

    def alone():
        with gpu.alone():
            order.append("alone")
            begun.set()
            ended.wait(10)
            order.append("alone ended")

    def together():
        with gpu.together():
            order.append("later")

    threads = [threading.Thread(target=alone), threading.Thread(target=together)]
    with gpu.together():
        threads[0].start()
        assert not begun.wait(0.2)
        order.append("first")
    assert begun.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    ended.set()
    for thread in threads:
        thread.join(10)
    assert order == ["first", "alone", "alone ended", "later"]


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
    ("library", "modules", "reason"),
    [
        ("no-such-library", (), "needs no-such-library, which is not installed"),
        ("pytest", ("pytest.no_such_module",), "needs pytest.no_such_module of pytest, which cannot be imported"),
    ],
)
def test_a_missing_library_is_named_and_fails_only_where_it_is_required(
    library, modules, reason, optional, require_gpu
):
    kernel = Kernel("toy.kernel", library, lambda *_: {}, modules=modules, optional=optional)
    outcome = pytest.fail.Exception if require_gpu and not optional else pytest.skip.Exception
    with pytest.raises(outcome, match=f"toy.kernel.* {reason}"):
        skip_unusable(kernel, (9, 0), require_gpu)


def test_an_installed_library_is_not_skipped():
    skip_unusable(Kernel("toy.kernel", "pytest", lambda *_: {}, modules=("pytest",)), (9, 0), require_gpu=True)


def test_a_kernel_of_another_gpu_is_skipped_whatever_is_required():
    kernel = Kernel("toy.kernel", "no-such-library", lambda *_: {}, min_capability=(10, 0))
    with pytest.raises(pytest.skip.Exception, match=r"needs compute capability 10\.0"):
        skip_unusable(kernel, (9, 0), require_gpu=True)
