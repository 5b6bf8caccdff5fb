"""A kernel that refuses inputs which known kernels do not take either is graded on the others; a wrong one is wrong."""

from __future__ import annotations

import pytest

from flashinfer_trace import load
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.verify import Job
from flashinfer_trace.judging.grades import kinds_of_inputs
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.verdict import Grade

NORM = """
import torch

def run(x, w):
    assert len(x)
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)
"""
PRODUCT = """
import torch

def run(a, b):
    if len(a) > 16:
        {beyond}
    return (a.float() @ b.float().T).to(a.dtype)
"""
#: As a Triton kernel next to the function that launches it.
LAUNCHED = """
class Kernel:
    def __call__(self, *arguments):
        raise TypeError("launch it with a grid")

kernel = Kernel()
"""
SIXTEEN_ROWS = "m 1 to 16: what sgl_kernel.dsv3_router_gemm takes"


@pytest.fixture
def kernel(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "my_kernel.py"
        path.write_text(text)
        return str(path)

    return write


def test_a_kernel_that_refuses_what_a_known_one_does_not_take_is_graded_on_the_rest(kernel, server):
    verdict = judge(kernel(NORM), "rmsnorm_h512", seed=5, server=server)
    assert verdict.grade == Grade.REFERENCE, verdict
    assert verdict.limited_to == "batch_size 1 or more: what flashinfer.norm.rmsnorm takes"
    assert verdict.beyond.kind == "raised" and verdict.beyond.axes == {"batch_size": 0}


def test_rows_that_a_known_kernel_does_not_take_may_be_refused(kernel, server):
    verdict = judge(kernel(PRODUCT.format(beyond="raise ValueError(len(a))")), "gemm_bf16_n256_k7168", server=server)
    assert verdict.passed and verdict.limited_to == SIXTEEN_ROWS, verdict
    assert verdict.beyond.kind == "raised" and verdict.beyond.axes["m"] > 16
    assert "for larger ones" not in str(verdict)


@pytest.mark.parametrize(
    "beyond",
    ["return torch.zeros(len(a), len(b), dtype=a.dtype)", "raise RuntimeError('CUDA error: an illegal memory access')"],
)
def test_rows_that_a_known_kernel_does_not_take_may_not_be_wrong(kernel, server, beyond):
    verdict = judge(kernel(PRODUCT.format(beyond=beyond)), "gemm_bf16_n256_k7168", server=server)
    assert verdict.grade == Grade.WRONG and verdict.failure.axes["m"] > 16, verdict
    assert verdict.right_on == SIXTEEN_ROWS and not verdict.limited_to
    assert f"right on fewer inputs, {SIXTEEN_ROWS}: raise an error for all others" in str(verdict)


def test_the_inputs_of_a_known_kernel_are_told_in_words():
    definition = load("top_k_renorm_probs_v32000")
    texts = [judged.limited_to for judged in kinds_of_inputs(Job(definition, family_of(definition), None, "cpu"))]
    assert texts == ["", "lowest k 1, only with sums to one: what torch.ops.sgl_kernel.top_k_renorm_probs takes"]


def test_the_function_that_launches_a_kernel_is_judged(kernel, server):
    verdict = judge(
        kernel(NORM.replace("def run", "def rmsnorm") + LAUNCHED), "rmsnorm_h512", examples=2, server=server
    )
    assert verdict.passed, verdict
