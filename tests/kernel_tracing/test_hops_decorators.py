"""Hops through decorators: with and without arguments, for debugging, wrapping methods, registering operators."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from synthetic import Hop, chains, check, trace_files

from tools.kernel_tracing.verify.check import check as check_frames

_IMPORTS = "import functools, os\nimport torch\nfrom torch import nn\nfrom sgl_kernel import good, other, wrong\n"
_DEBUG = """
LEVEL = int(os.environ.get("LEVEL", "0"))
def debug(function=None, *, name=None):
    if LEVEL == 0:
        if function is None:
            return lambda f: f
        return function
    def decorator(f):
        @functools.wraps(f)
        def wrapper(*args, **kwargs):
            print([arg for arg in args])
            return f(*args, **kwargs)
        return wrapper
    return decorator if function is None else decorator(function)
"""
_TWO_METHODS = """
class First:
    @logged
    def run(self, x, kernel):
        return self.work(x, kernel)
    def work(self, x, kernel):
        return kernel(x)
class Second(First):
    def work(self, x, kernel):
        return other(x)
class Third(First):
    def work(self, x, kernel):
        return wrong(x)
class Tiny(nn.Module):
    def __init__(self):
        self.first = First()
        self.unused = Third()
        self.second = Second()
    def one(self, x):
        return self.first.run(x, good)
    def two(self, x):
        return self.second.run(x, None)
    def forward(self, x):
        return self.one(x) + self.two(x)
EntryClass = Tiny
"""


def _model(body: str) -> dict[str, str]:
    return {"models/tiny.py": _IMPORTS + body}


HOPS = [
    Hop(
        "debugging decorator, with and without arguments, returns what it is given",
        _model(
            _DEBUG
            + """
@debug
def plain(x):
    return good(x)
@debug(name="named")
def named(x):
    return other(x)
def idle(x):
    return wrong(x)
class Tiny(nn.Module):
    def forward(self, x):
        return named(plain(idle))
EntryClass = Tiny
"""
        ),
        {"good": ("plain", "Tiny.forward"), "other": ("named", "Tiny.forward")},
    ),
    Hop(
        "debugging decorator, called",
        _model(
            _DEBUG
            + """
def plain(x):
    return good(x)
def idle(x):
    return wrong(x)
class Tiny(nn.Module):
    def __init__(self):
        self.run = debug(plain, name="plain")
        self.never = debug(idle)
    def forward(self, x):
        return self.run(self.never)
EntryClass = Tiny
"""
        ),
        {"good": ("plain", "Tiny.forward")},
    ),
    Hop(
        "decorator that returns a partial of itself when it gets no function",
        _model("""
def traced(function=None, *, level=1):
    if function is None:
        return functools.partial(traced, level=level)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper
@traced
def plain(x):
    return good(x)
@traced(level=2)
def levelled(x):
    return other(x)
@traced
def idle(x):
    return wrong(x)
class Tiny(nn.Module):
    def forward(self, x):
        return levelled(plain(x))
EntryClass = Tiny
"""),
        {
            "good": ("plain", "traced.wrapper", "Tiny.forward"),
            "other": ("levelled", "traced.wrapper", "Tiny.forward"),
        },
    ),
    Hop(
        "wrapper that is not a debugging wrapper keeps its frame, and keeps the receivers of its method separate",
        _model(
            """
def logged(method):
    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)
    return wrapper
"""
            + _TWO_METHODS
        ),
        {
            "good": ("First.work", "First.run", "logged.wrapper", "Tiny.one", "Tiny.forward"),
            "other": ("Second.work", "First.run", "logged.wrapper", "Tiny.two", "Tiny.forward"),
        },
    ),
    Hop(
        "operator registered for a function of another library does what the function does",
        {
            **_model("""
from sglang.srt.custom import register_custom_op_from_extern
fast = register_custom_op_from_extern(good, op_name="tiny_good")
named = register_custom_op_from_extern(other)
unused = register_custom_op_from_extern(wrong, op_name="tiny_wrong")
class Tiny(nn.Module):
    def forward(self, x):
        return named(torch.ops.sglang.tiny_good(x))
EntryClass = Tiny
"""),
            "custom.py": """
                import torch
                def register_custom_op_from_extern(fn, *, op_name=None):
                    return getattr(torch.ops.sglang, op_name or fn.__name__)
                """,
        },
        {"good": ("Tiny.forward",), "other": ("Tiny.forward",)},
    ),
]


@pytest.mark.parametrize("hop", HOPS, ids=lambda hop: hop.name)
def test_hop(hop: Hop, tmp_path: Path) -> None:
    check(hop, trace_files(tmp_path, hop.files))


def test_receivers_of_a_wrapped_method_are_not_mixed_up(tmp_path: Path) -> None:
    found = chains(trace_files(tmp_path, HOPS[3].files))
    assert all("Tiny.one" in chain for chain in found["good"])
    assert all("Tiny.two" in chain for chain in found["other"])


def test_a_path_that_grows_for_ever_ends(tmp_path: Path) -> None:
    body = """
import library
class Tiny(nn.Module):
    def __init__(self):
        self.node = library.first
    def forward(self, x):
        self.node = self.node.next
        self.node.run(x)
        return good(x)
EntryClass = Tiny
"""
    document = trace_files(tmp_path, _model(body))
    assert chains(document)["good"] == [("Tiny.forward",)]


@pytest.mark.parametrize(("count", "marked"), [(150, False), (151, True)])
def test_values_that_are_not_distinguished_are_marked(tmp_path: Path, count: int, marked: bool) -> None:
    functions = "".join(f"def f{number}(x):\n    return good(x)\n" for number in range(count))
    body = f"""
{functions}
def run(function, x):
    return function(x)
class Tiny(nn.Module):
    def __init__(self):
        self.functions = [{", ".join(f"f{number}" for number in range(count))}]
    def forward(self, x):
        for function in self.functions:
            run(function, x)
EntryClass = Tiny
"""
    document = trace_files(tmp_path, _model(body))
    frames = [frame for kernel in document["kernels"] for chain in kernel["chains"] for frame in chain]
    reasons = {frame.get("approximate", "") for frame in frames if frame["call"] == "run(function, x)"}
    assert reasons == ({"called with more than 150 values of function"} if marked else {""})


def test_invalid_escapes_in_sources_are_not_reported(tmp_path: Path) -> None:
    body = """
PATTERN = '\\d'
class Tiny(nn.Module):
    def forward(self, x):
        return good(x)
EntryClass = Tiny
"""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        document = trace_files(tmp_path, _model(body))
        del document["problems"]
        assert check_frames(document, tmp_path) == []
    assert chains(document)["good"] == [("Tiny.forward",)]
