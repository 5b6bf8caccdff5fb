"""Faults of kernels: what they change, when a verification rejects them, and what is recorded."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.family import private_kernel
from flashinfer_trace.harness.faults import MANTISSA_BITS, FaultyCase, any_kernel, flipped, with_inputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.power import Power, power, record_power, stand_in, unexplained
from flashinfer_trace.harness.verify import Job, verify
from flashinfer_trace.verdict.compare import ErrorBound

DEFINITION = flashinfer_trace.load("rmsnorm_h512")
FAMILY = family_of(DEFINITION)
JOB = Job(DEFINITION, FAMILY, stand_in(None))


def trial(values, before=None, number=3):
    """A trial of a kernel with the output y."""
    outputs = {"here": {"y": values}, "there": {"y": values if before is None else before}}
    return FaultyCase({"at": "here"}, {"at": "there"}, {}, lambda inputs: outputs[inputs["at"]], Draws(number, "cpu"))


@pytest.mark.parametrize("dtype", MANTISSA_BITS, ids=str)
def test_a_flipped_bit_changes_one_element_by_what_it_weighs(dtype):
    values = torch.linspace(1, 100, 60).view(6, 10).to(dtype)
    values[0] = 0
    for bit in range(2):
        wrong = flipped(MANTISSA_BITS[dtype] - 1 - bit, False, values, values, trial(values))
        different = (wrong.double() != values.double()).nonzero()
        assert len(different) == 1
        place = tuple(different[0].tolist())
        change = abs(float(wrong[place].double() / values[place].double()) - 1)
        assert 2.0 ** -(bit + 2) <= change <= 2.0 ** -(bit + 1)
        largest = flipped(MANTISSA_BITS[dtype] - 1 - bit, True, values, values, trial(values))
        assert values.double()[largest.double() != values.double()].tolist() == [float(values.double().max())]


def test_every_fault_changes_what_it_says():
    values, before = torch.arange(1.0, 801).view(20, 40), -torch.arange(1.0, 801).view(20, 40)
    changed = {}
    for fault in any_kernel({"y": (torch.float32, 2)}):
        wrong = fault.spoil(trial(values, before))
        assert wrong is not None
        changed[fault.name.removeprefix("y: ")] = (wrong["y"] != values, wrong["y"])
    assert torch.equal(values, torch.arange(1.0, 801).view(20, 40)), "the right output was changed"
    rows = {name: wrong.any(dim=1).sum().item() for name, (wrong, _) in changed.items()}
    columns = {name: wrong.any(dim=0).sum().item() for name, (wrong, _) in changed.items()}
    assert (rows["a stale row"], columns["a stale row"]) == (1, 40)
    assert (rows["a stale tile"], columns["a stale tile"]) == (16, 16)
    assert (rows["a stale last column"], columns["a stale last column"]) == (20, 1)
    assert (rows["last column zero"], columns["last column zero"]) == (20, 1)
    assert (rows["two rows exchanged"], columns["two rows exchanged"]) == (2, 40)
    assert all(
        torch.equal(changed[name][1][changed[name][0]], before[changed[name][0]]) for name in rows if "stale" in name
    )


def test_a_fault_that_makes_no_difference_is_none():
    same = torch.ones(4, 8, dtype=torch.int32)
    applied = {fault.name for fault in any_kernel({"y": (torch.int32, 2)}) if fault.spoil(trial(same)) is not None}
    assert applied == {"y: lowest bit of any element flipped", "y: last column zero"}
    assert all(fault.spoil(trial(same[:0])) is None for fault in any_kernel({"y": (torch.int32, 2)}))


def test_faults_are_rejected_in_the_first_cases():
    found = power(JOB, 3)
    assert not unexplained(FAMILY, found)
    assert max(each.cases or 99 for each in found.values()) <= 5


def test_a_policy_that_accepts_faults_is_named():
    loose = ErrorBound(lambda expected: expected.value.abs() * 0.2 + 1e-30, "a fifth of every element")
    family = dataclasses.replace(FAMILY, compare={"output": loose})
    found = power(dataclasses.replace(JOB, family=family), 3)
    assert any("mantissa bit 3 of the largest element" in line for line in unexplained(family, found))
    declared = dataclasses.replace(family, unseen={"output: mantissa bit *": "for this test"})
    assert not unexplained(declared, found)


def test_a_fault_of_the_family_calls_the_kernel_with_other_inputs():
    larger = with_inputs("2 % too large", lambda inputs, trial: {**inputs, "weight": inputs["weight"] * 1.02})
    never = with_inputs("does not apply", lambda inputs, trial: None)
    found = power(dataclasses.replace(JOB, family=dataclasses.replace(FAMILY, faults=(larger, never))), 3)
    assert found["2 % too large"].cases is not None
    assert found["does not apply"] == Power(0, None)


def test_a_kernel_that_is_wrong_as_it_is_has_no_power():
    wrong = private_kernel("toy.kernel", "toy", lambda d, i, o: {"output": reference_outputs(d, i, 0)["output"] * 2})
    with pytest.raises(ValueError, match=r"rmsnorm_h512: toy\.kernel does not pass as it is"):
        power(dataclasses.replace(JOB, kernel=wrong), 3)


SAMPLER = flashinfer_trace.load("top_k_top_p_sampling_from_probs_v128256")


@pytest.mark.parametrize(("fixed", "status"), [(False, "passed"), (True, "failed")])
def test_a_sampler_must_draw_by_its_seed(fixed, status):
    family = family_of(SAMPLER)

    def draw(definition, inputs, seed):
        return reference_outputs(definition, inputs, 7 if fixed else seed)

    kernel = dataclasses.replace(stand_in(family.kernels[0]), seeded=draw)
    report = verify(Job(SAMPLER, family, kernel), examples=2)
    assert report.status == status
    assert ("draws the same with two seeds, 64 rows each" in report.message) is fixed


def test_the_record_of_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    kernel = dataclasses.replace(stand_in(None), path="flashinfer.norm.rmsnorm", variant="a [b]/c")
    job = dataclasses.replace(JOB, kernel=kernel, device="cuda")
    found = {"output: a stale row": Power(2, 1), "output: last column zero": Power(3, None)}
    path = record_power(tmp_path / "power", job, 10, 4, found)
    assert path.name == "rmsnorm.flashinfer_norm_rmsnorm_a_b_c.json"
    written = json.loads(path.read_text())
    assert written["faults"] == {
        "output: a stale row": {"applied": 2, "cases": 1},
        "output: last column zero": {"applied": 3, "cases": None},
    }
    assert (written["kernel"], written["gpu"], written["seed"]) == (kernel.label, "NVIDIA H200", 4)
