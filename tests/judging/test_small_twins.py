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
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.twin_sizes import FEW_BYTES, small_by_default, twins_of, unseen
from flashinfer_trace.judging.verdict import Grade

LARGE = "gemm_bf16_n102400_k2048"
SIZES = "n 304"
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
    assert f"  at the sizes of a twin, the default here: {SIZES}" in lines and f"  {ADVICE}" in lines
    found = check(text, "--format", "json")
    verdict = json.loads(found.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(verdict)
    assert found.exit_code == 4 and verdict["grade"] == "not judged" and verdict["code"] == "other-sizes"
    assert verdict["by_default"] is True
    assert verdict["sizes"] == "twin" and verdict["twin"] == {"n": 304}
    assert " --twin " not in verdict["replay"], "the same verdict, which that option changes"


def test_an_error_after_right_values_is_not_one_of_sizes(check):
    text = (
        "def run(A, B):\n  if len(A) > 9: raise ValueError('too hard')\n  return (A.float() @ B.float().T).to(A.dtype)"
    )
    assert check(text).exit_code == 1


def test_a_twin_that_was_asked_for_has_no_excuse(check):
    text = flashinfer_trace.load(LARGE).to_dict()["reference"]
    shown = check(text, "--twin")
    assert shown.exit_code == 1 and "at the sizes of a twin: n 48, k 64" in shown.output, shown.output
    assert ADVICE in shown.output


def test_other_verdicts_name_the_sizes_too(check):
    wrong = check(PRODUCT.format("torch.zeros(len(A), len(B), dtype=A.dtype)"))
    assert wrong.exit_code == 1 and ADVICE in wrong.output, wrong.output
    right = check(PRODUCT.format("(A.float() @ B.float().T).to(A.dtype)"))
    assert right.exit_code == 0 and ADVICE not in right.output, right.output
    for shown in (wrong, right):
        assert f"  at the sizes of a twin, the default here: {SIZES}\n" in shown.output


def test_what_fails_at_the_own_sizes_is_wrong(check):
    shown = check("def run(x, w): raise ValueError(x)", name="rmsnorm_h512")
    assert shown.exit_code == 1 and "a twin" not in shown.output


def test_a_twin_is_not_the_default_where_it_saves_nothing(tmp_path, server):
    """A request of a decoder has one query, so its window may be wide."""
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


def from_shapes(name: str, text: str = "", **other: int) -> str:
    """A kernel that takes all sizes from the shapes of its inputs, and is this text, by default the reference, but for
    `other` constants."""
    inputs = flashinfer_trace.load(name).inputs
    text = text or flashinfer_trace.load(name).with_const_axes(other).reference
    shapes = [(each, axis, number) for each, one in inputs.items() for number, axis in enumerate(one.shape or ())]
    found = "".join(f"    globals()[{axis.upper()!r}] = {each}.shape[{number}]\n" for each, axis, number in shapes)
    arguments, text = ", ".join(inputs), text.replace("def run(", "def right(")
    return f"{text}\n\n\ndef run({arguments}):\n{found}    return right({arguments})\n"


def test_a_default_twin_keeps_what_no_shape_shows():
    found = set()
    for definition in flashinfer_trace.definitions():
        if small_by_default(definition, "cpu"):
            hidden = {axis for axis in unseen(definition) if axis in family_of(definition).twin}
            twin = twins_of(definition, family_of(definition)).family.twin
            sizes = definition.with_const_axes(twin).const_axes
            assert all(sizes[axis] == definition.const_axes[axis] for axis in hidden)
            constraints = [one for one in map(parse, definition.constraints) if one.names <= sizes.keys()]
            assert all(one.evaluate(sizes) for one in constraints), definition.name
            found |= hidden
    assert found >= {"logits_soft_cap", "window_size", "n_group", "topk_group"}


@pytest.mark.parametrize("name", [WINDOW, GROUPS])
def test_a_kernel_with_only_such_constants_in_it_is_right(name, check):
    shown = check(from_shapes(name), name=name)
    assert shown.exit_code == 0 and ": kernel-grade\n" in shown.output, shown.output
    sizes = re.search(r"a twin, the default here: (.*)", shown.output)
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


BLOCKS, LAYER = "fp8_blockwise_scaled_mm_n18432_k7168", "moe_bf16_softmax_routing_topk2_e8_h4096_i1792"
EXPERTS = "moe_fp8_block_scale_expert_gemm_topk8_r1_e128_n1536_k2048"
TILES = "(a @ b.T for a, b in zip(A.float().split(64, 1), B.float().split(64, 1)))"
#: Error -> Definition, a part of its reference, and what is there in a kernel that is right otherwise.
SHORT = {
    "the first 64 features": (LARGE, "A.float() @ B.float().T", "A[:, :64].float() @ B[:, :64].float().T"),
    "64 outputs": (LARGE, "A.float() @ B.float().T", "(A.float() @ B.float().T) * (torch.arange(len(B)) < 64)"),
    "bf16 between tiles of 64": (
        LARGE,
        "A.float() @ B.float().T",
        f"__import__('functools').reduce(lambda c, ab: (c + ab).bfloat16().float(), {TILES})",
    ),
    "the first 3 blocks": (
        BLOCKS,
        "x.flatten(1) @ weights.flatten(1).T",
        "x.flatten(1)[:, :384] @ weights.flatten(1).T[:384]",
    ),
    "the first 160 features": (
        "fp8_scaled_mm_n28672_k4096",
        "A.float() @ B.float().T",
        "A[:, :160].float() @ B[:, :160].float().T",
    ),
    "3 blocks of an expert": (EXPERTS, "rows[token, slot] @ own.T", "rows[token, slot][:, :384] @ own.T[:384]"),
    "the first 512 features of tokens": (LAYER, "(x @ gemm1.T)", "(x[:, :512] @ gemm1.T[:512])"),
    "the first 384 features of experts": (
        LAYER,
        "(torch.nn.functional.silu(gate) * up) @ gemm2.T",
        "(torch.nn.functional.silu(gate) * up)[:, :384] @ gemm2.T[:384]",
    ),
}


@pytest.mark.parametrize("wrong", SHORT)
def test_a_kernel_that_is_right_for_the_first_features_is_wrong(wrong, tmp_path, server):
    name, right, other = SHORT[wrong]
    text = flashinfer_trace.load(name).reference
    assert text.count(right) == 1
    (tmp_path / "mine.py").write_text(from_shapes(name, text.replace(right, other)))
    verdict = judge(tmp_path / "mine.py", name, examples=1, server=server)
    assert verdict.grade == Grade.WRONG and verdict.failure.kind == "values", verdict


@pytest.mark.parametrize("name", [LARGE, EXPERTS, LAYER])
def test_no_kernel_is_reference_grade_at_a_twin(name, tmp_path, server):
    (tmp_path / "mine.py").write_text(from_shapes(name))
    verdict = judge(tmp_path / "mine.py", name, examples=1, server=server)
    assert verdict.grade == Grade.KERNEL and verdict.capped and not verdict.cut, verdict
    assert "but reference-grade takes the Definition's own sizes" in str(verdict)
    assert verdict.longer == (
        {"hidden_size": 4096, "intermediate_size": 1792, "gemm1_out_size": 3584} if name == LAYER else {}
    )


def test_each_sum_is_as_long_as_that_of_the_definition_or_the_verdict_says_so():
    for definition in flashinfer_trace.definitions():
        if small_by_default(definition, "cpu"):
            twins = twins_of(definition, family_of(definition))
            assert not twins.cut, definition.name
            own = definition.const_axes
            for axis in {"k", "K", "hidden_size", "intermediate_size", "head_dim"} & own.keys():
                sizes = [definition.with_const_axes(one.twin).const_axes[axis] for one in (twins.family, *twins.longer)]
                assert own[axis] in sizes, definition.name
    huge = flashinfer_trace.load(LARGE).with_const_axes({"k": FEW_BYTES})
    assert twins_of(huge, family_of(huge)).cut == ("k",)
