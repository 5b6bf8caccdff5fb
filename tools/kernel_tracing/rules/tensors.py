"""Tensors are data: subclasses of torch.Tensor and torch.nn.Parameter hold weights, and their other attributes
(weight loaders, shapes, flags) do not affect the calls of a forward pass."""

from __future__ import annotations

from tools.kernel_tracing.source.declarations import ClassInfo
from tools.kernel_tracing.source.index import Index

_BASES = {"torch.Tensor", "torch.nn.Parameter", "torch.nn.parameter.Parameter", "torch.nn.UninitializedParameter"}
_BASES |= {"torch.nn.parameter.UninitializedParameter"}


def is_tensor(index: Index, info: ClassInfo) -> bool:
    """Whether instances of a class are tensors."""
    return not _BASES.isdisjoint(index.external_bases(info))
