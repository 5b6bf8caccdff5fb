"""Calls of functions as texts: what the words stand for, and where outputs come from."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flashinfer_trace.families.calls import called, calling

DEFINITION = SimpleNamespace(const_axes={"k": 7}, outputs=dict.fromkeys(("y", "x_out")))


def arguments(*positional, **by_name):
    return positional, by_name


def test_words_are_names_with_attributes_literals_and_keywords():
    known = {"a": torch.arange(6.0).view(2, 3), "scale": 2}
    text = "a.T.contiguous k -1e-10 'x' [1,2] scale= b=a.dtype c=d|None"
    (first, *rest), by_name = called(arguments, text, DEFINITION, known)
    assert torch.equal(first, known["a"].T) and first.is_contiguous()
    assert rest == [7, -1e-10, "x", [1, 2]]
    assert by_name == {"scale": 2, "b": torch.float32, "c": None}


def test_a_word_that_is_nothing_is_named():
    with pytest.raises(NameError, match=r"wieght is not a literal; known: .'a', 'k'."):
        called(arguments, "a wieght", DEFINITION, {"a": 1})


def test_triton_kernels_are_launched_on_a_grid():
    assert called({(4,): arguments}, "k", DEFINITION, {}, grid=(4,)) == ((7,), {})


def test_torch_ops_are_their_default_overloads(monkeypatch):
    """The library that registers them is imported first; here ATen stands for one."""
    monkeypatch.setitem(sys.modules, "aten", ModuleType("aten"))
    found = called("torch.ops.aten.neg", "a", DEFINITION, {"a": torch.ones(1)})
    assert found == -1


@pytest.mark.parametrize(
    ("text", "returned", "wanted"),
    [
        ("x y", None, {"y": "the output", "x_out": "the input"}),
        ("k y", "new", {"y": "the output", "x_out": "new"}),
        ("k", ("first", "second"), {"y": "first", "x_out": "second"}),
        ("x", "new", {"y": "new", "x_out": "the input"}),
        ("q=y", "new", {"y": "the output", "x_out": "new"}),
    ],
)
def test_outputs_are_given_overwritten_or_returned(text, returned, wanted, monkeypatch):
    library = ModuleType("library")
    library.function = lambda *positional, **by_name: returned
    monkeypatch.setitem(sys.modules, "library", library)
    monkeypatch.setattr("flashinfer_trace.families.calls.Kernel", lambda path, call, variant: call)
    call = calling("library.function", text)
    assert call(DEFINITION, {"x": "the input"}, {"y": "the output"}) == wanted
