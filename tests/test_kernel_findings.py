"""Known defects of real kernels still show; a library that fixes one makes its test fail, and the records follow."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import jsonschema
import kernel_findings
import pytest
from kernel_findings import PROBES, Probe
from moe_findings import raises

from flashinfer_trace import find_root
from flashinfer_trace.format.json_source import load_object
from tools.shared.findings import read_findings

ROOT = find_root()
#: FlashInfer compiles some kernels when they are first called.
SECONDS = 300
#: All defects show on Hopper.
CAPABILITY = (9, 0)
FINDINGS = list(read_findings(ROOT))
LIBRARIES = {probe: one.library for one in FINDINGS for defect in one.defects for probe in defect.probes}


class DefectShown(Exception):
    """The kernel did what its finding says."""


def verdict(name: str, kills: bool, returncode: int, output: str) -> bool:
    """Whether the kernel is right; raises for a probe that says nothing, which is neither."""
    if returncode == 0 and output.split()[-1:] in (["RIGHT"], ["WRONG"]):
        return output.split()[-1] == "RIGHT"
    lost = "CUDA error" in output or "AcceleratorError" in output
    if kills and (returncode < 0 or lost):
        return False
    raise RuntimeError(f"{name}: the probe ended with {returncode} and said {output[-1500:]!r}")


def run(name: str, probe: Probe) -> bool:
    command = [sys.executable, str(Path(kernel_findings.__file__)), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return verdict(name, probe.kills, done.returncode, done.stdout + (done.stderr if done.returncode else ""))


@pytest.mark.gpu_harness
@pytest.mark.xfail(strict=True, raises=DefectShown, reason="a known defect of a real kernel: findings/kernels.json")
@pytest.mark.parametrize("name", PROBES)
def test_the_kernel_is_right(name, cuda_device):
    import torch

    capability = torch.cuda.get_device_capability(cuda_device)
    if capability != CAPABILITY:
        pytest.skip(f"{name}: shows on compute capability {CAPABILITY}; this GPU has {capability}")
    try:
        importlib.metadata.version(LIBRARIES[name])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name}: needs {LIBRARIES[name]}, which is not installed")
    if not run(name, PROBES[name]):
        raise DefectShown(name)


def test_every_defect_has_a_probe_and_every_probe_a_defect():
    named = [probe for one in FINDINGS for defect in one.defects for probe in defect.probes]
    assert len(named) > 40 and sorted(named) == sorted(PROBES)


def test_the_findings_fit_their_schema():
    jsonschema.validate(load_object(ROOT / "findings/kernels.json"), load_object(ROOT / "schema/findings.schema.json"))
    ids = [one.id for one in FINDINGS]
    assert len(ids) == len({*ids})


@pytest.mark.parametrize(
    ("returncode", "output", "kills", "right"),
    [
        (0, "RIGHT\n", False, True),
        (0, "a warning\nWRONG\n", False, False),
        (-11, "", True, False),
        (1, "torch.AcceleratorError: CUDA error: an illegal memory access", True, False),
    ],
)
def test_what_a_probe_says(returncode, output, kills, right):
    assert verdict("a kernel", kills, returncode, output) == right


@pytest.mark.parametrize(
    ("returncode", "output", "kills"), [(0, "", True), (1, "ImportError", True), (-11, "", False), (1, "WRONG", False)]
)
def test_a_probe_that_fails_otherwise_shows_no_defect(returncode, output, kills):
    with pytest.raises(RuntimeError, match="the probe ended"):
        verdict("a kernel", kills, returncode, output)


def test_an_error_is_a_refusal_but_not_one_of_a_module_that_cannot_be_built():
    def refuse(message):
        raise RuntimeError(message)

    assert raises(lambda: refuse("x must be float32"))
    with pytest.raises(RuntimeError, match="build failed"):
        raises(lambda: refuse("Ninja build failed. Ninja output:"))
