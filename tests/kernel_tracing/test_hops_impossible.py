"""What cannot happen is left out (configurations, classes, host helpers); calls into unknown libraries are listed."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from synthetic import Hop, check, trace_files, write

from tools.kernel_tracing.report.trace import trace
from tools.kernel_tracing.source.sources import find_sources

CONFIG = """
    from transformers import PretrainedConfig
    class OtherConfig(PretrainedConfig):
        pass
"""
OTHER = "from sglang.srt.configs.other import OtherConfig"
RUNNER = """
    from sglang.srt.backends import Backend, LinearBackend, FullBackend
    from sglang.srt.configs.other import OtherConfig
    from sglang.srt.unknown import read
    class Runner:
        def __init__(self):
            self.backend = LinearBackend() if self.linear_config is not None else FullBackend()
        @property
        def linear_config(self):
            config = read()
            if isinstance(config, OtherConfig | int):
                return config
            return None
"""
BACKENDS = """
    from sgl_kernel import good, wrong
    class Backend:
        pass
    class FullBackend(Backend):
        def attend(self, x):
            return good(x)
    class LinearBackend(Backend):
        def attend(self, x):
            return wrong(x)
"""
MODEL = """
    from torch import nn
    from sglang.srt.backends import Backend
    from sglang.srt.runner import Runner
    class Batch:
        backend: Backend
    class Tiny(nn.Module):
        def __init__(self):
            self.runner = Runner()
        def forward(self, x, batch: Batch):
            return batch.backend.attend(x)
    EntryClass = Tiny
