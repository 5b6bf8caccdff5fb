"""Options of the GPU runs, hypothesis profiles, and one GPU per pytest-xdist worker."""

from __future__ import annotations

import os
from pathlib import Path

# Twins are small: more than one thread per worker would only wait. This must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# glibc gives the memory of each large tensor back at once, and a tenth of all time would go into taking it again. The
# workers of pytest-xdist and other processes that tests start read this when they begin.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 32))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 32))

import hypothesis
import pytest

from flashinfer_trace.dataset.evidence import DRAWN_CASES, SEED, released
from flashinfer_trace.dataset.store import find_root

#: Cases for each (Definition, kernel) on a GPU; also hypothesis's max_examples elsewhere.
PROFILES = {"ci": DRAWN_CASES, "dev": 20, "nightly": 400}

for name, examples in PROFILES.items():
    hypothesis.settings.register_profile(
        name, max_examples=examples, deadline=None, derandomize=name == "ci", print_blob=True
    )
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("real kernels")
    group.addoption("--require-gpu", action="store_true", help="fail instead of skipping if there is no GPU")
    group.addoption("--examples", type=int, help="real cases for each (Definition, kernel); default: the profile's")
    group.addoption(
        "--gpu-jobs", type=int, help="processes that verify, not with -n [8 per GPU, or 1 for few Definitions]"
    )
    group.addoption("--seed", type=int, default=SEED, help="seed of the GPU cases")
    group.addoption("--record-evidence", type=Path, metavar="DIR", help="record evidence of what passes in DIR")
    group.addoption(
        "--missing-evidence",
        action="store_true",
        help="only pairs without a run in evidence/, or with one that is out of date",
    )
    group.addoption("--record-times", type=Path, metavar="FILE", help="record how long the pairs took in FILE")
    group.addoption("--record-power", type=Path, metavar="DIR", help="record after how many cases faults are found")
    group.addoption(
        "--record-verdicts", type=Path, metavar="FILE", help="record what the judge says of kernels in FILE"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuses to record what `flashinfer-trace validate` would refuse; one process records verdicts for all workers."""
    path = config.getoption("--record-verdicts")
    if path and not hasattr(config, "workerinput"):
        from recorded_verdicts import Recorder

        config.pluginmanager.register(Recorder(path))
    times = config.getoption("--record-times")
    if times:
        if hasattr(config, "workerinput") or config.getoption("numprocesses", default=None):
            raise pytest.UsageError("--record-times times one process of pytest: leave -n out")
        from gpu_times import TimesRecorder

        config.pluginmanager.register(TimesRecorder(times))
    if config.getoption("--record-evidence") and config.getoption("--seed") != SEED:
        raise pytest.UsageError(f"--record-evidence needs --seed {SEED}: a run with a chosen seed is not evidence")
    if config.getoption("--record-evidence"):
        from flashinfer_trace.harness.evidence import started_at

        started_at()  # workers of pytest-xdist, which begin later, record the same run


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of the pinned release come first, and in the order of their files otherwise.

    As neighbors they run on one worker, which analyzes DeepSeek once; the shortest tests, which remain, even out the
    ends of all workers.
    """
    items.sort(key=lambda item: item.get_closest_marker("release") is None)
    if config.getoption("--missing-evidence"):
        missing = {item for item in items if lacks_evidence(item)}
        config.hook.pytest_deselected(items=[item for item in items if item not in missing])
        items[:] = [item for item in items if item in missing]


def lacks_evidence(item: pytest.Item) -> bool:
    """Whether this is a pair of Definition and kernel without a run that a release takes."""
    pair = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if pair.keys() != {"definition", "kernel"} or item.get_closest_marker("gpu") is None:
        return False
    return pair["kernel"].label not in released(find_root(), pair["definition"])


@pytest.fixture(scope="session")
def examples(request: pytest.FixtureRequest) -> int:
    chosen = request.config.getoption("--examples")
    return chosen or hypothesis.settings().max_examples


def worker_device(worker: str, count: int) -> str:
    """The GPU of a pytest-xdist worker: gw0 takes the first, gw1 the second, and round again."""
    number = int(worker.removeprefix("gw")) if worker.startswith("gw") else 0
    return f"cuda:{number % count}"


@pytest.fixture(scope="session")
def cuda_device(request: pytest.FixtureRequest) -> str:
    """This worker's GPU; without one, the test is skipped with the reason, or fails with --require-gpu."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        reason = "no CUDA device: torch.cuda.is_available() is False"
        if request.config.getoption("--require-gpu"):
            pytest.fail(f"--require-gpu: {reason}")
        pytest.skip(reason)
    device = worker_device(os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
