"""A small package with one call of each kind, and hand-made traces of it."""

from __future__ import annotations

import ast
import textwrap

import made_up_traces

from tools.shared.source_packages import package_hash

KERNEL = "sgl_kernel/gemm.py"
LAYERS = "sglang/srt/layers.py"
MODEL = "sglang/srt/model.py"
FILES = {
    "sgl_kernel/__init__.py": "from sgl_kernel.gemm import fp8_gemm\n",
    KERNEL: """\
        import torch

        def fp8_gemm(a, b):
            return torch.ops.sgl_kernel.fp8_gemm.default(a, b)

        alias = torch.ops.sgl_kernel.alias
        """,
    LAYERS: """\
        from functools import partial
        from typing import Callable

        import torch
        from sgl_kernel import fp8_gemm as gemm

        REGISTRY = {}

        def register(name):
            def decorator(function):
                REGISTRY[name] = function
                return function
            return decorator

        class Linear(torch.nn.Module):
            def __init__(self, weight):
                self.weight = prepare(weight)

            def forward(self, x):
                return gemm(
                    x,
                    self.weight,
                )

        class Other(torch.nn.Module):
            def forward(self, x):
                return gemm(x, x)

            def helper(self, x):
                return gemm(x, None)

        def prepare(weight):
            return gemm(weight, weight)

        @register("plain")
        def registered(x):
            return gemm(x, 1)

        def callback(x):
            return gemm(x, 2)

        def unrelated(x):
            return gemm(x, 3)

        def make_layers(count, make):
            return torch.nn.ModuleList([make(index) for index in range(count)])

        def guarded(function):
            def wrapper(*arguments):
                gemm(arguments, 4)
                return function(*arguments)
            return wrapper

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return gemm(x, 5)

        def implementation(x):
            return gemm(x, 6)

        direct_register_custom_op(op_name="custom_op", op_func=implementation)
        """,
    MODEL: """\
        import torch
        from sglang.srt import layers
        from sglang.srt.layers import REGISTRY, Function, Linear, Other, callback, guarded, make_layers, partial

        class Mixin:
            def mixed(self, x):
                return self.linear(x)

        class Base:
            def run(self, x):
                raise NotImplementedError

        class Runner(Base):
            def run(self, x):
                return layers.callback(x)

        class Strange:
            def run(self, x):
                return x

        class Layer(torch.nn.Module, Mixin):
            def __init__(self, runner: Base):
                self.linear = Linear(1)
                self.plain = REGISTRY["plain"]
                self.later = partial(callback, 1)
                self.runner = runner
                self.wrapped = guarded(callback)

            def forward(self, x):
                x = self.mixed(x)
                x = self.plain(x)
                x = self.later(x)
                x = self.runner.run(x)
                x = self.wrapped(x)
                x = Function.apply(x)
                x = torch.ops.sglang.custom_op(x)
                return self.apply_to(callback, x)

            def apply_to(self, function, x):
                return function(x)

            @property
            def ready(self):
                return layers.callback(self)

        class Model(torch.nn.Module):
            def __init__(self):
                self.layers = make_layers(2, lambda index: Layer(Runner()))

            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                if self.layers[0].ready:
                    return self.layers[0](x)
                return x
        """,
}


def write(root, files):
    for name, text in {"sglang/__init__.py": "", "flashinfer/__init__.py": ""}.items() | files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def frame(file, function, call, line=None, **extra):
    """A frame; by default its line is where the text of the call is found."""
    if line is None:
        lines = textwrap.dedent(FILES[file]).splitlines()
        start = call.split("(")[0].removeprefix("@") + ("(" if "(" in call else "")
        inside = body(file, function)
        (line,) = (number for number in inside if start in lines[number - 1] and "def " not in lines[number - 1])
    return {"file": file, "line": line, "function": function, "call": call, **extra}


def body(file, function):
    node = ast.parse(textwrap.dedent(FILES[file]))
    for part in function.split("."):
        (node,) = (child for child in node.body if getattr(child, "name", "") == part)
    return range(node.lineno, node.end_lineno + 1)


def make_trace(root, *chains, **kernel):
    """A trace with one kernel; its frames are in `trace["frames"]`, in the order of the chains."""
    sources = {
        name: {"version": "1.0", "sha256": package_hash(root / package)}
        for name, package in (("sglang", "sglang"), ("sgl-kernel", "sgl_kernel"), ("flashinfer-python", "flashinfer"))
    }
    made = {
        "name": "fp8_gemm",
        "source": "sgl-kernel",
        "category": "gemm",
        "definition": {"file": KERNEL, "line": 3},
        "chains": [made_up_traces.chain(*one) for one in chains],
    }
    return made_up_traces.file_form([made | kernel], sources)


LINEAR = frame(LAYERS, "Linear.forward", "gemm( x, self.weight, )")
MIXED = frame(MODEL, "Mixin.mixed", "self.linear(x)")
CALL_MIXED = frame(MODEL, "Layer.forward", "self.mixed(x)")
LAYER = frame(MODEL, "Model.forward", "layer(x)")
CALLBACK = frame(LAYERS, "callback", "gemm(x, 2)")
PREPARE = [frame(LAYERS, "prepare", "gemm(weight, weight)"), frame(LAYERS, "Linear.__init__", "prepare(weight)")]
RIGHT = {
    "mixin, module call, list of layers from a lambda": [LINEAR, MIXED, CALL_MIXED, LAYER],
    "subscripted layer": [LINEAR, MIXED, CALL_MIXED, frame(MODEL, "Model.forward", "self.layers[0](x)")],
    "constructor": [*PREPARE, frame(MODEL, "Layer.__init__", "Linear(1)")],
    "registry filled by a decorator": [
        frame(LAYERS, "registered", "gemm(x, 1)"),
        frame(MODEL, "Layer.forward", "self.plain(x)"),
    ],
    "partial": [CALLBACK, frame(MODEL, "Layer.forward", "self.later(x)")],
    "function of an imported module": [CALLBACK, frame(MODEL, "Runner.run", "layers.callback(x)")],
    "override of an annotated base": [
        CALLBACK,
        frame(MODEL, "Runner.run", "layers.callback(x)"),
        frame(MODEL, "Layer.forward", "self.runner.run(x)"),
    ],
    "callback as an argument": [
        CALLBACK,
        frame(MODEL, "Layer.apply_to", "function(x)"),
        frame(MODEL, "Layer.forward", "self.apply_to(callback, x)"),
    ],
    "callback that the call itself is given": [CALLBACK, frame(MODEL, "Layer.forward", "self.apply_to(callback, x)")],
    "wrapper of a decorator": [
        frame(LAYERS, "guarded.wrapper", "gemm(arguments, 4)"),
        frame(MODEL, "Layer.forward", "self.wrapped(x)"),
    ],
    "through the wrapper": [
        CALLBACK,
        frame(LAYERS, "guarded.wrapper", "function(*arguments)"),
        frame(MODEL, "Layer.forward", "self.wrapped(x)"),
    ],
    "autograd function": [
        frame(LAYERS, "Function.forward", "gemm(x, 5)"),
        frame(MODEL, "Layer.forward", "Function.apply(x)"),
    ],
    "custom op": [
        frame(LAYERS, "implementation", "gemm(x, 6)"),
        frame(MODEL, "Layer.forward", "torch.ops.sglang.custom_op(x)"),
    ],
    "property": [
        CALLBACK,
        frame(MODEL, "Layer.ready", "layers.callback(self)"),
        frame(MODEL, "Model.forward", "self.layers[0].ready"),
    ],
}
CHAIN = RIGHT["mixin, module call, list of layers from a lambda"]
