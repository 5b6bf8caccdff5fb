"""Conditions of choices: what selects a class or function among those that a call may enter."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from conditional_models import KERNELS, MODES, conditions, model, trace_model
from synthetic import trace_files

SPECULATIVE = {
    "models/tiny.py": model("def forward(self, x):\n    return wrong(x)"),
    "speculative/spec_info.py": """
        from enum import Enum, auto
        class SpeculativeAlgorithm(Enum):
            EAGLE = auto()
            EAGLE3 = auto()
            NGRAM = auto()
            NONE = auto()
            @classmethod
            def from_string(cls, name):
                return cls[name]
            def is_eagle(self):
                return self == SpeculativeAlgorithm.EAGLE or self == SpeculativeAlgorithm.EAGLE3
            def is_ngram(self):
                return self == SpeculativeAlgorithm.NGRAM
            def create_worker(self, server_args):
                assert not self == SpeculativeAlgorithm.NONE
                if self.is_eagle():
                    from sglang.srt.speculative.eagle_worker import EAGLEWorker
                    return EAGLEWorker
                elif self.is_ngram():
                    from sglang.srt.speculative.ngram_worker import NGRAMWorker
                    return NGRAMWorker
                raise ValueError
    """,
    "managers/tp_worker.py": """
        class TpModelWorker:
            def forward_batch_generation(self, batch):
                return batch
    """,
    "speculative/eagle_worker.py": """
        from sgl_kernel import good
        from sglang.srt.managers.tp_worker import TpModelWorker
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        class Verify:
            def __init__(self, x):
                self.x = x
            def verify(self):
                return good(self.x)
        class EAGLEWorker:
            def __init__(self):
                self.algorithm = SpeculativeAlgorithm.EAGLE
                self.target = TpModelWorker()
            def forward_batch_generation(self, batch):
                return Verify(batch).verify()
    """,
    "speculative/ngram_worker.py": """
        from sgl_kernel import other
        class NGRAMWorker:
            def forward_batch_generation(self, batch):
                return other(batch)
    """,
}


def test_the_class_of_a_worker_says_the_algorithm(tmp_path):
    document = trace_files(tmp_path, SPECULATIVE)
    root = "EAGLEWorker.forward_batch_generation"
    assert conditions(document, "good", root) == {"speculative=EAGLE or EAGLE3"}
    assert conditions(document, "good", "Verify.verify") == {""}  # stated once, at the root
    assert conditions(document, "other") == {"speculative=NGRAM"}
    assert conditions(document, "wrong") == {""}


@pytest.mark.parametrize(("scheduler", "expected"), [("", {"speculative=EAGLE or EAGLE3"}), ("TpModelWorker()", {""})])
def test_a_class_that_the_runtime_also_makes_unseen_is_not_chosen_by_its_seen_maker(tmp_path, scheduler, expected):
    files = dict(SPECULATIVE)
    files["managers/tp_worker.py"] = """
        from sgl_kernel import good
        class TpModelWorker:
            def __init__(self):
                self.x = 1
            def forward_batch_generation(self, batch):
                return good(batch)
    """
    files["speculative/eagle_worker.py"] = """
        from sglang.srt.managers.tp_worker import TpModelWorker
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        class EAGLEWorker:
            def __init__(self):
                self.algorithm = SpeculativeAlgorithm.EAGLE
                self.target = TpModelWorker()
            def forward_batch_generation(self, batch):
                return batch
    """
    files["managers/scheduler.py"] = f"def run():\n    return {scheduler or None}\n"
    assert conditions(trace_files(tmp_path, files), "good") == expected


def test_modes_and_draft_models_of_speculative_decoding_only(tmp_path):
    body = """
        def forward(self, x, batch: Batch):
            mode = batch.forward_mode
            if mode.is_target_verify():
                return good(x)
            if mode.is_decode():
                return other(x)
    """
    document = trace_model(tmp_path, body, "from sglang.srt.modes import Batch", modes=MODES)
    assert conditions(document, "good") == {"speculative decoding and ForwardMode.TARGET_VERIFY"}
    assert conditions(document, "other") == {"ForwardMode.DECODE"}
    draft = trace_files(
        tmp_path / "draft", {"models/tiny_nextn.py": model("def forward(self, x):\n    return good(x)")}
    )
    assert conditions(draft, "good") == {"speculative decoding"}


REGISTRY = """
from sgl_kernel import good, other, wrong
ATTENTION_BACKENDS = {}
def register_attention_backend(name):
    def decorator(function):
        ATTENTION_BACKENDS[name] = function
        return function
    return decorator
