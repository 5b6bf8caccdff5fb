"""Parts that constants of a shared reference switch off leave no trace in the text of a family."""

from __future__ import annotations

import ast
import textwrap

import pytest

from flashinfer_trace import definitions
from flashinfer_trace.format.folding import FoldingError, fold, is_switch, literals
from flashinfer_trace.format.reference import ReferenceSourceError, compile_reference, render

SHARED = '''"""A sum[[WEIGHTS:, with weights]][[LIMIT:, limited to LIMIT]].

Every value counts once. [[not WEIGHTS: None has a weight.]][[LIMIT == 5: Five is the limit of most.]]

[[LIMIT: What is beyond the limit is cut off.]]
"""

import math

import torch

N = 4
LIMIT = 5
WEIGHTS = None
SIGN = True


def limited(x, limit):
    return min(x, limit)


def total(x, weights: list | None):
    """The sum."""
    # All of them.
    return sum(x) if weights is None else math.fsum(a * b for a, b in zip(x, weights))


def run(
    x: list,
    weights: list | None,
    scale: float,
) -> float:
    """x [N].

    [[WEIGHTS: weights [N].]]
    """
    result = total(x, weights)
    if LIMIT is not None and SIGN:
        # At the most.
        result = limited(result, LIMIT)
    elif weights is None:
        result = result + 1
    else:
        result = result + 2
    if not SIGN or scale > 1:
        result = result * scale
    return result
'''


def shared(**constants: str) -> str:
    source = SHARED
    for name, value in constants.items():
        lines = [line for line in source.splitlines() if line.startswith(f"{name} = ")]
        source = source.replace(lines[0], f"{name} = {value}")
    return source


def test_what_is_off_is_gone_with_what_only_it_used():
    assert (
        fold(shared())
        == '''"""A sum, limited to LIMIT.

Every value counts once. None has a weight. Five is the limit of most.

What is beyond the limit is cut off.
"""

import torch

N = 4
LIMIT = 5


def limited(x, limit):
    return min(x, limit)


def total(x):
    """The sum."""
    # All of them.
    return sum(x)


def run(
    x: list,
    scale: float,
) -> float:
    """x [N]."""
    result = total(x)
    # At the most.
    result = limited(result, LIMIT)
    if scale > 1:
        result = result * scale
    return result
'''
    )


@pytest.mark.parametrize(
    ("constants", "arguments", "value", "gone", "kept"),
    [
        ({}, ([1, 2], 1.0), 3, ["math", "weights", "SIGN", "elif"], ["limited"]),
        ({"WEIGHTS": "True"}, ([1, 2], [3, 4], 1.0), 5, ["WEIGHTS", "if weights"], ["weights: list,", "import math"]),
        ({"LIMIT": "None"}, ([1, 2], 2.0), 8.0, ["LIMIT", "limited", "else"], ["result + 1"]),
        ({"LIMIT": "None", "WEIGHTS": "True"}, ([1], [9], 1.0), 11.0, ["result + 1", "limit"], ["result + 2"]),
        ({"SIGN": "False"}, ([1, 2], 3.0), 12.0, ["SIGN", "limited", "scale > 1"], ["result + 1", "result * scale"]),
    ],
)
def test_each_choice_computes_what_it_says(constants, arguments, value, gone, kept):
    folded = fold(shared(**constants))
    body = folded.partition("import torch")[2] + folded.partition("import torch")[0].partition('"""\n')[2]
    assert not [text for text in gone if text in body] and not [text for text in kept if text not in folded]
    assert fold(folded) == folded and "[[" not in folded
    namespace: dict[str, object] = {}
    exec(folded, namespace)
    assert namespace["run"](*arguments) == value


def test_a_source_without_switches_stays_as_it_is():
    source = "import math\nUNUSED = 1\n\n\ndef other():\n    return 1\n\n\ndef run(x):\n    return x if x else 0\n"
    assert fold(source) == source


def test_long_text_is_filled_again():
    words = " ".join(["word"] * 40)
    folded = fold(f'"""Title.\n\n[[ON: First.]] {words}\n"""\n\nON = True\n\n\ndef run():\n    return 1\n')
    assert folded.startswith('"""Title.\n\n' + textwrap.fill(f"First. {words}", 120) + '\n"""')


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("    return result\n", "    return result, WEIGHTS\n", "WEIGHTS is read where the switches do not decide"),
        ("total(x, weights)", "total(x, [1])", "line .*: pass weights or None, by position, for weights of total"),
        ("    scale: float,", "    scale: float | None,", "the optional parameter scale needs a constant SCALE"),
        ("[[LIMIT == 5:", "[[LIMIT > 5:", "the constants do not decide the condition of"),
        ("if not SIGN or scale > 1:", "if (\n        not SIGN\n    ):", "write the condition on one line"),
    ],
)
def test_what_cannot_be_folded_is_named(old, new, told):
    assert SHARED.count(old) == 1
    with pytest.raises(FoldingError, match=told):
        fold(SHARED.replace(old, new))


def test_a_family_is_the_run_of_a_sibling_with_constants_of_its_own(tmp_path):
    directory = tmp_path / "reference" / "toy"
    directory.mkdir(parents=True)
    (directory / "_shared.py").write_text(
        "import math\n\nDOUBLED = None\n\n\ndef root(x):\n    if DOUBLED is not None:\n        x = 2 * x\n"
        "    return math.sqrt(x)\n"
    )
    (directory / "toy.py").write_text(
        "from ._shared import root\n\nN = 1\nEPS = 1e-6\n\n\ndef run(x):\n    return root(x) + N * EPS"
    )
    (directory / "toy_doubled.py").write_text("from .toy import run as run\n\nEPS = 1e-5\nDOUBLED = True\n")
    plain, doubled = (render(tmp_path, "toy", name, {"n": 7}) for name in ("toy", "toy_doubled"))
    assert "2 * x" not in plain and "if" not in doubled and "DOUBLED" not in plain + doubled
    assert "EPS = 1e-6" in plain and "EPS = 1e-5" in doubled and plain.count("import math") == 1
    assert compile_reference(doubled, "toy")(8) == 4 + 7 * 1e-5
    (directory / "toy_doubled.py").write_text("from .toy import run as run\n\nEPSILON = 1e-5\n")
    with pytest.raises(ReferenceSourceError, match=r"toy_doubled\.py: sets EPSILON, which toy\.py does not have"):
        render(tmp_path, "toy", "toy_doubled", {})
    (directory / "toy_other.py").write_text("from .gone import run as run\n")
    with pytest.raises(ReferenceSourceError, match=r"toy_other\.py:1: imports from toy/gone\.py, which does not exist"):
        render(tmp_path, "toy", "toy_other", {})


def test_no_embedded_reference_shows_that_it_was_folded():
    found = list(definitions())
    assert len(found) > 1000
    for definition in found:
        assert "[[" not in definition.reference and "| None" not in definition.reference, definition.name
        assert not [v for v in literals(ast.parse(definition.reference)).values() if is_switch(v)], definition.name