"""
FILES = {
    "configs/other.py": CONFIG,
    "models/other.py": OTHER,
    "runner.py": RUNNER.replace("OtherConfig | int", "OtherConfig"),
    "backends.py": BACKENDS,
    "models/tiny.py": MODEL,
}


def names(document: dict) -> set[str]:
    return {kernel["name"] for kernel in document["kernels"]}


def test_a_configuration_of_another_model_and_what_only_it_constructs(tmp_path: Path) -> None:
    assert names(trace_files(tmp_path, FILES)) == {"good"}


@pytest.mark.parametrize(
    "model", [OTHER, "from sglang.srt.models.other import Other", "from sglang.srt.models import other"]
)
def test_a_model_that_names_the_configuration_keeps_its_kernels(tmp_path: Path, model: str) -> None:
    """This also holds if the model is built from another one whose file names the configuration."""
    assert names(trace_files(tmp_path, {**FILES, "models/tiny.py": model + "\n" + dedent(MODEL)})) == {"good", "wrong"}


def test_a_configuration_that_no_model_names_decides_nothing(tmp_path: Path) -> None:
    assert names(trace_files(tmp_path, {**FILES, "models/other.py": ""})) == {"good", "wrong"}


def test_an_alternative_that_is_possible_keeps_the_branch(tmp_path: Path) -> None:
    assert names(trace_files(tmp_path, {**FILES, "runner.py": RUNNER})) == {"good", "wrong"}


@pytest.mark.parametrize(
    "maker",
    [
        "KINDS = {'linear': LinearBackend}",  # not only called
        "def make():\n    return LinearBackend()",  # called in a function that was not interpreted
    ],
)
def test_a_class_that_something_else_may_make_is_kept(tmp_path: Path, maker: str) -> None:
    files = {**FILES, "maker.py": "from sglang.srt.backends import LinearBackend\n" + maker}
    assert names(trace_files(tmp_path, files)) == {"good", "wrong"}


LIBRARY = """
import torch
def good(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.ops.sgl_kernel.good.default(x, size)
def other(xs: list[torch.Tensor]) -> None:
    torch.ops.sgl_kernel.other.default(xs)
def workspace_size(rows: int, columns: int) -> int:
    return torch.ops.sgl_kernel.workspace_size.default(rows, columns)
def open_handle(x: torch.Tensor) -> int:
    return torch.ops.sgl_kernel.open_handle.default(x)
def register(handle: int, buffers: list[list[int]]) -> None:
    torch.ops.sgl_kernel.register.default(handle, buffers)
def fast_plan(x: torch.Tensor) -> None:
    torch.ops.sgl_kernel.fast_plan.default(x)
if torch.version.hip is not None:
    def two(x):
        return torch.ops.sgl_kernel.two.default(x)
else:
    def two(x):
        return torch.ops.sgl_kernel.two.default(x, 1)
"""


def test_host_queries_of_a_library_are_no_kernels_and_another_platforms_definition_is_none(tmp_path: Path) -> None:
    model = """
        from torch import nn
        from torch.utils.cpp_extension import load
        from sgl_kernel import fast_plan, good, open_handle, other, register, two, workspace_size
        host = load(name="host", sources=["tree.cpp", f"{root}/binding.cpp"])
        device = load(name="device", sources=["tree.cpp", "tree.cu"])
        class Tiny(nn.Module):
            def forward(self, x):
                register(open_handle(x), workspace_size(1, 2))
                fast_plan(x)
                host.search(x)
                device.launch(x)
                good(x, 1)
                two(x)
                return other([x])
        EntryClass = Tiny
    """
    write(tmp_path, {"models/tiny.py": model})
    (tmp_path / "sgl_kernel/__init__.py").write_text(LIBRARY)
    document = trace(find_sources(tmp_path), "tiny")
    assert names(document) == {"good", "other", "two", "launch"}
    (two,) = [kernel["definition"]["line"] for kernel in document["kernels"] if kernel["name"] == "two"]
    assert LIBRARY.splitlines()[two - 2] == "else:"


def test_calls_into_libraries_without_sources_are_listed(tmp_path: Path) -> None:
    model = """
        from torch import nn
        import fast_gemm
        import numpy as np
        from fast_comm import Buffer
        class Tiny(nn.Module):
            def __init__(self):
                self.buffer = Buffer(4)
            def forward(self, x):
                fast_gemm.set_sms(2)
                y = fast_gemm.matmul(x, np.linspace(0, 1))
                return self.buffer.exchange(y).view(-1)
        EntryClass = Tiny
        if __name__ == "__main__":
            fast_gemm.benchmark()
    """
    document = trace_files(tmp_path, {"models/tiny.py": model})
    reasons = {call["call"].partition("(")[0]: call["reason"] for call in document["unresolved"]}
    assert reasons == {
        "fast_gemm.matmul": "external library fast_gemm: its sources are not among those given",
        "self.buffer.exchange": "external library fast_comm: its sources are not among those given",
    }


HOPS = [
    Hop(
        "a module of a package without __init__",
        {
            "deep/wrapper/__init__.py": "from .entry import *",
            "deep/wrapper/entry.py": """
                from sgl_kernel import good
                def gemm(x):
                    return good(x)
            """,
            "models/tiny.py": """
                from torch import nn
                from sglang.srt.deep import wrapper
                import sgl_kernel
                class Tiny(nn.Module):
                    def forward(self, x):
                        return wrapper.gemm(x)
                    def unused(self, x):
                        return sgl_kernel.wrong(x)
                EntryClass = Tiny
            """,
        },
        {"good": ("gemm", "Tiny.forward")},
    ),
    Hop(
        "a weak reference in a registry",
        {
            "models/tiny.py": """
                import weakref
                from torch import nn
                from sgl_kernel import good, wrong
                GROUPS = {}
                class Group:
                    def reduce(self, x):
                        return good(x)
                    def __call__(self, x):
                        return wrong(x)
                GROUPS["tp"] = weakref.ref(Group())
                class Tiny(nn.Module):
                    def forward(self, x):
                        group = GROUPS["tp"]()
                        return group.reduce(x)
                EntryClass = Tiny
            """
        },
        {"good": ("Group.reduce", "Tiny.forward")},
    ),
    Hop(
        "isinstance of an unknown value, and the name of its class",
        {
            "models/tiny.py": """
                from torch import nn
                from sgl_kernel import good, other, wrong
                class Op(nn.Module):
                    def __init__(self):
                        self.method = self.fast
                    def compile(self):
                        if "Expert" in self.__class__.__name__:
                            self.method = self.batched
                        else:
                            self.method = self.native
                    def forward(self, x):
                        return self.method(x)
                class Norm(Op):
                    def fast(self, x):
                        return x
                    def native(self, x):
                        return good(x)
                    def batched(self, x):
                        return wrong(x)
                class Experts(Op):
                    def fast(self, x):
                        return x
                    def batched(self, x):
                        return other(x)
                    def native(self, x):
                        return wrong(x)
                class Unused(Op):
                    def native(self, x):
                        return wrong(x)
                def compile_all(model):
                    for part in model._modules.values():
                        if isinstance(part, Op):
                            part.compile()
                class Tiny(nn.Module):
                    def __init__(self):
                        self.norm = Norm()
                        self.experts = Experts()
                        compile_all(self)
                    def forward(self, x):
                        return self.experts(self.norm(x))
                EntryClass = Tiny
            """
        },
        {
            "good": ("Norm.native", "Op.forward", "Tiny.forward"),
            "other": ("Experts.batched", "Op.forward", "Tiny.forward"),
        },
    ),
]


@pytest.mark.parametrize("hop", HOPS, ids=lambda hop: hop.name)
def test_hop(hop: Hop, tmp_path: Path) -> None:
    check(hop, trace_files(tmp_path, hop.files))