class Base:
    def forward(self, x):
        return self.decode(x)
class Fast(Base):
    def decode(self, x):
        return good(x)
class Slow(Base):
    def decode(self, x):
        return other(x)
class Plain:
    def forward(self, x):
        return wrong(x)
"""
CHOOSE = """
    def __init__(self, config):
        self.attn_backend = ATTENTION_BACKENDS[config.attention_backend](config)
    def forward(self, x):
        return self.attn_backend.forward(x)
"""


def registry(**keys: str) -> str:
    """A registry whose keys make these classes."""
    makers = [
        f'@register_attention_backend("{key}")\ndef create_{key}(config):\n    return {name}()\n'
        for key, name in keys.items()
    ]
    return REGISTRY + "".join(makers)


def trace_registry(root: Path, **keys: str) -> dict:
    return trace_model(root, CHOOSE, "from sglang.srt.registry import ATTENTION_BACKENDS", registry=registry(**keys))


def test_a_choice_is_stated_only_at_the_hop_that_selects_the_class(tmp_path):
    document = trace_registry(tmp_path, a="Fast", b="Fast", c="Slow")
    assert conditions(document, "good", "Tiny.forward") == {"attention_backend=a or b"}
    assert conditions(document, "good", "Base.forward") == {""}
    assert conditions(document, "other", "Tiny.forward") == {"attention_backend=c"}


def test_a_class_of_too_many_keys_is_named_and_one_of_all_keys_is_not_a_condition(tmp_path):
    many = trace_registry(tmp_path / "many", **{f"k{n}": "Fast" for n in range(6)}, c="Slow")
    assert conditions(many, "good", "Tiny.forward") == {"attn_backend=Fast"}
    every = trace_registry(tmp_path / "every", a="Fast", b="Fast")
    assert conditions(every, "good") == {""}


def test_what_does_not_reach_a_kernel_is_no_alternative(tmp_path):
    body = """
        def __init__(self, last):
            self.layer = Layer() if last else Missing()
        def forward(self, x):
            return self.layer(x)
    """
    layers = "from torch import nn\nfrom sgl_kernel import good\n" + dedent(
        """
        class Layer(nn.Module):
            def forward(self, x):
                return good(x)
        class Missing(nn.Module):
            def forward(self, x):
                return x
        """
    )
    document = trace_model(tmp_path, body, "from sglang.srt.layer import Layer, Missing", layer=layers)
    assert conditions(document, "good") == {""}


def test_factories_and_construction_pass_a_choice_on(tmp_path):
    body = """
        def __init__(self):
            self.experts = get_class()()
        def forward(self, x):
            return self.experts.forward(x)
    """
    experts = KERNELS + dedent(
        """
        from sglang.srt.modes import get_runner
        class Core:
            def __init__(self):
                self.x = 1
            def run(self, x):
                return good(x)
        class Deep:
            def __init__(self):
                self.core = Core()
            def forward(self, x):
                return self.core.run(x)
        class Plain:
            def forward(self, x):
                return other(x)
        def get_class():
            if get_runner().is_deep_gemm():
                return Deep
            return Plain
        """
    )
    document = trace_model(tmp_path, body, "from sglang.srt.experts import get_class", experts=experts, modes=MODES)
    assert conditions(document, "good", "Tiny.forward") == {"runner=deep_gemm"}
    assert conditions(document, "good", "Deep.forward") == {""}
    assert conditions(document, "other", "Tiny.forward") == {"experts=Plain"}
