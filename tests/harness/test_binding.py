"""Evidence is stale when code that decides a verdict changed, and only then."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import flashinfer_trace
from flashinfer_trace.families import all_families
from flashinfer_trace.harness import binding, case
from flashinfer_trace.harness.binding import judging_code
from flashinfer_trace.harness.family import Family
from flashinfer_trace.verdict import compare

PACKAGE = Path(flashinfer_trace.__file__).parent
ALL = {family.name: family for family in all_families()}
#: Enough to tell what a change reaches.
FAMILIES = {name: one for name, one in ALL.items() if one.op_type in ("rmsnorm", "moe", "activation")}
RMSNORM = FAMILIES["rmsnorm"]
Code = dict[tuple[str, str], dict[str, str]]

PRINT = """
import json
from flashinfer_trace.families import all_families
from flashinfer_trace.harness.binding import judging_code
from flashinfer_trace.harness.family import Family
print(json.dumps([[f.name, k.label, judging_code(f, k)] for f in all_families() for k in f.kernels]))
"""


def code(families: Iterable[Family] = tuple(FAMILIES.values())) -> Code:
    return {(f.name, k.label): judging_code(f, k) for f in families for k in f.kernels}


def forget() -> None:
    for cached in (binding._tree, binding._by_line, binding._verdict, binding._of_family, binding._of_kernel):
        cached.cache_clear()


@pytest.fixture(scope="module")
def before() -> Code:
    return code()


@pytest.fixture
def stale(before: Code) -> Iterator[Callable[[], dict[str, set[str]]]]:
    """What has changed since, as part -> families, with nothing remembered."""

    def found() -> dict[str, set[str]]:
        forget()
        changed: dict[str, set[str]] = {}
        for (family, label), today in code().items():
            for part, digest in today.items():
                if digest != before[family, label][part]:
                    changed.setdefault(part, set()).add(family)
        return changed

    forget()
    yield found
    forget()


def edit(monkeypatch: pytest.MonkeyPatch, module: str, old: str, new: str) -> None:
    """Has a module read as if it said something else, in as many lines."""
    source, name = binding._source, f"flashinfer_trace.{module}"
    assert source(name).count(old) >= 1, f"{name} does not say {old!r}"
    assert old.count("\n") == new.count("\n")
    monkeypatch.setattr(binding, "_source", lambda one: source(one).replace(old, new) if one == name else source(one))


class _Rewritten(ast.NodeTransformer):
    """Another docstring for everything, and another text for every error."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Expr(ast.Constant("Says something else.\n\nAnd more."))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and not node.exc.keywords:
            node.exc.args = [ast.Constant("another message")] if len(node.exc.args) == 1 else node.exc.args
        return node


def test_other_docstrings_comments_and_messages_change_nothing(tmp_path: Path) -> None:
    before = code(ALL.values())
    package = shutil.copytree(PACKAGE, tmp_path / "flashinfer_trace", ignore=shutil.ignore_patterns("__pycache__"))
    for path in package.rglob("*.py"):  # unparsing drops comments, and moves every line
        tree = ast.parse(path.read_text(encoding="utf-8"))
        path.write_text(ast.unparse(ast.fix_missing_locations(_Rewritten().visit(tree))), encoding="utf-8")
    root = str(flashinfer_trace.find_root())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "FLASHINFER_TRACE_ROOT": root}
    found = subprocess.run(
        [sys.executable, "-c", PRINT], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    after = {(family, label): digests for family, label, digests in json.loads(found.stdout)}
    assert {key: (before[key], after[key]) for key in before if before[key] != after[key]} == {}
    assert after.keys() == before.keys()


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("harness.case", "poison = math.nan if", "poison = 0.0 if"),
        ("harness.case", "poisoned = poisoned_outputs(definition, inputs, seed)", "poisoned = {}"),
        ("harness.case", "wrong = misfits(definition, axes, actual, device_of(inputs)) or", "wrong ="),
        ("harness.case", "if policies[name].passes_zero(", "if not policies[name].passes_zero("),
        ("harness.case", "if not comparison.passed", "if comparison.ratio > 2"),
        ("sandbox.ownership", "return ", "return [] and "),
        ("format.precision", "yield", "yield 1"),
        ("harness.cases", "if missing() <= 0", "if missing() <= 1"),
    ],
)
def test_a_changed_verdict_makes_all_stale(before, stale, monkeypatch, module, old, new) -> None:
    edit(monkeypatch, module, old, new)
    assert (
        judging_code(RMSNORM, RMSNORM.kernels[0])["harness"] != before["rmsnorm", RMSNORM.kernels[0].label]["harness"]
    )


