"""python -m tools.scaffold: three files that are rejected until their TODOs are filled in."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import flashinfer_trace
from flashinfer_trace.dataset.sync import SyncError, sync_definitions
from flashinfer_trace.dataset.validation import validate_paths
from tools.scaffold.__main__ import main
from tools.scaffold.contract import pattern_of

CHECKOUT = flashinfer_trace.find_root()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout without Definitions."""
    shutil.copytree(CHECKOUT / "schema", tmp_path / "schema", ignore=shutil.ignore_patterns("tests"))
    for directory in ("definitions", "evidence", "reference", "flashinfer_trace/families/packaged"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "flashinfer_trace" / "families" / "plain.py").write_text("FAMILIES = ()\n")
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    return tmp_path


def written(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*my_kernel*"))


def rules(root):
    return {problem.rule for problem in validate_paths([root], root).problems}


def record_of(root):
    spec = importlib.util.spec_from_file_location(
        "scaffolded_record", root / "flashinfer_trace" / "families" / "my_op.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    assert f"schema/naming.json, families: {line}" in capsys.readouterr().out
    assert json.loads(f"{{{line}}}")


def test_the_steps_have_the_commands_of_contributing_in_its_order(root, capsys):
    text = (CHECKOUT / "CONTRIBUTING.md").read_text().partition("\n## Add a family\n")[2].partition("\n## ")[0]
    documented = re.findall(r"`((?:flashinfer-trace|pytest|python -m tools\.)[^`]*)`", text)
    assert len(documented) >= 7 and documented[-1] == "flashinfer-trace sync"
    assert main(["my_kernel", "--op-type", "my_op"]) == 0
    steps = capsys.readouterr().out
    for command in documented:
        found = steps.find(command.replace("<family>", "my_kernel").replace("NAME", "my_kernel_n8"))
        assert found >= 0, f"the scaffold prints no later step with {command}"
        steps = steps[found:]
    assert steps.rstrip().endswith("flashinfer-trace sync")


def test_the_tags_and_the_kernels_are_asked_for_before_the_first_embed(root, capsys):
    assert main(["my_kernel", "--op-type", "my_op"]) == 0
    definition = json.loads((root / "definitions" / "my_op" / "my_kernel_n8.json").read_text())
    assert definition["tags"] == ["status:unverified"]
    steps = capsys.readouterr().out.partition("flashinfer-trace embed")[0]
    assert '"tags": ["stage:prefill", "stage:decode"]' in steps and "flashinfer_trace/kernels/" in steps


def test_they_are_refused_until_everything_is_filled(root):
    main(["my_kernel", "--op-type", "my_op"])
    asked = {"description-trivial", "reference-undefined", "record-unfinished"}
    assert rules(root) == asked | {"name-family"}
    declare(root)
    assert rules(root) == asked
    fill(root)
    sync_definitions(root, write=True)
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
        "description": {"description-trivial"},
        "reference": {"reference-undefined"},
        "record": {"record-unfinished"},
    }
    if left == "record":  # not a part of the Definition
        sync_definitions(root, write=True)
        assert rules(root) == expected[left]
    else:
        with pytest.raises(SyncError) as refused:
            sync_definitions(root, write=True)
        assert {line.split(": ")[1] for line in str(refused.value).splitlines()[1:]} == expected[left]


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
    (family,) = record_of(root).FAMILIES
    assert (family.name, family.op_type, set(family.compare)) == ("my_kernel", "my_op", {"output"})
    assert set(family.plan.counts) == {"m"}
    with pytest.raises(NotImplementedError, match="TODO"):
        family.oracle(None, {})


@pytest.mark.parametrize(
    ("op_type", "record", "shared"),
    [("packaged", "packaged/my_kernel.py", "packaged/"), ("plain", "plain_my_kernel.py", "plain.py")],
)
def test_the_record_goes_beside_those_of_its_op_type(root, op_type, record, shared, capsys):
    assert main(["my_kernel", "--op-type", op_type]) == 0
    assert (root / "flashinfer_trace" / "families" / record).is_file()
    out = capsys.readouterr().out
    assert f"families/{record} is found automatically: it may import from flashinfer_trace/families/{shared}" in out


#: Imports each record first, or the families first, in a fork: torch is imported once.
IMPORTED = """
import importlib, os, sys
import torch
for record in sys.argv[1:]:
    for first in ("flashinfer_trace.families", record):
        if not (child := os.fork()):
            importlib.import_module(first)
            of = importlib.import_module("flashinfer_trace.families").families_of_op_type
            found = of(record.split(".")[2].partition("_my_kernel")[0])
            os._exit(len(found) < 2 or "my_kernel" not in found)
        assert os.waitpid(child, 0)[1] == 0, (record, first)
"""


def test_a_record_that_builds_on_its_op_type_is_found(tmp_path, monkeypatch):
    """For an existing op_type: nothing must import the record, so it can import from the op_type's module."""
    pytest.importorskip("torch")
    for part in ("flashinfer_trace", "schema"):
        shutil.copytree(CHECKOUT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    (tmp_path / "definitions").mkdir()
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    records = []
    for op_type in ("rmsnorm", "moe"):
        assert main(["my_kernel", "--op-type", op_type]) == 0
        families = tmp_path / "flashinfer_trace" / "families"
        record = families / (f"{op_type}/my_kernel.py" if (families / op_type).is_dir() else f"{op_type}_my_kernel.py")
        existing = f"from flashinfer_trace.families.{op_type} import FAMILIES as EXISTING\n"
        record.write_text(record.read_text().replace("import torch\n", f"import torch\n{existing}"))
        records.append(".".join(record.relative_to(tmp_path).with_suffix("").parts))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", IMPORTED, *records]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0 and len(records) == 2, found.stderr


CONTRACT = [
    *("--axis", "batch_size", "--axis", "hidden_size=4096", "--axis", "wide_rows=3"),
    *("--input", "x:bfloat16[batch_size,hidden_size]", "--input", "eps:float32", "--input", "count:int32"),
    *("--output", "y:bfloat16[batch_size, hidden_size]", "--output", "ids:int32[batch_size]"),
]


def test_axes_inputs_and_outputs_of_the_command_line(root, capsys):
    assert main(["my_kernel", "--op-type", "my_op", *CONTRACT]) == 0
    definition = json.loads((root / "definitions" / "my_op" / "my_kernel_h4096_wr3.json").read_text())
    assert {name: axis.get("value") for name, axis in definition["axes"].items()} == {
        "batch_size": None,
        "hidden_size": 4096,
        "wide_rows": 3,
    }
    shapes = {name: (one["dtype"], one["shape"]) for name, one in definition["inputs"].items()}
    assert shapes == {
        "x": ("bfloat16", ["batch_size", "hidden_size"]),
        "eps": ("float32", None),
        "count": ("int32", None),
    }
    assert list(definition["outputs"]) == ["y", "ids"]
    reference = (root / "reference" / "my_op" / "my_kernel.py").read_text()
    assert definition["reference"] == reference
    assert "HIDDEN_SIZE = 4096\nWIDE_ROWS = 3\n" in reference and "assert x.shape[1] == HIDDEN_SIZE" in reference
    assert "    eps: float,\n    count: int,\n) -> tuple[torch.Tensor, torch.Tensor]:" in reference
    out = capsys.readouterr().out
    assert '"pattern": "my_kernel_h{hidden_size}_wr{wide_rows}"' in out
    assert 'schema/naming.json, abbreviations: "wr": ["wide_rows"]' in out
    assert "name it in models/needs/<model>.json" in out
    assert "flashinfer-trace sync my_kernel_h4096_wr3" in out


def test_a_multiple_of_an_axis_is_a_constraint_and_no_part_of_the_name(root, capsys):
    axes = ["--axis", "rows", "--axis", "intermediate_size=48", "--axis", "gate_up_size=2*intermediate_size"]
    tensors = ["--input", "x:bfloat16[rows,gate_up_size]", "--output", "y:bfloat16[rows,intermediate_size]"]
    assert main(["my_kernel", "--op-type", "my_op", *axes, *tensors]) == 0
    definition = json.loads((root / "definitions" / "my_op" / "my_kernel_i48.json").read_text())
    assert definition["axes"]["gate_up_size"]["value"] == 96
    assert definition["constraints"] == ["gate_up_size == 2 * intermediate_size"]
    assert record_of(root).FAMILIES[0].twin == {"intermediate_size": 8, "gate_up_size": 16}
    assert "abbreviations" not in capsys.readouterr().out


def test_the_record_has_a_policy_for_each_output(root):
    pytest.importorskip("torch")
    main(["my_kernel", "--op-type", "my_op", *CONTRACT])
    (family,) = record_of(root).FAMILIES
    assert {name: type(policy).__name__ for name, policy in family.compare.items()} == {
        "y": "ErrorBound",
        "ids": "Exact",
    }
    assert family.twin == {"hidden_size": 8, "wide_rows": 3}


def test_only_integers_need_no_bound(root):
    pytest.importorskip("torch")
    main(["my_kernel", "--op-type", "my_op", *CONTRACT[:-4], "--output", "ids:int32[batch_size]"])
    (family,) = record_of(root).FAMILIES
    assert list(family.compare) == ["ids"]
    assert "ErrorBound" not in (root / "flashinfer_trace" / "families" / "my_op.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--axis", "n=0"], "--axis 'n=0': write NAME, NAME=VALUE"),
        (
            ["--axis", "N=4"],
            "--axis 'N=4': write NAME, NAME=VALUE for a constant axis, or NAME=FACTOR*AXIS; names are lower case",
        ),
        (
            ["--axis", "n=2147483648"],
            "--axis 'n=2147483648': the value is larger than 2147483647, the largest of an axis",
        ),
        (["--axis", "n=" + 5000 * "9"], ": the value is larger than 2147483647"),
        (["--axis", "n=2147483647", "--axis", "m=2*n"], "--axis 'm=2*n': the value is larger"),
        (
            ["--output", "y:bfloat16[]"],
            "--output 'y:bfloat16[]': an axis in [] has no name; write NAME:DTYPE without []",
        ),
        (["--input", "x:bfloat16[n,]"], "--input 'x:bfloat16[n,]': an axis in [] has no name"),
        (["--axis", "n=8"], "give at least one --axis NAME[=VALUE], one --input NAME:DTYPE[AXIS,...] and one --output"),
        (["--input", "x=bfloat16"], "--input 'x=bfloat16': write NAME:DTYPE[AXIS,AXIS], or NAME:DTYPE for a scalar"),
        ([*CONTRACT, "--input", "z:double[batch_size]"], "z: no dtype 'double'; choose from float32"),
        (
            [*CONTRACT, "--input", "z:int32[rows]"],
            "z: no axis 'rows'; declare it with --axis rows or --axis rows=VALUE",
        ),
        (["--axis", "wide=2*n"], "--axis 'wide=2*n': declare the constant axis first, with --axis n=VALUE"),
        ([*CONTRACT, "--input", "x:int32"], "'x' is declared twice"),
        ([*CONTRACT, "--input", "batch_size:int32"], "'batch_size' is declared twice"),
        ([*CONTRACT, "--input", "torch:int32"], "'torch' cannot name an input or output"),
        ([*CONTRACT, "--axis", "class=3"], "'class' cannot name an axis"),
        ([*CONTRACT, "--axis", "rows"], "no shape uses the variable axis rows"),
    ],
)
def test_contracts_that_cannot_be_read_are_explained(root, arguments, message, capsys):
    assert main(["my_kernel", "--op-type", "my_op", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not written(root)


@pytest.mark.parametrize(
    ("axes", "pattern", "missing"),
    [
        (["num_qo_heads", "hidden_size"], "f_h{num_qo_heads}_hs{hidden_size}", {"hs": ("hidden_size",)}),
        (["kappa", "n"], "f_ka{kappa}_n{n}", {"ka": ("kappa",)}),
        (["z_1", "z_2"], "f_z{z_1}_zx{z_2}", {"z": ("z_1",), "zx": ("z_2",)}),
    ],
)
def test_abbreviations_are_those_there_are_or_new_ones(axes, pattern, missing):
    known = {"h": ("num_qo_heads", "hidden_size"), "k": ("k",), "n": ("n",)}
    assert pattern_of("f", axes, known) == (pattern, missing)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["My-Kernel", "--op-type", "my_op"], "'My-Kernel' is not a valid family"),
        (["my_kernel", "--op-type", "../up"], "'../up' is not a valid op_type"),
        (["lambda", "--op-type", "my_op"], "'lambda' is not a valid"),
        (["rmsnorm", "--op-type", "rmsnorm"], "already has the family rmsnorm"),
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
