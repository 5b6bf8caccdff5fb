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
from made_up_evidence import change_lines, change_run, read_lines, small_dataset

import flashinfer_trace
from flashinfer_trace.cli import main
from flashinfer_trace.dataset import evidence as proof
from flashinfer_trace.dataset.digests import definition_sha256, short
from flashinfer_trace.dataset.evidence_run import DIGESTS, FIGURES
from flashinfer_trace.dataset.sync import SyncError, sync_definitions
from flashinfer_trace.dataset.validation import validate_paths
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.kernels.table import KernelFacts

ROOT = flashinfer_trace.find_root()
OP_TYPE, NAME, OTHER = "gqa_paged", "gqa_paged_decode_h32_kv8_d128_ps1", "gqa_paged_decode_h32_kv4_d128_ps1"
THIRD = "gqa_paged_decode_h12_kv4_d128_ps1"
FAMILY = "gqa_paged_decode_ps1"
DEFINITION = f"definitions/{OP_TYPE}/{NAME}.json"
EVIDENCE = f"evidence/{OP_TYPE}/{NAME}.jsonl"
Json = dict[str, Any]
PATCHES = pytest.MonkeyPatch()


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    small_dataset(tmp_path, ROOT, NAME, OTHER, THIRD)
    sync_definitions(tmp_path, write=True)  # the tags of kernels that have not been run yet
    yield tmp_path
    PATCHES.undo()


def edit(root: Path, relative: str, change: Callable[[Json], object]) -> None:
    path = root / relative
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document, indent=2), encoding="utf-8")


def lines(change: Callable[[list[Json]], object]) -> Callable[[Path], None]:
    """Changes the lines of the evidence."""
    return lambda root: change_lines(root / EVIDENCE, change)


def entry(change: Callable[[Json], object]) -> Callable[[Path], None]:
    """Changes the first line of the evidence."""
    return lines(lambda found: change(found[0]))


def run(change: Callable[[Json], object]) -> Callable[[Path], None]:
    """Changes the run of the first line of the evidence, and its name with it."""
    return lambda root: change_run(root / EVIDENCE, change)


def gpu(**facts: str) -> Callable[[Path], None]:
    """Changes the GPU of the first line of the evidence."""
    return run(lambda header: header["gpu"].update(facts))


def output(**figures: Any) -> Callable[[Path], None]:
    """Changes an output of the first line of the evidence."""

    def change(line: Json) -> None:
        for name, figure in figures.items():
            line["outputs"]["lse"][FIGURES.index(name)] = figure

    return entry(change)


def definition(change: Callable[[Json], object]) -> Callable[[Path], None]:
    return lambda root: edit(root, DEFINITION, change)


def in_the_table(change: Change) -> Callable[[Path], None]:
    """Has the table of kernels say otherwise of the family, until the test ends."""
    return lambda root: change_kernels(PATCHES, FAMILY, change)


def refusing(kernel: KernelFacts) -> KernelFacts:
    return dataclasses.replace(kernel, needs=(lambda definition: "takes nothing",))


def edited_header(root: Path) -> None:
    (path,) = (root / "evidence" / "runs").iterdir()
    edit(root, f"evidence/runs/{path.name}", lambda header: header.update(driver="580.95.05"))


def copy_of_another(root: Path) -> None:
    shutil.copy(root / "evidence" / OP_TYPE / f"{OTHER}.jsonl", root / EVIDENCE)


def copy_with_its_digest(root: Path) -> None:
    """Another Definition's evidence, made to fit but for its second output."""
    copy_of_another(root)
    sha256 = short(definition_sha256(Definition.from_file(root / DEFINITION)))
    lines(lambda found: [(one.update(definition=sha256), one["outputs"].pop("lse")) for one in found])(root)


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
    (root / EVIDENCE).rename(root / "evidence" / "gemm" / f"{NAME}.jsonl")


def duplicate_key(root: Path) -> None:
    text = (root / EVIDENCE).read_text(encoding="utf-8")
    (root / EVIDENCE).write_text(text.replace('"vacuous":60', '"vacuous":1,"vacuous":60'), encoding="utf-8")


