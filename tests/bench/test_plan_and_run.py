"""Submissions with plan() and run(): both are judged, timed apart, and a plan sees index inputs alone."""

from __future__ import annotations

import pytest

import flashinfer_trace
from flashinfer_trace.judging.bench import Policy, bench
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.server import Server
from flashinfer_trace.judging.verdict import Grade, Verdict

NAME = "causal_conv1d_update_c2048_w4"
SHORT = Policy(fresh=2, least=2, repeats=3, processes=1)
WRAPPER = """
import time
import torch

class Wrapper:
    def plan(self, conv_state_indices):
        PLAN
        self.real = conv_state_indices >= 0
        self.slots = conv_state_indices[self.real]

    def run(self, x, conv_state, weight, conv_state_indices):
        RUN
        tokens = torch.cat((conv_state[self.slots], x[self.real].unsqueeze(2)), dim=2)
        output, state = x.clone(), conv_state.clone()
        output[self.real] = torch.nn.functional.silu((tokens.float() * weight).sum(dim=2)).bfloat16()
        state[self.slots] = tokens[:, :, 1:]
        return output, state
"""


@pytest.fixture(scope="module")
def server():
    with Server() as started:
        yield started


def written(tmp_path, plan="", run="", text=WRAPPER):
    path = tmp_path / "mine.py"
    path.write_text(text.replace("PLAN", plan or "pass").replace("RUN", run or "pass"))
    return path


def judged(tmp_path, server, **parts):
    return judge(str(written(tmp_path, **parts)), NAME, examples=2, seed=5, server=server)


def timed(tmp_path, server, monkeypatch, **parts):
    passed = Verdict(NAME, "mine.py", "cpu", "own", grade=Grade.REFERENCE, cases=1)
    monkeypatch.setattr("flashinfer_trace.judging.bench.measure.judge", lambda *one, **more: passed)
    workloads = [one for one in flashinfer_trace.workloads(NAME) if one.name == "decode-8"]
    path = written(tmp_path, **parts)
    report = bench([path], NAME, workloads, device="cpu", policy=SHORT, examples=2, seed=5, server=server)
    return report.timetables[0].kernels[0]


def test_both_are_judged(tmp_path, server):
    assert judged(tmp_path, server).grade == Grade.REFERENCE
    # The plan of the first call is kept for all others.
    kept = judged(tmp_path, server, plan="if hasattr(self, 'slots'): return")
    assert kept.grade == Grade.WRONG
    assert judged(tmp_path, server, run="x = x + 1").code == "values"
    assert judged(tmp_path, server, plan="conv_state_indices[:1] = 0").code == "inputs-changed"


def test_they_are_timed_apart(tmp_path, server, monkeypatch):
    found = timed(tmp_path, server, monkeypatch, plan="time.sleep(0.02)", run="time.sleep(0.005)")
    assert found.failure is None and not found.summary.disputed
    assert found.summary.plan > 0.02 > found.summary.run > 0.005 and found.summary.served == found.summary.run
    assert found.summary.seconds >= found.summary.plan


def test_a_plan_has_no_other_inputs(tmp_path, server):
    for parameters, message in (
        ("x, conv_state_indices", "plan takes ['x'], which is not known before a model's layers run"),
        (
            "conv_state_indices, batch",
            "plan takes ['conv_state_indices', 'batch']; it must take, by these names, some of",
        ),
    ):
        text = WRAPPER.replace("def plan(self, conv_state_indices)", f"def plan(self, {parameters})")
        verdict = judged(tmp_path, server, text=text)
        assert not verdict.passed and message in verdict.failure.message, verdict
        assert "['conv_state_indices']" in verdict.failure.message


#: Keeps the inputs of the first call, which are at the same addresses in all others, and computes while it plans.
EARLY = (
    WRAPPER.replace("def run(self,", "def compute(self,")
    .replace("PLAN", "kept = self.kept")
    .replace("        RUN\n", "")
    + """
    kept, ready = None, None

    def run(self, x, conv_state, weight, conv_state_indices):
        if self.ready is not None and self.kept[0].data_ptr() == x.data_ptr():
            found, self.ready = self.ready, None
            return found
        self.kept = x, conv_state, weight
        return self.compute(x, conv_state, weight, conv_state_indices)
"""
)
EARLY = EARLY.replace(
    "self.slots = conv_state_indices[self.real]\n",
    "self.slots = conv_state_indices[self.real]\n"
    "        self.ready = kept and self.compute(*kept, conv_state_indices)\n",
)


def test_what_a_plan_computes_from_kept_inputs_is_wrong(tmp_path, server, monkeypatch):
    """Words of all other inputs are wrong until it has returned."""
    found = timed(tmp_path, server, monkeypatch, text=EARLY)
    assert found.failure is not None and found.failure.kind == "values"
