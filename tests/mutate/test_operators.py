"""Each operator makes the changes that it says, and ids follow from content alone."""

from __future__ import annotations

import ast
import textwrap

import pytest

import flashinfer_trace
from flashinfer_trace.families import family_of
from tools.mutate.cases import known_families, representative
from tools.mutate.mutants import OPERATORS, Location, locations, mutants
from tools.mutate.operators import Place

SIZE = 100


def changes(operator, body, arguments="x: T, y: T, n: int"):
    """The function body after each change that an operator makes, normalized by `ast.unparse`."""
    tree = ast.parse(f"def run({arguments}):\n{textwrap.indent(body, '    ')}")
    found = []
    for location in list(locations(tree, set())):
        place = Place(location.parent, location.field, location.function, SIZE)
        for replacement in OPERATORS[operator](location.node, place):
            location.put(replacement)
            found.append(ast.unparse(ast.fix_missing_locations(tree)).split("\n", 1)[1])
            location.put(location.node)
    return [textwrap.dedent(text) for text in found]


@pytest.mark.parametrize(
    ("operator", "body", "expected"),
    [
        ("arithmetic", "return x * y", ["return x / y", "return x + y"]),
        ("operand", "return x - y", ["return x", "return y", "return y - x"]),
        ("sign", "return -x", ["return x"]),
        ("comparison", "return x < y", ["return x <= y", "return x >= y", "return x == y"]),
        ("number", "return x[3]", ["return x[4]", "return x[2]", "return x[6]", "return x[0]"]),
        ("number", "return x.sum(-1)", ["return x.sum(0)", "return x.sum(-2)"]),
        ("truth", "return f(True)", ["return f(False)"]),
        ("index", "return x[n]", ["return x[n + 1]", "return x[n - 1]"]),
        ("slice", "return x[:n]", ["return x[:n + 1]", "return x[:n - 1]", "return x[:]"]),
        ("exchanged_names", "return x + n", ["return y + n"]),
        ("exchanged_elements", "a, b = f(n)", ["b, a = f(n)"]),
        ("conditional", "return 1 if n else 2", ["return 1", "return 2"]),
        ("related", "return x.amax()", ["return x.amin()", "return x.mean()"]),
        ("precision", "return x.to(torch.float64)", ["return x.to(torch.float32)"]),
        ("precision", "return x.double()", ["return x.float()"]),
        ("dropped_call", "return x.abs()", ["return x"]),
        ("dropped_call", "return torch.exp(x)", ["return x"]),
        ("dropped_argument", "return f(x, y, device=x.device)", ["return f(x, device=x.device)"]),
        ("dropped_argument", "return x.sort(stable=True)", ["return x.sort()"]),
        ("exchanged_arguments", "return f(x, y)", ["return f(y, x)"]),
        (
            "part_of_a_dimension",
            "return x.sum(-1)",
            ["return x[..., :100].sum(-1)", "return x[..., :-1].sum(-1)"],
        ),
        ("transposed", "return x.T", ["return x"]),
        ("deleted", "assert x.shape == y.shape\nreturn x", ["pass\nreturn x"]),
        ("deleted", "a = x\nreturn a", []),
        ("deleted", "x = y\nreturn x", ["pass\nreturn x"]),
        ("condition", "if n:\n    f()", ["if not n:\n    f()", "if True:\n    f()"]),
        (
            "loop",
            "for i in range(n):\n    f(i)",
            ["for i in list(range(n))[:-1]:\n    f(i)", "for i in list(range(n))[1:]:\n    f(i)"],
        ),
        ("one_result_twice", "return (x, y)", ["return (x, x)", "return (y, y)"]),
        ("scaled", "return x * y", ["return x * y * 1.015625"]),
        ("scaled", "return x.shape[0] * n + 2", []),
        ("rounded", "return x.exp()", ["return x.exp().to(torch.float8_e4m3fn).to(torch.float32)"]),
        ("reordered", "return x @ y", ["return (x @ y).roll(1, 0)", "return (x @ y).roll(1, -1)"]),
        (
            "unwritten",
            "x[0] = y",
            [
                "x[0] = torch.cat([y[:-1], y[-1:] * 0], dim=0)",
                "x[0] = torch.cat([y[..., :-1], y[..., -1:] * 0], dim=-1)",
            ],
        ),
        ("other_choice", "return torch.where(n, x, y)", ["return x", "return y"]),
        ("boundary", "return x < n", ["return x < n + 1", "return x < n - 1"]),
        ("rounds", "for i in range(n):\n    f(i)", ["for i in list(range(n))[::2]:\n    f(i)"]),
        ("earlier_name", "a = x\nb = y\nreturn b", ["a = x\nb = y\nreturn a"]),
    ],
)
def test_an_operator_changes_what_it_says(operator, body, expected):
    assert changes(operator, body) == expected


def test_every_operator_is_tested():
    marks = test_an_operator_changes_what_it_says.pytestmark
    assert {parameters[0] for parameters in marks[0].args[1]} == OPERATORS.keys()


def test_placement_on_a_device_is_left_alone():
    assert changes("dropped_call", "return f(x, device=g(y))") == ["return x"]


@pytest.fixture(scope="module")
def rmsnorm():
    family = known_families()["rmsnorm"]
    return representative(family), family


def test_mutants_are_deterministic_and_differ_from_each_other_and_from_the_reference(rmsnorm):
    first, again = mutants(*rmsnorm), mutants(*rmsnorm)
    assert first == again
    assert len({mutant.id for mutant in first}) == len(first)
    assert len({mutant.source for mutant in first}) == len(first) > 50
    original = ast.unparse(ast.parse(rmsnorm[0].reference))
    assert all(mutant.source != original and mutant.before != mutant.after for mutant in first)


def test_constants_of_axes_are_left_alone_and_others_are_not(rmsnorm):
    changed = {mutant.before for mutant in mutants(*rmsnorm) if mutant.function == "<module>"}
    assert changed == {"EPS = 1e-06"}


def test_shared_code_has_the_same_content_hash_in_every_family():
    families = known_families()
    contents = [
        {mutant.content for mutant in mutants(representative(families[name]), families[name])}
        for name in ("rmsnorm", "fused_add_rmsnorm")
    ]
    assert contents[0] & contents[1]


def test_every_family_has_a_representative_of_its_own():
    for name, family in known_families().items():
        definition = representative(family)
        assert family_of(flashinfer_trace.load(definition.name)).name == name
        assert isinstance(next(locations(ast.parse(definition.reference), set())), Location)
