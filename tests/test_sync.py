"""Embedding: the choice of Definitions, what it refuses, and what it must not remove."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from made_up_evidence import small_dataset

import flashinfer_trace
from flashinfer_trace.dataset import evidence as proof
from flashinfer_trace.dataset import sync
from flashinfer_trace.dataset.sync import SyncError, outdated_reference, sync_definitions

ROOT = flashinfer_trace.find_root()
NAMES = ("rmsnorm_h128", "rmsnorm_h512")


@pytest.fixture
def dataset(tmp_path):
    """A dataset of two verified Definitions with their evidence."""
    return small_dataset(tmp_path, ROOT, *NAMES)


def path_of(root, name):
    return root / "definitions" / "rmsnorm" / f"{name}.json"


def edit(root, name, **fields):
    path = path_of(root, name)
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2))


def tags_of(root, name):
    return json.loads(path_of(root, name).read_text())["tags"]


def outdate(root, *names):
    for name in names:
        edit(root, name, reference="def run():\n    return 0\n")


@pytest.mark.parametrize(
    ("names", "changed"),
    [((), NAMES), (("rmsnorm_h512",), NAMES[1:]), (("*h1*",), NAMES[:1]), (("*", "rmsnorm_h512"), NAMES)],
)
def test_names_and_globs_choose_the_definitions(dataset, names, changed):
    before = {name: path_of(dataset, name).read_text() for name in NAMES}
    outdate(dataset, *NAMES)
    found = sync_definitions(dataset, write=True, names=names)
    assert [(path.stem, changes) for path, changes in found] == [(name, "reference") for name in changed]
    for name in changed:
        assert path_of(dataset, name).read_text() == before[name]
    assert len(sync_definitions(dataset, write=False)) == len(NAMES) - len(changed)


@pytest.mark.parametrize(
    ("name", "message"), [("rmsnorm_h513", r"did you mean rmsnorm_h5?12\d?\?"), ("gemm*", "`flashinfer-trace list`")]
)
def test_a_name_that_matches_nothing_is_an_error(dataset, name, message):
    with pytest.raises(SyncError, match=message):
        sync_definitions(dataset, write=True, names=[name])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tags": "status:verified"}, "not a Definition .tags is not a list of strings"),
        ({"tags": ["status:verified", 7]}, "not a Definition .tags is not a list of strings"),
        ({"description": "TODO"}, "description-trivial"),
        ({"inputs": {}}, "schema-length"),
        ({"axes": []}, "not a Definition"),
        ({"op_type": "../rmsnorm"}, "no family"),
        ({"constraints": ["batch_size = 1"]}, "constraint-syntax"),
        ({"surplus": 1}, "schema-unknown-field"),
    ],
)
def test_what_validate_refuses_is_refused_and_nothing_is_written(dataset, fields, message):
    outdate(dataset, *NAMES)
    edit(dataset, NAMES[1], **fields)
    before = [path_of(dataset, name).read_text() for name in NAMES]
    with pytest.raises(SyncError, match=message):
        sync_definitions(dataset, write=True)
    assert [path_of(dataset, name).read_text() for name in NAMES] == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"constraints": []', '"constraints": [], "tags": []', r"line \d+: the key tags appears twice"),
        ('"op_type"', "'op_type'", "line 3: not JSON"),
        ('"value": 512', '"value": NaN', r"line \d+: the number NaN"),
    ],
)
def test_a_damaged_file_is_refused(dataset, old, new, message):
    path = path_of(dataset, "rmsnorm_h512")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(SyncError, match=rf"rmsnorm_h512\.json: {message}"):
        sync_definitions(dataset, write=True)


def test_a_source_that_validate_refuses_is_not_embedded(dataset):
    source = dataset / "reference" / "rmsnorm" / "rmsnorm.py"
    source.write_text(source.read_text() + "\n\ndef leak():\n    return open('x')\n")
    before = path_of(dataset, "rmsnorm_h512").read_text()
    with pytest.raises(SyncError, match="reference-builtin"):
        sync_definitions(dataset, write=True, names=["rmsnorm_h512"])
    assert path_of(dataset, "rmsnorm_h512").read_text() == before


@pytest.mark.parametrize(("there", "message"), [(False, "is missing"), (True, "lacks files")])
def test_no_definition_loses_its_tag_because_evidence_is_missing(dataset, there, message):
    (dataset / "evidence").rename(dataset / "elsewhere")
    if there:
        (dataset / "evidence").mkdir()
    with pytest.raises(SyncError, match=rf"evidence {message}, and 2 Definitions would lose status:verified"):
        sync_definitions(dataset, write=True)
    assert all(proof.VERIFIED in tags_of(dataset, name) for name in NAMES)


def test_evidence_that_cannot_be_read_takes_no_tag_away(dataset):
    (dataset / "evidence" / "rmsnorm" / "rmsnorm_h512.jsonl").write_text("{")
    with pytest.raises(SyncError, match=r"rmsnorm_h512\.jsonl: line 1: not JSON"):
        sync_definitions(dataset, write=True)
    assert proof.VERIFIED in tags_of(dataset, "rmsnorm_h512")


@pytest.mark.parametrize("forged", [NAMES, NAMES[1:]])
def test_evidence_that_validate_refuses_takes_no_tag_away(dataset, forged):
    """Emptied, it has runs of no kernel; each file is told, with the fix."""
    for name in forged:
        (dataset / "evidence" / "rmsnorm" / f"{name}.jsonl").write_text("")
    outdate(dataset, NAMES[0])
    before = [path_of(dataset, name).read_text() for name in NAMES]
    with pytest.raises(SyncError, match=r"`git restore evidence`.*, or delete it on purpose") as error:
        sync_definitions(dataset, write=True)
    for name in forged:
        assert f"evidence/rmsnorm/{name}.jsonl:" in str(error.value)
    assert "the file has 0 items" in str(error.value)
    assert [path_of(dataset, name).read_text() for name in NAMES] == before


def test_what_awaits_a_run_stays_unverified(dataset):
    (dataset / "evidence" / "rmsnorm" / "rmsnorm_h512.jsonl").unlink()
    ((path, what),) = sync_definitions(dataset, write=True)
    assert path.stem == "rmsnorm_h512" and what.startswith(f"{proof.UNVERIFIED} and tags (-fi_api:")
    tags = tags_of(dataset, "rmsnorm_h512")
    assert proof.UNVERIFIED in tags and not any("_api:" in tag for tag in tags)
    assert sync_definitions(dataset, write=True) == []


@pytest.mark.parametrize("models", [False, True])
def test_a_recorded_run_gives_the_status_and_nothing_else(dataset, models):
    """Also where all other tags follow from models/ and are right already."""
    if models:
        shutil.copytree(ROOT / "models", dataset / "models")
    verified = tags_of(dataset, "rmsnorm_h512")
    edit(
        dataset,
        "rmsnorm_h512",
        tags=[proof.UNVERIFIED if tag == proof.VERIFIED else tag for tag in verified],
    )
    assert [(path.stem, what) for path, what in sync_definitions(dataset, write=True)] == [
        ("rmsnorm_h512", proof.VERIFIED)
    ]
    assert tags_of(dataset, "rmsnorm_h512") == verified


def test_an_older_embedded_reference_is_told(dataset):
    definition = flashinfer_trace.load("rmsnorm_h512", dataset)
    assert outdated_reference(dataset, definition) is None
    older = dataclasses.replace(definition, reference=definition.reference + "# older\n")
    assert outdated_reference(dataset, older) == (
        "rmsnorm_h512: the embedded reference is older than reference/rmsnorm/rmsnorm.py; "
        "run `flashinfer-trace sync rmsnorm_h512`"
    )
    source = dataset / "reference" / "rmsnorm" / "rmsnorm.py"
    source.write_text("def run(:\n")
    assert "the reference is not Python" in (outdated_reference(dataset, definition) or "")
    source.unlink()
    assert outdated_reference(dataset, definition) is None
    assert outdated_reference(dataset, dataclasses.replace(definition, name="a_name_of_no_family")) is None


def test_a_message_names_each_tag_once_and_not_all_of_many():
    old = ["status:verified", *["tp:9"] * 3, *(f"tp:{number}" for number in range(10, 40))]
    assert sync._difference(old[:4], ["status:verified", "tp:1"]) == "tags (-tp:9 +tp:1)"
    assert sync._difference(old, ["status:verified"]).endswith("-tp:27 -tp:28 and 11 more)")


@pytest.mark.parametrize(
    "lay_out", [lambda text: json.dumps(json.loads(text)), lambda text: text.replace("\n", "\r\n")]
)
def test_another_layout_is_brought_to_that_of_all_definitions(dataset, lay_out):
    path = path_of(dataset, NAMES[0])
    before = path.read_bytes()
    path.write_bytes(lay_out(before.decode()).encode())
    assert [(one.stem, change) for one, change in sync_definitions(dataset, write=False)] == [(NAMES[0], "layout")]
    assert path.read_bytes() != before
    sync_definitions(dataset, write=True)
    assert path.read_bytes() == before and sync_definitions(dataset, write=False) == []
