"""The meaning of *proven*: the committed evidence and documents say so, and validate and embed agree on it."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
from made_up_evidence import change_lines, change_run, read_lines, small_dataset, write_lines
from whole_dataset import DEFINITIONS, MEMBERS

import flashinfer_trace
from flashinfer_trace.dataset import evidence as proof
from flashinfer_trace.dataset.sync import SyncError, sync_definitions
from flashinfer_trace.dataset.validation import validate_paths
from flashinfer_trace.families import all_families, family_of
from flashinfer_trace.format.definition import Definition
from tools.site import evidence_pages
from tools.site.facts import gather

HOPPER = (9, 0)
ROOT = flashinfer_trace.find_root()
NAME = "rmsnorm_h512"


def test_verified_means_every_kernel_that_hopper_runs():
    awaiting = summary_of(ROOT).splitlines()
    wrong = {name: found for name, one in DEFINITIONS.items() if (found := wrongly_verified(one, set(awaiting)))}
    assert not wrong, "\n".join(f"{name}: {'; '.join(found)}" for name, found in wrong.items())


def wrongly_verified(definition, listed):
    """Problems with the status of a Definition; `listed` are the lines of the document."""
    proofs = {entry.kernel_label for entry in proof.proofs(ROOT, definition)}
    kernels = family_of(definition).kernels_of(definition)
    on_hopper = [kernel for kernel in kernels if kernel.unavailable(HOPPER) is None]
    runnable = {kernel.label for kernel in on_hopper if not kernel.known.last_in}
    found = []
    if proof.VERIFIED in definition.tags:
        if not on_hopper:
            found.append("no kernel of a verified Definition runs on the GPU that evidence is recorded on")
        if not proofs or runnable - proofs:
            found.append(f"no evidence of {runnable - proofs or 'any kernel'}")
    else:
        if runnable and runnable <= proofs:
            found.append("its evidence proves it: run `flashinfer-trace sync`")
        if f"- `{definition.name}`" not in listed:
            found.append("verification.md does not list it among those that await a run")
    entries = (proof.read(ROOT, definition) or proof.Evidence(())).entries
    return found + [f"{entry.kernel_label}: {entry.shortcoming}" for entry in entries if entry.shortcoming]


def test_a_status_that_does_not_fit_the_evidence_is_found():
    verified = next(
        one for one in DEFINITIONS.values() if proof.VERIFIED in one.tags and family_of(one).kernels_of(one)
    )
    other = dataclasses.replace(verified, tags=(proof.UNVERIFIED,))
    proven, unlisted = wrongly_verified(other, set())
    assert "its evidence proves it" in proven and "does not list it" in unlisted
    changed = dataclasses.replace(verified, reference=verified.reference + "\n# newer\n")
    assert "no evidence of" in wrongly_verified(changed, set())[0]
    assert wrongly_verified(verified, set()) == []


@pytest.mark.parametrize("family", all_families(), ids=lambda family: family.name)
def test_a_reason_for_lacking_evidence_stands_exactly_where_it_lacks(family):
    ran = {entry.kernel_label for one in MEMBERS[family.name] for entry in proof.proofs(ROOT, one)}
    ran &= {kernel.label for kernel in family.kernels}
    if family.unverified:
        assert not ran, f"Family.unverified says {family.unverified!r}, but there is evidence of {ran}"
    else:  # a Definition that only awaits a GPU run needs no reason; one that no kernel computes does
        assert family.kernels, "the family has no kernel: Family.unverified must say why"


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A dataset of one Definition, verified, with its evidence."""
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    return small_dataset(tmp_path, ROOT, NAME)


def change_evidence(root, line, header):
    """Writes other fields into every line, and into the run of the first one."""
    path = proof.evidence_path(root, DEFINITIONS[NAME])
    change_lines(path, lambda lines: [one.update(line) for one in lines])
    if header:
        change_run(path, lambda found: found.update(header))


def verdicts(root):
    """The answers of `proven`, validate and embed about the one Definition; embed changes it, or refuses its
    evidence."""
    (path,) = root.glob("definitions/*/*.json")
    try:
        embedded = not sync_definitions(root, write=False)
    except SyncError as error:
        assert "evidence is not valid; nothing was written" in str(error)
        embedded = False
    return proof.proven(root, DEFINITIONS[NAME]), not validate_paths([path], root).problems, embedded


@pytest.mark.parametrize(
    ("line", "header", "proves"),
    [
        ({}, {}, True),
        ({"cases": 57, "vacuous": 60}, {}, True),
        ({"cases": proof.REQUIRED_CASES, "vacuous": 0}, {}, True),
        ({"cases": proof.REQUIRED_CASES - 1, "vacuous": 0}, {}, False),
        ({"cases": proof.REQUIRED_CASES - 1, "vacuous": 500}, {}, False),
        ({}, {"seed": proof.SEED + 1}, False),
        ({"outputs": {"output": [1.0, 1.0, 0.002, 0.001]}}, {}, True),
        ({"outputs": {"output": [1.1, 1.0, 0.002, 0.001]}}, {}, False),
        ({}, {"started_at": "2999-01-01T00:00:00Z"}, False),
    ],
)
def test_validate_and_embed_mean_the_same_by_proven(dataset, line, header, proves):
    change_evidence(dataset, line, header)
    assert verdicts(dataset) == (proves, proves, proves)


