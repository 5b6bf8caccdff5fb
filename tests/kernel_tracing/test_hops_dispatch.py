"""Hops through tables and registrations: enums, handlers, decorators, custom operators, platforms, imports."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import Hop, check, trace_files

HOPS = [
    Hop(
        "enum branches and a handler dictionary",
        {
            "handlers.py": """
                from enum import IntEnum, auto
                class Method(IntEnum):
                    MHA = auto()
                    MLA = auto()
                class Registry:
                    _handlers = {}
                    @classmethod
                    def register(cls, name, handler):
                        cls._handlers[name] = handler
                    @classmethod
                    def get_handler(cls, name):
                        return cls._handlers.get(name, cls._handlers.get("default"))
                def handle_default(attn):
                    return attn.choose()
                def handle_unused(attn):
                    return attn.refuse()
                Registry.register("default", handle_default)
            """,
            "models/tiny.py": """
                from torch import nn
                from sgl_kernel import good, other, wrong
                from sglang.srt.handlers import Method, Registry
                class Tiny(nn.Module):
                    def choose(self):
                        other(1)
                        return Method.MLA
                    def refuse(self):
                        return wrong(1)
                    def forward(self, x, name):
                        method = Registry.get_handler(name)(self)
                        if method == Method.MHA:
                            return x
                        elif method == Method.MLA:
                            return self.forward_mla(x)
                    def forward_mla(self, x):
                        return good(x)
                EntryClass = Tiny
            """,
        },
        {
            "good": ("Tiny.forward_mla", "Tiny.forward"),
            "other": ("Tiny.choose", "handle_default", "Tiny.forward"),
        },
        conditions={"good": "Method.MLA"},
    ),
    Hop(
        "decorator registry in modules that nothing imports",
        {
            "registry.py": """
                BACKENDS = {}
                def register_backend(name):
                    def decorator(fn):
                        BACKENDS[name] = fn
                        return fn
                    return decorator
            """,
            "backends_a.py": """
                from sgl_kernel import good
                from sglang.srt.registry import register_backend
                class Fast:
                    def forward(self, x):
                        return good(x)
                @register_backend("fast")
                def create_fast(runner):
                    return Fast()
            """,
            "backends_b.py": """
                from sgl_kernel import other, wrong
                from sglang.srt.registry import register_backend
                class Slow:
                    def forward(self, x):
                        return other(x)
                class Forgotten:
                    def forward(self, x):
                        return wrong(x)
                @register_backend("slow")
                def create_slow(runner):
                    return Slow()
                def create_forgotten(runner):
                    return Forgotten()
            """,
            "models/tiny.py": """
                from torch import nn
                from sglang.srt.registry import BACKENDS
                class Tiny(nn.Module):
                    def __init__(self, name):
                        self.backend = BACKENDS[name](self)
                    def forward(self, x):
                        return self.backend.forward(x)
                EntryClass = Tiny
            """,
        },
        {"good": ("Fast.forward", "Tiny.forward"), "other": ("Slow.forward", "Tiny.forward")},
        conditions={"good": "backend=fast", "other": "backend=slow"},
    ),
    Hop(
        "quant_method chosen by get_quant_method, configurations in a table",
        {
            "quantization.py": """
                from sgl_kernel import good, other, wrong
                class QuantizationConfig:
                    def get_quant_method(self, layer):
                        raise NotImplementedError
                class Fp8LinearMethod:
                    def apply(self, layer, x):
                        return good(x)
                class Fp8Config(QuantizationConfig):
                    def get_quant_method(self, layer):
                        return Fp8LinearMethod()
                class Int8LinearMethod:
                    def apply(self, layer, x):
                        return other(x)
                class Int8Config(QuantizationConfig):
                    def get_quant_method(self, layer):
                        return Int8LinearMethod()
                class AscendLinearMethod:
                    def apply(self, layer, x):
                        return wrong(x)
                class AscendConfig(QuantizationConfig):
                    def get_quant_method(self, layer):
                        return AscendLinearMethod()
                BASE_QUANTIZATION_METHODS = {"fp8": Fp8Config, "int8": Int8Config, "ascend": AscendConfig}
                def get_config(name):
                    return BASE_QUANTIZATION_METHODS[name]()
            """,
            "models/tiny.py": """
                from torch import nn
                from sglang.srt.quantization import get_config
                class Linear(nn.Module):
                    def __init__(self, name):
                        self.quant_method = get_config(name).get_quant_method(self)
                    def forward(self, x):
                        return self.quant_method.apply(self, x)
                class Tiny(nn.Module):
                    def __init__(self, name):
                        self.linear = Linear(name)
                    def forward(self, x):
                        return self.linear(x)
                EntryClass = Tiny
            """,
        },
        {
            "good": ("Fp8LinearMethod.apply", "Linear.forward", "Tiny.forward"),
            "other": ("Int8LinearMethod.apply", "Linear.forward", "Tiny.forward"),
        },
        conditions={"good": "quantization=fp8", "other": "quantization=int8"},
    ),
    Hop(
        "registry keyed by values, filled by a decorator with two keys",
        {
            "runner.py": """
                class Pool:
                    _functions = {}
                    @classmethod
                    def register(cls, a, b, function):
                        cls._functions[(a, b)] = function
                    @classmethod
                    def get(cls, a, b):
                        key = (a, b)
                        return cls._functions.get(key)
                def register_fused(a, b):
                    def decorator(function):
                        Pool.register(a, b, function)
                        return function
                    return decorator
                class Runner:
                    def __init__(self, backend):
                        self.fused = Pool.get("none", backend.value)
                    def run(self, x):
                        return self.fused(x)
            """,
            "fused.py": """
                from sgl_kernel import good, other, wrong
                from sglang.srt.runner import register_fused
                @register_fused("none", "triton")
                def fused_triton(x):
                    return good(x)
                @register_fused("none", "marlin")
                def fused_marlin(x):
                    return other(x)
                def fused_unregistered(x):
                    return wrong(x)
            """,
            "models/tiny.py": """
                from torch import nn
                from sglang.srt.runner import Runner
                class Tiny(nn.Module):
                    def __init__(self, backend):
                        self.runner = Runner(backend)
                    def forward(self, x):
                        return self.runner.run(x)
                EntryClass = Tiny
            """,
        },
        {
            "good": ("fused_triton", "Runner.run", "Tiny.forward"),
            "other": ("fused_marlin", "Runner.run", "Tiny.forward"),
        },
        conditions={"good": "a=none and b=triton", "other": "a=none and b=marlin"},
    ),
    Hop(
        "platform method stored in an attribute",
        {
            "models/tiny.py": """
                from torch import nn
                from sgl_kernel import good, other, wrong
                from sglang.srt.utils import is_cuda, is_hip
                _is_cuda = is_cuda()
                _is_hip = is_hip()
                class MultiPlatformOp(nn.Module):
                    def __init__(self):
                        self._forward_method = self.dispatch_forward()
                    def forward(self, *args, **kwargs):
                        return self._forward_method(*args, **kwargs)
                    def forward_cuda(self, x):
                        raise NotImplementedError
                    def forward_hip(self, x):
                        return wrong(x)
                    def dispatch_forward(self):
                        if _is_cuda:
                            return self.forward_cuda
                        elif _is_hip:
                            return self.forward_hip
                        return self.forward_native
                class Norm(MultiPlatformOp):
                    def forward_cuda(self, x):
                        return good(x)
                class Act(MultiPlatformOp):
                    def forward_cuda(self, x):
                        return other(x)
                class Tiny(nn.Module):
                    def __init__(self):
                        self.norm = Norm()
                        self.unused = Act()
                    def forward(self, x):
                        return self.norm(x)
                EntryClass = Tiny
            """
        },
        {"good": ("Norm.forward_cuda", "MultiPlatformOp.forward", "Tiny.forward")},
        pruned=("wrong", "other"),
    ),
    Hop(
        "torch custom operators, decorated and registered by call",
        {
            "ops.py": """
                import torch
                from sgl_kernel import good, other, wrong
                from sglang.srt.custom import direct_register_custom_op, register_custom_op
                @register_custom_op(mutates_args=["x"])
                def decorated(x):
                    good(x)
                def called(x):
                    return other(x)
                def fake(x):
                    return wrong(x)
                direct_register_custom_op(op_name="tiny_called", op_func=called, mutates_args=[], fake_impl=fake)
            """,
            "custom.py": """
                import torch
                def register_custom_op(fn=None, **options):
                    def decorator(function):
                        return getattr(torch.ops.sglang, function.__name__)
                    return decorator
                def direct_register_custom_op(op_name, op_func, mutates_args, fake_impl):
                    torch.library.Library("sglang", "FRAGMENT").impl(op_name, op_func)
            """,
            "models/tiny.py": """
                import torch
                from torch import nn
                from sglang.srt import ops
                from sglang.srt.ops import decorated
                class Tiny(nn.Module):
                    def forward(self, x):
                        decorated(x)
                        ops.fake
                        return torch.ops.sglang.tiny_called(x)
                EntryClass = Tiny
            """,
        },
        {"good": ("decorated", "Tiny.forward"), "other": ("called", "Tiny.forward")},
    ),
    Hop(
        "conditional, local and fallback imports",
        {
            "fast.py": """
                from sgl_kernel import good
                def norm(x):
                    return good(x)
            """,
            "local.py": """
                from sgl_kernel import other
                def scale(x):
                    return other(x)
            """,
            "rocm_only.py": """
                from sgl_kernel import wrong
                def norm(x):
                    return wrong(x)
                def act(x):
                    return wrong(x)
            """,
            "models/tiny.py": """
                from torch import nn
                from sglang.srt.utils import is_cuda, is_hip
                _is_cuda = is_cuda()
                _use_aiter = is_hip() and True
                if _is_cuda:
                    from sglang.srt.fast import norm
                elif _use_aiter:
                    from sglang.srt.rocm_only import norm
                try:
                    from not_there import act
                except ImportError:
                    act = None
                class Tiny(nn.Module):
                    def forward(self, x):
                        if not _is_cuda:
                            from sglang.srt.rocm_only import act as scale
                        else:
                            from sglang.srt.local import scale
                        return scale(norm(x))
                EntryClass = Tiny
            """,
        },
        {"good": ("norm", "Tiny.forward"), "other": ("scale", "Tiny.forward")},
    ),
]


@pytest.mark.parametrize("hop", HOPS, ids=lambda hop: hop.name)
def test_hop(hop: Hop, tmp_path: Path) -> None:
    check(hop, trace_files(tmp_path, hop.files))
