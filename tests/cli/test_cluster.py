"""`verify` and `tools.mutate` with `--cluster`, on a local cluster of Ray, one of whose workers is killed half-way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import flashinfer_trace
from flashinfer_trace.cli.runs import Settings
from flashinfer_trace.cli.tasks import find_tasks
from flashinfer_trace.dataset.store import find_root

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'flashinfer-trace[cluster]'")

NAMES = [
    "rmsnorm_h512",
    "rmsnorm_h7168",
    "silu_and_mul_i4096",
    "fused_add_rmsnorm_residual_out_h4096",
    "gemm_bf16_n512_k512",
]


@pytest.fixture(autouse=True, scope="module")
def one_small_cluster():
    """Two workers for all tests of a process: each imports torch once. No reports about usage."""
    options = {"num_cpus": 2, "include_dashboard": False, "configure_logging": False}
    start, stop = ray.init, ray.shutdown
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setattr(ray, "init", lambda **given: ray.is_initialized() or start(**given, **options))
        patch.setattr(ray, "shutdown", lambda: None)
        yield
        stop()


def busy_workers() -> list[int]:
    """Processes of this process's own cluster that run a task now."""
    parents, busy = {}, []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            parents[int(lines["Pid"])] = int(lines["PPid"])
            if (status.parent / "cmdline").read_bytes().startswith(b"ray::run_batch"):
                busy.append(int(lines["Pid"]))
    return [pid for pid in busy if parents.get(parents[pid]) == os.getpid()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="finds processes through /proc")
def test_the_tasks_of_a_killed_worker_are_run_again():
    from flashinfer_trace.cli.cluster import run_on_cluster

    definitions = [flashinfer_trace.load(name) for name in NAMES]
    tasks = find_tasks(definitions, find_root(), "all", None)
    settings = Settings("cpu", 20, 0, None, None, False, None, None)
    killed, reports = [], []
    for report in run_on_cluster(tasks, settings, "local"):
        reports.append(report)
        if not killed:
            killed = busy_workers()[:1]
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
    assert killed, "no worker was busy when the first report came"
    assert {(r.definition, r.target) for r in reports} == {(t.definition.name, t.target) for t in tasks}
    assert len(reports) == len(tasks)
    for report in reports:
        assert report.status == ("passed" if report.target == "oracle" else "skipped"), report.message
        assert report.cases >= 20 or report.target != "oracle"


HANGS = """
import time
from flashinfer_trace import find_root, load
from flashinfer_trace.cli import cluster
from flashinfer_trace.cli.runs import Batch, Settings
from flashinfer_trace.cli.tasks import find_tasks

tasks = find_tasks([load("rmsnorm_h512")], find_root(), "oracle", None)
cluster.ANSWERS_WITHIN = 0.2
Batch.run = lambda batch: time.sleep(60)
cluster.run_batch(Batch.of(tasks, Settings("cpu", 20, 0, None, None, False, None, None)))
"""


def test_a_worker_that_does_not_answer_in_time_ends_itself():
    """Ray then counts it as lost: it runs the task again elsewhere, and in the end the report says so."""
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1 and ended.stderr.startswith("Timeout (0:00:00.2"), ended.stderr


def test_the_command_prints_what_the_cluster_found(invoke):
    result = invoke("verify", "rmsnorm_h512", "--against", "all", "--cluster", "local", "--format", "json")
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)
    skipped = [report["message"] for report in reports if report["status"] == "skipped"]
    assert {report["target"]: report["status"] for report in reports}["oracle"] == "passed"
    assert len(reports) == 3 and len(skipped) == 2 and all("kernels need --device cuda" in one for one in skipped)


def test_without_a_gpu_or_a_cluster_the_command_says_so(invoke):
    result = invoke("verify", "rmsnorm_h512", "--device", "cuda", "--against", "kernel", "--cluster", "local")
    assert result.exit_code == 1 and "none of its machines has a GPU" in result.stderr
    result = invoke("verify", "rmsnorm_h512", "--cluster", "local", "--axes", "batch_size=3")
    assert result.exit_code == 2 and "--cluster is for whole runs" in result.stderr


def test_mutants_are_judged_on_the_cluster_as_here():
    from tools.mutate.cases import bench_of, known_families, representative
    from tools.mutate.cluster import judge_on_cluster
    from tools.mutate.judge import judge
    from tools.mutate.mutants import mutants

    tasks, here = [], []
    for name in ("concat_mla_k", "moe_shuffle_rows"):
        family = known_families()[name]
        bench = bench_of(family, representative(family))
        for mutant in mutants(bench.definition, family)[::8]:
            tasks.append((name, mutant.source, ""))
            here.append(judge(bench, mutant.source))
    found = dict(judge_on_cluster(tasks, address="local"))
    assert [found[number] for number in range(len(tasks))] == here
    assert {verdict.how for verdict in here} >= {"compared", "raised"}


def test_submissions_travel_to_the_cluster(tmp_path, invoke):
    """A file goes with its text: other machines do not have it."""
    (tmp_path / "mine.py").write_text("def run(x, w): return x")
    lines = [{"definition": "rmsnorm_h512", "file": "mine.py"}, {"definition": "rmsnorm_h512", "source": "no("}]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.jsonl"
    options = ("--out", str(out), "--cluster", "local", "--examples", "1")
    result = invoke("check-many", str(tmp_path / "all.jsonl"), *options)
    assert result.exit_code == 0, result.output
    found = {one["line"]: one["code"] for one in map(json.loads, out.read_text().splitlines())}
    assert found == {1: "values", 2: "not-loaded"}
