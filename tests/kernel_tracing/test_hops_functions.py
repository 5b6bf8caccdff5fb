"""Hops through functions as values: attributes, callbacks, partials, aliases, patches, operation lists, hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import Hop, check, trace_files


def _model(body: str, extra: str = "") -> dict[str, str]:
    """A model file with the usual imports before `body`."""
    return {"models/tiny.py": "from torch import nn\nfrom sgl_kernel import good, other, wrong\n" + body + extra}


HOPS = [
    Hop(
        "function stored in an attribute, chosen by a factory",
        _model("""
def fast_linear(x):
    return good(x)
def slow_linear(x):
    return other(x)
def dead_linear(x):
    return wrong(x)
def dispatch(config):
    if config.fast:
        return fast_linear
    return slow_linear
class Tiny(nn.Module):
    def __init__(self, config):
        self.linear = dispatch(config)
    def forward(self, x):
        return self.linear(x)
EntryClass = Tiny
"""),
        {"good": ("fast_linear", "Tiny.forward"), "other": ("slow_linear", "Tiny.forward")},
    ),
    Hop(
        "function wrapped by torch.compile or torch.compiler.disable, which do not call it",
        _model("""
import torch
class Tiny(nn.Module):
    def __init__(self):
        self.first = torch.compiler.disable(first)
        self.second = torch.compile(dynamic=True)(second)
        self.third = torch.compile(third)
    def forward(self, x):
        return self.second(self.first(x))
def first(x):
    return good(x)
def second(x):
    return other(x)
def third(x):
    return wrong(x)
EntryClass = Tiny
"""),
        {"good": ("first", "Tiny.forward"), "other": ("second", "Tiny.forward")},
    ),
    Hop(
        "callback passed as an argument",
        _model("""
class Communicator:
    def __init__(self, gather):
        self._gather = gather
    def prepare(self, x, norm):
        return self._gather(norm(x))
def gather(x):
    return good(x)
def scatter(x):
    return wrong(x)
class Norm(nn.Module):
    def forward(self, x):
        return other(x)
class Tiny(nn.Module):
    def __init__(self):
        self.norm = Norm()
        self.communicator = Communicator(gather)
    def forward(self, x):
        return self.communicator.prepare(x, self.norm)
EntryClass = Tiny
"""),
        {
            "good": ("gather", "Communicator.prepare", "Tiny.forward"),
            "other": ("Norm.forward", "Communicator.prepare", "Tiny.forward"),
        },
    ),
    Hop(
        "functools.partial",
        _model("""
import functools
from functools import partial
def run(function, x):
    return function(x)
def work(x):
    return good(x)
def idle(x):
    return wrong(x)
class Tiny(nn.Module):
    def __init__(self):
        self.job = partial(run, work)
        self.never = functools.partial(run, idle)
    def forward(self, x):
        return self.job(x)
EntryClass = Tiny
"""),
        {"good": ("work", "run", "Tiny.forward")},
    ),
    Hop(
        "aliases of attributes, classes and library functions",
        {
            **_model("""
from sglang.srt.alias import Norm, renamed
class Tiny(nn.Module):
    def __init__(self):
        self.norm = Norm()
        self.final_norm = self.norm
    def forward(self, x):
        norm = self.final_norm
        return renamed(norm(x))
EntryClass = Tiny
"""),
            "alias.py": """
                from torch import nn
                import sgl_kernel
                renamed = sgl_kernel.other
                class BaseNorm(nn.Module):
                    def forward(self, x):
                        return sgl_kernel.good(x)
                class Unused(nn.Module):
                    def forward(self, x):
                        return sgl_kernel.wrong(x)
                Norm = BaseNorm
            """,
        },
        {"good": ("BaseNorm.forward", "Tiny.forward"), "other": ("Tiny.forward",)},
    ),
    Hop(
        "patched forward",
        _model("""
import types
class Layer(nn.Module):
    def forward(self, x):
        return other(x)
def patched(self, x):
    return good(x)
