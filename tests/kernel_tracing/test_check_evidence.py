"""The checker finds the evidence for a call among hundreds of places with the same names, and none where none is."""

from __future__ import annotations

import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
from check_package import FILES, LINEAR, make_trace, write

from tools.kernel_tracing.verify import check_files
from tools.kernel_tracing.verify.check import check
from tools.kernel_tracing.verify.check_source import SourceFile, read

SERVED = "sglang/srt/served.py"
#: More places than the checker follows from one call.
MANY = 900
CROWD = "sglang/srt/crowd.py"
#: Values, models, and routines for the sake of their names: objects of any of these classes have such an attribute.
CROWD_TEXT = "from sglang.srt.layers import Other\n" + "".join(
    f"class Setting{number}:\n"
    f"    def __init__(self, given{number}):\n"
    f"        self.value = given{number}\n"
    f"        self.model = Other()\n"
    for number in range(MANY)
)
SERVED_TEXT = """\
    from typing import Callable, Dict

    import torch
    from outside import make_layers
    from sglang.srt.layers import Linear, Other

    class Pool:
        functions: Dict[str, Callable] = {}

        @classmethod
        def register(cls, one, other, function):
            cls.functions[(one, other)] = function

        @classmethod
        def get(cls, one, other):
            key = (one, other)
            step0 = cls.functions.get(key)
            STEPS
            return step12

    def register(one, other):
        def decorator(function: Callable):
            entry = function
            Pool.register(one, other, entry)
            return function
        return decorator

    @register("a", "b")
    def pooled(x):
        return Linear.forward(Linear(1), x)

    def not_pooled(x):
        return Linear.forward(Linear(2), x)

    class Runner:
        def __init__(self, backend):
            self.function = Pool.get(backend.value, backend.value)

        def run(self, x):
            return self.function(x)

    class Stack(torch.nn.Module):
        def __init__(self, count):
            def one_layer(index):
                kind = Linear
                return kind(index)

            self.stack, self.first, self.last = make_layers(count, one_layer)

        def forward(self, x):
            for index in range(self.first, self.last):
                layer = self.stack[index]
                x = layer(x)
            return x

    class Inner(torch.nn.Module):
        def __init__(self):
            self.model = Linear(1)

    class Outer(torch.nn.Module):
        def __init__(self):
            self.inner = Inner()

        def forward(self, x):
            return routine(x, language_model=self.inner.model)

    class Parent(torch.nn.Module):
        def __init__(self, x, kind):
            self.made = kind(x)

        def forward(self, x):
            return routine(x, language_model=self.made)

    class Child(Parent):
        def __init__(self, x, kind=Linear):
            super().__init__(x, kind)

    def routine(x, language_model):
        return language_model(x)
    """.replace("STEPS", "; ".join(f"step{number} = step{number - 1}" for number in range(1, 13)))
CALLERS = "sglang/srt/callers.py"
#: Other callers of the routine, which hand it other models.
CALLERS_TEXT = "from sglang.srt.served import routine\n" + "".join(
    f"class Caller{number}:\n"
    f"    def forward(self, x):\n"
    f"        return routine(x, language_model=self.part{number}.model)\n"
    for number in range(MANY)
)
OTHER = {"file": "sglang/srt/layers.py", "line": 27, "function": "Other.forward", "call": "gemm(x, x)"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    write(root, FILES | {SERVED: SERVED_TEXT, CROWD: CROWD_TEXT, CALLERS: CALLERS_TEXT})
    return root


def served(function: str, call: str) -> dict[str, Any]:
    """The frame of a call of which the text occurs once in the served module."""
    lines = textwrap.dedent(SERVED_TEXT).splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if call in text)
    return {"file": SERVED, "line": line, "function": function, "call": call}


POOLED = served("pooled", "Linear.forward(Linear(1), x)")
RUN = served("Runner.run", "self.function(x)")
LAYER = served("Stack.forward", "layer(x)")
ROUTINE = served("routine", "language_model(x)")
OF_OUTER = served("Outer.forward", "routine(x, language_model=self.inner.model)")
OF_PARENT = served("Parent.forward", "routine(x, language_model=self.made)")
RIGHT = {
    "a registry that is asked with attributes that hundreds of objects have": [LINEAR, POOLED, RUN],
    "layers that an unknown function makes with one that it is given": [LINEAR, LAYER],
    "a parameter, by the frame that calls the function": [LINEAR, ROUTINE, OF_OUTER],
    "a class that a subclass hands to the constructor": [LINEAR, ROUTINE, OF_PARENT],
}
WRONG = {
    "a function that is not in the registry": [LINEAR, served("not_pooled", "Linear.forward(Linear(2), x)"), RUN],
    "layers of another class": [OTHER, LAYER],
}


@pytest.mark.parametrize("case", RIGHT)
def test_evidence_is_found(sources: Path, case: str) -> None:
    assert check(make_trace(sources, RIGHT[case]), sources) == []


@pytest.mark.parametrize("case", WRONG)
def test_what_has_no_evidence_is_reported(sources: Path, case: str) -> None:
    (problem,) = check(make_trace(sources, WRONG[case]), sources)
    assert f"no evidence that `{WRONG[case][-1]['call']}`" in problem


def test_files_that_are_searched_in_vain_are_parsed_once_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Syntax trees are most of the memory that a check takes. These files only mention what is searched."""
    readers = {f"sglang/srt/reader{number}.py": "def read(x):\n    return x.model.made\n" for number in range(40)}
    write(tmp_path, FILES | {SERVED: SERVED_TEXT} | readers)
    parsed: list[tuple[str, weakref.ref[SourceFile]]] = []
    kept: set[str] = set()

    def noted(name: str, text: str) -> SourceFile:
        kept.update(file for file, reference in parsed if reference() is not None)
        source = read(name, text)
        parsed.append((name, weakref.ref(source)))
        return source

    monkeypatch.setattr(check_files, "read", noted)
    assert check(make_trace(tmp_path, *RIGHT.values()), tmp_path) == []
    assert sorted(file for file, _ in parsed if file in readers) == sorted(readers)
    assert SERVED in kept and not kept & set(readers)
