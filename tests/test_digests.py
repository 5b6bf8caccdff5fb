"""Digests: the same everywhere, and different when what they bind changes."""

from __future__ import annotations

import ast
import dataclasses
import shutil
from pathlib import Path

import pytest

import flashinfer_trace
from flashinfer_trace import digests, ledger_entry
from flashinfer_trace.definition import Definition
from flashinfer_trace.digests import PACKAGE, CodeDigests, contract_sha256
from flashinfer_trace.records import load_records

DEFINITION = flashinfer_trace.load("fused_add_rmsnorm_residual_out_h2048")
MODULES = sorted(set(load_records(flashinfer_trace.find_root()).modules.values()))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's code."""
    return shutil.copytree(PACKAGE, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__", "data"))


def changed(package: Path) -> set[str]:
    """What differs from the package that runs."""
    ours, theirs = CodeDigests(), CodeDigests(package)
    found = {module for module in MODULES if ours.family(module) != theirs.family(module)}
    return found | ({"harness"} if ours.harness != theirs.harness else set())


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


def test_a_copy_elsewhere_has_the_same_digests(package: Path) -> None:
    assert changed(package) == set()
    for path in package.rglob("*.py"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert changed(package) == set()
    assert digests.current().harness == CodeDigests(package).harness


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("harness/compare.py", {"harness"}),
        ("harness/case.py", {"harness"}),
        ("definition.py", {"harness"}),
        ("reference.py", {"harness"}),
        ("families/gemm/qserve.py", {"families.gemm.qserve"}),
        ("embedding.py", set()),
        ("harness/evidence.py", set()),
        ("families/__init__.py", set()),
    ],
)
def test_a_change_shows_where_the_code_is_used(package: Path, file: str, expected: set[str]) -> None:
    append(package / file, "\n# changed\n")
    assert changed(package) == expected


def test_what_families_share_counts_for_each(package: Path) -> None:
    append(package / "families" / "attention" / "rounding.py", "\n# changed\n")
    attention = {f"families.{name}" for name in ("gqa_paged", "gqa_ragged", "mla_paged", "mla_ragged")}
    assert attention <= changed(package)
    assert not changed(package) & {"harness", "families.rmsnorm", "families.gemm"}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_that_a_record_imports_is_in_its_digest(module: str) -> None:
    code = CodeDigests()
    covered = code.family_modules(module) | code.harness_modules
    assert module in covered
    for name in covered:
        base = PACKAGE.joinpath(*name.split("."))
        path = next(p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                inside = node.module.removeprefix("flashinfer_trace.")
                judging = inside.startswith(("harness.", "families."))
                assert inside == node.module or not judging or inside in covered, f"{name} imports {inside}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from flashinfer_trace.harness import compare\n", "harness.compare"),
        ("from flashinfer_trace.harness import (\n    case,\n    compare,\n)\n", "harness.compare"),
        ("import flashinfer_trace.harness.compare\n", "harness.compare"),
        ("def f():\n    from flashinfer_trace.harness.compare import Exact\n", "harness.compare"),
        ("from .other import x\n", "families.mine.other"),
        ("from . import other\n", "families.mine.other"),
        ("from ..shared import x\n", "families.shared"),
    ],
)
def test_every_form_of_import_is_followed(tmp_path: Path, text: str, found: str) -> None:
    for name in ("harness/compare.py", "harness/case.py", "families/shared.py", "families/mine/other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    for name in ("harness/__init__.py", "families/__init__.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "families" / "mine" / "__init__.py").write_text(text)
    assert found in CodeDigests(tmp_path).family_modules("families.mine")


def test_the_contract_is_what_the_definition_promises() -> None:
    original = contract_sha256(DEFINITION)
    first, second = DEFINITION.inputs.values(), DEFINITION.outputs.values()
    other_dtype = {one.name: dataclasses.replace(one, dtype="float16") for one in second}
    reordered = {one.name: one for one in reversed(list(first))}
    changes = [
        {"name": "other"},
        {"op_type": "other"},
        {"constraints": ("batch_size >= 0",)},
        {"outputs": other_dtype},
        {"inputs": reordered},
        {"axes": {name: dataclasses.replace(axis, value=7) for name, axis in DEFINITION.axes.items()}},
    ]
    different = {contract_sha256(dataclasses.replace(DEFINITION, **change)) for change in changes}
    assert len(different | {original}) == len(changes) + 1
    assert contract_sha256(dataclasses.replace(DEFINITION, description="x", tags=("y",), reference="z")) == original
    assert contract_sha256(Definition.from_dict(DEFINITION.to_dict())) == original


def test_what_judges_outside_of_the_digest_is_as_it_was() -> None:
    """These values decide what passes, and no digest changes with them: whoever changes one records all runs again."""
    assert (ledger_entry.REQUIRED_CASES, ledger_entry.SEED) == (50, 0)


def test_how_close_a_reference_must_be_is_in_the_digest() -> None:
    assert "closeness" in digests.current().harness_modules
