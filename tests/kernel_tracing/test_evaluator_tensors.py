"""Shapes and dtypes that the evaluator gives to what functions of torch and of the libraries return."""

from __future__ import annotations

import pytest
from small_sources import evaluate

from tools.kernel_tracing.evaluator.values import UNKNOWN, External, Unknown

#: Native functions of a library, named as those of sgl_kernel and FlashInfer are.
LIBRARY = """
import torch
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor):
    return torch.ops.sgl_kernel.fwd(q, k)
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor):
    return torch.ops.sgl_kernel.fwd(q, k_cache)
def top_k_top_p_sampling_from_probs(probs: torch.Tensor) -> torch.Tensor:
    return torch.ops.sgl_kernel.sample(probs)
"""


def run(tmp_path, expression):
    """What an expression is, with `unknown` for a size that nobody knows."""
    source = f"""
    import sgl_kernel
    def run():
        unknown = torch.empty(2).item()
        return {expression}
    """
    return evaluate(tmp_path, source, {"sgl_kernel": LIBRARY})[1]


@pytest.mark.parametrize("name", ["flash_attn_varlen_func", "flash_attn_with_kvcache"])
@pytest.mark.parametrize(
    ("dtype", "expected"), [("float8_e4m3fn", "bfloat16"), ("float16", "float16"), ("bfloat16", "bfloat16")]
)
def test_flash_attention_3_computes_fp8_in_bfloat16(tmp_path, name, dtype, expected):
    found = run(tmp_path, f"sgl_kernel.{name}(torch.empty(3, 8, 128, dtype=torch.{dtype}), torch.empty(3, 8, 128))")
    assert (found.shape[0], found.dtype) == (3, External(f"torch.{expected}"))


@pytest.mark.parametrize(
    ("expression", "shape"),
    [
        ("torch.multinomial(torch.empty(2, 9), num_samples=1)", (2, 1)),
        ("torch.multinomial(torch.empty(9), 4)", (4,)),
        ("torch.gather(torch.empty(2, 9), dim=1, index=torch.empty(2, 1))", (2, 1)),
        ("torch.empty(2, 9).gather(1, torch.empty(2, 3))", (2, 3)),
        ("torch.empty(2, 9).sort(dim=-1, descending=True)[1]", (2, 9)),
        ("torch.sort(torch.empty(2, 9))[0]", (2, 9)),
        ("torch.topk(torch.empty(2, 9), 3, dim=0)[1]", (3, 9)),
        ("torch.argmax(torch.empty(2, 9), -1)", (2,)),
        ("torch.argmax(torch.empty(2, 9), dim=1, keepdim=True)", (2, 1)),
        ("torch.empty(2, 9).argmax()", ()),
        ("torch.log_softmax(torch.empty(2, 9), dim=-1).exp()", (2, 9)),
        ("torch.zeros_like(torch.empty(2, 9)).scatter_(-1, torch.empty(2, 1), 0)", (2, 9)),
        ("sgl_kernel.top_k_top_p_sampling_from_probs(torch.empty(2, 9))", (2,)),
    ],
)
def test_sampling_keeps_the_rows(tmp_path, expression, shape):
    assert run(tmp_path, expression).shape == shape


@pytest.mark.parametrize(
    ("shape", "sizes", "rows"),
    [
        ("2, unknown", "-1, 8, 128", 2),
        ("2, unknown, 128", "-1, 4096", 2),
        ("unknown, 8, 128", "-1, 1024", UNKNOWN),
        ("2, unknown, 6144", "-1, 128", UNKNOWN),
        ("2, unknown, 128", "-1, 128", UNKNOWN),
        ("unknown, 6144", "-1, 128", UNKNOWN),
        ("2, 128", "-1, 6144", UNKNOWN),
        ("96, 128", "-1, 6144", 2),
        ("0, 128", "-1, 6144", 0),
    ],
)
def test_rows_are_kept_only_where_the_other_sizes_may_be_the_same(tmp_path, shape, sizes, rows):
    assert run(tmp_path, f"torch.empty({shape}).reshape({sizes})").shape[0] == rows


def test_a_tensor_whose_rows_are_not_known_is_not_empty(tmp_path):
    """Llama 4 norms the heads of its queries: `x.numel() == 0` would skip the next norm."""
    source = """
    def run():
        x = torch.empty(2, torch.empty(2).item(), 6144).reshape(-1, 128).reshape(-1, 6144)
        if x.numel() == 0:
            return x.shape[0]
        one[1](x)
        return x.shape[0]
    """
    kernels, rows, _ = evaluate(tmp_path, source)
    assert kernels == ["one"] and isinstance(rows, Unknown)