def not_patched(self, x):
    return wrong(x)
class Tiny(nn.Module):
    def __init__(self):
        self.layer = Layer()
        self.layer.forward = types.MethodType(patched, self.layer)
    def forward(self, x):
        return self.layer(x)
EntryClass = Tiny
"""),
        {"good": ("patched", "Tiny.forward")},
    ),
    Hop(
        "operation lists",
        _model("""
from dataclasses import dataclass
from typing import Callable, List
class Yield:
    pass
@dataclass
class Operation:
    name: str
    fn: Callable
@dataclass
class Strategy:
    operations: List[Operation]
    @classmethod
    def concat(cls, items):
        return Strategy(operations=[x for item in items for x in item.operations])
class Layer(nn.Module):
    def op_prepare(self, state):
        return good(state)
    def op_core(self, state):
        return other(state)
    def op_unused(self, state):
        return wrong(state)
def strategy(layer):
    return Strategy(operations=[layer.op_prepare, Yield(), layer.op_core])
def decorate(operation):
    if isinstance(operation, Yield):
        return operation
    return Operation(name="operation", fn=operation)
class Executor:
    def __init__(self, stages):
        self._stages = stages
    def next(self, state):
        for operation in self._stages[0]:
            operation.fn(state=state)
def chunks(items, separates):
    pending = []
    for item in items:
        if separates(item):
            yield pending
            pending = []
        else:
            pending.append(item)
    yield pending
def execute(operations, state):
    decorated = [decorate(operation) for operation in operations]
    stages = list(chunks(decorated, lambda operation: isinstance(operation, Yield)))
    executor = Executor(stages)
    executor.next(state)
class Tiny(nn.Module):
    def __init__(self):
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
    def forward(self, x):
        all_operations = Strategy.concat([strategy(layer) for layer in self.layers])
        return execute(all_operations.operations, x)
EntryClass = Tiny
"""),
        {
            "good": ("Layer.op_prepare", "Executor.next", "execute", "Tiny.forward"),
            "other": ("Layer.op_core", "Executor.next", "execute", "Tiny.forward"),
        },
    ),
    Hop(
        "combine hooks",
        _model("""
class Hooks:
    def __init__(self):
        self.hooks = []
    def register(self, hook):
        self.hooks.append(hook)
        return len(self.hooks)
    def __call__(self, x):
        for hook in self.hooks:
            hook(x)
class Dispatcher:
    def __init__(self):
        self._post_combine = Hooks()
    def register_post_combine_hook(self, hook):
        return self._post_combine.register(hook)
    def combine(self, x):
        self._post_combine(x)
        return x
class Tiny(nn.Module):
    def __init__(self):
        self.dispatcher = Dispatcher()
    def shared(self, x):
        return other(x)
    def forward(self, x):
        def _hook(y):
            return good(self.shared(y))
        def _forgotten(y):
            return wrong(y)
        self.dispatcher.register_post_combine_hook(_hook)
        return self.dispatcher.combine(x)
EntryClass = Tiny
"""),
        {
            "good": ("Tiny.forward._hook", "Hooks.__call__", "Dispatcher.combine", "Tiny.forward"),
            "other": ("Tiny.shared", "Tiny.forward._hook", "Hooks.__call__", "Dispatcher.combine", "Tiny.forward"),
        },
    ),
    Hop(
        "callable handed to a library",
        _model("""
from concurrent.futures import ThreadPoolExecutor
def work(x):
    return good(x)
def idle(x):
    return wrong(x)
class Tiny(nn.Module):
    def forward(self, x):
        return ThreadPoolExecutor().submit(work, x)
EntryClass = Tiny
"""),
        {"good": ("work", "Tiny.forward")},
        approximate=("good",),
    ),
]


@pytest.mark.parametrize("hop", HOPS, ids=lambda hop: hop.name)
def test_hop(hop: Hop, tmp_path: Path) -> None:
    check(hop, trace_files(tmp_path, hop.files))
