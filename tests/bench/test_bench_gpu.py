"""Benchmarks on a GPU: the same bits as on a CPU, cold against warm, repeatability, and cheats in timed calls."""

from pathlib import Path

import pytest

import flashinfer_trace
from flashinfer_trace.judging.bench import Policy, bench
from flashinfer_trace.judging.server import Server
from flashinfer_trace.judging.traffic import digests
from flashinfer_trace.judging.verdict import Grade, Verdict

pytestmark = pytest.mark.gpu_harness

FILES = sorted((Path(__file__).resolve().parents[2] / "workloads").glob("*/*.json"))
NORM = "rmsnorm_h512"
GOOD = """import torch
n = [0]
def good(x, w):
    v = x.float()
    return (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)
"""


@pytest.fixture(scope="module")
def server():
    with Server() as started:
        yield started


def passed(*arguments, **options):
    return Verdict(NORM, "mine.py", "cuda", "own", grade=Grade.REFERENCE, cases=1)


def timed(text, tmp_path, server, monkeypatch, name="prefill-2048", **policy):
    """A submission in timed calls, as if the judge had found it right."""
    monkeypatch.setattr("flashinfer_trace.judging.bench.measure.judge", passed)
    path = tmp_path / "mine.py"
    path.write_text(GOOD + text)
    workloads = [one for one in flashinfer_trace.workloads(NORM) if one.name == name]
    report = bench([path], NORM, workloads, policy=Policy(**policy), against=(), server=server)
    return report.timetables[0].kernels[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_bits_of_a_cpu_come_again_on_a_gpu(path, cuda_device):
    for workload in flashinfer_trace.workloads(path.stem):
        if workload.digests:
            assert digests(workload.inputs(cuda_device)) == workload.digests


HONEST = "def run(x, w):\n    return good(x, w)\n"


def test_a_cold_cache_takes_longer_than_a_warm_one(server, cuda_device):
    """One kernel that reads each element once: 8 MB from the memory or from the L2 cache."""
    pytest.importorskip("flashinfer", reason="needs flashinfer-python")
    workloads = [one for one in flashinfer_trace.workloads(NORM) if one.name == "prefill-8192"]
    found = []
    for warm in (False, True):
        report = bench(
            [], NORM, workloads, policy=Policy(warm=warm), against=["flashinfer.norm.rmsnorm"], server=server
        )
        found.append(report.timetables[0].kernels[0].summary)
    cold, warm = found
    assert warm.seconds < 0.95 * cold.seconds, found
    assert not cold.remembers and not cold.disputed, found


def test_two_runs_agree(tmp_path, server, monkeypatch, cuda_device):
    first, second = (timed(HONEST, tmp_path, server, monkeypatch, name="prefill-8192").summary for _ in range(2))
    assert first.seconds > 20e-6 and abs(first.seconds / second.seconds - 1) < 0.03, (first, second)


def test_a_graph_is_replayed(tmp_path, server, monkeypatch, cuda_device):
    launched = timed(HONEST, tmp_path, server, monkeypatch).summary
    replayed = timed(HONEST, tmp_path, server, monkeypatch, graph=True).summary
    assert replayed.seconds < launched.seconds * 1.05, (launched, replayed)


CHEATS = {
    "on another stream": "side = torch.cuda.Stream()\ndef run(x, w, output):\n    with torch.cuda.stream(side):\n"
    "        torch.cuda._sleep(20_000_000)\n        output.copy_(good(x, w))\n",
    "a late no-op": "def run(x, w, output):\n    n[0] += 1\n    if n[0] != 5: output.copy_(good(x, w))\n",
    "by address": "seen = {}\ndef run(x, w):\n    k = x.data_ptr(), x.shape\n"
    "    if k not in seen: seen[k] = good(x, w)\n    return seen[k]\n",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_in_timed_calls_are_wrong(name, tmp_path, server, monkeypatch, cuda_device):
    found = timed(CHEATS[name], tmp_path, server, monkeypatch)
    assert found.summary is None and found.failure.kind == "values", found


def test_what_was_computed_before_a_capture_is_not_the_result_of_its_replay(tmp_path, server, monkeypatch, cuda_device):
    text = (
        "kept = []\ndef run(x, w):\n    if not torch.cuda.is_current_stream_capturing():\n"
        "        kept[:] = [good(x, w)]\n    return kept[0].clone()\n"
    )
    found = timed(text, tmp_path, server, monkeypatch, graph=True)
    assert found.summary is None and found.failure.kind == "values", found


def test_a_replaced_event_changes_no_time(tmp_path, server, monkeypatch, cuda_device):
    patched = "torch.cuda.Event.elapsed_time = lambda *a: 1e-6\ntorch.cuda.synchronize = lambda *a: None\n"
    found = timed(patched + HONEST, tmp_path, server, monkeypatch)
    assert found.failure.kind == "tampered" and "torch.cuda.Event.elapsed_time" in found.failure.message
