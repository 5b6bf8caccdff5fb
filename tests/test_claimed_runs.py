"""A tag claims a run that the evidence has, on the GPU of the record or, for Blackwell's kernels, on another one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up_evidence import change_lines, change_run, small_dataset

import flashinfer_trace
from flashinfer_trace.dataset import evidence as proof
from flashinfer_trace.dataset.sync import sync_definitions
from flashinfer_trace.dataset.validation import validate_paths
from flashinfer_trace.format.definition import Definition

ROOT = flashinfer_trace.find_root()
Json = dict[str, Any]
HOPPER, BLACKWELL = proof.RECORDED_ON, (10, 0)
#: A Definition of one kernel, which Hopper does not run, and one that two such kernels compute.
GROUPED, FP4 = "moe_nvfp4_grouped_gemm_e32_n4096_k7168", "cutlass_scaled_fp4_mm_n512_k7168"
GROUPED_KERNEL = "sglang.jit_kernel.nvfp4.cutlass_fp4_group_mm"
FP4_KERNEL, FP4_OTHER = "sglang.jit_kernel.nvfp4.cutlass_scaled_fp4_mm", "sgl_kernel.cutlass_scaled_fp4_mm"
NORM, NORM_KERNEL = "rmsnorm_h512", "flashinfer.norm.rmsnorm"


class Small:
    """A dataset of one Definition, with made-up evidence from a GPU of some compute capability."""

    def __init__(self, root: Path, name: str, capability: tuple[int, int]) -> None:
        self.root = small_dataset(root, ROOT, name, capability=capability)
        (self.path,) = root.glob("definitions/*/*.json")
        (self.evidence,) = root.glob("evidence/*/*.jsonl")

    def rules(self) -> list[str]:
        """The rules that the Definition breaks."""
        return [problem.rule for problem in validate_paths([self.path], self.root).problems]

    def embedded(self) -> list[str]:
        """The tags that `flashinfer-trace sync` writes, which `validate` accepts."""
        sync_definitions(self.root, write=True)
        assert self.rules() == []
        tags: list[str] = json.loads(self.path.read_text(encoding="utf-8"))["tags"]
        assert proof.proven(self.root, Definition.from_file(self.path)) == (proof.VERIFIED in tags)
        return tags


def forged(evidence: Path) -> None:
    change_lines(evidence, lambda lines: lines[0].update(definition="0" * 12))


def on_hopper(evidence: Path) -> None:
    change_run(evidence, lambda header: header["gpu"].update(compute_capability="9.0"))


def only(evidence: Path, label: str) -> None:
    """Keeps the run of one kernel."""
    change_lines(evidence, lambda lines: lines.__setitem__(slice(None), [e for e in lines if e["kernel"] == label]))


def test_a_run_on_blackwell_proves_what_only_blackwell_runs(tmp_path: Path) -> None:
    small = Small(tmp_path, GROUPED, BLACKWELL)
    assert small.rules() == ["tag-claim"]  # the committed tag says that it has not been run
    assert {proof.VERIFIED, f"sgl_api:{GROUPED_KERNEL}"} <= set(small.embedded())


@pytest.mark.parametrize("change", [forged, on_hopper])
def test_a_run_that_does_not_fit_promotes_nothing(tmp_path: Path, change: Callable[[Path], object]) -> None:
    small = Small(tmp_path, GROUPED, BLACKWELL)
    change(small.evidence)
    assert small.rules() == ["evidence-mismatch"]
    assert {proof.UNVERIFIED, f"called_as:{GROUPED_KERNEL}"} <= set(small.embedded())


@pytest.mark.parametrize("name", [GROUPED, FP4])
def test_nothing_is_proven_without_a_run(tmp_path: Path, name: str) -> None:
    small = Small(tmp_path, name, BLACKWELL)
    small.evidence.unlink()
    assert small.rules() == ["evidence-missing"]
    assert proof.UNVERIFIED in small.embedded()


@pytest.mark.parametrize(
    ("left", "tag"), [(FP4_KERNEL, f"sgl_api:{FP4_KERNEL}"), (FP4_OTHER, f"called_as:{FP4_KERNEL}")]
)
def test_one_of_two_kernels_proves_it_and_only_its_own_tag(tmp_path: Path, left: str, tag: str) -> None:
    small = Small(tmp_path, FP4, BLACKWELL)
    only(small.evidence, left)
    assert {proof.VERIFIED, tag} <= set(small.embedded())


def test_an_unverified_definition_claims_no_run_that_it_lacks(tmp_path: Path) -> None:
    small = Small(tmp_path, NORM, HOPPER)
    assert small.rules() == []
    before, evidence = small.path.read_text(encoding="utf-8"), small.evidence.read_text(encoding="utf-8")
    small.evidence.unlink()
    small.path.write_text(before.replace(proof.VERIFIED, proof.UNVERIFIED), encoding="utf-8")
    claims = sum("_api:" in tag for tag in json.loads(before)["tags"])
    assert claims > 1 and small.rules() == ["tag-claim"] * claims
    assert not any("_api:" in tag for tag in small.embedded())
    small.evidence.write_text(evidence, encoding="utf-8")
    assert proof.VERIFIED in small.embedded()
    assert small.path.read_text(encoding="utf-8") == before


def test_each_kernel_is_claimed_by_its_own_run(tmp_path: Path) -> None:
    small = Small(tmp_path, NORM, HOPPER)
    only(small.evidence, NORM_KERNEL)
    tags = small.embedded()
    assert {proof.UNVERIFIED, f"fi_api:{NORM_KERNEL}", "called_as:sgl_kernel.rmsnorm"} <= set(tags)
