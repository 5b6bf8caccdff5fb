"""Sizes that nobody asked for: a kernel that has the Definition's own written into it is not called wrong for them."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from click.testing import CliRunner

import flashinfer_trace
from flashinfer_trace.cli import main
from flashinfer_trace.families import family_of
from flashinfer_trace.format.constraints import parse
from flashinfer_trace.judging.judge import judge, small_by_default, unseen, with_own_constants
from flashinfer_trace.judging.verdict import Grade

LARGE = "gemm_bf16_n102400_k2048"
SIZES = "n 48, k 64"
ADVICE = "a kernel with the Definition's own sizes written into it needs --full or --device cuda"
PRODUCT = "import torch\n\ndef run(A, B):\n    return {}\n"
SCHEMA = json.loads((flashinfer_trace.find_root() / "schema" / "verdict.schema.json").read_text(encoding="utf-8"))


@pytest.fixture
def check(tmp_path):
    """Runs `flashinfer-trace check` on the text of a kernel."""

    def run(text: str, *options: str, name: str = LARGE):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return CliRunner().invoke(
            main, ["check", str(path), "-d", name, "--examples", "1", "--seed", "3", "--verbose", *options]
        )

    return run


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (flashinfer_trace.load(LARGE).to_dict()["reference"], "raised"),
        (PRODUCT.format("torch.empty(len(A), 102400, dtype=A.dtype)"), "outputs"),
    ],
    ids=["the Definition's own run", "an output of its own sizes"],
)
def test_a_kernel_with_sizes_in_it_is_not_judged_at_those_of_the_twin(text, kind, check):
    shown = check(text)
    assert shown.exit_code == 4, shown.output
    first, *lines = shown.output.splitlines()
    assert first == f"mine.py for {LARGE} on cpu: not judged" and lines[0].startswith(f"  {kind}: ")
    assert f"  at the sizes of the small twin, the default here: {SIZES}" in lines and f"  {ADVICE}" in lines
    found = check(text, "--format", "json")
    verdict = json.loads(found.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(verdict)
    assert found.exit_code == 4 and verdict["grade"] == "not judged" and verdict["code"] == "other-sizes"
    assert verdict["by_default"] is True
    assert verdict["sizes"] == "twin" and verdict["twin"] == {"n": 48, "k": 64}
    assert " --twin " not in verdict["replay"], "the same verdict, which that option changes"


def test_an_error_after_right_values_is_not_one_of_sizes(check):
    text = (
        "def run(A, B):\n  if len(A) > 9: raise ValueError('too hard')\n  return (A.float() @ B.float().T).to(A.dtype)"
    )
    assert check(text).exit_code == 1


def test_a_twin_that_was_asked_for_has_no_excuse(check):
    text = flashinfer_trace.load(LARGE).to_dict()["reference"]
    shown = check(text, "--twin")
    assert shown.exit_code == 1 and f"at the sizes of the small twin: {SIZES}" in shown.output, shown.output
    assert ADVICE in shown.output


def test_other_verdicts_name_the_sizes_too(check):
    wrong = check(PRODUCT.format("torch.zeros(len(A), len(B), dtype=A.dtype)"))
    assert wrong.exit_code == 1 and ADVICE in wrong.output, wrong.output
    right = check(PRODUCT.format("(A.float() @ B.float().T).to(A.dtype)"))
    assert right.exit_code == 0 and ADVICE not in right.output, right.output
    for shown in (wrong, right):
        assert f"  at the sizes of the small twin, the default here: {SIZES}\n" in shown.output


def test_what_fails_at_the_own_sizes_is_wrong(check):
    shown = check("def run(x, w): raise ValueError(x)", name="rmsnorm_h512")
    assert shown.exit_code == 1 and "small twin" not in shown.output


def test_a_twin_is_not_the_default_where_it_saves_nothing(tmp_path, server):
    """A request of a decoder has one query, so that its window may be wide."""
    decode = flashinfer_trace.load("gqa_paged_decode_h1_kv1_d256_ps1_softcap50_window4096")
    prefill = flashinfer_trace.load("gqa_paged_prefill_causal_h1_kv1_d256_ps1_softcap50_window4096")
    assert small_by_default(prefill, "cpu") and not small_by_default(decode, "cpu")
    path = tmp_path / "mine.py"
    path.write_text(decode.reference)
    verdict = judge(str(path), decode, examples=1, server=server)
    assert verdict.grade == Grade.REFERENCE and verdict.sizes == "own" and not verdict.by_default, verdict


WINDOW = "gqa_paged_prefill_causal_h32_kv16_d128_ps64_window1024"
CAP = "gqa_ragged_prefill_causal_h1_kv1_d256_softcap50_window4096"
GROUPS = "moe_bf16_ds_routing_topk8_ng8_kg4_e256_h7168_i256"


def from_shapes(name: str, **other: int) -> str:
    """A kernel that is at the default twin what one is that takes sizes from shapes: the reference, but for `other`."""
    definition = flashinfer_trace.load(name)
    twin = with_own_constants(definition, family_of(definition)).twin
    return definition.with_const_axes({**twin, **other}).reference


def test_a_default_twin_keeps_what_no_shape_shows():
    found = set()
    for definition in flashinfer_trace.definitions():
        if small_by_default(definition, "cpu"):
            hidden = {axis for axis in unseen(definition) if axis in family_of(definition).twin}
            twin = with_own_constants(definition, family_of(definition)).twin
            sizes = definition.with_const_axes(twin).const_axes
            assert all(sizes[axis] == definition.const_axes[axis] for axis in hidden)
            constraints = [one for one in map(parse, definition.constraints) if one.names <= sizes.keys()]
            assert all(one.evaluate(sizes) for one in constraints), definition.name
            found |= hidden
    assert found >= {"logits_soft_cap", "window_size", "n_group", "topk_group"}


@pytest.mark.parametrize("name", [WINDOW, GROUPS])
def test_a_kernel_with_only_such_constants_in_it_is_right(name, check):
    shown = check(from_shapes(name), name=name)
    assert shown.exit_code == 0 and ": reference-grade\n" in shown.output, shown.output
    sizes = re.search(r"small twin, the default here: (.*)", shown.output)
    assert sizes is not None and "window_size" not in sizes[1] and "n_group" not in sizes[1]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        (WINDOW, {"window_size": 1023}),
        (CAP, {"logits_soft_cap": 30}),
        (GROUPS, {"n_group": 4}),
        (GROUPS, {"topk_group": 3}),
    ],
)
def test_one_with_another_of_them_is_wrong(name, other, check):
    shown = check(from_shapes(name, **other), name=name)
    assert shown.exit_code == 1 and "  values: " in shown.output, shown.output


def test_one_for_pages_of_one_token_needs_no_length_of_the_last(check):
    name = WINDOW.replace("ps64", "ps1")
    text, count = re.subn(r"PAGE_SIZE \+ last_page_len\[b\]", "1 + 1", from_shapes(name))
    assert count == 1 and check(text, name=name).exit_code == 0
