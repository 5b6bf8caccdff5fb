"""Known defects of real kernels still show; a library that fixes one makes its test fail, and the records follow."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import jsonschema
import pytest
from kernel_findings import PROBES, absence, changes, run, verdict
from moe_findings import raises

from flashinfer_trace import find_root
from flashinfer_trace.format.json_source import load_object
from tools.shared.findings import Defect, Finding, read_findings

ROOT = find_root()
#: The results of all probes on today's stack.
RECORD = ROOT / "findings" / "probes.json"
#: All defects show on Hopper.
CAPABILITY = (9, 0)
FINDINGS = list(read_findings(ROOT))
OF_PROBE = {probe: (one, defect) for one in FINDINGS for defect in one.defects for probe in defect.probes}


@pytest.mark.gpu_harness
@pytest.mark.parametrize("name", PROBES)
def test_the_kernel_is_as_its_finding_says(name, cuda_device):
    import torch

    finding, defect = OF_PROBE[name]
    capability = torch.cuda.get_device_capability(cuda_device)
    if capability != CAPABILITY:
        pytest.skip(f"{name}: shows on compute capability {CAPABILITY}; this GPU has {capability}")
    try:
        version = importlib.metadata.version(finding.library)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name}: needs {finding.library}, which is not installed")
    found = run(name)
    if found.startswith("absent"):
        pytest.skip(f"{name}: {finding.library} {version}: {found}")
    assert found == ("right" if defect.state == "gone" else "wrong"), f"{finding.library} {version}: mend the finding"


def test_the_findings_say_what_the_probes_showed():
    if not RECORD.exists():
        pytest.skip(f"{RECORD.name} is not there: `python tests/support/kernel_findings.py` on a GPU prints it")
    recorded = load_object(RECORD)
    assert recorded["probes"].keys() == PROBES.keys()
    assert list(changes(FINDINGS, recorded)) == []


def finding(state: str, upstream: str = "unknown", version: str = "1.0") -> Finding:
    defects = tuple(Defect("input", "result", "right", state, (probe,)) for probe in ("first", "second"))
    return Finding("some-id", "title", ("a.kernel",), "library", version, {"state": upstream}, defects)


@pytest.mark.parametrize(
    ("known", "first", "second", "words"),
    [
        (finding("shown"), "wrong", "wrong", []),
        (finding("shown"), "wrong", "absent: no b", []),
        (finding("gone", "fixed"), "right", "right", []),
        (finding("shown", "replaced"), "absent: no a", "absent: no b", []),
        (finding("shown", version="0.9"), "wrong", "wrong", ["1.0 has the defect"]),
        (finding("shown", "fixed"), "wrong", "wrong", ["1.0 has the defect"]),
        (finding("shown"), "wrong", "right", ["defect 1: state is shown, but 1.0 shows gone"]),
        (finding("gone"), "right", "right", ["all probes are right in 1.0: fixed"]),
        (finding("shown"), "absent: no a", "absent: no b", ["all probes are absent in 1.0: replaced"]),
        (finding("shown"), "wrong", "error: timeout", ["defect 1: a probe says nothing"]),
    ],
)
def test_what_a_record_of_the_probes_changes(known, first, second, words):
    recorded: dict[str, Any] = {"libraries": {"library": "1.0"}, "probes": {"first": first, "second": second}}
    found = list(changes([known], recorded))
    assert len(found) == len(words) and all(word in line for word, line in zip(words, found, strict=True))


def test_every_defect_has_a_probe_and_every_probe_a_defect():
    named = [probe for one in FINDINGS for defect in one.defects for probe in defect.probes]
    assert len(named) > 40 and sorted(named) == sorted(PROBES)


def test_the_findings_fit_their_schema():
    jsonschema.validate(load_object(ROOT / "findings/kernels.json"), load_object(ROOT / "schema/findings.schema.json"))
    ids = [one.id for one in FINDINGS]
    assert len(ids) == len({*ids})


@pytest.mark.parametrize(
    ("returncode", "output", "kills", "said"),
    [
        (0, "RIGHT\n", False, "right"),
        (0, "a warning\nWRONG\n", False, "wrong"),
        (0, "a warning\nABSENT module 'sgl_kernel' has no x\n", False, "absent: module 'sgl_kernel' has no x"),
        (-11, "", True, "wrong"),
        (1, "torch.AcceleratorError: CUDA error: an illegal memory access", True, "wrong"),
    ],
)
def test_what_a_probe_says(returncode, output, kills, said):
    assert verdict("a kernel", kills, returncode, output) == said


@pytest.mark.parametrize(
    ("returncode", "output", "kills"), [(0, "", True), (1, "ImportError", True), (-11, "", False), (1, "WRONG", False)]
)
def test_a_probe_that_fails_otherwise_shows_no_defect(returncode, output, kills):
    with pytest.raises(RuntimeError, match="the probe ended"):
        verdict("a kernel", kills, returncode, output)


@pytest.mark.parametrize(
    ("error", "absent"),
    [
        (ImportError("cannot import name 'x' from 'sglang.a'", name="sglang.a"), True),
        (ModuleNotFoundError("No module named 'sgl_kernel.x'", name="sgl_kernel.x"), True),
        (ModuleNotFoundError("No module named 'IPython'", name="IPython"), False),
        (ImportError("libcuda.so.1: cannot open shared object file"), False),
        (AttributeError("module 'sgl_kernel' has no attribute 'bmm_fp8'"), True),
        (AttributeError("'_OpNamespace' 'sgl_kernel' object has no attribute 'x'"), True),
        (AttributeError("'NoneType' object has no attribute 'x'"), False),
    ],
)
def test_what_another_release_lacks_is_absent_and_what_the_machine_lacks_is_not(error, absent):
    assert absence(error) == (str(error) if absent else None)


def test_an_error_is_a_refusal_but_not_one_of_a_module_that_cannot_be_built():
    def refuse(message):
        raise RuntimeError(message)

    assert raises(lambda: refuse("x must be float32"))
    with pytest.raises(RuntimeError, match="build failed"):
        raises(lambda: refuse("Ninja build failed. Ninja output:"))