def test_every_kernel_of_the_record_is_needed(dataset):
    path = proof.evidence_path(dataset, DEFINITIONS[NAME])
    *lines, removed = read_lines(path)
    write_lines(path, lines)
    assert verdicts(dataset) == (False, False, False)
    assert [entry.kernel_label for entry in proof.proofs(dataset, DEFINITIONS[NAME])] == [
        line["kernel"] for line in lines
    ]
    write_lines(path, [*lines, removed])
    assert verdicts(dataset) == (True, True, True)


def test_another_reference_is_not_proven(dataset):
    (path,) = dataset.glob("definitions/*/*.json")
    definition = Definition.from_file(path)
    assert proof.proven(dataset, definition)
    assert not proof.proven(dataset, dataclasses.replace(definition, reference=definition.reference + "\n# newer\n"))
    assert proof.read(dataset, DEFINITIONS["rmsnorm_h128"]) is None


@pytest.mark.parametrize("figure", ["kernel_worst", "reference_worst"])
@pytest.mark.parametrize("value", [1.0001, -0.1, float("nan"), float("inf")])
def test_figures_beyond_the_bound_prove_nothing(dataset, figure, value):
    (entry, *_) = proof.proofs(dataset, DEFINITIONS[NAME])
    (output,) = entry.outputs.values()
    changed = dataclasses.replace(entry, outputs={"output": {**output, figure: value}})
    assert figure in (changed.shortcoming or "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{\n", "line 1: not JSON"),
        ("{}\n", "not a JSON list"),
        ("[]\n", "line 1: .*ValueError"),
        ('["k", "r", "d f", 60, {}, {"run": 1, "run": 2}]\n', "appears twice"),
        ('["k", "../../x", "d f", 60, {}]\n', "line 1: there is no header of the run ../../x"),
        ('["k", 7, "d f", 60, {}]\n', "there is no header of the run 7"),
        ('["k", "r", "d", 60, {}]\n', "line 1: .*ValueError"),
        ('["k", "r", 8, 60, {}]\n', "line 1: .*AttributeError"),
        ("[]", "the last line has no end"),
        ("[" * 100, "nested deeper"),
    ],
)
def test_what_is_no_evidence_is_an_error_with_the_file(dataset, content, message):
    path = proof.evidence_path(dataset, DEFINITIONS[NAME])
    path.write_text(content)
    with pytest.raises(proof.EvidenceError, match=rf"{NAME}\.jsonl: .*{message}"):
        proof.read(dataset, DEFINITIONS[NAME])


@pytest.mark.parametrize("figure", range(4))
def test_a_figure_that_is_no_number_is_an_error_with_the_file(dataset, figure):
    path = proof.evidence_path(dataset, DEFINITIONS[NAME])
    change_lines(path, lambda lines: lines[0]["outputs"]["output"].__setitem__(figure, "0.5"))
    with pytest.raises(proof.EvidenceError, match=rf"{NAME}\.jsonl: line 1: is not evidence"):
        proof.read(dataset, DEFINITIONS[NAME])


def test_a_symbolic_link_is_no_evidence(dataset):
    path = proof.evidence_path(dataset, DEFINITIONS[NAME])
    path.rename(dataset / "elsewhere.json")
    path.symlink_to(dataset / "elsewhere.json")
    with pytest.raises(proof.EvidenceError, match="is a symbolic link"):
        proof.read(dataset, DEFINITIONS[NAME])


def summary_of(root):
    """The text of docs/verification.md."""
    return evidence_pages.verification(gather(root))


def test_the_verification_document_counts_what_older_code_judged(dataset):
    assert evidence_pages._stale(gather(dataset)) == []
    path = proof.evidence_path(dataset, DEFINITIONS[NAME])
    change_run(path, lambda header: header.update(harness="0" * 16))
    assert evidence_pages._stale(gather(dataset)) == [["`rmsnorm`", "harness", "1"]]
    assert "| `rmsnorm` | harness | 1 |" in summary_of(dataset)
    definition = next(dataset.glob("definitions/*/*.json"))
    definition.write_text(definition.read_text().replace(proof.VERIFIED, proof.UNVERIFIED))
    assert evidence_pages._stale(gather(dataset)) == [], "a run of an unverified Definition is not released"


def test_an_unverified_definition_is_valid_and_listed_as_awaiting_a_run(dataset):
    shutil.rmtree(dataset / "evidence" / "rmsnorm")
    ((_, changes),) = sync_definitions(dataset, write=True)
    assert changes.startswith(f"{proof.UNVERIFIED} and tags (")
    assert not validate_paths([dataset], dataset).problems
    assert not sync_definitions(dataset, write=True)
    text = summary_of(dataset)
    assert f"## Definitions that await a GPU run\n\nThese are `{proof.UNVERIFIED}`" in text
    assert f"\n- `{NAME}`\n" in text
    assert f"| `{NAME}` | `flashinfer.norm.rmsnorm` | awaits a GPU run |" in text
