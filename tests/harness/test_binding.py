"""Evidence is stale when code that decides a verdict changed, and only then."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import flashinfer_trace
from flashinfer_trace.families import all_families
from flashinfer_trace.harness import binding, cases
from flashinfer_trace.harness.binding import judging_code
from flashinfer_trace.harness.family import Family
from flashinfer_trace.harness.job import Job
from flashinfer_trace.harness.verify import verify_together
from flashinfer_trace.verdict import compare, judgment

PACKAGE = Path(flashinfer_trace.__file__).parent
ALL = {family.name: family for family in all_families()}
#: Enough to tell what a change reaches.
FAMILIES = {name: one for name, one in ALL.items() if one.op_type == "rmsnorm" or name.startswith(("moe_topk", "silu"))}
FAMILIES |= {name: one for name, one in ALL.items() if name.endswith("_routing") or "fp8_block_scale" in name}
RMSNORM = FAMILIES["rmsnorm"]
#: Rooms that what judges evidence never imports.
UNUSED = ("cli", "judging")
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
    of_code = (binding._tree, binding._by_line, binding._classes, binding._verdict, binding._drawing)
    for cached in (*of_code, binding._of_family, binding._of_kernel):
        cached.cache_clear()


@pytest.fixture(scope="module")
def before() -> Code:
    return code()


@pytest.fixture
def stale(before: Code) -> Iterator[Callable[[], dict[str, set[str]]]]:
    """The changes since, as part -> families, with nothing remembered."""

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
    package = shutil.copytree(
        PACKAGE, tmp_path / "flashinfer_trace", ignore=shutil.ignore_patterns("__pycache__", *UNUSED)
    )
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
        ("verdict.outputs", "poison = math.nan if", "poison = 0.0 if"),
        ("harness.case", "poisoned = poisoned_outputs(definition, inputs, seed)", "poisoned = {}"),
        ("harness.case", "wrong = misfits(definition, axes, actual, device_of(inputs)) or", "wrong ="),
        ("verdict.judgment", "if policies[name].passes_zero(", "if not policies[name].passes_zero("),
        ("verdict.judgment", "if not comparison.passed", "if comparison.ratio > 2"),
        ("sandbox.ownership", "return ", "return [] and "),
        ("format.precision", "yield", "yield 1"),
        ("harness.case", "result.failures += describe(", "result.failures = describe("),
        ("verdict.random_words", "numbers ^= (numbers >> shift) & (ALL >> shift)", "numbers ^= numbers >> shift"),
    ],
)
def test_a_changed_verdict_makes_all_stale(before, stale, monkeypatch, module, old, new) -> None:
    edit(monkeypatch, module, old, new)
    assert (
        judging_code(RMSNORM, RMSNORM.kernels[0])["harness"] != before["rmsnorm", RMSNORM.kernels[0].label]["harness"]
    )


@pytest.mark.parametrize(
    ("module", "name", "value"), [(compare, "CONFIDENCE", 9.0), (judgment, "too_far", lambda error: 2 * error)]
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
    judging, drawing = binding._of_family(binding._Same(family))
    for function in (family.oracle, family.make_inputs):
        plain = getattr(function, "func", function)
        assert any(part.startswith(f"{plain.__module__}:{plain.__qualname__}") for part in judging.parts), plain
    for name in ("plans", "corners", "plan_for_axes"):
        assert any(part.endswith(f"{type(family.plan).__qualname__}.{name}") for part in drawing.parts), name
    for kernel in family.kernels:
        plain = getattr(kernel.call, "func", kernel.call)
        parts = binding.Closure(kernel, methods=()).parts
        assert any(part.startswith(f"{plain.__module__}:{plain.__qualname__}") for part in parts), kernel.label


def test_a_method_that_a_family_names_is_bound(before, stale, monkeypatch) -> None:
    edit(
        monkeypatch,
        "harness.inputs",
        "every_bit = torch.full([dtype.itemsize], 0xFF",
        "every_bit = torch.full([dtype.itemsize], 0xFE",
    )
    changed = stale()
    assert changed.keys() == {"plans", "harness"}


def test_code_that_draws_plans_is_bound_apart(before, stale, monkeypatch) -> None:
    edit(monkeypatch, "harness.plans", "usual[name] = max(low, min(count.corner, high))", "usual[name] = low")
    changed = stale()
    assert changed.keys() == {"plans"} and "rmsnorm" in changed["plans"]


def test_a_function_in_another_module_is_the_same(before, stale, monkeypatch) -> None:
    """As after a move: its source, and the names that its callers have for it, are there and no longer here."""
    read, sources = binding._source, dict[str, str]()
    monkeypatch.setattr(binding, "_source", lambda module: sources.get(module) or read(module))
    for module, function in ((judgment, "vacuity"), (compare, "summation_error")):
        moved = types.ModuleType(f"flashinfer_trace.verdict.moved_{function}")
        source = inspect.getsource(getattr(module, function))
        vars(moved).update({name: value for name, value in vars(module).items() if not name.startswith("__")})
        monkeypatch.setitem(sys.modules, moved.__name__, moved)
        sources[moved.__name__] = source
        exec(compile(source, moved.__name__, "exec"), vars(moved))
        original = getattr(module, function)
        for each in list(sys.modules.values()):
            if getattr(each, "__name__", "").startswith("flashinfer_trace.") and vars(each).get(function) is original:
                monkeypatch.setattr(each, function, getattr(moved, function))
        assert stale() == {}, function


def test_cases_are_drawn_again_without_running_them() -> None:
    """Of kernels that share cases, and of one that has some of its own; another plan shows."""
    family = ALL["gqa_paged_decode"]
    definition = flashinfer_trace.load("gqa_paged_decode_h32_kv8_d128_ps64")
    first, second = family.kernels_of(definition)[:2]
    run = {"call": lambda d, inputs, _: d.name_outputs(d.compiled(*inputs.values())), "compare": {}}
    less = dataclasses.replace(first, **run)
    more = dataclasses.replace(second, **run, plan_options=Further(), common=less.plan_options, limits=less.limits)
    jobs = [Job(definition, family, kernel) for kernel in (less, more)]
    reports = verify_together(jobs, examples=40, seed=3)
    assert [(report.status, len(report.plans.counts)) for report in reports] == [("passed", 1), ("passed", 2)]
    for job, report in zip(jobs, reports, strict=True):
        assert cases.drawn_again(job, 3, report.plans) == report.plans
        assert cases.drawn_again(job, 4, report.plans) != report.plans
        assert sum(report.plans.counts) == report.cases + report.vacuous
    other = dataclasses.replace(family, plan=family.plan.with_corners(lambda request: []))
    assert cases.drawn_again(Job(definition, other, less), 3, reports[0].plans) != reports[0].plans


@dataclasses.dataclass(frozen=True)
class Further:
    """Options of a kernel that takes more than another."""
