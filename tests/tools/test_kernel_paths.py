"""Paths of kernels in tags: what exists in the pinned packages, and what a tag may claim."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import digests
import jsonschema
import pytest
import release

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import flashinfer_trace
from flashinfer_trace.dataset.evidence import VERIFIED, kernels_today, proofs
from flashinfer_trace.dataset.kernel_tags import KernelTags, kernel_tags
from flashinfer_trace.dataset.model_claims import curated_path
from flashinfer_trace.format.naming import load_naming
from flashinfer_trace.kernels import TABLE
from flashinfer_trace.kernels.names import KINDS, RUN, load_kernel_paths
from flashinfer_trace.kernels.table import RECORDED
from tools.kernel_paths.__main__ import main, source_of
from tools.kernel_paths.resolve import callers_of_ops, exists, public_names

ROOT = flashinfer_trace.find_root()
KNOWN = load_kernel_paths(ROOT)
PACKAGES = json.loads((ROOT / "schema" / "kernel_paths.json").read_text(encoding="utf-8"))["packages"]
TAGGED = {
    (one.name, *tag.partition(":")[::2])
    for one in flashinfer_trace.definitions()
    for tag in one.tags
    if tag.partition(":")[0] in KINDS
}


def directories() -> list[Path]:
    given = [Path(one) for one in os.environ.get("KERNEL_SOURCES", "").split(os.pathsep) if one]
    return [*given, *sorted(ROOT.glob(".sources*"))]


def test_every_tagged_kernel_exists_in_its_pinned_package():
    assert len(TAGGED) > 500
    assert {path for _, _, path in TAGGED if path.partition(".")[0] not in KNOWN.versions} == set()
    assert sorted({path for _, _, path in TAGGED} - KNOWN.paths) == []


@pytest.mark.parametrize(
    "path",
    [
        "sgl_kernel.apply_rope_with_cos_sin_cache_inplace",
        "sgl_kernel.top_k_renorm_probs",
        "sgl_kernel.top_p_renorm_probs",
        "sglang.srt.layers.moe.fused_moe_triton.fused_moe.fused_experts",
    ],
)
def test_the_paths_that_were_tagged_wrongly_do_not_exist(path):
    assert path not in KNOWN.paths


@pytest.mark.parametrize("package", PACKAGES)
def test_the_committed_paths_are_those_of_the_sources(package):
    directory = source_of(package, PACKAGES[package], directories())
    if directory is None:
        pinned = f"{PACKAGES[package]['distribution']} {PACKAGES[package]['version']}"
        fetched = f"--release {PACKAGES[package]['release']} --only {PACKAGES[package]['distribution']}"
        reason = (
            f"no sources of {pinned} in KERNEL_SOURCES or .sources*; `python -m tools.fetch_sources {fetched} --dest`"
        )
        if "CI" in os.environ:  # it fetches them first
            pytest.fail(reason)
        pytest.skip(reason)
    own = {path for path in KNOWN.paths if path.partition(".")[0] == package}
    assert own
    assert [path for path in sorted(own) if not exists(directory, path)] == []
    if package == "sgl_kernel":
        assert KNOWN.ops == {op: tuple(sorted(names)) for op, names in callers_of_ops(directory, package).items()}
        assert not exists(directory, "sgl_kernel.apply_rope_with_cos_sin_cache_inplace")
        assert not exists(directory, "sgl_kernel.top_k_renorm_probs")


def test_the_pinned_versions_are_those_of_the_release_and_of_the_evidence():
    """Under another version, the test of the paths would find no sources and be skipped."""
    releases = tomllib.loads((ROOT / "tools" / "sources.toml").read_text(encoding="utf-8"))["releases"]
    pinned = {(one["distribution"], one["version"]) for one in PACKAGES.values()}
    for one in PACKAGES.values():
        fetched = {(part["distribution"], part["version"]) for part in releases[one["release"]].values()}
        assert (one["distribution"], one["version"]) in fetched
    ran = {(entry.library, entry.version) for one in flashinfer_trace.definitions() for entry in proofs(ROOT, one)}
    distributions = {distribution for distribution, _ in pinned}
    assert {one for one in ran if one[0] in distributions} == pinned


def test_verified_definitions_claim_runs_that_their_evidence_has():
    """Each claimed kernel of a verified Definition is a path of its own evidence, an op's function, or a pipeline's."""
    claims = wrong = 0
    for one in flashinfer_trace.definitions(tag=VERIFIED):
        computing = kernels_today(ROOT, one)
        ran = {path for entry in proofs(ROOT, one) for path in computing[entry.kernel_label].tags}
        for tag in one.tags:
            if tag.partition(":")[0] in RUN:
                claims += 1
                wrong += tag.partition(":")[2] not in ran
    assert claims > 300 and wrong == 0


def test_the_table_names_what_exists_in_the_pinned_packages():
    """Its paths, and those by which tags name them; of other packages, nobody lists what they export."""
    listed = {"sglang-kernel", "flashinfer-python", "sglang"}
    named = {path for entry in TABLE for path in (entry.path, *entry.tags)}
    unlisted = {path for path in named if path.partition(".")[0] not in KNOWN.versions}
    assert {path.partition(".")[0] for path in unlisted} == {"torch", "deep_gemm"}
    gone = {entry.path for entry in TABLE if listed.isdisjoint(place.distribution for place in entry.places)}
    assert sorted(named - unlisted - KNOWN.paths - gone) == []
    assert gone - unlisted == {"sgl_kernel.cutlass_scaled_fp4_mm"}
    ops = {entry.path for entry in TABLE if entry.path.startswith("torch.ops.")}
    assert all(KNOWN.ops[entry.path] == entry.tags for entry in TABLE if entry.path in ops) and len(ops) == 10


def test_the_table_is_of_the_pinned_releases():
    pinned = {tuple(one.split(" ", 1)) for one in KNOWN.versions.values()}
    assert {(name, version) for name, version in RECORDED.items() if name in dict(pinned)} == pinned


def test_tags_follow_the_state():
    naming = load_naming(ROOT)
    proven = {"sgl_kernel.rmsnorm", "sglang.jit_kernel.norm.x", "sglang.srt.a.b", "flashinfer.norm.rmsnorm"}
    state = KernelTags(frozenset(proven), frozenset({*proven, "flashinfer.norm.layernorm"}))
    wanted = [
        "status:verified",
        "fi_api:flashinfer.norm.rmsnorm",
        "sgl_api:sgl_kernel.rmsnorm",
        "sgl_api:sglang.jit_kernel.norm.x",
        "triton_api:sglang.srt.a.b",
        "called_as:flashinfer.norm.layernorm",
    ]
    assert state.applied(["status:verified", "called_as:sgl_kernel.moe_fused_gate"], naming) == wanted
    right = wanted[::-1]
    assert state.applied(right, naming) is right


@pytest.mark.parametrize(
    ("name", "path"),
    [
        # It takes a power of two, and up to 32 experts per group (sgl_kernel/moe.py).
        ("moe_fp8_block_scale_ds_routing_topk8_ng1_kg1_e384_h7168_i2048", "sgl_kernel.moe_fused_gate"),
        ("moe_fp8_block_scale_ds_routing_topk8_ng1_kg1_e48_h7168_i2048", "sgl_kernel.moe_fused_gate"),
        ("moe_topk_deepseek_shared_experts_topk9_ng1_kg1_e160_s1", "sgl_kernel.moe_fused_gate"),
        # SGLang calls it where N is a multiple of 128 (srt/layers/quantization/fp8_utils.py).
        ("fp8_blockwise_scaled_mm_n2112_k7168", "sgl_kernel.fp8_blockwise_scaled_mm"),
        # Its wrapper and SGLang's guard want topk_group x n_group, which is 1, to be at least top_k (srt/.../topk.py).
        ("moe_topk_deepseek_topk6_ng1_kg1_e64", "flashinfer.fused_moe.fused_topk_deepseek"),
    ],
)
def test_a_kernel_that_does_not_take_a_definition_is_not_named(name, path):
    definition = flashinfer_trace.load(name)
    assert path in kernel_tags(ROOT, definition.to_dict()).refused
    assert path not in {tag.partition(":")[2] for tag in definition.tags}


def test_a_kernel_of_which_one_use_takes_a_definition_is_not_refused():
    definition = flashinfer_trace.load("gqa_paged_decode_h5_kv1_d128_ps1")
    state = kernel_tags(ROOT, definition.to_dict())
    assert "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper" in state.proven and not state.refused


PACKAGE = {
    "__init__.py": "from .ops import *\nfrom pkg.other import g as exported\nfrom pkg.other import alias\n"
    "if True:\n    from .late import h\n",
    "ops.py": "from .core import f, missing\ndef _hidden(): pass\n",
    "core.py": "class f: pass\n",
    "other.py": "import torch\ndef _inner(x):\n    return torch.ops.pkg.do.default(x)\n"
    "def g(x):\n    return _inner(x)\nalias = g\n",
    "late.py": "try:\n    import fast\nexcept ImportError:\n    def h(): pass\n",
}


@pytest.fixture
def package(tmp_path):
    (tmp_path / "pkg").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "pkg" / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("pkg.f", True),
        ("pkg.exported", True),
        ("pkg.g", False),
        ("pkg.h", True),
        ("pkg.missing", False),
        ("pkg.ops.f", True),
        ("pkg.ops._hidden", True),
        ("pkg._hidden", False),
        ("pkg.core", True),
        ("pkg.core.f.method", False),
        ("other.f", False),
    ],
)
def test_a_path_is_followed_through_imports(package, path, found):
    assert exists(package, path) is found


def test_public_names_and_ops(package):
    assert public_names(package, "pkg") == {"f", "exported", "alias", "h"}
    assert callers_of_ops(package, "pkg") == {"torch.ops.pkg.do": {"pkg.alias"}}


def test_sources_of_other_versions_are_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "sglang-kernel 0.4.2" in capsys.readouterr().err


def test_the_file_follows_its_schema():
    schema = json.loads((ROOT / "schema" / "kernel_paths.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(
        json.loads((ROOT / "schema" / "kernel_paths.json").read_text(encoding="utf-8"))
    )


#: A place in SGLang, as the source of a claim names it: the file, and the class, function or attribute there.
PLACE = re.compile(r"(srt/[\w/]+\.py)(?:, ((?:\w+\.)*\w+))?")


@digests.needs_digest_sources
@release.needs_sources
def test_the_places_that_curated_claims_name_exist() -> None:
    """Each function is in its file of the release that the claim names; of 0.5.8, the file names the kernel, too."""
    sources = {"SGLang 0.5.8": digests.SOURCES, "SGLang 0.5.11": release.SOURCES}
    claims = json.loads(curated_path(ROOT).read_text(encoding="utf-8"))["claims"]
    checked = 0
    for claim in claims:
        named = re.match(r"SGLang 0\.5\.\d+", claim["source"])
        if named is None:
            continue
        places = PLACE.findall(claim["source"])
        assert places, claim
        checked += 1
        for file, name in places:
            text = (sources[named[0]] / "sglang" / file).read_text(encoding="utf-8")
            last = re.escape(name.rpartition(".")[2])
            assert not name or re.search(rf"\b(def|class) {last}\b|self\.{last} =", text), (file, name)
            assert named[0] != "SGLang 0.5.8" or claim.get("kernel", "") in text, (file, claim["kernel"])
    assert checked >= sum("models" in claim for claim in claims) - 1
