"""Synthetic packages: a few small files with one dynamic hop each, traced like sglang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

from tools.kernel_tracing.report.trace import trace

from tools.kernel_tracing.source.sources import find_sources

KERNELS = ("good", "other", "wrong")
PLATFORM = """
def is_cuda():
    import torch
    return torch.version.cuda is not None
def is_hip():
    import torch
    return torch.version.hip is not None
def is_npu():
    return hasattr(torch, "npu")
"""


@dataclass(frozen=True)
class Hop:
    """One package.

    Attributes:
        name: the name of the hop.
        files: path below sglang/srt -> text; the model is models/tiny.py.
        reached: kernel -> functions of one chain that must exist, kernel call first.
        pruned: kernels that must not be reached, such as those of another platform or another type.
        conditions: kernel -> text that some frame's condition must contain.
        approximate: kernels whose chains must all be marked as approximate.
    """

    name: str
    files: Mapping[str, str]
    reached: Mapping[str, tuple[str, ...]]
    pruned: tuple[str, ...] = ("wrong",)
    conditions: Mapping[str, str] = field(default_factory=dict)
    approximate: tuple[str, ...] = ()


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Write a source tree: sglang with these files, and a small sgl_kernel."""
    kernels = "\n".join(f"def {name}(x):\n    return torch.ops.sgl_kernel.{name}.default(x)" for name in KERNELS)
    tree = {
        "sglang/__init__.py": "",
        "sglang/srt/__init__.py": "",
        "sglang/srt/layers/__init__.py": "",
        "sglang/srt/models/__init__.py": "",
        "sglang/srt/utils.py": PLATFORM,
        "sgl_kernel/__init__.py": f"import torch\n{kernels}\n",
        **{f"sglang/srt/{path}": dedent(text) for path, text in files.items()},
    }
    for path, text in tree.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def trace_files(root: Path, files: Mapping[str, str], **options: Any) -> dict[str, Any]:
    """Write a tree and trace its model `tiny`."""
    return trace(find_sources(write(root, files)), "tiny", **options)


def chains(document: dict[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """kernel -> its chains, each as the functions that enclose its frames."""
    return {
        kernel["name"]: [tuple(frame["function"] for frame in chain) for chain in kernel["chains"]]
        for kernel in document["kernels"]
    }


def check(hop: Hop, document: dict[str, Any]) -> None:
    """Assert what a hop expects in its trace."""
    found = chains(document)
    for kernel, functions in hop.reached.items():
        assert functions in found.get(kernel, []), (kernel, found)
    for kernel in hop.pruned:
        assert kernel not in found, found[kernel]
    for kernel in document["kernels"]:
        frames = [frame for chain in kernel["chains"] for frame in chain]
        wanted = hop.conditions.get(kernel["name"], "")
        assert any(wanted in frame["condition"] for frame in frames), [frame["condition"] for frame in frames]
        if kernel["name"] in hop.approximate:
            assert all(any("approximate" in frame for frame in chain) for chain in kernel["chains"])
        else:
            assert not any("approximate" in frame for frame in frames), frames
