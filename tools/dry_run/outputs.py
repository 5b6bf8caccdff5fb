"""Results of kernels, where they are more than the tensors that they are given. One entry for each: no other is
guessed.

Shapes are those of the kernels' own Python wrappers and C++ sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from tools.dry_run import findings, tensors

Given = Mapping[str, Any]


def _new(like: Any, shape: Sequence[int], dtype: Any = None) -> Any:
    return torch.empty(tuple(shape), dtype=dtype or like.dtype, device=like.device)


def _wide(like: Any) -> Any:
    """The type of the output of attention: that of the queries, bfloat16 if they have 8 bits."""
    return torch.bfloat16 if like.dtype.itemsize == 1 else like.dtype


def _product(given: Given) -> Any:
    a, b = given["mat_a"], given["mat_b"]
    return _new(a, (a.shape[0], b.shape[1]), given["out_dtype"])


def _flash_attention_3(given: Given) -> Any:
    q, v, out = given["q"], given["v"], given.get("out")
    if out is None:
        out = _new(q, (*q.shape[:-1], v.shape[-1]), _wide(q))
    lse = _new(q, (q.shape[-2], q.shape[:-2].numel()), torch.float32)
    return [out, lse, _new(q, (0,), torch.float32), _new(q, (0,), torch.float32)]


def _multi_latent(given: Given) -> Any:
    q = given["q"]
    out = _new(q, (*q.shape[:-1], given["head_size_v"]), _wide(q))
    return [out, _new(q, (q.shape[0], q.shape[2], q.shape[1]), torch.float32)]


def _multi_latent_metadata(given: Given) -> Any:
    lengths = given["seqlens_k"]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return [_new(lengths, (sms, 8)), _new(lengths, (lengths.shape[0] + 1,))]


def _sparse(given: Given) -> tuple[Any, Any]:
    q = given["q"]
    out = _new(q, (*q.shape[:-1], given["d_v"]), _wide(q))
    return out, _new(q, q.shape[:-1], torch.float32)


def _sparse_prefill(given: Given) -> Any:
    out, row = _sparse(given)
    return [out, row, row.clone()]


def _sparse_decode(given: Given) -> Any:
    out, row = _sparse(given)
    return [out, row.transpose(-1, -2), given["tile_scheduler_metadata"], given["num_splits"]]


def _logits(q: Any, rows: int, columns: int) -> Any:
    return _new(q, (rows, (columns + 255) // 256 * 256), torch.float32)[:, :columns]


def _indexer_logits(given: Given) -> Any:
    keys = given["kv_data"] if "kv_data" in given else given["kv"][0]
    return _logits(given["q"], given["q"].shape[0], keys.shape[0])


def _aligned_scales(given: Given) -> Any:
    """Scales in the layout of the tensor memory accelerator: rows are contiguous, and padded to 16 bytes."""
    scales = given.get("sf", given.get("a"))
    *groups, rows, columns = scales.shape
    padded = (rows + 3) // 4 * 4
    found = _new(scales, (*groups, columns, padded), torch.float32).transpose(-1, -2)
    return found[..., :rows, :]


def _packed_scales(given: Given) -> Any:
    """As `_aligned_scales`, with four exponents in each integer."""
    scales = given.get("sf", given.get("a"))
    *groups, rows, columns = scales.shape
    padded = (rows + 3) // 4 * 4
    return _new(scales, (*groups, (columns + 3) // 4, padded), torch.int32).transpose(-1, -2)[..., :rows, :]


def _not_if(given: Given, option: str) -> Any:
    """Two values that are known to be None without an option."""
    if given.get(option):
        raise findings.fail(findings.UNKNOWN_OUTPUT, f"a kernel with {option}")
    return None, None


def _number(value: int) -> Callable[[Given], int]:
    return lambda given: value


#: Operator -> what it returns, given its arguments by name.
OPERATORS: dict[str, Callable[[Given], Any]] = {
    "deep_gemm::fp8_paged_mqa_logits": lambda one: _logits(
        one["q"], one["q"].shape[0] * one["q"].shape[1], one["max_context_len"]
    ),
    "deep_gemm::fp8_mqa_logits": _indexer_logits,
    "deep_gemm::get_paged_mqa_logits_metadata": lambda one: _new(one["context_lens"], (one["num_sms"] + 1, 2)),
    "deep_gemm::get_mn_major_tma_aligned_tensor": _aligned_scales,
    "deep_gemm::get_mn_major_tma_aligned_packed_ue8m0_tensor": _packed_scales,
    # How the work of overlapped products is cut, which only they return.
    "deep_gemm::m_grouped_fp8_gemm_nt_masked": lambda one: _not_if(one, "enable_overlap"),
    # Rows of scales, padded to 16 bytes for the tensor memory accelerator.
    "deep_gemm::get_tma_aligned_size": lambda one: (
        -(-one["mn"] * one["element_size"] // 16) * 16 // one["element_size"]
    ),
    "deep_gemm::get_num_sms": lambda one: torch.cuda.get_device_properties(0).multi_processor_count,
    "deep_gemm::get_tc_util": _number(100),
    "deep_gemm::get_pdl": _number(0),
    # Custom all-reduce: bytes of its signals before a buffer, its handle, and what a graph would have registered.
    "sgl_kernel::meta_size": _number(1 << 12),
    "sgl_kernel::init_custom_ar": _number(1),
    "sgl_kernel::get_graph_buffer_ipc_meta": lambda one: ([], []),
    "sgl_kernel::fp8_scaled_mm": _product,
    "sgl_kernel::int8_scaled_mm": _product,
    "sgl_kernel::fp8_blockwise_scaled_mm": _product,
    "sgl_kernel::fwd": _flash_attention_3,
    # A semaphore, and the splits of each request: only the kernel that it is passed to reads it.
    "sgl_kernel::get_scheduler_metadata": lambda one: _new(one["seqused_k"], (1 + one["batch_size"],), torch.int32),
    "sgl_kernel::get_mla_decoding_metadata": _multi_latent_metadata,
    "sgl_kernel::fwd_kvcache_mla": _multi_latent,
    "sgl_kernel::dense_decode_fwd": _multi_latent,
    "sgl_kernel::fwd_kvcache_mla_fp8": _multi_latent,
    **{f"{name}::sparse_prefill_fwd": _sparse_prefill for name in ("sgl_kernel", "flash_mla", "flash_mla_legacy")},
    **{f"{name}::sparse_decode_fwd": _sparse_decode for name in ("sgl_kernel", "flash_mla", "flash_mla_legacy")},
}


def _plan_prefill(args: Sequence[Any]) -> Any:
    return tuple(_new(args[0], (args[6], width), torch.uint8) for width in (16, 8))


#: End of the name of a compiled module's function -> what it returns, given its positional arguments. Others return
#: nothing: they write into tensors that they are given.
FUNCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    ".plan_decode": lambda args: _new(args[0], (args[0].shape[0], 16), torch.uint8),
    ".plan_prefill": _plan_prefill,
    ".plan": lambda args: [0] * 32,
    ".get_rank": lambda args: torch.distributed.get_rank(),
    ".get_world_size": lambda args: torch.distributed.get_world_size(),
    ".all_reduce": lambda args: torch.empty_like(args[1]),
    "_tactic_num": lambda args: 1,
    ".bmm_fp8_get_algos": lambda args: 1,
    ".trtllm_get_valid_moe_configs": lambda args: [],  # the default is one of its own
    ".get_max_active_clusters": lambda args: 16,
    ".get_num_sms": lambda args: torch.cuda.get_device_properties(0).multi_processor_count,
    ".get_tc_util": lambda args: 100,
    ".get_pdl": lambda args: False,
    ".get_deterministic_algorithms": lambda args: False,
}


def written(name: str, given: Given) -> None:
    """Computes what a Triton kernel writes, if Python reads it afterwards: where the tokens of each request begin."""
    if name != "compute_position_kernel" or not tensors.is_known(given["extend_seq_lens"]):
        return
    lengths = tensors.values(given["extend_seq_lens"])
    given["extend_start_loc"].inner.copy_(lengths.cumsum(0) - lengths)


def of_function(path: str, args: Sequence[Any]) -> Any:
    """The result of a function of a compiled module."""
    known = next((known for end, known in FUNCTIONS.items() if path.endswith(end)), None)
    return None if known is None else known(args)


def communicated(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an operator that exchanges data with other ranks: PyTorch's fake group computes its shapes."""
    plain = tree_map(lambda one: tensors.without_data(one.inner) if isinstance(one, tensors.DryTensor) else one, args)
    try:
        out = func(*plain, **kwargs)
    except NotImplementedError as error:  # the operator has no shape function: the run fails and names it
        raise findings.fail(findings.UNKNOWN_OUTPUT, f"{func}: {error}") from error
    tensors.launched(str(func))
    gathered = _gathered(*args[:2]) if func._schema.name == "c10d::_allgather_base_" else None
    for one in tree_flatten(args)[0]:
        tensors.forget(one)
    if gathered is not None:
        args[0].inner.copy_(gathered)
    return tree_map(tensors.wrap, out)


def _gathered(out: Any, own: Any) -> Any:
    """Integers of all ranks, which have what this one has, such as the number of tokens; None for other values."""
    dry = [one for one in (out, own) if isinstance(one, tensors.DryTensor) and tensors.is_known(one)]
    if len(dry) < 2 or own.dtype.is_floating_point:
        return None
    return tensors.values(own).flatten().repeat(out.numel() // own.numel()).view(out.shape)
