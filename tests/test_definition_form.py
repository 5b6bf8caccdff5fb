"""Fields of the wrong type: found when a file is read, not when something is done with them."""

from __future__ import annotations

import json

import pytest

import flashinfer_trace
from flashinfer_trace import Definition, InputError
from flashinfer_trace.dataset.store import load
from flashinfer_trace.format.definition import MAX_LINE, field_errors
from flashinfer_trace.format.naming import MAX_NAME

ROOT = flashinfer_trace.find_root()
GOOD = json.loads((ROOT / "definitions" / "rmsnorm" / "rmsnorm_h512.json").read_text())


def test_every_definition_of_the_dataset_is_well_formed():
    for definition in flashinfer_trace.definitions():
        assert not list(field_errors(definition.to_dict()))
        assert Definition.from_dict(definition.to_dict()) == definition


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "name is not a name"),
        ({"name": "a\nb"}, "name is not a name"),
        ({"op_type": "x" * (MAX_NAME + 1)}, "op_type is not a name"),
        ({"description": ["x"]}, "description is not a string"),
        ({"reference": {"x": 1}}, "reference is not a string"),
        ({"reference": []}, "reference is not a string"),
        ({"reference": None}, "reference is not a string"),
        ({"tags": ["status:verified", 3]}, "tags is not a list of strings"),
        ({"constraints": ["x" * (MAX_LINE + 1)]}, "constraints is not a list of strings"),
        ({"axes": {**GOOD["axes"], "n": {"type": "const", "value": True}}}, "the value of axis n"),
        ({"axes": {**GOOD["axes"], "n": {"type": "var", "description": [1]}}}, "description of n in axes"),
        ({"inputs": {**GOOD["inputs"], "n": {"shape": [{}], "dtype": "int32"}}}, "shape or dtype of n"),
        ({"outputs": {"n": {"shape": None, "dtype": 3}}}, "shape or dtype of n"),
        ({"outputs": {"n": {"shape": None, "dtype": "int32", "description": 3}}}, "the description of n"),
        ({"outputs": {"n": {"dtype": "int32"}}}, "n has no shape"),
        ({"outputs": {"n": {"shape": "rows", "dtype": "int32"}}}, "shape or dtype of n"),
        ({"outputs": {"x" * (MAX_NAME + 1): {"shape": None, "dtype": "int32"}}}, "outputs has a name"),
        ({"inputs": {"n": "float32"}}, "n in inputs is not an object"),
        ({"inputs": ["n"]}, "inputs is not an object"),
        ({"tags": "status:verified"}, "tags is not a list of strings"),
        ({"axes": None}, "axes is not an object"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(change, message):
    with pytest.raises(InputError, match=message):
        Definition.from_dict({**GOOD, **change})


def test_loading_refuses_it(tmp_path):
    directory = tmp_path / "definitions" / "rmsnorm"
    directory.mkdir(parents=True)
    (directory / "rmsnorm_h512.json").write_text(json.dumps({**GOOD, "tags": [["x"]]}))
    with pytest.raises(InputError, match=r"rmsnorm_h512\.json: not a Definition .*validate"):
        load("rmsnorm_h512", tmp_path)


def test_what_is_no_object_or_lacks_a_field_is_refused():
    for data in ([], "rmsnorm", None):
        with pytest.raises(InputError, match="it is not an object"):
            Definition.from_dict(data)
    for field in ("name", "axes", "reference"):
        with pytest.raises(InputError, match=f"{field} is missing"):
            Definition.from_dict({key: value for key, value in GOOD.items() if key != field})
