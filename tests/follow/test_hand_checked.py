"""tools.follow on two real releases, against what people found by reading both (hand_checked.json)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tools.follow.compare import GONE, MOVED, SIGNATURE, compare
from tools.follow.public import public_kernels
from tools.follow.stacks import Stack, bring_stack, read_stacks
from tools.source_archives import FetchError

ROOT = Path(__file__).parents[2]
CHECKED = json.loads(Path(__file__).with_name("hand_checked.json").read_text())


@pytest.fixture(scope="module")
def stacks() -> tuple[Stack, Stack]:
    """CI fetches the sources first, so a missing tree is a failure there, not a skip."""
    known = read_stacks(ROOT / "stacks.toml").stacks
    try:
        old, new = (bring_stack(known[CHECKED[side]], ROOT, fetch=False) for side in ("old", "new"))
    except FetchError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"{error}; `python -m tools.follow` fetches them (wheels of 490 MB besides those of the tracers)")
    return old, new


def test_what_changed_moved_and_is_gone(stacks):
    paths = [*CHECKED["signature"], *CHECKED["moved"], *CHECKED["gone"]]
    found = {one.path: one for one in compare(*stacks, paths)}
    signatures = {path: list(one.changes) for path, one in found.items() if one.state == SIGNATURE}
    assert signatures == CHECKED["signature"]
    assert {path: one.now for path, one in found.items() if one.state == MOVED} == CHECKED["moved"]
    assert [path for path, one in found.items() if one.state == GONE] == CHECKED["gone"]


def test_the_whole_registry_is_read(stacks):
    (before, _), (after, unread) = (public_kernels(stack) for stack in stacks)
    assert unread == []
    assert "sglang.kernels.ops.kvcache.mla_buffer.set_mla_kv_buffer_triton" in after["kvcache.set_mla_kv_buffer_triton"]
    assert "deep_gemm.fp8_fp4_mqa_logits" in after and "deep_gemm.fp8_fp4_mqa_logits" not in before
