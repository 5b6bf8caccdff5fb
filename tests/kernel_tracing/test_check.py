"""The checker accepts correct chains with every kind of hop, and rejects links that the sources do not support."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect

import pytest
from check_package import (
    CALL_MIXED,
    CALLBACK,
    FILES,
    LAYERS,
    LINEAR,
    MIXED,
    MODEL,
    PREPARE,
    RIGHT,
    frame,
    make_trace,
    write,
)

from tools.kernel_tracing.verify.check import check


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    write(root, FILES)
    return root


@pytest.mark.parametrize("hop", RIGHT)
def test_right_chains_are_accepted(sources, hop):
    assert check(make_trace(sources, RIGHT[hop]), sources) == []


def test_all_of_them_at_once(sources):
    assert check(make_trace(sources, *RIGHT.values()), sources) == []


WRONG_LINKS = {
    "another class's forward": [frame(LAYERS, "Other.forward", "gemm(x, x)"), MIXED],
    "a method that is not entered by a call": [frame(LAYERS, "Other.helper", "gemm(x, None)"), MIXED],
    "a frame left out": [LINEAR, CALL_MIXED],
    "the chain turned round": [LINEAR, CALL_MIXED, MIXED],
    "a function that is registered nowhere": [
        frame(LAYERS, "unrelated", "gemm(x, 3)"),
        frame(MODEL, "Layer.forward", "self.plain(x)"),
    ],
    "a function that is passed nowhere": [
        frame(LAYERS, "unrelated", "gemm(x, 3)"),
        frame(MODEL, "Layer.apply_to", "function(x)"),
    ],
    "another function of the module": [
        frame(LAYERS, "unrelated", "gemm(x, 3)"),
        frame(MODEL, "Runner.run", "layers.callback(x)"),
    ],
    "forward instead of the constructor": [*PREPARE, MIXED],
    "another custom op": [CALLBACK, frame(MODEL, "Layer.forward", "torch.ops.sglang.custom_op(x)")],
    "a function of the same name elsewhere": [LINEAR, frame(MODEL, "Runner.run", "layers.callback(x)")],
    "a wrapper that is not around it": [
        frame(LAYERS, "guarded.wrapper", "gemm(arguments, 4)"),
        frame(MODEL, "Layer.forward", "self.plain(x)"),
    ],
}


@pytest.mark.parametrize("link", WRONG_LINKS)
def test_wrong_links_are_found(sources, link):
    chain = WRONG_LINKS[link]
    problems = check(make_trace(sources, chain), sources)
    assert problems, link
    assert all("no evidence that" in problem for problem in problems)
    assert all(any(part["call"] in problem for part in chain[1:]) for problem in problems)


def test_an_unrelated_method_of_the_same_name(sources):
    chain = [
        frame(MODEL, "Strange.run", "x", line=20),
        frame(MODEL, "Layer.forward", "self.runner.run(x)"),
    ]
    assert any("no call `x` begins on this line" in problem for problem in check(make_trace(sources, chain), sources))


def test_the_checker_does_not_use_the_tracer():
    """The checker shares only the layout and the hash of source trees with the tracer."""
    parts = ("arguments", "classes", "files", "links", "names", "source", "values")
    allowed = {*(f"tools.kernel_tracing.verify.check_{part}" for part in parts)}
    allowed |= {"tools.kernel_tracing.source.sources", "tools.shared.source_packages"}
    waiting, seen = ["tools.kernel_tracing.verify.check"], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(name)))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tools."):
                assert node.module in allowed, f"{name} imports {node.module}"
                waiting += [node.module] if node.module not in seen else []
    assert seen == allowed | {"tools.kernel_tracing.verify.check"}


def test_the_garbage_collector_is_left_as_it_was(sources):
    assert gc.isenabled()
    check(make_trace(sources, [LINEAR, MIXED]), sources)
    assert gc.isenabled()
