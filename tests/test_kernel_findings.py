"""Known defects of real kernels still show; a library that fixes one makes its test fail, and the records follow."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import kernel_findings
import pytest
from kernel_findings import FINDINGS
from moe_findings import raises

from flashinfer_trace import find_root

#: FlashInfer compiles some kernels when they are first called.
SECONDS = 300
NOT_RUN = "- Not yet run: the defect was reported, and its probe is written, but has run on no GPU."


class DefectShown(Exception):
    """The kernel did what its finding says."""


def verdict(finding: kernel_findings.Finding, returncode: int, output: str) -> bool:
    """Whether the kernel is right; raises for a probe that says nothing, which is neither."""
    if returncode == 0 and output.split()[-1:] in (["RIGHT"], ["WRONG"]):
        return output.split()[-1] == "RIGHT"
    lost = "CUDA error" in output or "AcceleratorError" in output
    if finding.kills and (returncode < 0 or lost):
        return False
    raise RuntimeError(f"{finding.name}: the probe ended with {returncode} and said {output[-1500:]!r}")


def run(finding: kernel_findings.Finding) -> bool:
    command = [sys.executable, str(Path(kernel_findings.__file__)), finding.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return verdict(finding, done.returncode, done.stdout + (done.stderr if done.returncode else ""))


@pytest.mark.gpu_harness
@pytest.mark.xfail(strict=True, raises=DefectShown, reason="a known defect of a real kernel: docs/kernel_findings.md")
@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.name)
def test_the_kernel_is_right(finding, cuda_device):
    import torch

    low, high = finding.capability
    capability = torch.cuda.get_device_capability(cuda_device)
    if not low <= capability <= high:
        pytest.skip(f"{finding.name}: shows on compute capability {low} to {high}; this GPU has {capability}")
    try:
        importlib.metadata.version(finding.library)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{finding.name}: needs {finding.library}, which is not installed")
    if not run(finding):
        raise DefectShown(finding.name)


def test_every_finding_is_described_and_every_description_has_a_probe():
    lines = (find_root() / "docs/kernel_findings.md").read_text(encoding="utf-8").splitlines()
    described = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert described == [finding.name for finding in FINDINGS]


def test_the_document_says_which_probes_have_not_run():
    text = (find_root() / "docs/kernel_findings.md").read_text(encoding="utf-8")
    sections = [" ".join(section.split()) for section in text.split("\n## ")[1:]]
    assert len(sections) == len(FINDINGS)
    assert [NOT_RUN in section for section in sections] == [finding.pending for finding in FINDINGS]


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
    finding = kernel_findings.Finding("a kernel", "a-library", "1", lambda: True, kills)
    assert verdict(finding, returncode, output) == right


@pytest.mark.parametrize(
    ("returncode", "output", "kills"), [(0, "", True), (1, "ImportError", True), (-11, "", False), (1, "WRONG", False)]
)
def test_a_probe_that_fails_otherwise_shows_no_defect(returncode, output, kills):
    finding = kernel_findings.Finding("a kernel", "a-library", "1", lambda: True, kills)
    with pytest.raises(RuntimeError, match="the probe ended"):
        verdict(finding, returncode, output)


def test_an_error_is_a_refusal_but_not_one_of_a_module_that_cannot_be_built():
    def refuse(message):
        raise RuntimeError(message)

    assert raises(lambda: refuse("x must be float32"))
    with pytest.raises(RuntimeError, match="build failed"):
        raises(lambda: refuse("Ninja build failed. Ninja output:"))
