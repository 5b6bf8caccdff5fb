"""Ops: how chains name them, and that none is lost, however many call sites a kernel has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from synthetic import trace_files

from tools.kernel_tracing.graph.chains import MAX_MORE
from tools.kernel_tracing.graph.ops import called_name, op_name, weight_owner

LINEAR = """
from torch import nn
from sgl_kernel import good
class Linear(nn.Module):
    def forward(self, x):
        return good(x)
"""


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("self.q_b_proj(q)", "q_b_proj"),
        ("experts[0](x)", "experts"),
        ("self.layers[i].mlp(x)", "mlp"),
        ("make(x)(y)", "make"),
        ("norm(x)", "norm"),
    ],
)
def test_name_of_a_call(call: str, name: str) -> None:
    assert called_name(expression(call)) == name


@pytest.mark.parametrize(
    ("call", "owner"),
    [
        ("gemm(x, self.proj.weight)", "proj"),
        ("gemm(x, self.proj.weight.T)", "proj"),
        ("gemm(x, b=self.proj.weight.t())", "proj"),
        ("gemm(x, self.proj.weight_scale)", "proj"),
        ("gemm(x, self.weight)", "self"),
        ("gemm(x, self.proj.bias)", ""),
        ("gemm(x, weight)", ""),
        ("gemm(x, self.proj.weight + 1)", ""),
    ],
)
def test_whose_weight_a_kernel_is_given(call: str, owner: str) -> None:
    assert weight_owner(expression(call)) == owner


@pytest.mark.parametrize(
    ("calls", "position", "name"),
    [
        (["gemm(x)", "self.proj(x)", "self.mlp(x)"], 1, "proj"),
        (["gemm(x, self.proj.weight)", "self.mlp(x)"], 0, "proj"),
        (["gemm(x, self.weight)", "self.gate(x)"], 0, "gate"),
        (["gemm(x, self.weight)"], 0, "kernel"),
        (["gemm(x)", "self.mlp(x)"], 0, "kernel"),
    ],
)
def test_op_of_a_chain(calls: list[str], position: int, name: str) -> None:
    assert op_name([expression(call) for call in calls], position, "Wrapper.kernel") == name


def test_every_call_of_the_model_has_a_chain(tmp_path: Path) -> None:
    number = 3 * MAX_MORE
    fields = "\n".join(f"        self.p{i} = Linear()" for i in range(number))
    uses = "\n".join(f"        x = self.p{i}(x)" for i in range(number))
    model = f"""
from torch import nn
from sglang.srt.layers.linear import Linear
class Tiny(nn.Module):
    def __init__(self):
{fields}
    def forward(self, x):
{uses}
        return x
EntryClass = Tiny
"""
    document = trace_files(tmp_path, {"layers/linear.py": LINEAR, "models/tiny.py": model})
    (kernel,) = document["kernels"]
    assert kernel["ops"] == sorted(f"p{i}" for i in range(number))
    assert [chain[1]["call"] for chain in kernel["chains"]] == [f"self.p{i}(x)" for i in range(number)]
    assert "omitted_chains" not in kernel


def test_a_direct_kernel_is_the_op_whose_weight_it_is_given(tmp_path: Path) -> None:
    model = """
from torch import nn
from sgl_kernel import good, other
from sglang.srt.layers.linear import Linear
class Gate(nn.Module):
    def forward(self, x):
        return other(x, self.weight)
class Tiny(nn.Module):
    def __init__(self):
        self.proj = Linear()
        self.gate = Gate()
    def forward(self, x):
        x = good(x, self.proj.weight.T) if x.small else self.proj(x)
        return self.gate(x)
EntryClass = Tiny
"""
    document = trace_files(tmp_path, {"layers/linear.py": LINEAR, "models/tiny.py": model})
    assert {kernel["name"]: kernel["ops"] for kernel in document["kernels"]} == {"good": ["proj"], "other": ["gate"]}
    assert [chain[0]["line"] for chain in document["kernels"][0]["chains"]] == [13, 6]
