"""Forged and outdated evidence: `validate` refuses it and says why, and `embed` keeps no tag by it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kernel_table import Change, change_kernels
from made_up_evidence import small_dataset

import flashinfer_trace
from flashinfer_trace.cli import main
from flashinfer_trace.dataset import evidence as ledger
from flashinfer_trace.dataset.sync import SyncError, sync_definitions
from flashinfer_trace.dataset.validation import validate_paths
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.kernels.table import KernelFacts

ROOT = flashinfer_trace.find_root()
OP_TYPE, NAME, OTHER = "gqa_paged", "gqa_paged_decode_h32_kv8_d128_ps1", "gqa_paged_decode_h32_kv4_d128_ps1"
THIRD = "gqa_paged_decode_h12_kv4_d128_ps1"
FAMILY = "gqa_paged_decode_ps1"
DEFINITION = f"definitions/{OP_TYPE}/{NAME}.json"
EVIDENCE = f"evidence/{OP_TYPE}/{NAME}.json"
Json = dict[str, Any]
PATCHES = pytest.MonkeyPatch()


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    yield small_dataset(tmp_path, ROOT, NAME, OTHER, THIRD)
    PATCHES.undo()


def edit(root: Path, relative: str, change: Callable[[Json], object]) -> None:
    path = root / relative
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document, indent=2), encoding="utf-8")


def entry(change: Callable[[Json], object]) -> Callable[[Path], None]:
    """Changes the first entry of the evidence."""
    return lambda root: edit(root, EVIDENCE, lambda document: change(document["entries"][0]))


def gpu(**facts: str) -> Callable[[Path], None]:
    """Changes the GPU of the first entry of the evidence."""
    return entry(lambda data: data["environment"]["gpu"].update(facts))


def output(**figures: Any) -> Callable[[Path], None]:
    """Changes an output of the first entry of the evidence."""
    return entry(lambda data: data["outputs"]["lse"].update(figures))


def definition(change: Callable[[Json], object]) -> Callable[[Path], None]:
    return lambda root: edit(root, DEFINITION, change)


def in_the_table(change: Change) -> Callable[[Path], None]:
    """Has the table of kernels say otherwise of the family, until the test ends."""
    return lambda root: change_kernels(PATCHES, FAMILY, change)


def refusing(kernel: KernelFacts) -> KernelFacts:
    return dataclasses.replace(kernel, needs=(lambda definition: "takes nothing",))


@entry
def another_library(data: Json) -> None:
    data["kernel"]["library"] = "torch"
    data["environment"]["libraries"]["torch"] = data["kernel"]["version"]


def copy_of_another(root: Path) -> None:
    shutil.copy(root / "evidence" / OP_TYPE / f"{OTHER}.json", root / EVIDENCE)


def renamed_copy_of_another(root: Path) -> None:
    copy_of_another(root)
    edit(root, EVIDENCE, lambda document: document.update(definition=NAME))


def copy_with_reference_hash(root: Path) -> None:
    renamed_copy_of_another(root)
    sha256 = Definition.from_file(root / DEFINITION).reference_sha256
    edit(root, EVIDENCE, lambda document: [one["digests"].update(reference=sha256) for one in document["entries"]])


def newer_reference(root: Path) -> None:
    for path in (root / "reference" / OP_TYPE).glob("*.py"):
        path.write_text(path.read_text(encoding="utf-8") + "\n# newer\n", encoding="utf-8")
    edit(root, DEFINITION, lambda document: document.update(reference=document["reference"] + "\n# newer\n"))


def swapped_inputs(document: Json) -> None:
    document["inputs"] = dict(reversed(document["inputs"].items()))


def symbolic_link(root: Path) -> None:
    (root / EVIDENCE).rename(root / "elsewhere.json")
    (root / EVIDENCE).symlink_to(root / "elsewhere.json")


def other_op_type(root: Path) -> None:
    (root / "evidence" / "gemm").mkdir()
    (root / EVIDENCE).rename(root / "evidence" / "gemm" / f"{NAME}.json")


def duplicate_key(root: Path) -> None:
    text = (root / EVIDENCE).read_text(encoding="utf-8")
    (root / EVIDENCE).write_text(text.replace('"cases": 57', '"cases": 1, "cases": 57'), encoding="utf-8")


def old_form(root: Path) -> None:
    """Entries as they were before they carried digests."""

    def change(document: Json) -> None:
        document["reference_sha256"] = document["entries"][0]["digests"]["reference"]
        for one in document["entries"]:
            del one["digests"]

    edit(root, EVIDENCE, change)


FORGERIES: dict[str, tuple[Callable[[Path], object], str]] = {
    # What ran
    "the hash of another reference": (
        entry(lambda e: e["digests"].update(reference="0" * 64)),
        "reference has changed",
    ),
    "a changed reference": (newer_reference, "reference has changed"),
    "the hash of another contract": (entry(lambda e: e["digests"].update(contract="0" * 64)), "dtypes have changed"),
    "another Definition's evidence": (copy_of_another, f'definition is "{OTHER}"'),
    "another Definition's evidence, renamed": (renamed_copy_of_another, "dtypes have changed"),
    "another Definition's evidence with this reference's hash": (copy_with_reference_hash, "dtypes have changed"),
    "an output's dtype": (definition(lambda d: d["outputs"]["lse"].update(dtype="float16")), "dtypes have changed"),
    "an input's dtype": (definition(lambda d: d["inputs"]["kv_indptr"].update(dtype="int64")), "dtypes have changed"),
    "another constraint": (definition(lambda d: d["constraints"].append("batch_size >= 0")), "constraints"),
    "a constraint less": (definition(lambda d: d["constraints"].pop()), "constraints"),
    "another constant": (definition(lambda d: d["axes"]["page_size"].update(value=2)), "axes"),
    "inputs in another order": (definition(swapped_inputs), "inputs"),
    # Kernels
    "an entry removed": (
        lambda root: edit(root, EVIDENCE, lambda d: d["entries"].pop()),
        "no run of .*computes it too",
    ),
    "no entries": (lambda root: edit(root, EVIDENCE, lambda d: d["entries"].clear()), "entries has 0 items"),
    "an entry twice": (
        lambda root: edit(root, EVIDENCE, lambda d: d["entries"].append(d["entries"][0])),
        "is there twice",
    ),
    "a renamed variant": (
        entry(lambda e: e["kernel"].update(variant="fa9", label=f"{e['kernel']['path']}[fa9]")),
        "no kernel of this label",
    ),
    "an unknown kernel": (
        entry(lambda e: e["kernel"].update(path="a.b", variant="", label="a.b")),
        "no kernel of this",
    ),
    "a label of another kernel": (entry(lambda e: e["kernel"].update(path="a.b")), "path and variant give another"),
    "another library": (another_library, "library is 'torch', but"),
    "a GPU that cannot run the kernel": (
        entry(lambda e: e["environment"]["gpu"].update(compute_capability="5.0")),
        "does not run on compute capability 5.0",
    ),
    "a kernel removed from the table": (in_the_table(lambda kernels: kernels[1:]), "no kernel of this label"),
    "a kernel renamed in the table": (
        in_the_table(lambda kernels: [dataclasses.replace(kernels[0], path="a.b"), *kernels[1:]]),
        "no run of a.b",
    ),
    "a kernel that does not compute it": (
        in_the_table(lambda kernels: [refusing(kernels[0]), *kernels[1:]]),
        "no kernel of this",
    ),
    "a table without kernels": (in_the_table(lambda kernels: []), "no kernel that could prove it"),
    # Judgement
    "one case": (entry(lambda e: e.update(cases=1)), "1 real cases are fewer than 50"),
    "too few cases": (entry(lambda e: e.update(cases=49, vacuous=600)), "49 real cases are fewer than 50"),
    "a negative count": (entry(lambda e: e.update(cases=-57)), "cases is -57, violates minimum"),
    "a negative count of vacuous cases": (entry(lambda e: e.update(vacuous=-1)), "vacuous is -1, violates minimum"),
    "a count that is true": (entry(lambda e: e.update(cases=True)), "cases is boolean"),
    "too many cases": (entry(lambda e: e.update(cases=10**9)), "cases is 1000000000, but no run has more"),
    "too many vacuous cases": (entry(lambda e: e.update(vacuous=10_001)), "vacuous is 10001, but no run has more"),
    "an exact kernel that is far off": (output(kernel_worst=0, kernel_error=5.0), "but kernel_worst is 0"),
    "an exact reference that is far off": (output(reference_worst=0, reference_error=1.01), "but reference_worst is 0"),
    "a reference farther from the oracle than the kernel": (
        output(reference_error=0.9, kernel_error=1e-9),
        "reference_error of lse is 0.9, but kernel_error is 1e-09",
    ),
    "errors far beyond the values": (output(reference_error=1e30, kernel_error=1e30), r"kernel_error of lse is 1e\+30"),
    "no error, yet near its bound": (output(kernel_worst=0.98, kernel_error=0), "does not go with kernel_worst 0.98"),
    "no draw that proves anything": (entry(lambda e: e.update(vacuous=9999)), "ends before it has more than 770"),
    "a GPU that looks like another": (gpu(name="NVIDIA \N{CYRILLIC CAPITAL LETTER EN}200"), "name is .* must match"),
    "a GPU with a blank behind it": (gpu(name="NVIDIA H200 "), "name is .* must match"),
    "a GPU with another blank": (gpu(name="NVIDIA\N{NO-BREAK SPACE}H200"), "name is .* must match"),
    "a capability in another form": (gpu(compute_capability="09.0"), "compute_capability is .* must match"),
    "a chosen seed": (entry(lambda e: e.update(seed=7)), "the seed is 7, not 0"),
    "a failed run": (entry(lambda e: e.update(result="failed")), "the run failed"),
    "another result": (entry(lambda e: e.update(result="PASSED")), 'result is "PASSED"'),
    "a kernel beyond its bound": (output(kernel_worst=1.5), "kernel_worst is 1.5, violates maximum"),
    "a reference beyond its bound": (output(reference_worst=1.01), "reference_worst is 1.01, violates maximum"),
    "a NaN": (output(kernel_worst=float("nan")), "the number NaN is not finite"),
    "an infinite error": (output(kernel_error=float("inf")), "the number Infinity is not finite"),
    "an output missing": (entry(lambda e: e["outputs"].pop("lse")), "the output lse is missing"),
    "an output more": (
        entry(lambda e: e["outputs"].update(more=e["outputs"]["lse"])),
        "the Definition has no output more",
    ),
    # Dates and places
    "an invalid date": (entry(lambda e: e.update(recorded_at="2026-02-30T00:00:00Z")), "no time of the calendar"),
    "a date in the future": (entry(lambda e: e.update(recorded_at="2999-01-01T00:00:00Z")), "in the future"),
    "a date before the project": (entry(lambda e: e.update(recorded_at="2026-11-20T23:59:59Z")), "before 2026-11-21"),
    "a date in another form": (entry(lambda e: e.update(recorded_at="2 January 2026")), "recorded_at is"),
    "another op_type": (lambda root: edit(root, EVIDENCE, lambda d: d.update(op_type="gemm")), 'op_type is "gemm"'),
    "another directory": (other_op_type, f"there is no {EVIDENCE}"),
    "a symbolic link": (symbolic_link, "is a symbolic link"),
    "no evidence": (lambda root: (root / EVIDENCE).unlink(), f"there is no {EVIDENCE}"),
    # The form
    "a key twice": (duplicate_key, "the key cases appears twice"),
    "no digests": (old_form, "lacks the field 'digests'"),
    "a digest that is cut short": (entry(lambda e: e["digests"].update(harness="0" * 63)), "harness is"),
    "an unknown field": (entry(lambda e: e.update(trusted=True)), 'no field "trusted"'),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_validate_refuses_it_and_embed_keeps_no_tag(dataset: Path, name: str) -> None:
    assert not validate_paths([dataset], dataset).problems
    forge, reason = FORGERIES[name]
    forge(dataset)
    found = validate_paths([dataset / "definitions", dataset / "evidence"], dataset).problems
    messages = [problem.message for problem in found if NAME in problem.file]
    assert any(re.search(reason, message) for message in messages), messages
    concerns_the_family = "table" in name or name in ("a changed reference", "a kernel that does not compute it")
    assert concerns_the_family or all(OTHER not in problem.file for problem in found)
    try:
        sync_definitions(dataset, write=True, names=[NAME])
    except SyncError:
        assert ledger.VERIFIED in json.loads((dataset / DEFINITION).read_text())["tags"]  # nothing was written
    else:
        assert ledger.UNVERIFIED in json.loads((dataset / DEFINITION).read_text())["tags"]


def test_there_are_more_than_the_issue_counts() -> None:
    assert len(FORGERIES) >= 24


@pytest.mark.parametrize(
    "change",
    [
        definition(lambda d: d["tags"].append("model:another-1.5")),
        definition(lambda d: d.update(description="Said in other words.")),
        definition(lambda d: d["axes"]["page_size"].update(description="Said in other words.")),
        entry(lambda e: e["environment"].update(driver="580.95.05")),
        entry(lambda e: e.update(cases=ledger.REQUIRED_CASES, vacuous=0)),
        output(kernel_worst=0, kernel_error=0.03432),  # the nearest e4m3 code
    ],
)
def test_what_does_not_matter_is_accepted(dataset: Path, change: Callable[[Path], object]) -> None:
    change(dataset)
    assert not [p for p in validate_paths([dataset], dataset).problems if not p.rule.startswith("tag-")]
    assert ledger.proven(dataset, Definition.from_file(dataset / DEFINITION))


def test_another_gpu_adds_an_entry(dataset: Path) -> None:
    def change(document: Json) -> None:
        more = json.loads(json.dumps(document["entries"][0]))
        more["environment"]["gpu"]["name"] = "Another GPU"
        document["entries"].append(more)

    edit(dataset, EVIDENCE, change)
    assert not validate_paths([dataset], dataset).problems


@pytest.mark.parametrize(("part", "word"), [("harness", "harness"), ("family", "family")])
def test_older_code_is_stale_and_refused_at_a_release(dataset: Path, part: str, word: str) -> None:
    assert not validate_paths([dataset], dataset, release=True).problems
    edit(dataset, EVIDENCE, lambda document: document["entries"][0]["digests"].update({part: "0" * 64}))
    loaded = Definition.from_file(dataset / DEFINITION)
    assert ledger.proven(dataset, loaded)
    assert not validate_paths([dataset], dataset).problems
    for arguments, status in ((["validate"], 0), (["validate", "--release"], 1)):
        assert CliRunner().invoke(main, arguments).exit_code == status
    (problem,) = validate_paths([dataset], dataset, release=True).problems
    assert (problem.rule, problem.file) == ("evidence-stale", DEFINITION)
    assert f"the code of the {word} has changed since the run of" in problem.message
    found = ledger.read(dataset, loaded)
    assert found is not None
    assert [changed for _, changed in found.stale(ledger.code_today(loaded))] == [[part]]