def cut_off(root: Path) -> None:
    """Half a line, as a write that ended in the middle would leave it."""
    text = (root / EVIDENCE).read_text(encoding="utf-8")
    (root / EVIDENCE).write_text(text[:-20], encoding="utf-8")


def two_on_a_line(root: Path) -> None:
    text = (root / EVIDENCE).read_text(encoding="utf-8")
    (root / EVIDENCE).write_text(text.replace("]\n", "]", 1), encoding="utf-8")


def old_form(root: Path) -> None:
    """A file as it was before it had a line for each run."""
    (root / EVIDENCE).unlink()
    path = root / "evidence" / OP_TYPE / f"{NAME}.json"
    path.write_text(json.dumps({"definition": NAME, "op_type": OP_TYPE, "entries": []}), encoding="utf-8")


FORGERIES: dict[str, tuple[Callable[[Path], object], str]] = {
    # What ran
    "the digest of another Definition": (entry(lambda e: e.update(definition="0" * 12)), "dtypes have changed"),
    "a changed reference": (newer_reference, "the reference, .* have changed"),
    "another Definition's evidence": (copy_of_another, "dtypes have changed"),
    "another Definition's evidence with this one's digest": (copy_with_its_digest, "the output lse is missing"),
    "an output's dtype": (definition(lambda d: d["outputs"]["lse"].update(dtype="float16")), "dtypes have changed"),
    "an input's dtype": (definition(lambda d: d["inputs"]["kv_indptr"].update(dtype="int64")), "dtypes have changed"),
    "another constraint": (definition(lambda d: d["constraints"].append("batch_size >= 0")), "constraints"),
    "a constraint less": (definition(lambda d: d["constraints"].pop()), "constraints"),
    "another constant": (definition(lambda d: d["axes"]["page_size"].update(value=2)), "axes"),
    "inputs in another order": (definition(swapped_inputs), "inputs"),
    # Kernels
    "an entry removed": (
        lines(lambda found: found.pop()),
        "no run of .*computes it too",
    ),
    "no entries": (lines(lambda found: found.clear()), "the file has 0 items"),
    "an entry twice": (
        lines(lambda found: found.append(found[0])),
        "is there twice",
    ),
    "a renamed variant": (
        entry(lambda e: e.update(kernel=f"{e['kernel'].partition('[')[0]}[fa9]", library="flashinfer-python")),
        "no kernel of this label",
    ),
    "an unknown kernel": (
        entry(lambda e: e.update(kernel="a.b", library="flashinfer-python")),
        "no kernel of this",
    ),
    "a kernel of no library": (entry(lambda e: e.update(kernel="a.b")), "no kernel of this label"),
    "another library": (entry(lambda e: e.update(library="torch")), "library is 'torch', but"),
    "a library that the run does not list": (entry(lambda e: e.update(library="b")), 'does not list "b"'),
    "a GPU that cannot run the kernel": (
        gpu(name="Another GPU", compute_capability="5.0"),
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
    # Judgment
    "one case": (entry(lambda e: e.update(cases=1)), "1 real cases are fewer than 50"),
    "too few cases": (entry(lambda e: e.update(cases=49, vacuous=600)), "49 real cases are fewer than 50"),
    "a negative count": (entry(lambda e: e.update(cases=-57)), "is -57, violates minimum"),
    "a negative count of vacuous cases": (entry(lambda e: e.update(vacuous=-1)), "vacuous is -1, violates minimum"),
    "a count that is true": (entry(lambda e: e.update(cases=True)), "is boolean"),
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
    "a chosen seed": (run(lambda header: header.update(seed=7)), "the seed is 7, not 0"),
    "a failed run": (entry(lambda e: e.update(result="failed")), 'no field "result"'),
    "a kernel beyond its bound": (output(kernel_worst=1.5), "is 1.5, violates maximum"),
    "a reference beyond its bound": (output(reference_worst=1.01), "is 1.01, violates maximum"),
    "a NaN": (output(kernel_worst=float("nan")), "the number NaN is not finite"),
    "an infinite error": (output(kernel_error=float("inf")), "the number Infinity is not finite"),
    "an output missing": (entry(lambda e: e["outputs"].pop("lse")), "the output lse is missing"),
    "an output more": (
        entry(lambda e: e["outputs"].update(more=e["outputs"]["lse"])),
        "the Definition has no output more",
    ),
    # Dates and places
    "an invalid date": (
        run(lambda h: h.update(started_at="2026-02-30T00:00:00Z")),
        "not in the calendar",
    ),
    "a date in the future": (run(lambda h: h.update(started_at="2999-01-01T00:00:00Z")), "in the future"),
    "a date before the project": (
        run(lambda h: h.update(started_at="2026-11-20T23:59:59Z")),
        "before 2026-11-21",
    ),
    "a date in another form": (run(lambda h: h.update(started_at="2 January 2026")), "started_at is"),
    "another directory": (other_op_type, f"there is no {EVIDENCE}"),
    "a symbolic link": (symbolic_link, "is a symbolic link"),
    "no evidence": (lambda root: (root / EVIDENCE).unlink(), f"there is no {EVIDENCE}"),
    # Runs
    "an edited header": (edited_header, "its content is not that of the run"),
    "no header": (lambda root: shutil.rmtree(root / "evidence" / "runs"), "there is no header of the run"),
    "a run of another name": (entry(lambda e: e.update(run="2026-11-22-00000000")), "there is no header of the run"),
    "a run elsewhere": (entry(lambda e: e.update(run="../runs/x")), 'is "../runs/x", must match'),
    "a version that cannot have run it": (run(lambda h: h.update(python="3.9")), 'python is "3.9"'),
    # The form
    "a key twice": (duplicate_key, "the key vacuous appears twice"),
    "no digests": (entry(lambda e: [e.pop(name) for name in DIGESTS[1:]]), "must match"),
    "a digest less": (entry(lambda e: e.pop("drawn")), "must match"),
    "the form of before": (old_form, "is not a .jsonl file"),
    "half a line": (cut_off, "not JSON|has no end"),
    "two on a line": (two_on_a_line, "not JSON"),
    "a digest that is cut short": (entry(lambda e: e.update(family="0" * 11)), "must match"),
    "an unknown field": (entry(lambda e: e.update(trusted=True)), 'no field "trusted"'),
}


#: Forgeries of parts that other Definitions share, besides those of the table and of headers.
CONCERN_OTHERS = ("a changed reference", "a kernel that does not compute it")


@pytest.mark.parametrize("name", FORGERIES)
def test_validate_refuses_it_and_embed_keeps_no_tag(dataset: Path, name: str) -> None:
    assert not validate_paths([dataset], dataset).problems
    forge, reason = FORGERIES[name]
    forge(dataset)
    found = validate_paths([dataset / "definitions", dataset / "evidence"], dataset).problems
    messages = [problem.message for problem in found if NAME in problem.file or "evidence/runs/" in problem.file]
    assert any(re.search(reason, message) for message in messages), messages
    concerns_the_family = "table" in name or "header" in name or name in CONCERN_OTHERS
    assert concerns_the_family or all(OTHER not in problem.file for problem in found)
    try:
        sync_definitions(dataset, write=True, names=[NAME])
    except SyncError:
        assert proof.VERIFIED in json.loads((dataset / DEFINITION).read_text())["tags"]  # nothing was written
    else:
        assert proof.UNVERIFIED in json.loads((dataset / DEFINITION).read_text())["tags"]


def test_there_are_more_than_the_issue_counts() -> None:
    assert len(FORGERIES) >= 24


@pytest.mark.parametrize(
    "change",
    [
        definition(lambda d: d["tags"].append("model:another-1.5")),
        definition(lambda d: d.update(description="Said in other words.")),
        definition(lambda d: d["axes"]["page_size"].update(description="Said in other words.")),
        run(lambda header: header.update(driver="580.95.05")),
        entry(lambda e: e.update(cases=proof.REQUIRED_CASES, vacuous=0)),
        output(kernel_worst=0, kernel_error=0.03432),  # the nearest e4m3 code
    ],
)
def test_what_does_not_matter_is_accepted(dataset: Path, change: Callable[[Path], object]) -> None:
    change(dataset)
    assert not [p for p in validate_paths([dataset], dataset).problems if not p.rule.startswith("tag-")]
    assert proof.proven(dataset, Definition.from_file(dataset / DEFINITION))


def test_another_gpu_adds_an_entry(dataset: Path) -> None:
    lines(lambda found: found.insert(0, dict(found[0])))(dataset)
    gpu(name="Another GPU")(dataset)
    assert not validate_paths([dataset], dataset).problems


def dropped(kernel: KernelFacts) -> KernelFacts:
    """The kernel, if the release before today's were the last with it."""
    return dataclasses.replace(kernel, places=(dataclasses.replace(kernel.places[0], until="0.4.2"),))


def blackwell(kernel: KernelFacts) -> KernelFacts:
    return dataclasses.replace(kernel, min_capability=(10, 0))


def unverified(root: Path) -> None:
    edit(root, DEFINITION, lambda one: one["tags"].__setitem__(one["tags"].index(proof.VERIFIED), proof.UNVERIFIED))


def of_releases(**versions: str) -> Callable[[Path], None]:
    """Makes the first line one of a run of these releases; there is one torch in a run."""

    def change(header: Json) -> None:
        header["libraries"] |= {name.replace("_", "-"): version for name, version in versions.items()}
        header["torch"] = f"{header['libraries']['torch']}+cu130"

    return run(change)


def first(change: Callable[[KernelFacts], KernelFacts]) -> Callable[[Path], None]:
    return in_the_table(lambda kernels: [change(kernels[0]), *kernels[1:]])


def without_the_first(root: Path) -> None:
    lines(lambda found: found.pop(0))(root)


#: Changes of a dataset whose every kernel ran on today's stack, and what a release says of them.
RELEASES: dict[str, tuple[tuple[Callable[[Path], None], ...], str | None]] = {
    "an older FlashInfer": ((of_releases(flashinfer_python="0.7.1"),), "is of flashinfer-python 0.7.1, not 0.7.2"),
    "an older torch": ((of_releases(torch="2.14.0"),), "is of torch 2.14.0, not 2.14.1"),
    "no run of an unverified Definition": ((without_the_first, unverified), "it has not been run"),
    "a dropped kernel with an older run": (
        (first(dropped), of_releases(torch="2.11.0", flashinfer_python="0.6.12")),
        None,
    ),
    "a dropped kernel that other code judged": ((first(dropped), entry(lambda e: e.update(family="0" * 12))), None),
    "a dropped kernel without a run": ((first(dropped), without_the_first), None),
    "a kernel for Blackwell without a run": ((first(blackwell), without_the_first), None),
}


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_has_runs_of_what_todays_stack_has_on_hopper(dataset: Path, name: str) -> None:
    label = read_lines(dataset / EVIDENCE)[0]["kernel"]
    changes, reason = RELEASES[name]
    for change in changes:
        change(dataset)
    found = validate_paths([dataset / DEFINITION], dataset, release=True).problems
    found = [one for one in found if not one.rule.startswith("tag-")]
    if reason is None:
        assert found == []
        return
    (problem,) = found
    assert (problem.rule, problem.file) == ("evidence-stale", DEFINITION)
    assert f"not released with {label}: " in problem.message and reason in problem.message
    assert f"verify {NAME} --kernel '{label}' --device cuda --record" in problem.hint


@pytest.mark.parametrize(("part", "word"), [("harness", "harness"), ("family", "family"), ("plans", "plans")])
def test_older_code_is_stale_and_refused_at_a_release(dataset: Path, part: str, word: str) -> None:
    assert not validate_paths([dataset], dataset, release=True).problems
    (run if part == "harness" else entry)(lambda found: found.update({part: "0" * 12}))(dataset)
    loaded = Definition.from_file(dataset / DEFINITION)
    assert proof.proven(dataset, loaded)
    assert not validate_paths([dataset], dataset).problems
    for arguments, status in ((["validate"], 0), (["validate", "--release"], 1)):
        assert CliRunner().invoke(main, arguments).exit_code == status
    (problem,) = validate_paths([dataset], dataset, release=True).problems
    assert (problem.rule, problem.file) == ("evidence-stale", DEFINITION)
    assert f"the code of the {word} has changed since the run on Test GPU" in problem.message
    found = proof.read(dataset, loaded)
    assert found is not None
    assert [changed for _, changed in found.stale(loaded)] == [[part]]