@pytest.mark.parametrize(
    ("module", "name", "value"), [(compare, "CONFIDENCE", 9.0), (case, "too_far", lambda error: 2 * error)]
)
def test_a_widened_bound_makes_stale_what_uses_it(stale, monkeypatch, module, name, value) -> None:
    monkeypatch.setattr(module, name, value)
    changed = stale()
    assert "rmsnorm" in changed["family" if module is compare else "harness"]


def test_a_comparison_that_is_more_lenient_makes_its_families_stale(stale, monkeypatch) -> None:
    edit(monkeypatch, "verdict.compare", "return float(excess.amax())", "return float(excess.amin())")
    assert "rmsnorm" in stale()["family"]


def test_a_changed_oracle_makes_its_own_runs_stale(stale, monkeypatch) -> None:
    edit(monkeypatch, "families.moe.deepseek", "smallest = GAP * (", "smallest = 2 * GAP * (")
    changed = stale()
    assert changed.keys() == {"family"}
    users = {"moe_fp8_block_scale_ds_routing", "moe_bf16_ds_routing", "moe_nvfp4_ds_routing"}
    assert changed["family"] == users, "two more draw their logits there"


def test_a_changed_adapter_makes_its_kernels_stale(before, stale, monkeypatch) -> None:
    edit(monkeypatch, "families.rmsnorm", 'inputs["weight"], eps, False)', 'inputs["weight"], eps, True)')
    forget()
    changed = {key for key, digests in code().items() if digests != before[key]}
    calls = {(f.name, k.label): getattr(k.call, "func", k.call).__name__ for f in FAMILIES.values() for k in f.kernels}
    assert changed == {key for key, name in calls.items() if name == "run_sgl"}
    assert {("rmsnorm", "torch.ops.sgl_kernel.rmsnorm"), ("rmsnorm", "flashinfer.norm.rmsnorm")} - changed == {
        ("rmsnorm", "flashinfer.norm.rmsnorm")
    }


def test_policies_that_differ_or_are_missing_show() -> None:
    kernel, (name, policy) = RMSNORM.kernels[0], next(iter(RMSNORM.compare.items()))
    wider = dataclasses.replace(policy, bound=lambda expected, dtype: expected.value * 0 + 1.0)
    changes = [{"compare": {}}, {"compare": {name: wider}}, {"relations": (lambda *given: [],)}]
    original = judging_code(RMSNORM, kernel)
    for change in changes:
        assert judging_code(dataclasses.replace(RMSNORM, **change), kernel)["family"] != original["family"], change
    own = dataclasses.replace(kernel, compare={name: wider})
    assert judging_code(RMSNORM, own)["family"] != original["family"]
    for change in ({"twin": {}}, {"unverified": "why"}, {"faults": ()}, {"kernels": ()}):
        assert judging_code(dataclasses.replace(RMSNORM, **change), kernel) == original, change


@pytest.mark.parametrize("family", ALL.values(), ids=ALL)
def test_the_oracle_the_inputs_and_the_adapters_are_bound(family) -> None:
    shared = binding._of_family(binding._Same(family)).parts
    for function in (family.oracle, family.make_inputs, family.plans, family.corners):
        plain = getattr(function, "func", function)
        assert any(part.startswith(f"{plain.__module__}.{plain.__qualname__}") for part in shared), plain
    for kernel in family.kernels:
        plain = getattr(kernel.call, "func", kernel.call)
        parts = binding.Closure(kernel, methods=()).parts
        assert any(part.startswith(f"{plain.__module__}.{plain.__qualname__}") for part in parts), kernel.label
