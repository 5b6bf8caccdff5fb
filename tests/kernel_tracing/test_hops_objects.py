"""Hops through objects: attributes, layers, factories, mixins, overrides, wrappers."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import Hop, chains, check, trace_files

HOPS = [
    Hop(
        "names that __getattr__ passes on do not mix",
        {
            "models/tiny.py": """
                from torch import nn
                from sgl_kernel import good, other, wrong
                class Inner:
                    def apply(self, x):
                        return good(x)
                    def check(self, x):
                        return wrong(x)
                class Wrapper:
                    def __init__(self, inner):
                        self.inner = inner
                    def __getattr__(self, name):
                        return getattr(self.inner, name)
                class Tiny(nn.Module):
                    def __init__(self):
                        self.method = Wrapper(Inner())
                        self.check = self.method.check
                    def forward(self, x):
                        return self.method.apply(x)
                EntryClass = Tiny
            """
        },
        {"good": ("Inner.apply", "Tiny.forward")},
    ),
    Hop(
        "a platform flag returned by a function annotated as bool",
        {
            "models/tiny.py": """
                from torch import nn
                from sglang.srt.utils import is_hip
                from sgl_kernel import good, wrong
                _is_hip = is_hip()
                def is_special() -> bool:
                    if _is_hip:
                        return torch.special()
                    return False
                _is_special = is_special()
                class Tiny(nn.Module):
                    def forward(self, x):
                        if _is_special:
                            return wrong(x)
                        return good(x)
                EntryClass = Tiny
            """
        },
        {"good": ("Tiny.forward",)},
    ),
    Hop(
        "attribute holding a module, called through nn.Module",
        {
            "models/tiny.py": """
                from torch import nn
                from sgl_kernel import good, wrong
                class Layer(nn.Module):
                    def forward(self, x):
                        return good(x)
                    def backward(self, x):
                        return wrong(x)
                class Tiny(nn.Module):
                    def __init__(self):
                        self.layer = Layer()
                    def forward(self, x):
                        return self.layer(x)
                EntryClass = Tiny
            """
        },
        {"good": ("Layer.forward", "Tiny.forward")},
    ),
    Hop(
        "attribute with two types",
        {
            "models/tiny.py": """
                from torch import nn
                from sgl_kernel import good, other, wrong
                class TinyMoE(nn.Module):
                    def forward(self, x):
                        return good(x)
                class TinyMLP(nn.Module):
                    def forward(self, x):
                        return other(x)
                class Unused(nn.Module):
                    def forward(self, x):
                        return wrong(x)
                class Tiny(nn.Module):
                    def __init__(self, config):
                        if config.sparse:
                            self.mlp = TinyMoE()
                        else:
                            self.mlp = TinyMLP()
                    def forward(self, x):
                        return self.mlp(x)
                EntryClass = Tiny
            """
        },
        {"good": ("TinyMoE.forward", "Tiny.forward"), "other": ("TinyMLP.forward", "Tiny.forward")},
        conditions={"good": "MoE layer", "other": "dense layer"},
    ),
    Hop(
        "layer list built from a lambda",
        {
            "utils_layers.py": """
                import torch
                def make_layers(count, layer_fn, prefix=""):
                    return torch.nn.ModuleList([layer_fn(idx=i, prefix=prefix) for i in range(count)])
            """,
            "models/tiny.py": """
                from torch import nn
                from sgl_kernel import good, wrong
                from sglang.srt.utils_layers import make_layers
                class Layer(nn.Module):
                    def __init__(self, idx, prefix):
                        self.idx = idx
                    def forward(self, x):
                        return good(x)
                class OtherLayer(nn.Module):
                    def forward(self, x):
                        return wrong(x)
                class Elsewhere(nn.Module):
                    def __init__(self):
                        self.layers = make_layers(2, lambda idx, prefix: OtherLayer())
                class Tiny(nn.Module):
                    def __init__(self):
                        self.elsewhere = Elsewhere()
                        self.layers = make_layers(2, lambda idx, prefix: Layer(idx=idx, prefix=prefix))
                    def forward(self, x):
                        for i in range(2):
                            layer = self.layers[i]
                            x = layer(x)
                        return x
                EntryClass = [Tiny]
            """,
        },
        {"good": ("Layer.forward", "Tiny.forward")},
    ),
    Hop(
        "class factory",
        {
            "models/tiny.py": """
                from torch import nn
                from sgl_kernel import good, other, wrong
                class Plain(nn.Module):
                    def forward(self, x):
                        return good(x)
                class Expert(Plain):
                    def forward(self, x):
                        return other(x)
                class Never(Plain):
                    def forward(self, x):
                        return wrong(x)
                def get_class(config):
                    if config is None:
                        return Plain
                    return Expert
                class Tiny(nn.Module):
                    def __init__(self, config):
                        self.experts = get_class(config)(config)
                    def forward(self, x):
                        return self.experts(x)
                EntryClass = Tiny
            """
        },
        {"good": ("Plain.forward", "Tiny.forward"), "other": ("Expert.forward", "Tiny.forward")},
    ),
    Hop(
        "mixin whose self is annotated",
        {
            "mixin.py": """
                from __future__ import annotations
                from typing import TYPE_CHECKING
                if TYPE_CHECKING:
                    from sglang.srt.models.tiny import Attention
                class ForwardMixin:
                    def forward_core(self: Attention, x):
                        return self.project(x)
            """,
            "models/tiny.py": """
                from torch import nn
                from sgl_kernel import good, wrong
                from sglang.srt.mixin import ForwardMixin
                class Projection(nn.Module):
                    def forward(self, x):
                        return good(x)
                class Wrong:
                    def project(self, x):
                        return wrong(x)
                class Attention(nn.Module, ForwardMixin):
                    def __init__(self):
                        self.project = Projection()
                    def forward(self, x):
                        return self.forward_core(x)
                class Tiny(nn.Module):
                    def __init__(self):
                        self.attention = Attention()
                    def forward(self, x):
                        return self.attention(x)
                EntryClass = Tiny
            """,
        },
        {"good": ("Projection.forward", "ForwardMixin.forward_core", "Attention.forward", "Tiny.forward")},
    ),
    Hop(
        "override of an abstract method, reached from the base class",
        {
            "models/tiny.py": """
                from abc import ABC, abstractmethod
                from torch import nn
                from sgl_kernel import good, other, wrong
                class Backend(ABC):
                    def forward(self, x):
                        return self.decode(x)
                    @abstractmethod
                    def decode(self, x):
                        return wrong(x)
                class First(Backend):
                    def decode(self, x):
                        return good(x)
                class NpuBackend(Backend):
                    def decode(self, x):
                        return wrong(x)
                class Second(Backend):
                    def decode(self, x):
                        return other(x)
                class Batch:
                    backend: Backend = None
                class Tiny(nn.Module):
                    def forward(self, x, batch: Batch):
                        return batch.backend.forward(x)
                EntryClass = Tiny
            """
        },
        {
            "good": ("First.decode", "Backend.forward", "Tiny.forward"),
            "other": ("Second.decode", "Backend.forward", "Tiny.forward"),
        },
        conditions={"good": "backend=First"},
        approximate=("good", "other"),
    ),
    Hop(
        "two-backend wrapper",
        {
            "models/tiny.py": """
                from torch import nn
                from sgl_kernel import good, other, wrong
                class Backend:
                    def forward(self, x):
                        raise NotImplementedError
                class Prefill(Backend):
                    def forward(self, x):
                        return good(x)
                class Decode(Backend):
                    def forward(self, x):
                        return other(x)
                class Never(Backend):
                    def forward(self, x):
                        return wrong(x)
                class Hybrid(Backend):
                    def __init__(self, prefill, decode):
                        self.prefill, self.decode = prefill, decode
                    def forward(self, x):
                        if x.decoding:
                            return self.decode.forward(x)
                        return self.prefill.forward(x)
                class Tiny(nn.Module):
                    def __init__(self):
                        self.backend = Hybrid(Prefill(), Decode())
                    def forward(self, x):
                        return self.backend.forward(x)
                EntryClass = Tiny
            """
        },
        {
            "good": ("Prefill.forward", "Hybrid.forward", "Tiny.forward"),
            "other": ("Decode.forward", "Hybrid.forward", "Tiny.forward"),
        },
        conditions={"other": "x.decoding"},
    ),
    Hop(
        "isinstance distinguishes types",
        {
            "models/tiny.py": """
                from torch import nn
                from sgl_kernel import good, other, wrong
                class LinearMethod:
                    def apply(self, x):
                        return good(x)
                class MoEMethod:
                    def apply(self, x):
                        return other(x)
                class WrongMethod:
                    def apply(self, x):
                        return wrong(x)
                class Config:
                    def get_quant_method(self, layer):
                        if isinstance(layer, Linear):
                            return LinearMethod()
                        elif isinstance(layer, Experts):
                            return MoEMethod()
                        elif isinstance(layer, Nowhere):
                            return WrongMethod()
                class Linear(nn.Module):
                    def __init__(self, config: Config):
                        self.quant_method = config.get_quant_method(self)
                    def forward(self, x):
                        return self.quant_method.apply(x)
                class Experts(nn.Module):
                    def __init__(self, config: Config):
                        self.quant_method = config.get_quant_method(self)
                    def forward(self, x):
                        return 0
                class Nowhere(nn.Module):
                    pass
                class Tiny(nn.Module):
                    def __init__(self, config: Config):
                        self.linear = Linear(config)
                        self.experts = Experts(config)
                    def forward(self, x):
                        return self.linear(self.experts(x))
                EntryClass = Tiny
            """
        },
        {"good": ("LinearMethod.apply", "Linear.forward", "Tiny.forward")},
        pruned=("wrong", "other"),
    ),
]


@pytest.mark.parametrize("hop", HOPS, ids=lambda hop: hop.name)
def test_hop(hop: Hop, tmp_path: Path) -> None:
    check(hop, trace_files(tmp_path, hop.files))


def test_two_patched_modules_do_not_share_their_forwards(tmp_path: Path) -> None:
    """Each module's chain passes through the function that patches it, and ends where that module is called."""
    model = """
        from torch import nn
        from sgl_kernel import good, other
        class First(nn.Module):
            def forward(self, x):
                return good(x)
        class Second(nn.Module):
            def forward(self, x):
                return other(x)
        def hook(module):
            original = module.forward
            def forward(*args):
                module.forward = original
                result = module(*args)
                module.forward = forward
                return result
            module.forward = forward
        class Tiny(nn.Module):
            def __init__(self):
                self.first = First()
                self.second = Second()
                for module in (self.first, self.second):
                    hook(module)
            def forward_split(self, x):
                return self.second(x)
            def forward(self, x):
                return self.first(x)
        EntryClass = Tiny
    """
    found = chains(trace_files(tmp_path, {"models/tiny.py": model}))
    assert set(found["good"]) == {
        ("First.forward", "Tiny.forward"),
        ("First.forward", "hook.forward", "Tiny.forward"),
    }
    assert set(found["other"]) == {
        ("Second.forward", "Tiny.forward_split"),
        ("Second.forward", "hook.forward", "Tiny.forward_split"),
    }
