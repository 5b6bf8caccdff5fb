"""python -m tools.family_tags adds the families that models/curated/family_tags.json lacks, and changes no other."""

from __future__ import annotations

import json
import shutil

import pytest

import flashinfer_trace
from flashinfer_trace.model_claims import family_tags_path
from tools import family_tags

ROOT = flashinfer_trace.find_root()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A dataset of two families with all their Definitions."""
    for place in ("schema", "models", "definitions/merge_state", "definitions/layernorm"):
        shutil.copytree(ROOT / place, tmp_path / place)
    monkeypatch.setattr(family_tags, "find_root", lambda: tmp_path)
    return tmp_path


def test_what_is_there_stays_byte_for_byte(root, capsys):
    before = family_tags_path(root).read_bytes()
    assert family_tags.main([]) == 0
    assert family_tags_path(root).read_bytes() == before
    assert "no family added" in capsys.readouterr().out


def test_a_family_is_added_from_the_tags_of_its_definitions(root, capsys):
    path = family_tags_path(root)
    document = json.loads(path.read_text())
    gone = {name: document["families"].pop(name) for name in ("layernorm", "merge_state")}
    path.write_text(json.dumps(document))
    assert family_tags.main([]) == 0
    assert "layernorm, merge_state added" in capsys.readouterr().out
    families = json.loads(path.read_text())["families"]
    assert families["layernorm"] == gone["layernorm"]
    shared, prefill, decode = families["merge_state"]
    assert shared == {"kernels": ["flashinfer.cascade.merge_state"]}
    assert prefill["tags"] == ["stage:prefill"] and len(prefill["only"]) == 3
    assert decode == {"only": ["merge_state_h16_d512"], "tags": ["stage:decode"]}


@pytest.mark.parametrize("text", ["{", "{}", '{"families": []}'])
def test_an_unusable_file_is_named(root, capsys, text):
    family_tags_path(root).write_text(text)
    assert family_tags.main([]) == 2
    assert str(family_tags_path(root)) in capsys.readouterr().err


@pytest.mark.parametrize("tags", [[], ["stage:TODO", "called_as:flashinfer.norm.layernorm"], ["called_as:TODO"]])
def test_a_family_without_stages_and_kernels_is_refused(root, capsys, tags):
    """Otherwise `embed` would remove the tags that its Definitions get later."""
    path = family_tags_path(root)
    document = json.loads(path.read_text())
    del document["families"]["layernorm"]
    path.write_text(json.dumps(document))
    before = path.read_bytes()
    for one in (root / "definitions" / "layernorm").glob("*.json"):
        definition = json.loads(one.read_text())
        one.write_text(json.dumps(definition | {"tags": ["status:unverified", *tags]}))
    assert family_tags.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("layernorm: ") and "stage:prefill" in line and "called_as:PATH" in line
    assert path.read_bytes() == before
