"""tools.follow on two real stacks (SGLang 0.5.11 and 0.5.23), against what reading both showed (hand_checked.json)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flashinfer_trace.kernels.stacks import BEFORE, TODAY
from tools.follow.compare import GONE, MOVED, OTHER, SIGNATURE, STATES, UNCHANGED, compare
from tools.follow.public import public_kernels
from tools.follow.stacks import Stack, bring_stack
from tools.source_archives import FetchError

ROOT = Path(__file__).parents[2]
CHECKED = json.loads(Path(__file__).with_name("hand_checked.json").read_text())


@pytest.fixture(scope="module")
def stacks() -> tuple[Stack, Stack]:
    """CI fetches the sources first, so a missing tree is a failure there, not a skip."""
    try:
        old, new = (bring_stack(versions, ROOT, fetch=False) for versions in (BEFORE, TODAY))
    except FetchError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"{error}; `python -m tools.follow` fetches them (wheels of 1 GB)")
    return old, new


def test_what_changed_moved_and_is_gone(stacks):
    """In signatures with more than three changes only the path was checked."""
    found = {one.path: one for one in compare(*stacks, [path for paths in CHECKED.values() for path in paths])}
    by_state = {state: {path: one for path, one in found.items() if one.state == state} for state in STATES}
    assert not by_state[UNCHANGED] and not by_state[OTHER]
    assert sorted(by_state[SIGNATURE]) == sorted([*CHECKED["signature"], *CHECKED["signature_of_many"]])
    assert {path: list(found[path].changes) for path in CHECKED["signature"]} == CHECKED["signature"]
    assert {path: one.now for path, one in by_state[MOVED].items()} == CHECKED["moved"]
    assert list(by_state[GONE]) == CHECKED["gone"]


def test_the_whole_registry_is_read(stacks):
    (before, _), (after, unread) = (public_kernels(stack) for stack in stacks)
    assert unread == []
    assert "sglang.kernels.ops.kvcache.mla_buffer.set_mla_kv_buffer_triton" in after["kvcache.set_mla_kv_buffer_triton"]
    assert "deep_gemm.fp8_fp4_mqa_logits" in after and "deep_gemm.fp8_fp4_mqa_logits" not in before
