"""python -m tools.scaffold: three files that are refused until their TODOs are filled."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest

import flashinfer_trace
from flashinfer_trace.embedding import EmbeddingError, embed_all
from flashinfer_trace.validation import validate_paths
from tools.scaffold.__main__ import main


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout without Definitions."""
    source = flashinfer_trace.find_root()
    shutil.copytree(source / "schema", tmp_path / "schema", ignore=shutil.ignore_patterns("tests"))
    for directory in ("definitions", "evidence", "reference", "flashinfer_trace/families/packaged"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "flashinfer_trace" / "families" / "plain.py").write_text("FAMILIES = ()\n")
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    return tmp_path


def written(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*my_kernel*"))


def rules(root):
    return {problem.rule for problem in validate_paths([root], root).problems}


def declare(root):
    path = root / "schema" / "naming.json"
    naming = json.loads(path.read_text())
    naming["families"]["my_kernel"] = {"op_type": "my_op", "pattern": "my_kernel_n{n}"}
    path.write_text(json.dumps(naming))


def fill(root):
    reference = root / "reference" / "my_op" / "my_kernel.py"
    reference.write_text(reference.read_text().replace("return TODO", "return x + x").replace("TODO", "Doubled"))
    definition = root / "definitions" / "my_op" / "my_kernel_n8.json"
    definition.write_text(definition.read_text().replace("TODO: ", "Surely "))
    record = root / "flashinfer_trace" / "families" / "my_op.py"
    record.write_text(record.read_text().replace("TODO", "Done"))


def test_three_files_and_the_line_to_add(root, capsys):
    assert main(["my_kernel", "--op-type", "my_op"]) == 0
    assert written(root) == ["definitions/my_op/my_kernel_n8.json", "reference/my_op/my_kernel.py"]
    assert (root / "flashinfer_trace" / "families" / "my_op.py").is_file()
    line = '"my_kernel": {"op_type": "my_op", "pattern": "my_kernel_n{n}"}'
    assert line in capsys.readouterr().out
    assert json.loads(f"{{{line}}}")


def test_they_are_refused_until_everything_is_filled(root):
    main(["my_kernel", "--op-type", "my_op"])
    assert rules(root) == {"name-family", "description-trivial", "reference-undefined", "record-unfinished"}
    declare(root)
    assert rules(root) == {"description-trivial", "reference-undefined", "record-unfinished"}
    fill(root)
    embed_all(root, write=True)
    assert rules(root) == set()


@pytest.mark.parametrize("left", ["description", "reference", "record"])
def test_one_todo_that_is_left_is_enough(root, left):
    main(["my_kernel", "--op-type", "my_op"])
    declare(root)
    kept = {
        "description": root / "definitions" / "my_op" / "my_kernel_n8.json",
        "reference": root / "reference" / "my_op" / "my_kernel.py",
        "record": root / "flashinfer_trace" / "families" / "my_op.py",
    }[left]
    text = kept.read_text()
    fill(root)
    kept.write_text(text)
    expected = {
        "description": "description-trivial",
        "reference": "reference-undefined",
        "record": "record-unfinished",
    }
    if left == "record":  # not a part of the Definition
        embed_all(root, write=True)
        assert rules(root) == {expected[left]}
    else:
        with pytest.raises(EmbeddingError) as refused:
            embed_all(root, write=True)
        assert {line.split(": ")[1] for line in str(refused.value).splitlines()[1:]} == {expected[left]}


def test_the_lines_of_a_record_that_are_left_are_named(root):
    main(["my_kernel", "--op-type", "my_op"])
    record = root / "flashinfer_trace" / "families" / "my_op.py"
    problems = [one for one in validate_paths([root], root).problems if one.rule == "record-unfinished"]
    assert {one.file for one in problems} == {"flashinfer_trace/families/my_op.py"}
    lines = record.read_text().splitlines()
    assert [one.line for one in problems] == [number for number, line in enumerate(lines, 1) if "TODO" in line]


def test_the_record_is_a_family_whose_parts_say_todo(root):
    pytest.importorskip("torch")
    main(["my_kernel", "--op-type", "my_op"])
    path = root / "flashinfer_trace" / "families" / "my_op.py"
    spec = importlib.util.spec_from_file_location("scaffolded_record", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (family,) = module.FAMILIES
    assert (family.name, family.op_type, set(family.compare)) == ("my_kernel", "my_op", {"output"})
    with pytest.raises(NotImplementedError, match="TODO"):
        family.plans(None)
    with pytest.raises(NotImplementedError, match="TODO"):
        family.oracle(None, {})


@pytest.mark.parametrize(
    ("op_type", "record"),
    [("packaged", "packaged/my_kernel.py"), ("plain", "plain_my_kernel.py")],
)
def test_the_record_goes_beside_those_of_its_op_type(root, op_type, record, capsys):
    assert main(["my_kernel", "--op-type", op_type]) == 0
    assert (root / "flashinfer_trace" / "families" / record).is_file()
    assert "add its FAMILIES to those there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["My-Kernel", "--op-type", "my_op"], "'My-Kernel' is no name of family"),
        (["my_kernel", "--op-type", "../up"], "'../up' is no name of op_type"),
        (["lambda", "--op-type", "my_op"], "'lambda' is no name"),
        (["rmsnorm", "--op-type", "rmsnorm"], "has the family rmsnorm already"),
    ],
)
def test_unusable_names(root, arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not any((root / "definitions").iterdir())


def test_nothing_is_overwritten(root, capsys):
    main(["my_kernel", "--op-type", "my_op"])
    path = root / "reference" / "my_op" / "my_kernel.py"
    path.write_text("mine")
    assert main(["my_kernel", "--op-type", "my_op"]) == 2
    assert "my_kernel.py exists" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_a_wheel_is_no_checkout(root, capsys):
    shutil.rmtree(root / "flashinfer_trace")
    assert main(["my_kernel", "--op-type", "my_op"]) == 2
    assert "run this in a checkout" in capsys.readouterr().err
