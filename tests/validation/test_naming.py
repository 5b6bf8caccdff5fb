"""Families and names."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashinfer_trace.format.naming import NamingError, derive_name, family_name, load_naming

from .conftest import REPOSITORY

pytestmark = pytest.mark.quick

NAMING = load_naming(REPOSITORY)


def definition(name: str, op_type: str, **const_axes: int) -> dict[str, Any]:
    return {
        "name": name,
        "op_type": op_type,
        "axes": {axis: {"type": "const", "value": value} for axis, value in const_axes.items()},
    }


@pytest.mark.parametrize(
    ("candidate", "family"),
    [
        (definition("gemm_n2112_k7168", "gemm"), "gemm"),
        (definition("gemm_bf16_n2112_k7168", "gemm"), "gemm_bf16"),
        (definition("rmsnorm_h4096", "rmsnorm", hidden_size=4096), "rmsnorm_eps1e5"),
        (definition("rmsnorm_h4096", "rmsnorm", hidden_size=64), "rmsnorm_eps1e5"),
        (definition("rmsnorm_h4096_eps1e6", "rmsnorm", hidden_size=4096), "rmsnorm"),
        (definition("rmsnorm_h4096_eps1e5", "rmsnorm", hidden_size=4096), None),
        (definition("rmsnorm_h7168_eps1e6", "rmsnorm", hidden_size=7168), None),
        (definition("rmsnorm_h8192_eps1e5", "rmsnorm", hidden_size=8192), "rmsnorm_eps1e5"),
        (definition("gemm_n2112_k7168", "rmsnorm"), None),
        (definition("gemm_n02_k7168", "gemm"), None),
        (definition("gemm_n2112_k7168_x", "gemm"), None),
        (definition("gemm_n_k7168", "gemm"), None),
        (definition("gemm_n2112_k7168\n", "gemm"), None),
        (definition("fused_add_rmsnorm_h7168", "rmsnorm"), "fused_add_rmsnorm"),
        (definition("mla_paged_decode_h16_ckv512_kpe64_ps1", "mla_paged", page_size=1), "mla_paged_decode_ps1"),
        (definition("mla_paged_decode_h16_ckv512_kpe64_ps64", "mla_paged", page_size=64), "mla_paged_decode"),
        (definition("mla_paged_decode_h16_ckv512_kpe64_ps1", "mla_paged", page_size=64), "mla_paged_decode"),
        ({"name": 1, "op_type": "gemm", "axes": {}}, None),
        ({"name": "gemm_n1_k1", "op_type": "gemm", "axes": None}, "gemm"),
        ({}, None),
    ],
)
def test_family_of(candidate: dict[str, Any], family: str | None) -> None:
    assert family_name(candidate, NAMING) == family


def test_family_of_an_object() -> None:
    candidate = SimpleNamespace(name="gemm_n2_k3", op_type="gemm", const_axes={"N": 2, "K": 3})
    assert family_name(candidate, NAMING) == "gemm"


def test_every_family_finds_itself_by_its_name() -> None:
    for family in NAMING.families.values():
        const_axes = dict.fromkeys(family.axes, 7) | dict(family.where)
        name = derive_name(family, const_axes)
        found = family_name(definition(name, family.op_type, **const_axes), NAMING)
        assert found == family.name


def test_derive_name_needs_its_axes() -> None:
    with pytest.raises(NamingError, match="const axis K"):
        derive_name(NAMING.families["gemm"], {"N": 1})


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NamingError, match=r"naming\.json: cannot be read"):
        load_naming(tmp_path)


def test_two_families_need_different_patterns(tmp_path: Path) -> None:
    path = tmp_path / "schema" / "naming.json"
    path.parent.mkdir()
    data = json.loads((REPOSITORY / "schema" / "naming.json").read_text(encoding="utf-8"))
    data["families"]["my_norm"] = {**data["families"]["rmsnorm"], "op_type": "my_norm"}
    path.write_text(json.dumps(data))
    with pytest.raises(NamingError, match="families rmsnorm and my_norm have the same pattern"):
        load_naming(tmp_path)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "schema" / "naming.json"
    path.parent.mkdir()
    data = json.loads((REPOSITORY / "schema" / "naming.json").read_text(encoding="utf-8"))
    path.write_text(json.dumps(data))
    assert "causal" in load_naming(tmp_path).flags
    data["tags"]["flags"] = {"other": "Another flag."}
    path.write_text(json.dumps(data, indent=1))
    assert list(load_naming(tmp_path).flags) == ["other"]
