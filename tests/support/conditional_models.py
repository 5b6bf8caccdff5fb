"""Small models whose chains have conditions: backends, modes, platforms, server arguments."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

from synthetic import trace_files

KERNELS = "from sgl_kernel import good, other, wrong\n"
MODEL = """
from torch import nn
from sgl_kernel import good, other, wrong
{imports}
class Tiny(nn.Module):
{body}
EntryClass = Tiny
"""
MODES = """
from enum import Enum, IntEnum, auto
class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()
    DRAFT_EXTEND_V2 = auto()
    def is_decode(self):
        return self == ForwardMode.DECODE
    def is_extend(self, include_v2=False):
        return (
            self == ForwardMode.EXTEND
            or self in (ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND)
            or (include_v2 and self == ForwardMode.DRAFT_EXTEND_V2)
            or self.is_target_verify()
        )
    def is_target_verify(self):
        return self == ForwardMode.TARGET_VERIFY
    def is_draft_extend(self, include_v2=False):
        return self == ForwardMode.DRAFT_EXTEND or (include_v2 and self == ForwardMode.DRAFT_EXTEND_V2)
class Runner(Enum):
    AUTO = "auto"
    DEEP_GEMM = "deep_gemm"
    TRITON = "triton"
    def is_deep_gemm(self):
        return self == Runner.DEEP_GEMM
    def is_triton(self):
        return self == Runner.TRITON
    def is_ascend(self):
        return self == Runner.AUTO
class Algorithm(Enum):
    NONE = auto()
    EAGLE = auto()
    @classmethod
    def from_string(cls, name) -> "Algorithm":
        return cls[name]
class ServerArgs:
    sampling_backend: str = "auto"
    attention_backend: str = "auto"
    runner: str = "auto"
    quantization: str = ""
    enable_sparse: bool = False
class Batch:
    forward_mode: ForwardMode = None
def get_runner() -> Runner:
    return Runner.AUTO
def get_server_args() -> ServerArgs:
    return ServerArgs()
def uses_triton(runner: Runner):
    return runner.is_triton()
def is_sm90_supported():
    return torch.cuda.get_device_capability()[0] == 9
BACKENDS = ["fa3", "triton", "ascend"]
_is_sm90 = is_sm90_supported()
"""


def conditions(document: dict, kernel: str, function: str = "") -> set[str]:
    """Conditions of the frames of a kernel's chains (in one function)."""
    found = {
        frame["condition"]
        for one in document["kernels"]
        if one["name"] == kernel
        for chain in one["chains"]
        for frame in chain
        if not function or frame["function"] == function
    }
    assert found, (kernel, function, [one["name"] for one in document["kernels"]])
    return found


def model(body: str, imports: str = "") -> str:
    return MODEL.format(imports=imports, body=indent(dedent(body), "    "))


def trace_model(root: Path, body: str, imports: str = "", **files: str) -> dict:
    """Trace a model of this class body; keywords are more modules."""
    others = {f"{name}.py": text for name, text in files.items()}
    return trace_files(root, {"models/tiny.py": model(body, imports), **others})
